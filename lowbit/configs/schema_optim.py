"""Settings of the optimizer: AdamW or Muon, its schedule, clipping and averaging."""

from dataclasses import dataclass, field
from enum import StrEnum


class OptimizerKind(StrEnum):
    """Optimizer of the 2-D hidden matrices; everything else always takes AdamW."""

    adamw = "adamw"
    muon = "muon"


class ScheduleKind(StrEnum):
    """Shape of the learning rate over the run, after warm-up."""

    wsd = "wsd"
    """Constant, then linear down to `final_fraction` over the last `decay_fraction` of the run."""
    cosine = "cosine"
    constant = "constant"


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule, as a function of the run's progress."""

    kind: ScheduleKind = ScheduleKind.wsd
    warmup_steps: int = 20
    decay_fraction: float = 0.3
    final_fraction: float = 0.0
    """Last learning rate over the peak."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon's own settings (`torch.optim.Muon`)."""

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0
    ns_steps: int = 5
    match_rms_adamw: bool = False
    """Scale updates by 0.2 * sqrt(max(rows, cols)), so that AdamW learning rates apply."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, its schedule, clipping and weight averaging."""

    kind: OptimizerKind = OptimizerKind.adamw
    lr: float = 3e-3
    """AdamW's peak learning rate (with Muon: of embeddings, head and norms)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; on matrices only, never on embeddings or norms."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, evaluated beside them; None means none."""
    z_loss: float = 0.0
    """Weight of mean(logsumexp(logits)**2), added to the training loss only."""
