"""Line charts as inline SVG: no library, no picture files, coloured by the page's style sheet for either theme.

A curve is one path in tenths of a unit, each point relative to the one before it, which takes some seven bytes a point.
Curves of many points are drawn thinned and pale, and their means over short stretches on top.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowbit.trainer.report.html import Html, join, tag
from lowbit.trainer.report.scale import Axis, Floats, averaged, axis_of, short, thinned

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 8, 36
INNER = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
COLOURS = 8
"""Of the style sheet; after those, lines are dashed."""
DASHES = 4
SMOOTH_FROM = 400
"""Points from which on a curve's means are drawn over it."""
SMOOTH_COLUMNS = 120
BEGINNING, MANY = 0.02, 100
"""Part of the axis whose values a falling curve's chart may leave out, and the points that it must keep."""
DOTS_TO = 40
"""Points up to which each is marked."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    x: Floats
    y: Floats
    colour: int = 0
    """The number of its colour: runs count from 0."""
    dash: int = 0
    """The number of its pattern, 0 solid."""
    run: int | None = None
    """The run that it belongs to, by which the page's legend hides it."""


@dataclass(frozen=True)
class Chart:
    """What one picture shows."""

    title: str
    curves: Sequence[Curve]
    x_label: str
    help: str = ""
    log: bool | None = None
    """A logarithmic value axis; None: where the values ask for one."""
    x_range: tuple[float, float] | None = None
    """The part of the axis to show; None: that of the curves."""
    whole: bool = False
    """Whether x is a number of something."""
    falling: bool = False
    """Whether its first values may be left out where they would press the rest flat."""
    legend: Sequence[tuple[str, int, int]] = ()
    """Its own legend, where the page's is not enough: texts, colours, dashes."""

    @property
    def constant(self) -> float | None:
        """The only value that it would show, of two points and more."""
        values = [curve.y for curve in self.curves if len(curve.y)]
        if sum(map(len, values)) < 2:
            return None
        first = float(values[0][0])
        return first if all(np.all(y == first) for y in values) else None


def draw_chart(chart: Chart, columns: int) -> Html:
    """A figure. `columns`: into how many parts long curves are thinned."""
    curves = [curve for curve in chart.curves if len(curve.x)]
    xs = np.array(chart.x_range) if chart.x_range else np.concatenate([curve.x for curve in curves])
    x_axis = replace(axis_of(xs, log=False, padded=False), whole=chart.whole)
    settled = _settled(curves) if chart.falling else None
    y_axis = axis_of(np.concatenate([curve.y for curve in curves]) if settled is None else settled, chart.log)
    crowd = "paler" if len(curves) > 3 else "pale"
    paths = [path for curve in curves for path in _paths(curve, x_axis, y_axis, columns, crowd)]
    plot = tag(
        "g",
        *paths,
        cls="plot",
        transform=f"translate({LEFT} {TOP}) scale(.1)",
        data_x=f"{x_axis.low:.9g} {x_axis.high:.9g} 0",
        data_y=f"{y_axis.low:.9g} {y_axis.high:.9g} {int(y_axis.log)}",
    )
    notes = [chart.help] if chart.help else []
    notes += ["logarithmic"] if y_axis.log else []
    notes += (
        [f"first values, up to {short(max(float(c.y.max()) for c in curves))}, left out"] if settled is not None else []
    )
    picture = tag(
        "svg",
        *_grid(x_axis, y_axis),
        tag("text", chart.x_label, x=LEFT + INNER[0], y=HEIGHT - 4, text_anchor="end", cls="unit"),
        plot,
        tag("line", cls="cursor", x1=0, x2=0, y1=TOP, y2=TOP + INNER[1]),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{chart.title} over {chart.x_label}, {len(curves)} curves",
    )
    note = tag("span", "; ".join(notes), cls="help") if notes else None
    caption = tag("figcaption", tag("b", chart.title), " ", note)
    return tag("figure", caption, picture, legend(chart.legend) if chart.legend else None)


def _settled(curves: Sequence[Curve]) -> Floats | None:
    """The values after the first part of the axis, if all that come before are too far above them to show both."""
    first = min(float(curve.x[0]) for curve in curves)
    begin = first + BEGINNING * (max(float(curve.x[-1]) for curve in curves) - first)
    later = np.concatenate([curve.y[curve.x >= begin] for curve in curves])
    sooner = np.concatenate([curve.y[curve.x < begin] for curve in curves])
    if len(later) < MANY or not len(sooner):
        return None
    low, high = float(later.min()), float(later.max())
    return later if sooner.max() - low > 2 * (high - low) > 0 else None


