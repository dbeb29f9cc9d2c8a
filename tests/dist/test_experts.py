"""Experts spread over ranks: the numbers of one process, whole runs, other ranks at the next start, few bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny_runs
import worker
from nearness import assert_near, assert_same_rows
from safetensors.torch import load_file
from test_runs import fine, run_jobs, same
from test_zero import BACKENDS, run_cases, usable

from lowbit.configs.schema import ComputeDtype, GateKind, MoeConfig, PrecisionConfig, RunConfig
from lowbit.errors import ConfigError
from lowbit.models.spread import Spread
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.own_experts import OwnExperts
from lowbit.trainer.run import pretrain

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]

MOE = MoeConfig(experts=12, top_k=2, expert_width=16, shared=1, first_dense=1, gate=GateKind.sigmoid, bias_rate=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_numbers_of_one_process(world: int, backend: str, tmp_path: Path) -> None:
    usable(backend, world)
    cases: list[dict[str, Any]] = [
        {"name": "one", "stage": 1, "optimizer": "adamw"},
        {"name": "two", "stage": 2, "optimizer": "muon"},
        {"name": "recomputed", "stage": 1, "optimizer": "adamw", "recompute": "full"},
        {"name": "compiled", "stage": 1, "optimizer": "adamw", "compile": "on"},
    ][: 3 if backend == "gloo" else 4]
    folder = run_cases(world, [{"moe": True, "spread": True, **case} for case in cases], tmp_path, backend)
    for case in cases:
        device = "cuda" if backend == "nccl" else "cpu"
        rows, expected = worker.local({"moe": True, "optimizer": case["optimizer"]}, device)
        found = json.loads((folder / f"{case['name']}.json").read_text())
        assert_same_rows(found["rows"], rows, backend, case)
        saved = load_file(folder / f"{case['name']}.safetensors")
        assert_near(saved, expected, backend, weight=2e-6, state=1e-4, what=case["name"])
        assert len(set(found["weights"])) == world, "each rank has other experts"
        assert_counted(found["traffic"], expected, world)


def assert_counted(traffic: dict[str, float], tensors: dict[str, Any], world: int) -> None:
    """Bytes of three steps: FP32 gradients of what is no expert; rows of tokens, to experts and back."""
    others = [t for name, t in tensors.items() if name.startswith("model/") and ".experts." not in name]
    numbers = sum(t.numel() for t in others if t.ndim > 0)
    assert traffic["comm/gradient_bytes"] == pytest.approx(3 * 2 * 4 * numbers * (world - 1) / world, rel=0.02)
    assert traffic["comm/token_bytes"] == traffic["exchanged"] > 0


def _config(folder: Path, **engine: Any) -> RunConfig:
    config = jobs.tiny(folder, **engine)
    return replace(config, model=replace(config.model, moe=MOE))


def test_whole_runs_and_other_ranks_at_the_next_start(tmp_path: Path) -> None:
    """Validation, averages, samples, balancing biases; a checkpoint of spread experts goes on anywhere."""
    pretrain(jobs.local(_config(tmp_path)), tmp_path / "one")
    spread = _config(tmp_path, zero_stage=1, expert_parallel=True)
    fine(run_jobs(3, [(spread, tmp_path / "three", {})], tmp_path / "all"))
    same(tmp_path / "one", tmp_path / "three")
    rows, expected = tiny_runs.rows(tmp_path / "three"), tiny_runs.rows(tmp_path / "one")
    for row, wanted in zip(rows, expected, strict=True):
        assert row["experts/load/blocks.1"] == pytest.approx(wanted["experts/load/blocks.1"], abs=1e-3)
        assert row["experts/bias/blocks.1"] == pytest.approx(wanted["experts/bias/blocks.1"], abs=1e-6)

    start = str(tmp_path / "three" / "checkpoints" / "step_00000004")
    planned = [
        (replace(spread, resume=start), tmp_path / "two", {}),
        (replace(_config(tmp_path, zero_stage=3), resume=start), tmp_path / "sharded", {}),
    ]
    fine(run_jobs(2, planned, tmp_path / "next"))
    pretrain(replace(jobs.local(_config(tmp_path)), resume=start), tmp_path / "local")
    whole = tiny_runs.tensors(tmp_path / "one")
    for name in ("two", "sharded", "local"):
        assert_near(tiny_runs.tensors(tmp_path / name), whole, "gloo", weight=1e-5, state=1e-3, what=name)


@pytest.mark.exhaustive
def test_low_bit_experts_learn_where_they_are(tmp_path: Path) -> None:
    """Each expert keeps its own noise; scales over a batch differ, so the numbers are near and not equal."""
    precision = PrecisionConfig(forward="nvfp4", backward="nvfp4", compute=ComputeDtype.fp32)
    config = replace(_config(tmp_path, zero_stage=1, expert_parallel=True), precision=precision)
    pretrain(jobs.local(config), tmp_path / "one")
    fine(run_jobs(2, [(config, tmp_path / "two", {})], tmp_path / "all"))
    for row, wanted in zip(tiny_runs.rows(tmp_path / "two"), tiny_runs.rows(tmp_path / "one"), strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=0.02)
    assert tiny_runs.rows(tmp_path / "two")[-1]["loss"] < tiny_runs.rows(tmp_path / "two")[0]["loss"]


def test_what_cannot_be_shared() -> None:
    model = Transformer(replace(worker.MODEL, moe=worker.MOE), 60)
    with pytest.raises(ConfigError, match=r"3 processes cannot share model\.moe\.experts=4"):
        OwnExperts(model, Ranks(rank=0, world=3), worker.config_of({}).optim)
    assert Spread(1, 4, 12).mine == slice(3, 6)
