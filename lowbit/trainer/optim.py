"""The optimizer: AdamW for everything, or Muon for the hidden matrices and AdamW for the rest.

    AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101):
        m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
        w <- (1 - lr * decay) w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the momentum of a matrix, made nearly orthogonal
        by `ns_steps` Newton-Schulz iterations, so that every direction of the update has about the same length
        (trainer/muon.py).

Five groups of parameters, and each parameter that trains is in exactly one:

    hidden matrices   2-D (or more) weights inside `blocks.`; weight decay. Muon may take those that are one matrix
                      for all tokens: not routers, and not experts, which come as one tensor of several
    head              the untied LM head: always AdamW; weight decay, since it multiplies activations like any
                      other matrix and decay is what bounds its logits
    embedding         always AdamW, no weight decay: a row is touched only when its token occurs, and decay would
                      shrink the rare ones towards zero in between. A tied head is the embedding, so it has none either
    norms             gains of norms and other vectors: AdamW, no weight decay
    adapters          of LoRA: always AdamW, no weight decay. Muon evens out the directions of a matrix's own update,
                      and what counts is that of B A; and it would blow A's first gradients, which are zero or nearly
                      so while B is, up to full size. Decay would pull towards the frozen weight, which is what a
                      penalty on the divergence from the reference is for

Weights, gradients and states are FP32; Muon's iterations multiply in BF16. AdamW runs fused: one kernel a group on
CUDA, one vectorised pass a tensor on the CPU (4 to 8 times faster than the unfused one there). Learning rates are plain
floats handed to these kernels, so changing them recompiles nothing and never waits for the device.

State goes in and out as plain tensors named `<parameter's full name>.<slot>`: `exp_avg`, `exp_avg_sq`, `step` of
AdamW and `momentum_buffer` of Muon.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.configs.schema import OptimConfig, OptimizerKind
from lowbit.errors import CheckpointError, ConfigError
from lowbit.models.adapters import MARK
from lowbit.models.cost import mup_ratio
from lowbit.models.transformer import Transformer
from lowbit.trainer.muon import Muon

FUSED_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class GroupRow:
    """One row of the printed table of parameter groups."""

    group: str
    optimizer: str
    tensors: int
    parameters: int
    lr: float
    weight_decay: float

    def __str__(self) -> str:
        return (
            f"{self.group:<15}  {self.optimizer:<5}  {self.tensors:>4} tensors  {self.parameters:>13,} parameters"
            f"  lr {self.lr:g}  weight decay {self.weight_decay:g}"
        )


@dataclass(frozen=True)
class _Group:
    """Parameters that share an optimizer and its settings; `torch_group` is where torch keeps the learning rate."""

    name: str
    optimizer: torch.optim.Optimizer
    torch_group: dict[str, Any]
    parameters: dict[str, nn.Parameter]
    lr: float
    weight_decay: float


def group_of(name: str, parameter: Tensor) -> str:
    """Which of the groups a parameter belongs to, by its full name and its number of dimensions."""
    room = name.split(".", 1)[0]
    if MARK in name:
        return "adapters"
    if parameter.ndim < 2:
        return "norms"
    if room == "blocks":
        return "hidden matrices"
    if room in ("embedding", "head"):
        return room
    raise ConfigError(f"optimizer: parameter {name} is a matrix outside of embedding, head and blocks: name its group")


class Optimizer:
    """All parameters of a model with their update rules; made by `build_optimizer`."""

    def __init__(self, groups: list[_Group], with_state: bool = True) -> None:
        self._groups = groups
        self._optimizers = list(dict.fromkeys(group.optimizer for group in groups))
        if with_state:
            _make_state(groups)

    @property
    def parts(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """For each group the optimizer that updates it and its entry there: parameters, rates, settings."""
        return [(group.optimizer, group.torch_group) for group in self._groups]

    def set_lr_scale(self, scale: float) -> None:
        """Learning rate of every group = its peak * `scale`, for the next steps."""
        for group in self._groups:
            group.torch_group["lr"] = group.lr * scale

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def groups(self) -> list[GroupRow]:
        """The parameter groups with their peak learning rates, for printing."""
        return [
            GroupRow(
                group=group.name,
                optimizer=type(group.optimizer).__name__,
                tensors=len(group.parameters),
                parameters=sum(parameter.numel() for parameter in group.parameters.values()),
                lr=group.lr,
                weight_decay=group.weight_decay,
            )
            for group in self._groups
        ]

    def state_tensors(self) -> dict[str, Tensor]:
        """Every state tensor by `<full name>.<slot>`. They are the live tensors, not copies."""
        return {
            f"{name}.{slot}": tensor
            for group in self._groups
            for name, parameter in group.parameters.items()
            for slot, tensor in group.optimizer.state[parameter].items()
        }

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a saved state, bit by bit; CheckpointError names an unknown, missing or misshapen entry."""
        own = self.state_tensors()
        for name in sorted(own.keys() ^ tensors.keys()):
            what = "missing in the checkpoint" if name in own else "unknown to this run"
            raise CheckpointError(
                f"optimizer state {name} is {what}: go on with the optim settings of the run that "
                "saved it (its config.yaml), or start anew under another run_name"
            )
        for name, tensor in own.items():
            saved = tensors[name]
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                was, now = (f"{tuple(t.shape)} {t.dtype}" for t in (saved, tensor))
                raise CheckpointError(f"optimizer state {name} is {was} in the checkpoint and {now} in this run")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def build_optimizer(model: nn.Module, config: OptimConfig, with_state: bool = True) -> Optimizer:
    """Group the model's trainable parameters and give each group its optimizer, at peak learning rates.

    Parameters must already lie on their device. Shared parameters (a tied head) count once, under their first name.
    Without `with_state`, whoever shards the states creates them (`new_state`).
    """
    members: dict[str, dict[str, nn.Parameter]] = {
        group: {} for group in ("hidden matrices", "head", "embedding", "norms", "adapters")
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[group_of(name, parameter)][name] = parameter

    adamw: list[tuple[str, dict[str, nn.Parameter]]] = []
    groups: list[_Group] = []
    for group, parameters in members.items():
        matrices = {name: p for name, p in parameters.items() if p.ndim == 2 and ".router." not in name}
        if group == "hidden matrices" and config.kind is OptimizerKind.muon and matrices:
            groups.append(_muon(group, matrices, config))
            parameters = {name: p for name, p in parameters.items() if name not in matrices}
        if parameters:
            adamw.append((group, parameters))
    hidden_scale = mup_ratio(model.config) if isinstance(model, Transformer) else 1.0
    return Optimizer(groups + _adamw(adamw, config, hidden_scale), with_state)


def expert_optimizer(parameters: dict[str, nn.Parameter], model: Transformer, config: OptimConfig) -> Optimizer:
    """AdamW over the experts of one rank, as `build_optimizer` would have it over those of all."""
    return Optimizer(_adamw([("hidden matrices", parameters)], config, mup_ratio(model.config)))


def _adamw(
    members: list[tuple[str, dict[str, nn.Parameter]]], config: OptimConfig, hidden_scale: float
) -> list[_Group]:
    """AdamW over groups of parameters; hidden matrices learn at `hidden_scale` times the rate (muP)."""
    if not members:
        return []
    devices = {parameter.device.type for _, parameters in members for parameter in parameters.values()}
    decays = [config.weight_decay if group in ("hidden matrices", "head") else 0.0 for group, _ in members]
    rates = [config.lr * (hidden_scale if group == "hidden matrices" else 1.0) for group, _ in members]
    optimizer = torch.optim.AdamW(
        [
            {"params": list(p.values()), "weight_decay": decay, "lr": rate}
            for (_, p), decay, rate in zip(members, decays, rates, strict=True)
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=all(device in FUSED_DEVICES for device in devices),
    )
    return [
        _Group(name, optimizer, torch_group, parameters, rate, decay)
        for (name, parameters), decay, rate, torch_group in zip(
            members, decays, rates, optimizer.param_groups, strict=True
        )
    ]


def _muon(name: str, matrices: dict[str, nn.Parameter], config: OptimConfig) -> _Group:
    """Muon over the hidden matrices."""
    muon = config.muon
    optimizer = Muon(
        matrices.values(),
        lr=muon.lr,
        weight_decay=muon.weight_decay,
        momentum=muon.momentum,
        ns_steps=muon.ns_steps,
        adjust_lr_fn="match_rms_adamw" if muon.match_rms_adamw else "original",
    )
    return _Group(name, optimizer, optimizer.param_groups[0], matrices, muon.lr, muon.weight_decay)


def _make_state(groups: list[_Group]) -> None:
    """Create the states that torch would create in the first step, so that one can be loaded before it."""
    for group in groups:
        for parameter in group.parameters.values():
            group.optimizer.state[parameter] = new_state(group.optimizer, group.torch_group, parameter)


def new_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter, or of a rank's part of several, before the first step."""
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    device = parameter.device if group["fused"] else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
