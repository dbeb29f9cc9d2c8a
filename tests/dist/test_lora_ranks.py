"""LoRA on two ranks: ZeRO 0 to 2 give the numbers of one process, and so does what they save and load; coded gradients.

Oracle: `LocalEngine` in this process, as in `test_zero`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import worker
from ranks import run_cases
from safetensors.torch import load_file, save_file
from test_zero import BACKENDS, close, usable

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

RANK = 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_one_process(backend: str, tmp_path: Path) -> None:
    """Weights, states of adapters alone, frozen weights whole; from the start and from a checkpoint of one process."""
    usable(backend, 2)
    tmp_path.mkdir(exist_ok=True)
    rows, expected = worker.local({"lora": RANK, "steps": 4})
    half_rows, half = worker.local({"lora": RANK, "steps": 2})
    assert half_rows == rows[:2]
    save_file(half, tmp_path / "half.safetensors")
    cases: list[dict[str, Any]] = [{"name": f"stage{s}", "stage": s, "lora": RANK, "steps": 4} for s in range(3)]
    cases += [
        {"name": f"bf16_{s}", "stage": s, "lora": RANK, "steps": 3, "dtype": "bf16", "weights": "bf16"} for s in (0, 2)
    ]
    cases += [
        {"name": f"{comm}{s}", "stage": s, "lora": RANK, "steps": 3, "comm": comm, "exact_below": 16}
        for comm, s in (("bf16", 1), ("squinch", 0), ("squinch", 2))
    ]
    cases.append({"name": "loaded", "stage": 1, "lora": RANK, "steps": 0, "load": str(tmp_path / "half.safetensors")})
    folder = run_cases(2, cases, tmp_path, backend)
    states = {name.split("/")[1].rpartition(".")[0] for name in expected if name.startswith("optimizer/")}
    assert len(states) == 28 and all("low_rank" in name for name in states)
    for case in cases[:3]:
        close(case, folder, rows, expected, backend)
    close(cases[-1], folder, [], half, backend)

    start = worker.tensors_of(worker.model_of({"lora": RANK}, torch.device("cpu")))
    numbers = sum(t.numel() for name, t in start.items() if "low_rank" in name)
    for case in cases[3:-1]:
        found = json.loads((folder / f"{case['name']}.json").read_text())
        saved = load_file(folder / f"{case['name']}.safetensors")
        assert len(set(found["weights"])) == 1, f"{case['name']}: replicas differ"
        limit = 1e-2 if case.get("dtype") == "bf16" else 3e-3
        for (loss, norm), (wanted, wanted_norm) in zip(found["rows"], rows, strict=False):
            assert loss == pytest.approx(wanted, rel=limit) and norm == pytest.approx(wanted_norm, rel=0.1), case
        for name, tensor in start.items():
            assert torch.equal(saved[f"model/{name}"], tensor) is ("low_rank" not in name), (case["name"], name)
        sent, steps = found["traffic"], case["steps"]
        if case["stage"]:  # A and B are added up in FP32, so they are gathered so
            assert sent["comm/weight_bytes"] == pytest.approx(steps * 4 * numbers / 2, rel=0.05), case
        bits = {"bf16": 16, "squinch": 6}.get(case.get("comm", ""), 32)
        passes = 1 if case["stage"] and bits < 32 else 2
        assert sent["comm/gradient_bytes"] == pytest.approx(passes * steps * numbers * bits / 8 / 2, rel=0.15), case
