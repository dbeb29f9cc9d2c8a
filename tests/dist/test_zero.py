"""Training on several processes gives the numbers of one: every ZeRO stage, 1 to 4 ranks, both optimizers.

Oracle: `LocalEngine`, in this process, on the same micro-batches. FP32 throughout; gradients are summed in another
order, hence the tolerances: losses and norms to 1e-5 relative, weights to 2e-6 absolute (they move by about 1e-3 a
step), optimizer states to 1e-4 relative to their largest number.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import worker
from nearness import assert_near, assert_same_rows
from ranks import run_cases
from safetensors.torch import load_file

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


def usable(backend: str, world: int) -> None:
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")


def close(case: dict[str, Any], folder: Path, rows: list[Any], expected: dict[str, torch.Tensor], backend: str) -> None:
    """A case's results agree with the oracle's."""
    name = case["name"]
    found = json.loads((folder / f"{name}.json").read_text())
    saved = load_file(folder / f"{name}.safetensors")
    assert_same_rows(found["rows"], rows, backend, name)
    assert_near(saved, expected, backend, weight=2e-6, state=1e-4, what=name)
    if case.get("stage", 0) < 3:
        assert len(set(found["weights"])) == 1, f"{name}: replicas differ"


def cases_of(world: int) -> list[dict[str, Any]]:
    """Every stage with AdamW and Muon, and at some world sizes what else can differ."""
    cases: list[dict[str, Any]] = [
        {"name": f"{optimizer}{stage}", "stage": stage, "optimizer": optimizer}
        for optimizer in ("adamw", "muon")
        for stage in range(4)
    ]
    if world == 2:
        cases += [{"name": f"tied{s}", "stage": s, "tied": True} for s in (0, 2, 3)]
        cases += [{"name": f"recompute{s}", "stage": s, "recompute": "full"} for s in (2, 3)]
    if world == 3:
        cases += [{"name": f"moe{s}", "stage": s, "moe": True, "optimizer": "muon"} for s in (1, 3)]
        cases += [{"name": f"unused{s}", "stage": s, "objective": "half_used"} for s in (0, 1, 2, 3)]
    return cases


def oracle(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k in ("optimizer", "tied", "objective", "moe")}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 3, 4))])
def test_numbers_of_one_process(world: int, backend: str, tmp_path: Path) -> None:
    usable(backend, world)
    cases = cases_of(world)
    folder = run_cases(world, cases, tmp_path, backend)
    known: dict[str, Any] = {}
    for case in cases:
        key = json.dumps(oracle(case))
        if key not in known:
            known[key] = worker.local(oracle(case), "cuda" if backend == "nccl" else "cpu")
        close(case, folder, *known[key], backend)


def test_the_oracle_learns() -> None:
    rows, trained = worker.local({"steps": 2})
    _, start = worker.local({"steps": 0})
    assert rows[0][0] != rows[1][0] and all(norm > 0.1 for _, norm in rows)
    assert all(not torch.equal(trained[k], start[k]) for k in start if k.startswith("model/"))
