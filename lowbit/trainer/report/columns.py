"""Rows of metrics as columns: each key's numbers, and the rows that have them, in the order of steps.

A file of a hundred thousand rows takes Python two seconds and pyarrow's parser half of one; that one wants every line
whole and every key of one type, so whatever it refuses is read row by row, with the same result.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.trainer.jsonl import read_rows

Floats = NDArray[np.float64]
LARGE = 4 << 20
"""Bytes of a file from which on it is read the fast way."""


@dataclass(frozen=True)
class Column:
    """The numbers under one key: the rows that have it, and its values there."""

    rows: NDArray[np.intp]
    values: Floats


@dataclass(frozen=True)
class Columns:
    """What a file of metrics holds."""

    numbers: Mapping[str, Column] = field(default_factory=dict)
    lists: Mapping[str, list[float]] = field(default_factory=dict)
    """Of metrics that are lists of numbers (loads of experts), the last that has some."""


def read_columns(path: Path) -> Columns:
    """The columns of a file of rows; rows without a step, and lines that are not whole, are left out."""
    fast = _by_arrow(path) if path.stat().st_size >= LARGE else None
    return fast or columns_of(read_rows(path))


def columns_of(rows: list[dict[str, Any]]) -> Columns:
    """Rows as columns."""
    rows = [row for row in rows if is_number(row.get("step"))]
    rows.sort(key=lambda row: float(row["step"]))
    places: dict[str, list[int]] = {}
    values: dict[str, list[Any]] = {}
    lists: dict[str, list[float]] = {}
    for place, row in enumerate(rows):
        for key, value in row.items():
            if is_number(value):
                places.setdefault(key, []).append(place)
                values.setdefault(key, []).append(value)
            elif isinstance(value, list) and value and all(map(is_number, value)):
                lists[key] = _floats(value).tolist()
    return Columns({key: Column(np.array(places[key]), _floats(found)) for key, found in values.items()}, lists)


def _floats(values: Sequence[float]) -> Floats:
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:  # an integer beyond what floats hold
        return np.array([float(str(value)) for value in values])


def _by_arrow(path: Path) -> Columns | None:
    """The same by pyarrow; None where it refuses the file."""
    import pyarrow as pa
    from pyarrow import compute as pc
    from pyarrow import json as arrow_json

    data = path.read_bytes()
    end = data.rstrip().rfind(b"\n") + 1
    try:
        json.loads(data[end:])
    except ValueError:  # half-written
        data = data[:end]
    try:
        table = arrow_json.read_json(pa.BufferReader(data), arrow_json.ReadOptions(block_size=1 << 22))
    except pa.ArrowInvalid:
        return None
    types = pa.types
    if "step" not in table.column_names or not _numeric(types, table.column("step").type):
        return None
    steps = table.column("step").to_numpy()
    order = np.argsort(steps, kind="stable")  # NaN, where there is none, comes last
    order = order[: np.count_nonzero(np.isfinite(steps))]
    numbers, lists = {}, {}
    for key in table.column_names:
        column = table.column(key)
        if _numeric(types, column.type):
            values = column.cast(pa.float64()).to_numpy()[order]
            rows = np.flatnonzero(np.isfinite(values))
            if len(rows):
                numbers[key] = Column(rows, values[rows])
        elif types.is_list(column.type) and _numeric(types, column.type.value_type):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()[order]
            for place in np.flatnonzero(lengths)[::-1]:
                found = column[int(order[place])].as_py()
                if all(map(is_number, found)):
                    lists[key] = [float(value) for value in found]
                    break
    return Columns(numbers, lists)


def _numeric(types: Any, kind: Any) -> bool:
    return bool(types.is_floating(kind) or types.is_integer(kind))


def is_number(value: Any) -> bool:
    """Whether a value of a row is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
