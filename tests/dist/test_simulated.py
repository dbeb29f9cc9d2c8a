"""Quality runs whose micro-batches stand for ranks leave the bits of real ranks (`scripts/bench_comm_quality.py`).

Oracle: whole runs by DeepSpeed's engine at ZeRO 0 on real processes, gloo between them. Sums of vectors, which travel
in FP32, are the backend's there: with two ranks one addition, whatever its order; with more its ring's order, so that
after a step only what is coded can be the same in every bit.
"""

from dataclasses import replace
from pathlib import Path

import bench_comm_quality as quality
import jobs
import pytest
import tiny_runs
import torch
from test_runs import BACKENDS, fine, run_jobs
from test_zero import usable

from lowbit.configs.schema import CommConfig, CommKind, OptimizerKind, RunConfig
from lowbit.errors import ConfigError

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]


def config_of(folder: Path, kind: str, steps: int, clip: float) -> RunConfig:
    config = jobs.tiny(folder, steps, zero_stage=0, bucket_mib=1)
    kind = "none" if kind == "fp32" else kind
    return replace(
        config,
        model=replace(config.model, width=128, mlp_width=320),  # buckets and pieces of several matrices, and several
        comm=CommConfig(kind=CommKind(kind), exact_below=100),
        optim=replace(config.optim, kind=OptimizerKind.muon, clip_norm=clip),
        evaluation=replace(config.evaluation, every_steps=0, sample_tokens=0),
    )


def simulated(folder: Path, kind: str, ranks: int, steps: int, clip: float) -> dict[str, torch.Tensor]:
    run_dir = folder / f"simulated-{kind}"
    quality.train(jobs.local(config_of(folder, kind, steps, clip)), kind, ranks, run_dir)
    return tiny_runs.tensors(run_dir)


def real(folder: Path, kinds: list[str], ranks: int, steps: int, clip: float) -> dict[str, dict[str, torch.Tensor]]:
    planned = [(config_of(folder, kind, steps, clip), folder / f"real-{kind}", {}) for kind in kinds]
    fine(run_jobs(ranks, planned, folder / "ranks"))
    return {kind: tiny_runs.tensors(folder / f"real-{kind}") for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [["fp32", "squinch"], pytest.param(["fp32", "bf16", "squinch", "sq48"], marks=pytest.mark.exhaustive)]
)
def test_whole_runs_of_two_ranks(kinds: list[str], tmp_path: Path) -> None:
    """Weights, both optimizers' states and moving averages after six clipped steps."""
    found = real(tmp_path, kinds, 2, 6, 1.0)
    ends = []
    for kind in kinds:
        wanted = simulated(tmp_path, kind, 2, 6, 1.0)
        assert wanted.keys() == found[kind].keys() and len(wanted) > 30
        assert [name for name, tensor in wanted.items() if not torch.equal(tensor, found[kind][name])] == [], kind
        ends.append(wanted["model/blocks.0.mlp.up.weight"])
    assert not any(torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [3, 4])
def test_a_step_of_more_ranks(world: int, tmp_path: Path) -> None:
    kinds = ["squinch", "sq48"]
    found = real(tmp_path, kinds, world, 1, 0.0)
    for kind in kinds:
        wanted = simulated(tmp_path, kind, world, 1, 0.0)
        for name, tensor in wanted.items():
            if "norm" not in name:
                assert torch.equal(tensor, found[kind][name]), (kind, name)
            assert torch.allclose(tensor, found[kind][name], rtol=1e-4, atol=1e-6), (kind, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_control_is_worse(backend: str, tmp_path: Path) -> None:
    """What a reduced gradient is off by, of the same micro-batches: four bits far more than six, six than BF16."""
    usable(backend, 1)
    config = jobs.local(config_of(tmp_path, "fp32", 1, 0.0), backend)
    moved = {}
    for kind in ("fp32", "bf16", "sq48", "int4"):
        quality.train(config, kind, 4, tmp_path / kind)
        moved[kind] = tiny_runs.tensors(tmp_path / kind)["optimizer/blocks.0.mlp.up.weight.momentum_buffer"]
    exact = moved.pop("fp32").double()
    off = {kind: float((g - exact).norm() / exact.norm()) for kind, g in moved.items()}
    assert off["bf16"] < 0.01 < off["sq48"] < 0.07 and 2 * off["sq48"] < off["int4"] < 1, off


def test_ranks_that_cannot_share(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="12 micro-batches a step cannot be shared by 5 ranks"):
        quality.train(jobs.local(config_of(tmp_path, "fp32", 1, 0.0)), "fp32", 5, tmp_path / "five")


def test_rows_are_held_against_fp32_of_the_same_seed(tmp_path: Path) -> None:
    rows = [
        {"gradients": kind, "seed": seed, "val_loss": loss, "last tenth": loss}
        for kind, seed, loss in (("fp32", 1, 1.5), ("sq48", 1, 1.502), ("fp32", 2, 1.51), ("sq48", 2, 1.505))
    ]
    assert [round(row["over fp32"], 4) for row in quality.compared(rows)] == [0.0, 0.002, 0.0, -0.005]
    assert quality.noise(rows) == "fp32: seeds 0.0100 nats apart"
    assert quality.measured(tmp_path, 10) is None
