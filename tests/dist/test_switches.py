"""Switches of precision on several ranks: rehearsed before the first step on each, and without any effect."""

from dataclasses import replace
from pathlib import Path

import jobs
import pytest
import tiny_runs
from test_runs import BACKENDS, fine, run_jobs
from test_zero import usable

from lowbit.configs.schema import BatchConfig, PrecisionConfig, PrecisionSwitch, RunConfig
from lowbit.trainer.run import pretrain

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]

REHEARSED = "2 that may follow rehearsed"


def config_of(folder: Path, stage: int) -> RunConfig:
    """Two switches, to formats without noise, so that one process and several draw alike."""
    config = replace(jobs.tiny(folder, zero_stage=stage), batch=BatchConfig(sequences=8, micro_batch=2))
    switch = [PrecisionSwitch(at_step=2, forward="int8"), PrecisionSwitch(at_step=4, forward="fp8_row")]
    return replace(config, precision=PrecisionConfig(compute=config.precision.compute, switch=switch))


EVERY = (0, 1, 2, 3)
CELLS = [
    pytest.param(2, (1, 3), id="two ranks"),
    pytest.param(1, (1, 3), id="one rank"),
    *(pytest.param(world, EVERY, marks=pytest.mark.exhaustive, id=f"{world} ranks, every stage") for world in (1, 2)),
]


@pytest.mark.parametrize(("world", "stages"), CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rehearsal_on_every_rank_changes_nothing(
    tmp_path: Path, backend: str, world: int, stages: tuple[int, ...]
) -> None:
    """Oracle: one process by `LocalEngine`; stage 3 does without a rehearsal and switches all the same.

    The stages are jobs of one set of processes, one after the other; a stage-3 engine's hooks are those of any number
    of ranks, so one rank is a case of its own.
    """
    usable(backend, world)
    pretrain(jobs.local(config_of(tmp_path, 0), backend), tmp_path / "one")
    planned = [(config_of(tmp_path, stage), tmp_path / f"stage{stage}", {}) for stage in stages]
    fine(run_jobs(world, planned, tmp_path / "ranks", backend))
    for stage in stages:
        found = tiny_runs.rows(tmp_path / f"stage{stage}")
        for row, wanted in zip(found, tiny_runs.rows(tmp_path / "one"), strict=True):
            assert row["step"] == wanted["step"]
            for key in ("loss", "grad_norm"):  # sums over ranks round differently, and weights at an edge may follow
                assert row[key] == pytest.approx(wanted[key], rel=1e-4), (stage, row["step"], key)
        log = (tmp_path / f"stage{stage}" / "run.log").read_text()
        assert (REHEARSED in log) == (stage < 3)
        assert "precision after step 2: from here on" in log and "precision after step 4: from here on" in log
