"""What watches a run: signals that ask it to end, what went wrong first and where, and a score for loss spikes."""

import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from lowbit.errors import NonFiniteError

WATCHED = (signal.SIGTERM, signal.SIGINT)


class SignalGuard:
    """Turns SIGTERM and the first SIGINT (Ctrl-C) into a request that the loop obeys at its next step boundary.

    `requested` is the name of the signal that came first, or None. A second SIGINT raises KeyboardInterrupt at once;
    a second SIGTERM changes nothing, since schedulers repeat theirs. The previous handlers come back on exit. Signals
    can be handled in the main thread only: elsewhere the guard does nothing.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = signal.Signals(number).name
        hint = "; Ctrl-C again ends it at once, unsaved" if number == signal.SIGINT else ""
        message = f"\n{self.requested}: the run ends after this step and saves{hint}\n"
        os.write(2, message.encode())  # a raw write: printing and logging may be interrupted half-way by a signal


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


class SpikeScore:
    """How many standard deviations the latest loss lies above the mean of the last 128 before it.

    A healthy run stays within a few; 6 and more is a spike. The score is None until 16 losses are known, and so is
    that of a loss that is not finite, which is not remembered either.
    """

    WINDOW = 128
    ENOUGH = 16

    def __init__(self, losses: list[float] | None = None) -> None:
        self._losses: deque[float] = deque(losses or [], maxlen=self.WINDOW)

    def update(self, loss: float) -> float | None:
        """Score `loss` against those before it, then remember it."""
        if not math.isfinite(loss):
            return None
        score = self._score(loss) if len(self._losses) >= self.ENOUGH else None
        self._losses.append(loss)
        return score

    def _score(self, loss: float) -> float:
        count = len(self._losses)
        mean = math.fsum(self._losses) / count
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in self._losses) / count)
        if loss == mean:
            return 0.0
        return (loss - mean) / max(deviation, 1e-12 * max(abs(mean), 1e-300))  # all alike: any change stands out

    def as_dict(self) -> dict[str, list[float]]:
        """State for a checkpoint, plain JSON."""
        return {"losses": list(self._losses)}

    @classmethod
    def from_dict(cls, state: Mapping[str, list[float]]) -> Self:
        """The score as it was when `as_dict` was called."""
        return cls(list(state["losses"]))
