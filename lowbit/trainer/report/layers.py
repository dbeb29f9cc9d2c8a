"""Metrics of single layers: their means over time, and their latest values over the depth of the model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lowbit.trainer.report.columns import Column, Floats
from lowbit.trainer.report.read import Run

_BLOCK = re.compile(r"blocks\.(\d+)\.?")
STATISTICS = {
    "relative_mse": "relative error",
    "clipped_share": "clipped",
    "underflow_share": "to zero",
    "amax": "greatest |x|",
    "oscillation_risk": "near an edge",
}
"""Of `quant.statistics`, with headings."""
OPERANDS = ("weight", "input", "gradient")


@dataclass(frozen=True)
class Measured:
    """One statistic of one operand of one layer, over time."""

    layer: str
    operand: str
    statistic: str
    column: Column


def quantised(run: Run) -> list[Measured]:
    """`quant/<layer>/<operand>/<statistic>`: what a run measured of its formats."""
    found = []
    for key, column in run.columns.items():
        parts = key.split("/")
        if len(parts) == 4 and parts[0] == "quant" and parts[2] in OPERANDS and parts[3] in STATISTICS:
            found.append(Measured(parts[1], parts[2], parts[3], column))
    return found


def mean_over_layers(measured: list[Measured], operand: str, statistic: str) -> Column | None:
    """One number a row: the mean over the layers, of amax the greatest."""
    columns = [m.column for m in measured if (m.operand, m.statistic) == (operand, statistic)]
    if not columns:
        return None
    rows = np.concatenate([column.rows for column in columns])
    values = np.concatenate([column.values for column in columns])
    places, which = np.unique(rows, return_inverse=True)
    if statistic == "amax":
        greatest = np.full(len(places), -np.inf)
        np.maximum.at(greatest, which, values)
        return Column(places, greatest)
    return Column(places, np.bincount(which, values) / np.bincount(which))


def over_depth(values: Mapping[str, float]) -> dict[str, tuple[Floats, Floats]]:
    """Values by layer -> what follows the block's number -> (numbers of blocks, values); others are left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for layer, value in values.items():
        if (match := _BLOCK.search(layer)) and len(match[1]) < 7:
            found.setdefault(layer[match.end() :] or layer[: match.start()], []).append((int(match[1]), value))
    return {
        kind: (np.array([float(x) for x, _ in points]), np.array([y for _, y in points]))
        for kind, points in ((kind, sorted(points)) for kind, points in found.items())
    }


def latest(measured: list[Measured], operand: str, statistic: str) -> dict[str, float]:
    """By layer, the last value."""
    return {m.layer: float(m.column.values[-1]) for m in measured if (m.operand, m.statistic) == (operand, statistic)}
