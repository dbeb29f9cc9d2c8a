"""Gradients in few bits through DeepSpeed: every stage and code against exact sums, bytes, replicas, learning.

Oracles: the FP64 sum of what the ranks had (each rank's gradients are gathered before the reduction), and for ZeRO 0
the single-process simulation of the collective, bit for bit.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import worker
from ranks import run_cases
from test_zero import BACKENDS, usable

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]

EXACT_BELOW = 100
"""Of the tiny model: its vectors (224 numbers), and nothing else."""
VECTORS = 224
MATRICES = 15_360 + 2 * 10_240
MATRICES_COUNT = 2 + 2 * 7

LIMITS = {"none": 1e-6, "bf16": 0.006, "squinch": 0.08, "sq48": 0.065}
"""Largest relative error of a matrix's gradient: FP32's order of summation; 8 bits; 26 and 28 dB a hop, two hops."""
FEW = {("none", 0), ("none", 3), ("bf16", 1), ("bf16", 3), ("squinch", 0), ("squinch", 2)}
"""With sq48 at every stage: the rest of two ranks' codes and stages is for `make exhaustive`."""


def cases_of(world: int, every: bool = True) -> list[dict[str, Any]]:
    common = {"kind": "gradients", "exact_below": EXACT_BELOW}
    kinds = ("none", "bf16", "squinch", "sq48") if world == 2 else ("sq48",)
    cells = [(comm, stage) for comm in kinds for stage in range(4) if every or comm == "sq48" or (comm, stage) in FEW]
    return [common | {"name": f"{comm}{stage}", "comm": comm, "stage": stage} for comm, stage in cells]


def expected_bytes(comm: str, stage: int, world: int) -> float:
    """What a rank sends: an all-reduce is two passes over the tensor, a reduce-scatter one."""
    passes = 2 if stage == 0 or (comm == "none" and stage < 3) else 1
    bits = {"none": 32, "bf16": 16, "squinch": 6, "sq48": 6}[comm]
    matrices = passes * MATRICES * bits / 8
    vectors = (2 if stage < 3 else 1) * VECTORS * 4
    return (matrices + vectors) * (world - 1) / world


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("world", "every"), [(2, False), *(pytest.param(n, True, marks=pytest.mark.exhaustive) for n in (2, 3))]
)
def test_reduced_gradients(world: int, every: bool, backend: str, tmp_path: Path) -> None:
    usable(backend, world)
    cases = cases_of(world, every)
    folder = run_cases(world, cases, tmp_path, backend)
    for case in cases:
        found = json.loads((folder / f"{case['name']}.json").read_text())
        comm, stage, name = case["comm"], case["stage"], case["name"]
        total = 0.0
        for parameter, (error, size) in found["errors"].items():
            total += size
            relative = (error / size) ** 0.5
            vector = "norm" in parameter
            assert relative < (1e-6 if vector else LIMITS[comm]), (name, parameter, relative)
            if not vector and comm != "none":
                assert relative > LIMITS[comm] / 50, f"{name}: {parameter} was not coded"
        assert found["norm"] == pytest.approx(total**0.5, rel=max(2e-2 * LIMITS[comm], 1e-6) + LIMITS[comm] ** 2), name
        assert found["simulated"] in (True, None), name
        sent, wanted = found["traffic"]["comm/gradient_bytes"], expected_bytes(comm, stage, world)
        if comm != "none":  # counted when the step is taken
            assert wanted <= sent < 1.1 * wanted, (name, sent, wanted)


@pytest.mark.exhaustive
def test_two_machines_of_two(tmp_path: Path) -> None:
    """Six bits between machines, FP32 inside: each rank passes on half of its machine's sum."""
    common = {"kind": "gradients", "exact_below": EXACT_BELOW, "comm": "sq48", "node_size": 2}
    cases = [common | {"name": f"stage{stage}", "stage": stage} for stage in (0, 1, 3)]
    folder = run_cases(4, cases, tmp_path, node_size=2)
    for case in cases:
        found = json.loads((folder / f"{case['name']}.json").read_text())
        for parameter, (error, size) in found["errors"].items():
            limit = 1e-6 if "norm" in parameter else LIMITS["sq48"]
            assert (error / size) ** 0.5 < limit, (case["name"], parameter)
        assert found["simulated"] in (True, None)
        passes = 2 if case["stage"] == 0 else 1
        between = passes * MATRICES / 2 / 2 * 6 / 8 + (2 if case["stage"] < 3 else 1) * VECTORS * 4 * 3 / 4
        assert between <= found["traffic"]["comm/gradient_bytes"] < 1.15 * between, case["name"]
        assert found["traffic"]["comm/node_bytes"] > 0


