"""Engines run the forward and backward passes and the optimizer step; the loop never touches a device itself.

One process runs `LocalEngine`: plain PyTorch. Engines share this interface, the checkpoint's tensor names and
the numbers they produce, so that a run may change engine between two checkpoints.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from lowbit.configs.schema import CompileMode, EngineConfig, OptimConfig
from lowbit.data.batch import Batch
from lowbit.errors import CheckpointError
from lowbit.models.transformer import Transformer
from lowbit.trainer.objective import Objective, ObjectiveOutput
from lowbit.trainer.optim import Optimizer, build_optimizer


class Engine(Protocol):
    """What the loop needs of whatever executes the model."""

    model: Transformer
    optimizer: Optimizer
    device: torch.device
    rank: int
    world: int

    def micro_step(self, objective: Objective, batch: Batch, scale: float) -> ObjectiveOutput:
        """Forward and backward of one micro-batch; gradients of `scale * loss_sum` add up in the parameters."""
        ...

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of all gradients, FP32 scalar on the device."""
        ...

    def step(self, lr_scale: float, gradient_scale: float) -> None:
        """Optimizer step on `gradient_scale * gradients` at `lr_scale` times the peak rates; clears the gradients."""
        ...

    def model_tensors(self) -> dict[str, Tensor]:
        """Master weights by fully qualified name, a tied one once."""
        ...

    def load(self, model: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Copy a checkpoint's tensors in, by name."""
        ...

    def sum_over_ranks(self, value: float) -> float:
        """Sum of a host number over all ranks."""
        ...


class LocalEngine:
    """One process on one device."""

    rank = 0
    world = 1

    def __init__(self, model: Transformer, optim: OptimConfig, engine: EngineConfig) -> None:
        self.model = model
        self.device = model.head_weight.device
        self.optimizer = build_optimizer(model, optim)
        model.set_recompute(engine.recompute)
        if wants_compile(engine.compile, self.device):
            model.compile_blocks()

    def micro_step(self, objective: Objective, batch: Batch, scale: float) -> ObjectiveOutput:
        """See `Engine.micro_step`."""
        out = objective(self.model, batch)
        (out.loss_sum * scale).backward()  # type: ignore[no-untyped-call]
        return out

    def gradient_norm(self) -> Tensor:
        """See `Engine.gradient_norm`."""
        return nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def step(self, lr_scale: float, gradient_scale: float) -> None:
        """See `Engine.step`."""
        if gradient_scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], gradient_scale)
        self.optimizer.set_lr_scale(lr_scale)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def model_tensors(self) -> dict[str, Tensor]:
        """See `Engine.model_tensors`."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def load(self, model: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """See `Engine.load`."""
        load_tensors(self.model_tensors(), model)
        self.optimizer.load_state_tensors(optimizer)

    def sum_over_ranks(self, value: float) -> float:
        """See `Engine.sum_over_ranks`."""
        return value


def load_tensors(into: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Copy `source` over `into` by name; every name must be on both sides with the same shape.

    Raises:
        CheckpointError: names the missing, unexpected and mis-shaped tensors.
    """
    problems = [f"{name} is missing" for name in into.keys() - source.keys()]
    problems += [f"{name} is not of this model" for name in source.keys() - into.keys()]
    problems += [
        f"{name} is {list(source[name].shape)} there and {list(into[name].shape)} here"
        for name in into.keys() & source.keys()
        if source[name].shape != into[name].shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        raise CheckpointError(f"the checkpoint's weights are of another model ({len(problems)} differences): {shown}")
    for name, tensor in into.items():
        tensor.copy_(source[name])


def wants_compile(mode: CompileMode, device: torch.device) -> bool:
    """Whether blocks are compiled: `on` and `off` as they say; `auto` on a GPU only.

    On a CPU compilation costs 20 s or more at the start and needs a C++ compiler, more than a short run gains.
    """
    return mode is CompileMode.on or (mode is CompileMode.auto and device.type == "cuda")
