"""From runs and the catalogue of metrics to charts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lowbit.trainer.report import layers
from lowbit.trainer.report.catalogue import FALLING, LINEAR, OTHER, SECTIONS, Figure, Section, drawable, figures_of
from lowbit.trainer.report.chart import COLOURS, DASHES, Chart, Curve, of_run
from lowbit.trainer.report.columns import Floats
from lowbit.trainer.report.read import Run

OVER = {"tokens": "tokens", "step": "steps", "hours": "hours"}
"""What curves can be drawn over, with the axis's label."""
NEUTRAL = 6
"""Colour of a legend that speaks of dashes."""


@dataclass(frozen=True)
class View:
    """The runs of a page and the axis that they are drawn over."""

    runs: Sequence[Run]
    over: str

    @property
    def label(self) -> str:
        """Of the axis."""
        return OVER[self.over]

    def curve(self, run: Run, key: str) -> tuple[Floats, Floats]:
        """A metric over the page's axis."""
        if self.over != "hours":
            return run.curve(key, self.over)
        x, y = run.curve(key, "seconds")
        return x / 3600, y

    def x_range(self, curves: Sequence[Curve]) -> tuple[float, float] | None:
        """From the first row to the last of the runs that have something to show."""
        shown = {curve.run for curve in curves if len(curve.x)}
        ends = [x for i, run in enumerate(self.runs) if i in shown and len(x := self.curve(run, "step")[0])]
        return (min(float(x[0]) for x in ends), max(float(x[-1]) for x in ends)) if ends else None

    def chart(self, title: str, curves: Sequence[Curve], help: str = "", names: Sequence[str] = ()) -> Chart:
        """Over the page's axis; `names` of variants are its own legend."""
        if len(names) < 2:
            legend = []
        elif len(self.runs) == 1:
            legend = [(name, *of_run(i)) for i, name in enumerate(names)]
        else:
            legend = [(name, NEUTRAL, i) for i, name in enumerate(names)]
        whole, part = self.over != "hours", self.x_range(curves)
        return Chart(title, curves, self.label, help, x_range=part, whole=whole, legend=legend)

    def keys(self) -> set[str]:
        """Every metric that gets a curve."""
        keys = {key for run in self.runs for key in run.columns}
        return {key for key in keys if drawable(key, keys) and any(len(run.values(key)) for run in self.runs)}


def axis_for(runs: Sequence[Run], over: str | None) -> str:
    """The axis asked for, else the one on which the runs can be compared: steps of rollouts, else tokens."""
    if over is not None:
        return over
    tokens = any(len(run.values("tokens")) for run in runs)
    return "tokens" if tokens and not all(run.kind == "rl" for run in runs) else "step"


def charts_of(view: View) -> dict[str, list[Chart]]:
    """Charts by the name of their section."""
    keys = view.keys()
    sections: Iterable[Section] = (*SECTIONS, OTHER)
    return {s.name: [c for figure in figures_of(s, keys) for c in _figure(view, figure)] for s in sections}


def _figure(view: View, figure: Figure) -> list[Chart]:
    """One chart, or one a metric where the runs are too many for several in one."""
    keys = figure.keys
    if len(keys) > 1 and len(view.runs) > (COLOURS if len(keys) < DASHES else 1):
        return [c for key in keys for c in _figure(view, replace(figure, title=f"{figure.title}: {key}", keys=(key,)))]
    curves = [
        Curve(_label(view, run, key, keys), *view.curve(run, key), *_look(view, number, i), run=number)
        for i, key in enumerate(keys)
        for number, run in enumerate(view.runs)
    ]
    chart = view.chart(figure.title, curves, figure.help, keys)
    log = False if keys[0].startswith(LINEAR) else None
    return [replace(chart, log=log, falling=keys[0].startswith(FALLING))]


def _look(view: View, run: int, variant: int) -> tuple[int, int]:
    """Colour and dash: runs have colours, variants dashes; of a single run, variants have the colours."""
    if len(view.runs) == 1:
        return of_run(variant)
    colour, dash = of_run(run)
    return colour, dash + variant


def _label(view: View, run: Run, key: str, keys: Sequence[str]) -> str:
    if len(view.runs) == 1:
        return key
    return run.name if len(keys) == 1 else f"{run.name}: {key}"


# Format error ---------------------------------------------------------------------------------------------------


def error_over_time(view: View) -> list[Chart]:
    """Each statistic's mean over the layers, the operands in one chart."""
    measured = [layers.quantised(run) for run in view.runs]
    charts = []
    for statistic, heading in layers.STATISTICS.items():
        curves, seen = [], []
        for operand in layers.OPERANDS:
            for number, run in enumerate(view.runs):
                column = layers.mean_over_layers(measured[number], operand, statistic)
                if column is None:
                    continue
                if operand not in seen:
                    seen.append(operand)
                at = replace(run, columns={**run.columns, "mean": column})
                x, y = view.curve(at, "mean")
                look = _look(view, number, seen.index(operand))
                curves.append(Curve(f"{run.name}: {operand}" if len(view.runs) > 1 else operand, x, y, *look, number))
        if curves:
            of = "greatest of all layers" if statistic == "amax" else "mean over layers"
            charts.append(view.chart(heading, curves, of, seen))
    return charts


def error_over_depth(run: Run) -> list[Chart]:
    """The latest relative error of each layer, by the number of its block, one chart an operand."""
    measured = layers.quantised(run)
    return [
        _depth(f"{operand}: relative error by layer", layers.latest(measured, operand, "relative_mse"), "latest")
        for operand in layers.OPERANDS
    ]


def attention_over_depth(run: Run) -> list[Chart]:
    """Of each layer the latest: loads of experts, logsumexp of attention logits."""
    loads = {k.removeprefix("experts/load/"): v for k, v in run.lists.items() if k.startswith("experts/load/")}
    z = {key: column.values[-1] for key, column in run.columns.items() if key.startswith("attention_z/")}
    extremes = {
        f"{layer}.{name}": of(load) for layer, load in loads.items() for name, of in (("max", max), ("min", min))
    }
    means = {f"{key.removeprefix('attention_z/mean/')}.mean": v for key, v in z.items() if "/mean/" in key}
    most = {f"{key.removeprefix('attention_z/max/')}.greatest": v for key, v in z.items() if "/max/" in key}
    return [
        _depth("load of experts by layer", extremes, "latest; 1 when even"),
        _depth("logsumexp of attention logits by layer", means | most, "latest"),
    ]


def _depth(title: str, values: dict[str, float], help: str) -> Chart:
    kinds = layers.over_depth(values)
    curves = [Curve(kind, x, y, *of_run(i)) for i, (kind, (x, y)) in enumerate(kinds.items())]
    return Chart(title, curves, "block", help, whole=True, legend=[(c.label, c.colour, c.dash) for c in curves])
