"""What is looked at when numbers go bad: the first layer, the first gradient, the weights before they are saved."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.errors import NonFiniteError


def first_bad(model: nn.Module, run_forward: Callable[[], object]) -> str | None:
    """Full name of the first module, in order of execution, whose output holds a NaN or an infinity; None if none.

    `run_forward` runs the forward pass that went wrong once more; modules report when they finish, so that an inner
    one is named before the one around it. Compiled blocks run uncompiled here, because hooks added after compilation
    are not seen. Every output waits for the device: a diagnosis, not for every step.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and any(not bool(t.isfinite().all()) for t in _float_tensors(output)):
                found.append(name or type(module).__name__)

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run_forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def first_bad_gradient(model: nn.Module) -> str | None:
    """Full name of the parameter whose gradient went bad first in the backward pass; None if all are finite.

    The backward pass meets parameters from the last to the first and carries a NaN on to all that follow, so the
    culprit is the last bad one in the model's order.
    """
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if not named:
        return None
    finite = torch.stack([gradient.isfinite().all().to(torch.float32).cpu() for _, gradient in named]).tolist()
    bad = [name for (name, _), good in zip(named, finite, strict=True) if not good]
    return bad[-1] if bad else None


def require_finite(step: int, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise NonFiniteError when a tensor of a checkpoint to be written holds a NaN or an infinity.

    Loss and gradients are looked at before each optimizer step. What the step itself makes of them (a learning rate or
    an epsilon beyond FP32) shows in the next step's loss, and a checkpoint may come before that one.
    """
    named = [
        (f"{part} {name}", tensor)
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    ]
    ends = [torch.stack(torch.aminmax(tensor.detach())) for _, tensor in named]  # a NaN is passed on
    finite = [end.isfinite().all().to("cpu", non_blocking=True) for end in ends]
    if any(end.is_cuda for end in ends):
        torch.cuda.synchronize()
    bad = [name for (name, _), good in zip(named, finite, strict=True) if not bool(good)]
    if bad:
        raise NonFiniteError(
            f"step {step} left NaN or infinity in {len(bad)} of {len(named)} tensors, first in the {bad[0]}; nothing "
            "of it was saved; lower optim.lr (or raise optim.eps): the same command goes on from the last checkpoint"
        )


def _float_tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors inside tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _float_tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _float_tensors(inner)
