"""How the learning rate and the batch size change over a run.

Both are pure functions of where the run stands, never of a counter kept somewhere: a resumed run computes the same
values from the same position.

*Progress* is the share of the run that is done, between 0 and 1: the largest of steps / max_steps,
tokens / max_tokens and seconds / (60 * max_minutes) over the limits that are set, because the run ends at whichever
limit comes first.

The learning rate of a step is its peak times ``warm(step, progress) * shape(progress)``:

    warm      min(1, max((step + 1) / warmup_steps, progress / 0.5))
    wsd       1, then linear to final_fraction over the last decay_fraction of the run
    cosine    final + (1 - final) * (1 + cos(pi * progress)) / 2
    constant  1

Warm-up is counted in steps, since what it protects (Adam's second moments, the first large gradients) is. In a run
too short for it, it ends at half of the run's progress at the latest. `step` counts from 0, so that the first step
already learns; and since the last step starts before progress 1, it still learns with final_fraction = 0.

WSD (warm-up, stable, decay): Hu et al. 2024, arXiv 2404.06395; linear decay to zero: Bergsma et al. 2025,
arXiv 2502.15938.
"""

import math

from lowbit.configs.schema import RunConfig, ScheduleConfig, ScheduleKind
from lowbit.errors import ConfigError

LONGEST_WARMUP = 0.5
"""Share of the run after which warm-up is over, however many `warmup_steps` are asked for."""


def progress(config: RunConfig, step: int, tokens: int, seconds: float) -> float:
    """Share of the run done after `step` steps, `tokens` trained tokens and `seconds` of training, in [0, 1].

    Raises ConfigError when no limit is set, since the run would never end.
    """
    shares = _shares(config, step, tokens, seconds)
    if not shares:
        raise ConfigError("no end of the run is set: give max_steps, max_tokens or max_minutes")
    return min(1.0, max(shares.values()))


def limits_reached(config: RunConfig, step: int, tokens: int, seconds: float) -> list[str]:
    """The keys of the limits that end the run at this position; empty while it goes on."""
    return [key for key, share in _shares(config, step, tokens, seconds).items() if share >= 1.0]


def _shares(config: RunConfig, step: int, tokens: int, seconds: float) -> dict[str, float]:
    """How much of each limit that is set is used up."""
    used: dict[str, tuple[float, float | None]] = {
        "max_steps": (step, config.max_steps),
        "max_tokens": (tokens, config.max_tokens),
        "max_minutes": (seconds / 60, config.max_minutes),
    }
    return {key: amount / limit if limit > 0 else 1.0 for key, (amount, limit) in used.items() if limit is not None}


def lr_scale(config: ScheduleConfig, step: int, progress: float) -> float:
    """Learning rate of step number `step` (from 0), started at `progress`, over its peak: in [0, 1]."""
    return _warm(config, step, progress) * _shape(config, progress)


def _warm(config: ScheduleConfig, step: int, progress: float) -> float:
    if config.warmup_steps <= 0:
        return 1.0
    return min(1.0, max((step + 1) / config.warmup_steps, progress / LONGEST_WARMUP))


def _shape(config: ScheduleConfig, progress: float) -> float:
    final = config.final_fraction
    if config.kind is ScheduleKind.constant:
        return 1.0
    if config.kind is ScheduleKind.cosine:
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    start = 1 - config.decay_fraction
    if progress <= start:
        return 1.0
    return 1 - (1 - final) * (progress - start) / config.decay_fraction


def decaying(config: ScheduleConfig, progress: float) -> bool:
    """Whether the learning rate of a step that starts at `progress` has begun to fall (`wsd` only)."""
    return config.kind is ScheduleKind.wsd and progress > 1 - config.decay_fraction


def sequences_at(config: RunConfig, sample: int) -> int:
    """Sequences of the optimizer step that starts at global sample `sample` (batch-size warm-up).

    The first stage of `batch.warmup` whose `until_tokens` lies ahead decides, else `batch.sequences`. The position is
    that of the data, sample * sequence_length tokens, so the answer is the same after a resume and on every rank.
    """
    tokens = sample * config.data.sequence_length
    for stage in config.batch.warmup:
        if tokens < stage.until_tokens:
            return stage.sequences
    return config.batch.sequences
