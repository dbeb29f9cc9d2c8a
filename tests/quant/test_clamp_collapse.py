"""Training with a fixed bound collapses where the bound that follows the weights learns as FP32 does."""

from pathlib import Path

import pytest
from clamp_collapse import Figures, draw, learn


def test_a_fixed_bound_stops_learning_and_a_dynamic_one_does_not(tmp_path: Path) -> None:
    """At a sixteenth of the scale that the bound was made for. 300 steps: 0.85 and 0.44; FP32: 0.44."""
    found: dict[str, dict[float, Figures]] = {
        way: {scale: learn(way, scale, steps=60) for scale in (1.0, 0.0625)[: 1 if way == "FP32" else 2]}
        for way in ("fixed", "dynamic", "FP32")
    }
    exact = found["FP32"][1.0].error
    assert exact < 0.9 * learn("FP32", 1.0, steps=1).error, "the task can be learnt"
    for scale, dynamic in found["dynamic"].items():
        assert dynamic.error == pytest.approx(exact, rel=0.02) and dynamic.zeros == pytest.approx(0.2, abs=0.03), scale
    assert found["fixed"][1.0].error == pytest.approx(exact, rel=0.02)
    collapsed = found["fixed"][0.0625]
    assert collapsed.zeros > 0.999 and collapsed.error > 0.98, "no nearer than answering zero would be"
    draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
