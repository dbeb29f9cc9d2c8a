"""Columns by either reader, and the arithmetic of charts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.trainer.report import columns
from lowbit.trainer.report.scale import axis_of, short, thinned, tick_text

ROWS = [
    {"step": 2, "loss": 1.5, "load": [1, 2.5], "text": "2020-01-01", "flag": True, "none": None, "whole": 3},
    {"step": 1, "loss": None, "load": [0.5], "late": 7, "whole": 0.25},
    {"loss": 9.0},
    {"step": 3, "late": -1e300, "whole": 5, "load": []},
    {"step": 2.5, "load": [4, None]},
]


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo', "\n\n"])
def test_both_readers_agree(tmp_path: Path, tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + tail)
    slow = columns.read_columns(path)
    monkeypatch.setattr(columns, "LARGE", 0)
    fast = columns._by_arrow(path)
    assert fast is not None
    expected = {
        "step": [(0, 1.0), (1, 2.0), (2, 2.5), (3, 3.0)], "loss": [(1, 1.5)], "late": [(0, 7.0), (3, -1e300)],
        "whole": [(0, 0.25), (1, 3.0), (3, 5.0)],
    }  # fmt: skip
    for found in (slow, fast, columns.read_columns(path)):
        assert {
            k: list(zip(c.rows.tolist(), c.values.tolist(), strict=True)) for k, c in found.numbers.items()
        } == expected
        assert found.lists == {"load": [1.0, 2.5]}, "neither the later empty one nor the one with a hole"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": "text"}\nrubbish\n{"step": 3, "a": 2}\n')
    mixed = columns.read_columns(path).numbers
    assert mixed["a"].rows.tolist() == [0, 2] and mixed["step"].values.tolist() == [1, 2, 3]
    assert math.isinf(columns.columns_of([{"step": 1, "a": 10**400}]).numbers["a"].values[0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=3000), st.integers(2, 60))
@settings(max_examples=60, deadline=None)
def test_thinning_keeps_what_can_be_seen(values: list[float], parts: int) -> None:
    x, y = np.arange(float(len(values))), np.array(values)
    thin_x, thin_y = thinned(x, y, parts)
    assert len(thin_x) <= max(len(x), 4 * parts) and (len(thin_x) <= 4 * parts or len(thin_x) == len(x))
    assert thin_x[0] == x[0] and thin_x[-1] == x[-1] and np.all(np.diff(thin_x) > 0)
    assert np.array_equal(y[thin_x.astype(int)], thin_y)
    edges = np.minimum((x / (x[-1] or 1) * parts).astype(int), parts - 1)
    for part in np.unique(edges):
        kept = thin_y[np.isin(thin_x, x[edges == part])]
        assert kept.min() == y[edges == part].min() and kept.max() == y[edges == part].max()


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.booleans())
@settings(max_examples=300, deadline=None)
def test_axes_show_all_and_have_ticks(low: float, span: float, log: bool) -> None:
    low = abs(low) + 1e-12 if log else low
    axis = axis_of(np.array([low, low + span]), log)
    assert axis.low <= low and axis.high >= low + span
    places = axis.at(np.array([low, low + span]))
    assert -1e-9 <= places[0] <= places[1] <= 1 + 1e-9
    ticks = axis.ticks()
    room = 1e-8 * (axis.high - axis.low) + 4 * np.spacing(abs(axis.low) + abs(axis.high))
    assert 2 <= len(ticks) <= 9 and all(axis.low - room <= value <= axis.high + room for value, _ in ticks), ticks
    assert len({text for _, text in ticks}) == len(ticks), ticks


def test_words() -> None:
    assert [tick_text(v, 0.05) for v in (0.0, 0.25, 1.5)] == ["0", "0.25", "1.50"]
    assert [tick_text(v, 5e5) for v in (5e5, 1e6, 1.5e6)] == ["500k", "1.0M", "1.5M"]
    assert tick_text(3e-5, 1e-5) == "3e-5" and tick_text(2e12, 1e12) == "2T"
    assert [short(v) for v in (None, math.nan, 3.0, 0.123456789, 12345.678, 1e-13)] == [
        "–", "–", "3", "0.12346", "12,346", "1e-13",
    ]  # fmt: skip
    assert [t for _, t in axis_of(np.array([0.01, 100.0])).ticks()] == ["0.01", "0.1", "1", "10", "100"]
    assert axis_of(np.array([])).ticks() and axis_of(np.array([5.0, 5.0])).ticks()
