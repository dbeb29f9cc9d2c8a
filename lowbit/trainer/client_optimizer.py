"""Our optimizers in the form that DeepSpeed takes: one `torch.optim.Optimizer` over all groups of parameters.

ZeRO replaces each group's parameters by one flat FP32 tensor, this rank's part of them, and steps on that. AdamW works
number by number, so it does not notice. Muon orthogonalises whole matrices: `ShardedMuon` keeps its momentum sharded,
gathers the update U of a group (see `trainer/muon.py`) from all ranks in the type in which it is orthogonalised anyway
(BF16 on a GPU: 2 bytes a number), orthogonalises every matrix on every rank, as ZeRO 0 does, and applies its own part.
The result is that of one process, up to the order in which gradients are summed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.configs.schema import OptimConfig
from lowbit.models.adapters import MARK
from lowbit.trainer.muon import Muon, directions_of, product_dtype
from lowbit.trainer.optim import GroupRow, build_optimizer, new_state

GATHERED_NUMBERS = 1 << 28
"""Most numbers in one group of matrices under ZeRO: bounds the gathered update to half a GiB of BF16."""

Gather = Callable[[Tensor, Tensor], list[Tensor]]
"""Given a flat part of a group and the same numbers in another type, that group's whole matrices."""
Scatter = Callable[[Tensor, list[Tensor]], Tensor]
"""Given a flat part of a group and its whole matrices, the flat part of these."""


class ClientOptimizer(torch.optim.Optimizer):
    """AdamW and Muon side by side; ZeRO may replace the parameters in `param_groups` by flat ones."""

    def __init__(self, model: nn.Module, config: OptimConfig, sharded: bool) -> None:
        ours = build_optimizer(model, config, with_state=False)
        self._rows = ours.groups()
        self._rules: list[torch.optim.Optimizer] = []
        exact = {id(p) for name, p in model.named_parameters() if used_in_fp32(name, p)}
        groups: list[dict[str, Any]] = []
        for rule, group in ours.parts:
            most = GATHERED_NUMBERS if sharded and isinstance(rule, Muon) else None
            apart = [[p for p in group["params"] if (id(p) in exact) is kind] for kind in (False, True)]
            for parameters in [run for part in apart if part for run in _runs(part, most)]:
                groups.append(group | {"params": parameters, "peak_lr": group["lr"], "rule": len(self._rules)})
            self._rules.append(ShardedMuon(rule) if sharded and isinstance(rule, Muon) else rule)
        super().__init__(groups, {})

    def lay_out(self, gather: Gather, scatter: Scatter) -> None:
        """How Muon comes by whole matrices; needed before the first step when sharded."""
        for rule in self._rules:
            if isinstance(rule, ShardedMuon):
                rule.gather, rule.scatter = gather, scatter

    def make_state(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Create the state that the first step would create, so that one can be loaded before it."""
        rule = self._rules[group["rule"]]
        self.state[parameter] = new_state(rule.inner if isinstance(rule, ShardedMuon) else rule, group, parameter)

    def set_lr_scale(self, scale: float) -> None:
        """Learning rate of every group = its peak * `scale`, for the next steps."""
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * scale

    def groups(self) -> list[GroupRow]:
        """The groups as the run prints them."""
        return self._rows

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that `param_groups` holds now."""
        assert closure is None
        for group in self.param_groups:
            if group["params"]:
                rule = self._rules[group["rule"]]
                rule.param_groups, rule.state = [group], self.state
                rule.step()


class ShardedMuon(torch.optim.Optimizer):
    """Muon over flat parts of groups of matrices; see the module's docstring."""

    def __init__(self, inner: Muon) -> None:
        self.inner = inner
        self.gather: Gather | None = None
        self.scatter: Scatter | None = None
        super().__init__([nn.Parameter(torch.empty(0))], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of each flat part that has a gradient."""
        assert closure is None and self.gather is not None and self.scatter is not None
        for group in self.param_groups:
            for part in group["params"]:
                gradient, momentum = part.grad, self.state[part]["momentum_buffer"]
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                rounded = update.to(product_dtype(part.device))
                whole = self.scatter(part, directions_of(self.gather(part, rounded), group))
                if group["weight_decay"]:
                    part.mul_(1 - group["lr"] * group["weight_decay"])
                part.add_(whole, alpha=-group["lr"])


def used_in_fp32(name: str, parameter: Tensor) -> bool:
    """Whether a model computes with this parameter in FP32: gains of norms and other vectors, routers, adapters.

    They are groups of their own under ZeRO, whose weights travel in FP32.
    """
    return reduced_exactly(name, parameter) or MARK in name


def numbers_of(parameter: Tensor) -> int:
    """Numbers of a parameter, also of one that is partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def travels_exactly(name: str, parameter: Tensor, least: int) -> bool:
    """Whether its gradient travels in FP32 whatever code is chosen: `reduced_exactly`, or fewer numbers than least."""
    return reduced_exactly(name, parameter) or numbers_of(parameter) < least


def reduced_exactly(name: str, parameter: Tensor) -> bool:
    """Whether its gradient always travels in FP32: of all but matrices of products, and parts of such."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) < 2 or ".router." in name


def _runs(parameters: list[nn.Parameter], most: int | None) -> list[list[nn.Parameter]]:
    """Parameters in consecutive runs of at most `most` numbers (at least one parameter each)."""
    if most is None:
        return [parameters]
    runs: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if runs[-1] and size + parameter.numel() > most:
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += parameter.numel()
    return runs