def legend(entries: Sequence[tuple[str, int, int]]) -> Html:
    """Names with their lines."""
    return tag("ul", *(tag("li", swatch(colour, dash), " ", name) for name, colour, dash in entries), cls="legend")


def swatch(colour: int, dash: int = 0) -> Html:
    """A short piece of a line."""
    line = tag("line", x1=0, x2=26, y1=5, y2=5, cls=_style(colour, dash))
    return tag("svg", line, viewBox="0 0 26 10", cls="swatch", aria_hidden="true")


def of_run(number: int) -> tuple[int, int]:
    """Colour and dash of a run, by its number."""
    return number % COLOURS, number // COLOURS % DASHES


def _style(colour: int, dash: int) -> str:
    return f"c{colour % COLOURS} d{dash % DASHES}"


def _grid(x_axis: Axis, y_axis: Axis) -> list[Html]:
    """Lines and texts of the ticks."""
    parts: list[Html] = []
    for value, words in y_axis.ticks():
        y = round(TOP + (1 - float(y_axis.at(np.array([value]))[0])) * INNER[1], 1)
        parts.append(tag("line", x1=LEFT, x2=LEFT + INNER[0], y1=y, y2=y, cls="grid"))
        parts.append(tag("text", words, x=LEFT - 5, y=y + 4, text_anchor="end"))
    for value, words in x_axis.ticks():
        x = round(LEFT + float(x_axis.at(np.array([value]))[0]) * INNER[0], 1)
        parts.append(tag("line", x1=x, x2=x, y1=TOP, y2=TOP + INNER[1], cls="grid"))
        parts.append(tag("text", words, x=x, y=TOP + INNER[1] + 14, text_anchor="middle"))
    return parts


def _paths(curve: Curve, x_axis: Axis, y_axis: Axis, columns: int, pale: str) -> list[Html]:
    """The curve, and its means where it has many points."""
    run = None if curve.run is None else f"r{curve.run}"
    style = " ".join(filter(None, (_style(curve.colour, curve.dash), run)))
    many = len(curve.x) >= SMOOTH_FROM
    x, y = thinned(curve.x, curve.y, columns)
    lines = [_path("" if many else curve.label, x, y, x_axis, y_axis, f"{style} {pale}" if many else style)]
    if many:
        x, y = averaged(curve.x, curve.y, min(SMOOTH_COLUMNS, columns))
        lines.append(_path(curve.label, x, y, x_axis, y_axis, style))
    if len(curve.x) <= DOTS_TO:
        lines.append(
            _path("", curve.x, curve.y, x_axis, y_axis, f"c{curve.colour} dot {run or ''}".rstrip(), dots=True)
        )
    return lines


def _path(label: str, x: Floats, y: Floats, x_axis: Axis, y_axis: Axis, style: str, dots: bool = False) -> Html:
    across = x_axis.at(x) * INNER[0] * 10
    place = y_axis.at(y)
    down = np.where(place <= 1, 1 - place, np.nan) * INNER[1] * 10  # above the axis: left out
    return tag("path", d=_dots(across, down) if dots else _points(across, down), cls=style, data_label=label or None)


def _points(across: Floats, down: Floats) -> str:
    """Path data; a place that is NaN interrupts the line."""
    good = np.isfinite(across) & np.isfinite(down)
    if not good.any():
        return "M0 0"
    pieces = []
    for piece in np.split(np.arange(len(good)), np.flatnonzero(np.diff(good)) + 1):
        if not good[piece[0]]:
            continue
        points = np.round(np.stack([across[piece], down[piece]], axis=1)).astype(int)
        steps = np.diff(points, axis=0)
        moved = "".join(
            f"{'' if dx < 0 or not i else ' '}{dx}{'' if dy < 0 else ' '}{dy}"
            for i, (dx, dy) in enumerate(steps.tolist())
        )
        pieces.append(f"M{points[0, 0]} {points[0, 1]}l{moved or '0 0'}")
    return "".join(pieces)


def _dots(across: Floats, down: Floats) -> str:
    """Path data of lines without length, which round ends make visible."""
    good = np.isfinite(across) & np.isfinite(down)
    points = np.round(np.stack([across[good], down[good]], axis=1)).astype(int).tolist()
    return "".join(f"M{x} {y}h0" for x, y in points) or "M0 0"


def grid_of(charts: Sequence[Chart], columns: int) -> Html:
    """Several charts side by side where there is room; those without a point are left out."""
    drawn = [draw_chart(chart, columns) for chart in charts if any(len(curve.x) for curve in chart.curves)]
    return tag("div", *drawn, cls="charts") if drawn else join([])