@pytest.mark.exhaustive
def test_machines_of_different_sizes(tmp_path: Path) -> None:
    """Two ranks on one machine and one on each of two others: no machine's view of the job decides for all.

    Then every rank sends in few bits to every other.
    """
    common = {"kind": "gradients", "exact_below": EXACT_BELOW, "comm": "sq48", "node_size": 1}
    cases = [common | {"name": f"stage{stage}", "stage": stage} for stage in (0, 1, 3)]
    cases.append({"name": "kept", "comm": "sq48", "stage": 1, "feedback": True, "exact_below": EXACT_BELOW})
    folder = run_cases(4, cases, tmp_path, node_size=(2, 1, 1))
    for case in cases[:3]:
        found = json.loads((folder / f"{case['name']}.json").read_text())
        for parameter, (error, size) in found["errors"].items():
            limit = 1e-6 if "norm" in parameter else LIMITS["sq48"]
            assert (error / size) ** 0.5 < limit, (case["name"], parameter)
        assert found["simulated"] in (True, None)
        wanted = expected_bytes("sq48", case["stage"], 4)
        assert wanted <= found["traffic"]["comm/gradient_bytes"] < 1.15 * wanted
        assert "comm/node_bytes" not in found["traffic"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_in_few_bits(backend: str, tmp_path: Path) -> None:
    """Losses stay near those of FP32, replicas stay equal, and what `auto` measures decides."""
    usable(backend, 2)
    cases: list[dict[str, Any]] = [
        {"name": f"{comm}{stage}", "comm": comm, "stage": stage, "weights": weights, "exact_below": EXACT_BELOW}
        for comm, stage, weights in (
            ("sq48", 0, "fp32"),
            ("squinch", 2, "bf16"),
            ("sq48", 3, "bf16"),
            ("auto", 1, "bf16"),
        )
    ]
    cases += [
        {"name": f"noise{stage}", "comm": "sq48", "stage": stage, "stochastic": True, "exact_below": EXACT_BELOW}
        for stage in (0, 1, 3)
    ]
    folder = run_cases(2, cases, tmp_path, backend)
    rows, _ = worker.local({}, "cuda" if backend == "nccl" else "cpu")
    for case in cases:
        found = json.loads((folder / f"{case['name']}.json").read_text())
        losses = torch.tensor(found["rows"])[:, 0]
        assert torch.allclose(losses, torch.tensor(rows)[:, 0], rtol=1e-3), case["name"]
        if case["stage"] < 3:
            assert len(set(found["weights"])) == 1, f"{case['name']}: replicas differ"
    weights = json.loads((folder / "squinch2.json").read_text())["traffic"]["comm/weight_bytes"]
    assert weights == pytest.approx(3 * (2 * MATRICES + 4 * VECTORS) / 2, rel=0.01)  # three steps, half of it to send


def test_error_feedback_loses_nothing(tmp_path: Path) -> None:
    """Reduced gradients of three steps and what is left over are the exact sums, at every stage.

    Also from what two ranks had left over at one stage to three ranks, and to another stage.
    """
    common = {"kind": "conserve", "exact_below": EXACT_BELOW, "feedback": True, "bucket_mib": 1}
    left = {stage: str(tmp_path / "two" / f"sq48-{stage}.safetensors") for stage in range(4)}

    def moved(begun: int, stage: int, comm: str) -> dict[str, Any]:
        return common | {"name": f"{begun}-to-{stage}", "comm": comm, "stage": stage, "load": left[begun]}

    cases = [common | {"name": f"sq48-{stage}", "comm": "sq48", "stage": stage} for stage in range(4)]
    cases.append(moved(0, 1, "sq48_fast"))
    folder = run_cases(2, cases, tmp_path / "two")
    places = [(folder, case) for case in cases]
    more = [moved(0, 2, "squinch"), moved(3, 0, "sq48")]
    folder = run_cases(3, more, tmp_path / "three")
    places += [(folder, case) for case in more]
    for where, case in places:
        found = json.loads((where / f"{case['name']}.json").read_text())
        assert len(found["rows"]) == MATRICES_COUNT
        assert any(key.startswith("owned.") for key in found["keys"]) == (case["stage"] == 0)
        for parameter, (without, with_rest) in found["rows"].items():
            assert with_rest < 3e-6 < 1e-3 < without, (case["name"], parameter, without, with_rest)
