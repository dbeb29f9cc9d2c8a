"""Engines run the forward and backward passes and the optimizer step; the loop never touches a device itself.

One process runs `LocalEngine`: plain PyTorch; several run `deepspeed_engine.DeepSpeedEngine`. Engines share this
interface, the checkpoint's tensor names and the numbers they produce, so that a run may change engine between two
checkpoints.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from lowbit.configs.schema import CompileMode, EngineConfig, OptimConfig
from lowbit.data.batch import Batch
from lowbit.errors import CheckpointError, ConfigError
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import ALONE, Ranks
from lowbit.trainer.graphs import MicroBatchGraphs
from lowbit.trainer.guard import first_bad_gradient
from lowbit.trainer.objective import Objective, ObjectiveOutput, run_objective
from lowbit.trainer.optim import GroupRow, build_optimizer


class Engine(Protocol):
    """What the loop needs of whatever executes the model. With several ranks every method is called on all of them."""

    model: Transformer
    device: torch.device
    ranks: Ranks
    rank: int
    world: int

    def micro_step(self, objective: Objective, batch: Batch, scale: float, last: bool = True) -> ObjectiveOutput:
        """Forward and backward of one micro-batch; gradients of `scale * loss_sum` add up, over ranks too.

        `last`: no other micro-batch of this step follows on this rank.
        """
        ...

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of all gradients, FP32 scalar on the device, the same on every rank."""
        ...

    def first_bad_gradient(self) -> str | None:
        """Name of the parameter whose gradient went bad first in the backward pass; None if all are finite."""
        ...

    def step(self, lr_scale: float, gradient_scale: float) -> None:
        """Optimizer step on `gradient_scale * gradients` at `lr_scale` times the peak rates; clears the gradients."""
        ...

    def traffic(self) -> dict[str, float]:
        """Bytes that this rank has sent to others since the last call, as metrics; empty with one process."""
        ...

    def groups(self) -> list[GroupRow]:
        """The parameter groups with their peak learning rates, for printing."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Master weights by fully qualified name (a tied one once), live: whole, or flat this rank's part of each."""
        ...

    def start_of(self, name: str) -> int:
        """Where this rank's part of a weight begins in the flattened whole."""
        ...

    def refresh(self) -> None:
        """Have the model compute with `weights()` as they are now."""
        ...

    def collect(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, on rank 0 (nothing elsewhere), from each rank's parts as `weights()` has them."""
        ...

    def distribute(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors, which only rank 0 needs to have."""
        ...

    def model_tensors(self) -> dict[str, Tensor]:
        """Master weights, whole, on rank 0."""
        ...

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Every state of the optimizer by `<full name>.<slot>`, whole, on rank 0."""
        ...

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint's tensors by name; only rank 0 needs to have them."""
        ...

    def exchange_tensors(self) -> dict[str, Tensor]:
        """What the exchange of gradients remembers between steps, whole, on rank 0; mostly nothing."""
        ...

    def load_exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `exchange_tensors` returned, on any number of ranks."""
        ...

    def whole_model(self) -> AbstractContextManager[Transformer | None]:
        """The model with all its weights, for rank 0 to use alone; None on the other ranks."""
        ...

    def close(self) -> None:
        """Let go of what the engine holds on to."""
        ...


class LocalEngine:
    """One process on one device."""

    ranks = ALONE
    rank = 0
    world = 1

    def __init__(self, model: Transformer, optim: OptimConfig, engine: EngineConfig) -> None:
        self.model = model
        self.device = model.head_weight.device
        self.optimizer = build_optimizer(model, optim)
        if engine.cuda_graphs and self.device.type != "cuda":
            raise ConfigError(
                f"engine.cuda_graphs=true on {self.device}: only a GPU has them; engine.cuda_graphs=false"
            )
        self._graphs = MicroBatchGraphs(model, self._pass, self.device) if engine.cuda_graphs else None
        model.attention_kernel = engine.attention
        model.set_recompute(engine.recompute)
        if wants_compile(engine.compile, self.device):
            model.compile_blocks()

    def micro_step(self, objective: Objective, batch: Batch, scale: float, last: bool = True) -> ObjectiveOutput:
        """See `Engine.micro_step`."""
        if self._graphs is not None:
            return self._graphs.run(objective, batch, scale)
        return self._pass(objective, batch, scale)

    def _pass(self, objective: Objective, batch: Batch, scale: float | Tensor) -> ObjectiveOutput:
        out = run_objective(objective, self.model, batch)
        (out.loss_sum * scale).backward()  # type: ignore[no-untyped-call]
        return out

    def gradient_norm(self) -> Tensor:
        """See `Engine.gradient_norm`."""
        return nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def first_bad_gradient(self) -> str | None:
        """See `Engine.first_bad_gradient`."""
        return first_bad_gradient(self.model)

    def step(self, lr_scale: float, gradient_scale: float) -> None:
        """See `Engine.step`."""
        if gradient_scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], gradient_scale)
        self.optimizer.set_lr_scale(lr_scale)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def traffic(self) -> dict[str, float]:
        """See `Engine.traffic`."""
        return {}

    def groups(self) -> list[GroupRow]:
        """See `Engine.groups`."""
        return self.optimizer.groups()

    def weights(self) -> dict[str, Tensor]:
        """See `Engine.weights`."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def start_of(self, name: str) -> int:
        """See `Engine.start_of`."""
        return 0

    def refresh(self) -> None:
        """See `Engine.refresh`: the masters are what the model computes with."""

    def collect(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Engine.collect`."""
        return dict(parts)

    def distribute(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Engine.distribute`."""
        return dict(whole)

    def model_tensors(self) -> dict[str, Tensor]:
        """See `Engine.model_tensors`."""
        return self.weights()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """See `Engine.optimizer_tensors`."""
        return self.optimizer.state_tensors()

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """See `Engine.load`."""
        load_tensors(self.weights(), model)
        self.optimizer.load_state_tensors(optimizer)

    def exchange_tensors(self) -> dict[str, Tensor]:
        """See `Engine.exchange_tensors`: one process exchanges nothing."""
        return {}

    def load_exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_exchange`: what several processes had left over is dropped."""

    def whole_model(self) -> AbstractContextManager[Transformer | None]:
        """See `Engine.whole_model`."""
        return nullcontext(self.model)

    def close(self) -> None:
        """See `Engine.close`."""


def load_tensors(into: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy `source` over `into` by name; every name must be on both sides with the same shape.

    Raises:
        CheckpointError: names the missing, unexpected and mis-shaped tensors.
    """
    check_names("weights", {name: tensor.shape for name, tensor in into.items()}, source)
    for name, tensor in into.items():
        tensor.copy_(source[name])


def check_names(what: str, wanted: Mapping[str, torch.Size], source: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless `source` has the `wanted` names with their shapes, and no others."""
    problems = [f"{name} is missing" for name in wanted.keys() - source.keys()]
    problems += [f"{name} is not of this model" for name in source.keys() - wanted.keys()]
    problems += [
        f"{name} is {list(source[name].shape)} there and {list(wanted[name])} here"
        for name in wanted.keys() & source.keys()
        if source[name].shape != wanted[name]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        raise CheckpointError(f"the checkpoint's {what} are of another model ({len(problems)} differences): {shown}")


def wants_compile(mode: CompileMode, device: torch.device) -> bool:
    """Whether blocks are compiled: `on` and `off` as they say; `auto` on a GPU only.

    On a CPU compilation costs 20 s or more at the start and needs a C++ compiler, more than a short run gains.
    """
    return mode is CompileMode.on or (mode is CompileMode.auto and device.type == "cuda")
