"""Stabilisers on masters that ZeRO shards: resumed inside a window they change no bit, and open windows move house."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny_runs
import torch
from test_runs import BACKENDS, fine, run_jobs

from lowbit.configs.schema import (
    OsciResetConfig,
    OutControlConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleKind,
    StabiliserConfig,
    StatisticsConfig,
)
from lowbit.trainer.run import pretrain

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]

OSCI = StabiliserConfig(oscireset=OsciResetConfig(enabled=True, start=0.0, period=4, window=2, threshold=2.0))
OUT = StabiliserConfig(outcontrol=OutControlConfig(enabled=True, first_step=4, steps=2))


def config_of(folder: Path, steps: int, stage: int, stabilisers: StabiliserConfig, **more: Any) -> RunConfig:
    """A 4-bit forward without noise, and matrices whose rows are whole blocks of 128."""
    config = jobs.tiny(folder, steps, zero_stage=stage)
    schedule = replace(config.optim.schedule, kind=ScheduleKind.constant)
    precision = PrecisionConfig(
        compute=config.precision.compute,
        forward="nvfp4",
        stabilisers=stabilisers,
        statistics=StatisticsConfig(every_steps=3),
    )
    return replace(
        config,
        model=replace(config.model, layers=1, width=128, mlp_width=128),
        optim=replace(config.optim, schedule=schedule),
        precision=precision,
        evaluation=replace(config.evaluation, every_steps=0, sample_tokens=0),
        checkpoint=replace(config.checkpoint, every_steps=0),
        **more,
    )


def same(a: Path, b: Path, count: int) -> None:
    """The same bits at the end, and the same numbers in the last `count` rows."""
    left, right = tiny_runs.tensors(a), tiny_runs.tensors(b)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    for ra, rb in zip(tiny_runs.rows(a)[-count:], tiny_runs.rows(b)[-count:], strict=True):
        keys = [key for key in ra if key.startswith("quant/") or key in ("step", "loss")]
        keys = [key for key in keys if "flip_share" not in key]  # flips are counted anew after a resume of shards
        assert {key: ra[key] for key in keys} == {key: rb.get(key) for key in keys}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.exhaustive), 1, pytest.param(3, marks=pytest.mark.exhaustive)]
)
def test_a_resume_inside_a_window_changes_nothing(tmp_path: Path, stage: int, backend: str) -> None:
    """Stopped after step 5 of 8, when a window is open (steps 4 to 7) and inputs are being measured (4 and 5)."""
    planned = []
    for name, stabilisers in (("osci", OSCI), ("out", OUT)):
        whole, begun = (config_of(tmp_path, steps, stage, stabilisers) for steps in (8, 5))
        resumed = replace(whole, resume=str(tmp_path / f"{name}-begun" / "checkpoints" / "step_00000005"))
        planned += [(whole, tmp_path / name, {}), (begun, tmp_path / f"{name}-begun", {})]
        planned += [(resumed, tmp_path / f"{name}-resumed", {})]
    fine(run_jobs(2, planned, tmp_path / "two", backend))
    for name in ("osci", "out"):
        same(tmp_path / name, tmp_path / f"{name}-resumed", 3)
    found = [row for row in tiny_runs.rows(tmp_path / "osci") if "quant/reset_share" in row]
    shares = {row["step"]: row["quant/reset_share"] for row in found}
    assert shares.keys() == {7} and 0.001 < shares[7] < 0.5
    assert tiny_runs.rows(tmp_path / "out")[4]["loss"] != tiny_runs.rows(tmp_path / "out")[5]["loss"]
    statistics = tiny_runs.rows(tmp_path / "osci")[2]
    assert "quant/blocks.0.mlp.gate/input/relative_mse" in statistics
    assert ("quant/blocks.0.mlp.up/weight/relative_mse" in statistics) == (stage < 3)


@pytest.mark.exhaustive
def test_an_open_window_moves_to_other_ranks_stages_and_engines(tmp_path: Path) -> None:
    """Begun on two ranks at stage 3, with whole tensors in the checkpoint; it closes in one process and on three ranks.

    Sums over other ranks round differently, so weights at an edge may fall on its other side: shares agree closely.
    """
    begun = config_of(tmp_path, 5, 3, OSCI)
    fine(run_jobs(2, [(begun, tmp_path / "begun", {})], tmp_path / "two"))
    held = tiny_runs.tensors(tmp_path / "begun")
    for slot in ("weight", "value", "moved", "jumped"):
        assert held[f"stabilisers/windows.{slot}.blocks.0.mlp.up.weight"].shape == (128, 128)
    whole = config_of(tmp_path, 8, 1, OSCI)
    pretrain(jobs.local(whole), tmp_path / "local")
    resume = str(tmp_path / "begun" / "checkpoints" / "step_00000005")
    pretrain(jobs.local(replace(whole, resume=resume)), tmp_path / "one")
    fine(run_jobs(4, [(replace(whole, resume=resume), tmp_path / "four", {})], tmp_path / "ranks"))
    shares = [
        row["quant/reset_share"]
        for name in ("local", "one", "four")
        for row in tiny_runs.rows(tmp_path / name)
        if "quant/reset_share" in row
    ]
    assert len(shares) == 3 and shares == pytest.approx([shares[0]] * 3, rel=0.05)
