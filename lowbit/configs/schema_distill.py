"""Settings of `lowbit distill`: those of a run, which are the student's, then the teacher, its cache and the loss."""

from dataclasses import dataclass, field
from enum import StrEnum

from lowbit.configs.schema import ModelConfig, PrecisionConfig, RunConfig


class Estimator(StrEnum):
    """How a few targets stand for a teacher's distribution."""

    varopt = "varopt"
    """The likeliest exactly, the tail by threshold sampling; unbiased with the least variance, weights sum to one."""
    gumbel = "gumbel"
    """Gumbel top-k, weighed by inclusion probabilities; unbiased."""
    multinomial = "multinomial"
    """Draws with replacement (RS-KD); unbiased."""
    topk = "topk"
    """The likeliest tokens: biased towards them. A baseline, and what reverse_kl and jsd need."""


class Divergence(StrEnum):
    """What a student minimises between the teacher p and itself, s."""

    forward_kl = "forward_kl"
    """KL(p || s): linear in p, so sampled targets leave it unbiased."""
    reverse_kl = "reverse_kl"
    """KL(s || p) over the stored tokens and one bucket for all others; topk caches only."""
    jsd = "jsd"
    """Jensen-Shannon divergence over the stored tokens and one bucket for all others; topk caches only."""


@dataclass(frozen=True)
class TeacherConfig:
    """Whose distribution is distilled."""

    path: str = ""
    """Folder of a run, or of a Hugging Face model; empty: `lowbit distill` trains a teacher of its own first."""
    checkpoint: str = "latest"
    """Which checkpoint of a run."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """What the teacher computes in while it is cached, whatever it was trained in; `teacher.precision=CHOICE` too."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Without `path`: the teacher to train, on the student's data, with its optimizer; `teacher.model=CHOICE` too."""
    max_steps: int = 400
    """Without `path`: optimizer steps it is trained for."""


@dataclass(frozen=True)
class CacheConfig:
    """The stored targets of a teacher over the first samples of the data, in the order of `cache.seed`."""

    path: str = ""
    """Folder; empty means `cache` in the run's folder."""
    more: list[str] = field(default_factory=list)
    """Folders of more caches over the same tokens, by other teachers: a student learns from the average of all."""
    estimator: Estimator = Estimator.varopt
    targets: int = 16
    """Targets kept a position."""
    temperature: float = 1.0
    """The teacher's logits are divided by it, and so are the student's when it learns from them."""
    tokens: int | None = None
    """Positions to cache; null: as many as the student trains on. A longer training goes over them again."""
    seed: int = 1
    """Order of the samples, and the sampling noise."""
    micro_batch: int = 16
    """Sequences the teacher reads at once."""
    shard_tokens: int = 262_144
    """Positions a shard holds, rounded to whole micro-batches: what is lost at most when caching is killed."""


@dataclass(frozen=True)
class DistillLossConfig:
    """What the student is trained for."""

    divergence: Divergence = Divergence.forward_kl
    alpha: float = 1.0
    """Share of the divergence; the rest is cross-entropy with the data."""


@dataclass(frozen=True)
class DistillConfig(RunConfig):
    """A distillation: the keys of a run are the student's; then its teacher, the teacher's cache, and the loss."""

    run_name: str = "distill"
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    loss: DistillLossConfig = field(default_factory=DistillLossConfig)
