"""One web page about one or more runs, in one file that needs nothing else: no network, no server, no other file.

Everything that comes from outside (names of runs and metrics, samples, settings) is text and is escaped
(`lowbit.trainer.report.html`); were something to get through, the page's content policy lets no script run but its own,
and nothing be loaded. The page is readable without its script, which only shows values under the pointer.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import lowbit
from lowbit.errors import LowbitError
from lowbit.trainer.report import parts
from lowbit.trainer.report.catalogue import OTHER, SECTIONS
from lowbit.trainer.report.chart import grid_of, of_run, swatch
from lowbit.trainer.report.curves import (
    View,
    attention_over_depth,
    axis_for,
    charts_of,
    error_over_depth,
    error_over_time,
)
from lowbit.trainer.report.html import Html, join, tag
from lowbit.trainer.report.read import Run, failed_jobs, read_runs
from lowbit.trainer.report.scale import short

POINTS = 110_000
"""Points of all curves of a page, about: seven bytes each."""
COLUMNS = 360
"""Parts that a curve is thinned to at most: the units of a chart's width."""
ALWAYS = ("quality",)
"""Parts in which what never changes is drawn too; elsewhere it is said."""
ABSENT = {
    "error": "format error (precision.statistics.every_steps=N measures it)",
    "mismatch": "sampler against trainer (lowbit rl)",
    "wire": "bytes on the wire (engine=deepspeed)",
    "precision": "precision of the layers",
    "samples": "samples",
}
"""Parts of the page that only some runs have, and how to have them."""


def write_page(paths: Sequence[Path], out: Path, over: str | None = None) -> Path:
    """Write the page about the runs, or sweeps, in these folders to `out`; returns its path.

    `over`: what curves are drawn over, tokens, step or hours; None: tokens, and steps where all runs are `rl`.

    Raises LowbitError: a folder is no run, or `out` cannot be written.
    """
    return write_runs(read_runs(paths), out, over, failed_jobs(paths))


def write_runs(runs: Sequence[Run], out: Path, over: str | None = None, failed: Sequence[str] = ()) -> Path:
    """The same of runs that have been read. failed: jobs to name."""
    path = out if out.suffix else out.with_suffix(".html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(page(runs, over, failed), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise LowbitError(f"cannot write the report to {path}: {error.strerror}") from None
    return path


def page(runs: Sequence[Run], over: str | None = None, failed: Sequence[str] = ()) -> Html:
    """The page's HTML."""
    view = View(runs, axis_for(runs, over))
    sections = _sections(view)
    names = ", ".join(run.name for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    body = tag(
        "body",
        _header(runs, failed),
        _navigation(runs, sections),
        tag("main", *(_section(name, title, content) for name, title, content in sections), _footer(sections)),
        tag("div", "", id="tip", role="status"),
        tag("script", Html(script)),
    )
    return join(
        [Html("<!DOCTYPE html>\n"), tag("html", _head(f"lowbit: {names}", script), body, lang="en"), Html("\n")]
    )


def _head(title: str, script: str) -> Html:
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    policy += "base-uri 'none'; form-action 'none'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(style)),
    )


def _header(runs: Sequence[Run], failed: Sequence[str]) -> Html:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    said = [f"Failed: {line}" for line in failed] + [f"{run.name}: {line}" for run in runs for line in run.remarks]
    return tag(
        "header",
        tag("h1", title),
        tag("p", f"lowbit {lowbit.__version__}, {now}", cls="soft"),
        *(tag("p", line, cls="warn") for line in said),
        parts.overview(runs),
    )


def _navigation(runs: Sequence[Run], sections: Sequence[tuple[str, str, Html]]) -> Html:
    """Stays in sight: which colour is which run, and the parts of the page."""
    items = [
        tag("li", tag("button", swatch(*of_run(i)), " ", run.name, type="button", data_run=i, aria_pressed="true"))
        for i, run in enumerate(runs)
    ]
    links = [tag("a", title, href=f"#{name}") for name, title, _ in sections]
    shown = tag("ul", *items, cls="legend runs", title="a click hides a run's curves") if len(runs) > 1 else None
    return tag("div", tag("div", tag("nav", *links), shown), cls="bar-top")


def _section(name: str, title: str, content: Html) -> Html:
    return tag("section", tag("h2", title), content, id=name)


def _footer(sections: Sequence[tuple[str, str, Html]]) -> Html:
    there = {name for name, _, _ in sections}
    absent = "; ".join(words for name, words in ABSENT.items() if name not in there)
    return tag("footer", f"Not logged by these runs: {absent}." if absent else "")


def _sections(view: View) -> list[tuple[str, str, Html]]:
    """Name, title and content of the parts that have some."""
    runs, charts = view.runs, charts_of(view)
    charts["error"] = error_over_time(view) + charts["error"]
    count = sum(len(c.curves) * (c.x_label == view.label) for found in charts.values() for c in found)
    columns = max(20, min(COLUMNS, POINTS // (4 * max(1, count))))
    before: dict[str, Callable[[], Html]] = {
        "speed": lambda: parts.speed(runs),
        "precision": lambda: parts.precision(runs),
        "error": lambda: parts.error_means(runs),
        "mismatch": lambda: parts.mismatch(runs),
        "wire": lambda: parts.wire(runs),
        "samples": lambda: parts.samples(runs),
        "settings": lambda: parts.settings(runs),
    }
    after: dict[str, Callable[[], Html]] = {"error": lambda: _errors(runs), "layers": lambda: _layers(runs)}
    found = []
    for section in (*SECTIONS, OTHER):
        pieces = [make[section.name]() for make in (before, after) if section.name in make]
        drawn = charts[section.name]
        drawn = [chart for chart in drawn if chart.constant is None or section.name in ALWAYS]
        words = "; ".join(f"{c.title} {short(c.constant)}" for c in charts[section.name] if c not in drawn)
        constant = tag("p", f"The same all the time: {words}.", cls="soft") if words else None
        content = join([pieces[0] if section.name in before else "", grid_of(drawn, columns), constant])
        content = join([content, pieces[-1]]) if section.name in after else content
        if content:
            found.append((section.name, section.title, content))
    return found


def _errors(runs: Sequence[Run]) -> Html:
    """Format errors by layer: charts over depth, and a table to look them up."""
    pieces: list[Html] = []
    measured = [run for run in runs if any(key.startswith("quant/") for key in run.columns)]
    for run in measured:
        charts = grid_of(error_over_depth(run), COLUMNS)
        table = parts.error_by_layer(run, parts.MOST_LAYERS // len(measured))
        pieces += [tag("h3", run.name) if len(runs) > 1 else join([]), charts]
        pieces.append(tag("details", tag("summary", "every layer, the largest error first"), table))
    return join(pieces)


def _layers(runs: Sequence[Run]) -> Html:
    pieces: list[Html] = []
    for run in runs:
        charts = grid_of(attention_over_depth(run), COLUMNS)
        if charts:
            pieces += [tag("h3", run.name) if len(runs) > 1 else join([]), charts]
    return join(pieces)
