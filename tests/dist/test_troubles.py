"""What users of compressed gradients and of ZeRO report, each as a test of its kind.

| report (DeepSpeed) | here |
|---|---|
| #4886 loss jumps, then Inf, with 4-bit sums on 2 nodes | `test_codes.test_two_machines_of_two`, and training below |
| #6926 loss stuck, gradient norm 0 | `test_runs.test_errors_are_raised_on_every_rank`: an error after one step |
| #5054 sizes that ranks do not divide; silent fallbacks | `test_collective`: any length, 1 to 4 ranks, empty shares |
| #886 hooks of DDP cannot be passed | `tests/comm/test_attachment.py`: where ours attach, and how that fails |
| PR #7764 reductions wait for all buckets | `test_buckets_leave_during_the_backward_pass` |
| #7059 a reduce-scatter that sends an all-reduce | `test_bytes_on_the_wire_are_those_counted` |
| #8061 NaN with overlap and compilation at stages 1 and 2 | `test_compiled_and_overlapped` (GPUs) |
| #2768, PR #7839 gradients added up in BF16, or divided | `test_zero`: the numbers of one process, 1 to 4 ranks |
| #5080 two levels: overflow; groups that do not fit machines | `test_codes.test_machines_of_different_sizes` |
| #5046 optimizers that a stage refuses | `test_zero`: AdamW and Muon at every stage |
| OpenTau #177 Python for each parameter | `test_buckets_leave_during_the_backward_pass`: calls follow buckets |
| #1069, #6889 stage 3 slower over nodes | `lowbit plan`: its bytes (`tests/trainer/test_plan.py`) |
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import shaped_network
import torch
import worker
from ranks import run_cases
from safetensors.torch import load_file
from shaped_network import ShapedNetwork
from test_codes import EXACT_BELOW
from test_zero import BACKENDS, usable

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_buckets_leave_during_the_backward_pass(backend: str, tmp_path: Path) -> None:
    """From the second step on, once a step however many micro-batches it has, the first before the last gradient is
    there. Every reduction is a bucket's. (DeepSpeed reduces at stage 1 after the pass, unless on a stream of its own.)
    """
    usable(backend, 2)
    common = {"kind": "when", "comm": "sq48", "exact_below": EXACT_BELOW, "width": 160, "bucket_mib": 1}
    cases = [common | {"name": f"stage{stage}", "stage": stage} for stage in (0, 1, 2, 3)]
    folder = run_cases(2, cases, tmp_path, backend)
    numbers = sum(p.numel() for p in worker.build(worker.config_of(common), torch.device("cpu")).parameters())
    for case in cases:
        first, *later = json.loads((folder / f"{case['name']}.json").read_text())
        assert first and all(when == "after" for when, _ in first), case["name"]
        for calls in later:
            assert all(when == "last" for when, _ in calls), (case["name"], calls)
            during = backend == "nccl" or case["stage"] != 1
            assert calls[0][1] is not during, f"{case['name']}: nothing left before the last gradient was there"
            assert 2 <= len(calls) <= 2 * numbers * 4 / 2**20 + 1, (case["name"], calls)


EARLY: list[dict[str, Any]] = [
    {"name": "unused later", "objective": "used_at_first", "feedback": True},
    {"name": "tied", "tied": True, "recompute": "full"},
    {"name": "bf16", "comm": "bf16"},
    {"name": "plain"},
    {"name": "muon", "optimizer": "muon"},
    {"name": "moe", "moe": True, "comm": "sq48_fast"},
    {"name": "lora", "lora": 4, "exact_below": 16},
    {"name": "all exact", "lora": 4, "exact_below": 10**9},
    {"name": "feedback", "comm": "sq48", "feedback": True},
    {"name": "noise", "stochastic": True},
    {"name": "unused", "objective": "half_used"},
    {"name": "one bucket", "bucket_mib": 200},
]


@pytest.mark.parametrize(
    ("world", "count"), [(3, 3), *(pytest.param(n, len(EARLY), marks=pytest.mark.exhaustive) for n in (2, 3))]
)
def test_leaving_early_changes_no_bit(world: int, count: int, tmp_path: Path) -> None:
    """ZeRO 0: weights, states, norms and bytes are those of buckets that all leave after the backward pass."""
    common = {"comm": "squinch", "exact_below": EXACT_BELOW, "width": 160, "bucket_mib": 1, "steps": 3}
    cases = [
        {**common, **case, "name": f"{case['name']}{'-late' * late}", "late": late}
        for case in EARLY[:count]
        for late in (False, True)
    ]
    folder = run_cases(world, cases, tmp_path)
    for name in (case["name"] for case in EARLY[:count]):
        early, late = (json.loads((folder / f"{name}{end}.json").read_text()) for end in ("", "-late"))
        assert early == late and len(set(early["weights"])) == 1, name
        left, right = (load_file(folder / f"{name}{end}.safetensors") for end in ("", "-late"))
        assert left.keys() == right.keys()
        assert [key for key, tensor in left.items() if not torch.equal(tensor, right[key])] == [], name


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason := shaped_network.why_not()), reason=str(reason))
def test_bytes_on_the_wire_are_those_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in namespaces: what left the network device in three steps, headers and small talk included."""
    cases: list[dict[str, Any]] = [
        {"kind": "wire", "name": f"{comm}{stage}", "comm": comm, "stage": stage, "width": 256, "weights": weights}
        for comm, stage, weights in (
            ("none", 0, "fp32"),
            ("squinch", 0, "fp32"),
            ("bf16", 1, "bf16"),
            ("sq48", 2, "bf16"),
            ("none", 3, "fp32"),
            ("sq48", 3, "bf16"),
        )
    ]
    cases = [case | {"exact_below": 1000} for case in cases]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    folders = [str(Path(ranks.__file__).parent), str(Path(shaped_network.__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ShapedNetwork(2, "1gbit") as network:
        command = [sys.executable, str(ranks.WORKER), str(tmp_path), "gloo"]
        codes = [process.wait(timeout=600) for process in [network.start(rank, command) for rank in range(2)]]
    assert codes == [0, 0]
    found = {}
    for case in cases:
        for row in json.loads((tmp_path / f"{case['name']}.json").read_text()):
            found[case["name"]] = row["sent"] / sum(row["counted"].values())
            assert sum(row["counted"].values()) > 1e6
    print(found)
    assert all(1 < ratio < 1.15 for ratio in found.values()), found


@pytest.mark.exhaustive
def test_training_on_two_machines_of_two(tmp_path: Path) -> None:
    """Six bits between machines: losses stay those of FP32, nothing overflows."""
    cases = [
        {"name": f"{comm}{stage}", "comm": comm, "stage": stage, "exact_below": EXACT_BELOW, "steps": 8}
        for comm, stage in (("squinch", 0), ("sq48", 1), ("squinch", 3))
    ]
    folder = run_cases(4, cases, tmp_path, node_size=2)
    rows, _ = worker.local({"steps": 8})
    for case in cases:
        found = torch.tensor(json.loads((folder / f"{case['name']}.json").read_text())["rows"])
        assert torch.allclose(found[:, 0], torch.tensor(rows)[:, 0], rtol=1e-3), case["name"]
        assert torch.allclose(found[:, 1], torch.tensor(rows)[:, 1], rtol=3e-2), case["name"]


@pytest.mark.gpu
def test_compiled_and_overlapped(tmp_path: Path) -> None:
    """Buckets on a stream of their own while compiled blocks go on: each rank's numbers stay those of one process."""
    usable("nccl", 2)
    common = {"compile": "on", "exact_below": EXACT_BELOW, "width": 160, "bucket_mib": 1, "steps": 6}
    cases = [
        common | {"name": f"{comm}{stage}", "comm": comm, "stage": stage}
        for comm in ("none", "sq48")
        for stage in (0, 1, 2, 3)
    ]
    folder = run_cases(2, cases, tmp_path, "nccl")
    rows, _ = worker.local({"steps": 6, "width": 160}, "cuda")
    for case in cases:
        found = torch.tensor(json.loads((folder / f"{case['name']}.json").read_text())["rows"])
        assert torch.allclose(found[:, 0], torch.tensor(rows)[:, 0], rtol=1e-3), case["name"]
        assert torch.allclose(found[:, 1], torch.tensor(rows)[:, 1], rtol=3e-2), case["name"]
