"""The arithmetic of charts: axes with round ticks, and curves thinned so that they look the same.

A curve of a million points is drawn on a few hundred columns of pixels. Of each column four points are kept, the first,
the last, the lowest and the highest: what is drawn then covers the same pixels as the whole curve would (the M4
aggregation, Jugel et al., VLDB 2014), spikes included.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LOG_FROM = 100.0
"""Positive values whose greatest is so many times the least are drawn on a logarithmic axis."""
LONGEST_TICK = 7
"""Letters of a tick."""


def thinned(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """At most four points for each of `columns` equal parts of the axis; short curves as they are. x ascends."""
    if len(x) <= 4 * columns:
        return x, y
    at = _parts(x, columns)
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    counts = np.diff(np.append(starts, len(x)))
    lowest = _first(y == np.repeat(np.minimum.reduceat(y, starts), counts), starts)
    highest = _first(y == np.repeat(np.maximum.reduceat(y, starts), counts), starts)
    keep = np.unique(np.concatenate([starts, ends, lowest, highest]))
    return x[keep], y[keep]


def _first(mask: NDArray[np.bool_], starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """The first true place from each of `starts` on."""
    places = np.flatnonzero(mask)
    return places[np.searchsorted(places, starts)]


def averaged(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Means over equal parts of the axis."""
    at = _parts(x, columns)
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def _parts(x: Floats, columns: int) -> NDArray[np.intp]:
    width = (x[-1] - x[0]) or 1.0
    part: NDArray[np.intp] = np.minimum((x - x[0]) / width * columns, columns - 1).astype(np.intp)
    return part


@dataclass(frozen=True)
class Axis:
    """Values to places between 0 and 1, with ticks."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    """Whether only whole numbers have a meaning."""

    def at(self, values: Floats) -> Floats:
        """Places of values; those that a logarithmic axis cannot show are NaN."""
        if not self.log:
            return (values - self.low) / (self.high - self.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(values > 0, np.log(values), np.nan)
        return (logs - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def ticks(self) -> list[tuple[float, str]]:
        """Some two to eight round values, with their texts."""
        values = _log_ticks(self.low, self.high) if self.log else []
        even = len(values) < 2  # between 11 and 12 there are no round powers
        if even:
            values = _ticks(self.low, self.high, 1.0 if self.whole else 0.0)
        step = values[1] - values[0] if even and len(values) > 1 else 0.0
        texts = [tick_text(value, step) for value in values]
        if (
            max(map(len, texts), default=0) > LONGEST_TICK
        ):  # values that are nearly the same: the first, and how much more
            first = values[0]
            texts = [f"{first:.6g}", *(f"+{tick_text(value - first, step)}" for value in values[1:])]
        return list(zip(values, texts, strict=True))


def axis_of(values: Floats, log: bool | None = None, padded: bool = True) -> Axis:
    """The axis that shows all finite values. `log` None: if they span much and are all positive."""
    values = values[np.isfinite(values)]
    if not len(values):
        return Axis(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if log is None:
        log = low > 0 and high / low >= LOG_FROM
    if log and low > 0 and high / low > 1.001:
        room = (high / low) ** 0.04
        return Axis(low / room, high * room, log=True)
    room = 0.04 * (high - low) if padded else 0.0
    if high - low <= 1e-12 * max(abs(high), abs(low)):  # all the same, but for what floats cannot tell apart
        room = abs(high) / 2 or 0.5
    return Axis(0.0 if low >= 0 > low - room else low - room, high + room)


def _ticks(low: float, high: float, least: float) -> list[float]:
    rough = max((high - low) / 7, least)
    base = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next((base * m for m in (1, 2, 5) if base * m >= rough), base * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, min(last, first + 20) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**k for k in range(first, last + 1) for m in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 8 and factors != (1,):
            return ticks
    return ticks[:: -(-len(ticks) // 7)]


def tick_text(value: float, step: float = 0.0) -> str:
    """`0`, `0.25`, `1.5M`, `3e-05`: with the digits that tell it from its neighbours a `step` away."""
    size = max(abs(value), step)
    if value == 0:
        return "0"
    if not 1e-4 <= size < 1e15:
        digits = max(0, math.floor(math.log10(size)) - math.floor(math.log10(step or size) + 1e-9))
        mantissa, exponent = f"{value:.{digits}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit and (unit > 1e3 or size >= 1e4):
            return _fixed(value / unit, step / unit) + letter
    return _fixed(value, step)


def _fixed(value: float, step: float) -> str:
    if step <= 0:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def short(value: float | None) -> str:
    """A number for people: five significant digits, thousands apart."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.5g}"
