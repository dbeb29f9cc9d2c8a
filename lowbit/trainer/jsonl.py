"""Rows of numbers in a text file, one JSON object a line: a kill leaves whole lines, and damaged ones are skipped."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """A value as strict JSON has it: numbers of torch and numpy become Python's, NaN and infinities become null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def to_line(row: Mapping[str, Any]) -> str:
    """A row as one line of strict JSON, with its end of line."""
    return json.dumps(plain(row), allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; lines that are not whole JSON objects (the last one of a killed run) are skipped."""
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    rows = _whole(lines[:-1])
    if rows is None:
        rows = [_parsed(line) for line in lines[:-1]]
    return [row for row in [*rows, *map(_parsed, lines[-1:])] if isinstance(row, dict)]


def _whole(lines: list[str]) -> list[Any] | None:
    """Lines parsed all at once, in half the time; None where some line is damaged."""
    rows = _parsed("[" + ",".join(lines) + "]")
    return rows if isinstance(rows, list) and len(rows) == len(lines) else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def last_step(path: Path) -> int:
    """The last step that a file of rows has; -1 without any."""
    return max((row["step"] for row in read_rows(path) if isinstance(row.get("step"), int)), default=-1)


def keep_rows_until(path: Path, step: int) -> None:
    """Drop the rows of steps after `step`, and damaged lines: what a run left that then went back to `step`.

    The file is replaced as a whole, so that a kill leaves either the old one or the new one.
    """
    if not path.is_file():
        return
    rows = [row for row in read_rows(path) if isinstance(row.get("step"), int) and row["step"] <= step]
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(to_line(row) for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
