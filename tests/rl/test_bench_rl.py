"""The benchmark of two precisions or two devices runs, and its tables say what the runs' own rows say."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_rl import main, smooth

QUICK = ["rl=quick", "device=cpu", "precision.compute=fp32", "task.examine=16"]


def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["bench_rl.py", arguments[0], str(tmp_path), *QUICK, *arguments[1:]])
    main()
    found: dict[str, Any] = json.loads((tmp_path / f"{arguments[0]}.json").read_text())
    return found


@pytest.mark.slow
def test_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At staleness 0 a copy on another device changes no number; ahead, rollouts are a step old and do not match."""
    rows = bench(monkeypatch, tmp_path, "overlap", "max_steps=6", "--other", "cpu")["rows"]
    assert [(row["sampler"], row["staleness"]) for row in rows] == [
        ("trainer's", 0), ("cpu", 0), ("trainer's", 1), ("cpu", 1)
    ]  # fmt: skip
    assert rows[0]["k3"] == rows[1]["k3"] and rows[0]["reward"] == rows[1]["reward"]
    assert float(rows[0]["k3"]) < 1e-10 < float(rows[2]["k3"])
    assert [row["age"] for row in rows] == [0, 0, 1, 1]
    assert all(0 < row["seconds/step"] < 60 and row["drawn tokens/s"] > 0 for row in rows)


@pytest.mark.slow
def test_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler agrees with its own trainer in FP32, and four bits with eight or sixteen do not."""
    cells = bench(monkeypatch, tmp_path, "mismatch", "--prompts", "2")["cells"]
    k3 = {(cell["sampler"], cell["trainer"]): cell["k3_kl"] for cell in cells}
    assert len(k3) == 25
    assert all(k3[name, name] < 1e-9 for name, _ in k3)
    assert min(k3["nvfp4", "bf16"], k3["bf16", "nvfp4"]) > 1e-4 > k3["nvfp4", "nvfp4"]
    assert (tmp_path / "mismatch.png").stat().st_size > 10_000


def test_curves_are_means_of_what_came_before() -> None:
    assert smooth([0.0, 1.0, 2.0, 3.0], 2) == [0.0, 0.5, 1.5, 2.5]
