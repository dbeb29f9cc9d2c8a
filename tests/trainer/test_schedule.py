"""Learning-rate and batch-size schedules against closed forms and tables written by hand."""

import math
from dataclasses import replace

import pytest

from lowbit.configs.schema import (
    BatchConfig,
    BatchWarmupConfig,
    DataConfig,
    RunConfig,
    ScheduleConfig,
    ScheduleKind,
)
from lowbit.errors import ConfigError
from lowbit.trainer.schedule import lr_scale, progress, sequences_at


def _curve(config: ScheduleConfig, steps: int) -> list[float]:
    return [lr_scale(config, step, step / steps) for step in range(steps)]


def test_wsd_by_hand() -> None:
    config = ScheduleConfig(kind=ScheduleKind.wsd, warmup_steps=2, decay_fraction=0.4, final_fraction=0.0)
    assert _curve(config, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_wsd_reaches_its_final_fraction_and_never_zero_before_the_end() -> None:
    config = ScheduleConfig(warmup_steps=0, decay_fraction=0.3, final_fraction=0.1)
    assert lr_scale(config, 99, 1.0) == pytest.approx(0.1)
    assert min(_curve(replace(config, final_fraction=0.0), 50)) > 0


def test_cosine_is_the_closed_form() -> None:
    config = ScheduleConfig(kind=ScheduleKind.cosine, warmup_steps=0, final_fraction=0.1)
    for step, value in enumerate(_curve(config, 37)):
        assert value == pytest.approx(0.1 + 0.9 * math.cos(math.pi * step / 74) ** 2)


def test_constant() -> None:
    config = ScheduleConfig(kind=ScheduleKind.constant, warmup_steps=4)
    assert _curve(config, 100) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 97)


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_a_short_run_still_reaches_most_of_its_peak(kind: ScheduleKind, decay: float) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=1000, decay_fraction=decay)
    curve = _curve(config, 10)
    assert all(0 <= value <= 1 for value in curve)
    assert max(curve) >= 0.4, "warm-up must not outlast a run of ten steps"
    assert all(math.isfinite(value) for value in [*curve, lr_scale(config, 10, 1.0)])


def test_one_step_run() -> None:
    assert lr_scale(ScheduleConfig(warmup_steps=1), 0, 0.0) == 1.0


def test_progress_is_the_largest_share() -> None:
    config = RunConfig(max_steps=100, max_tokens=1000, max_minutes=1.0)
    assert progress(config, 10, 200, 18) == pytest.approx(0.3)
    assert progress(config, 10, 200, 3) == pytest.approx(0.2)
    assert progress(config, 50, 200, 3) == pytest.approx(0.5)
    assert progress(config, 500, 0, 0) == 1.0
    assert progress(RunConfig(max_minutes=2.0), 0, 0, 30) == pytest.approx(0.25)
    assert progress(RunConfig(max_steps=0), 0, 0, 0) == 1.0


def test_progress_without_a_limit_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_steps"):
        progress(RunConfig(), 0, 0, 0)


def test_batch_warmup() -> None:
    stages = [BatchWarmupConfig(until_tokens=64, sequences=2), BatchWarmupConfig(until_tokens=200, sequences=4)]
    config = RunConfig(batch=BatchConfig(sequences=8, warmup=stages), data=DataConfig(sequence_length=16))
    sizes, sample = [], 0
    while len(sizes) < 7:
        sizes.append(sequences_at(config, sample))
        sample += sizes[-1]
    assert sizes == [2, 2, 4, 4, 4, 8, 8]  # stages end at samples 4 and 12.5
    assert sequences_at(RunConfig(), 10**9) == RunConfig().batch.sequences
