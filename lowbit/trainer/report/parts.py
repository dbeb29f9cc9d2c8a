"""The tables of the page: what was reached, how fast, in what precision, how far off, what was set."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowbit.trainer.report import layers
from lowbit.trainer.report.chart import of_run, swatch
from lowbit.trainer.report.compare import differing_settings, partial_settings, setting_text, summary
from lowbit.trainer.report.html import Html, join, number, table, tag
from lowbit.trainer.report.read import Run
from lowbit.trainer.report.scale import short

SAMPLES_SHOWN = 5
LONGEST_SAMPLE = 2000
MOST_LAYERS = 400
"""Rows of the tables of layers, over all runs."""
MOST_POLICY_ROWS = 300
CUT = "… "


def named(number_: int, run: Run) -> Html:
    """A run's name with its colour."""
    return tag("td", swatch(*of_run(number_)), " ", run.name, cls="run")


def overview(runs: Sequence[Run]) -> Html:
    """What each run reached."""
    header, rows = summary(runs)
    cells = [
        [named(i, run), run.kind, run.state, *map(number, row[1:])]
        for i, (run, row) in enumerate(zip(runs, rows, strict=True))
    ]
    return table([header[0], "command", "state", *header[1:]], cells)


# Speed ----------------------------------------------------------------------------------------------------------


def speed(runs: Sequence[Run]) -> Html:
    """Tokens a second, how even they are, and where the time goes."""
    rows = []
    for i, run in enumerate(runs):
        speeds = run.values("tokens_per_second")
        if not len(speeds):
            continue
        low, middle, high = np.quantile(speeds, [0.1, 0.5, 0.9])
        tokens, seconds = run.last("tokens"), run.last("seconds")
        overall = tokens / seconds if tokens and seconds else None
        memory, mfu = run.values("memory_gib"), run.values("mfu")
        rows.append(
            [
                named(i, run),
                number(f"{middle:,.0f}"),
                number(f"{low:,.0f} – {high:,.0f}"),
                number("–" if overall is None else f"{overall:,.0f}"),
                number(f"{np.median(mfu):.1%}" if len(mfu) else "–"),
                number(f"{memory.max():.2f}" if len(memory) else "–"),
                tag("td", _shares(run)),
            ]
        )
    if not rows:
        return join([])
    header = ["run", "tokens/s a GPU, median", "10% – 90%", "tokens/s of all time", "MFU", "memory, GiB", "time"]
    return join([table(header, rows), _share_legend(runs)])


def _parts(run: Run) -> dict[str, float]:
    """Mean shares of the time, the rest of a pretraining run as training."""
    prefix = "share/" if any(key.startswith("share/") for key in run.columns) else "time/"
    keys = [key for key in run.columns if key.startswith(prefix) and len(run.values(key))]
    found = {key.removeprefix(prefix): max(0.0, float(run.values(key).mean())) for key in keys}
    rest = 1 - sum(found.values())
    if prefix == "time/" and found and rest > 0:
        found = {"steps": rest} | found
    return found


def _part_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in _parts(run)))


def _shares(run: Run) -> Html:
    parts = _parts(run)
    total = max(1.0, sum(parts.values()))
    known = _COLOUR_OF_PART
    spans = [
        tag(
            "span",
            "",
            cls=f"b{known.get(name, 6)}",
            style=f"width:{100 * share / total:.1f}%",
            title=f"{name} {share:.1%}",
        )
        for name, share in parts.items()
    ]
    words = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
    return join([tag("div", *spans, cls="share"), tag("span", words, cls="soft")])


_COLOUR_OF_PART = {
    "steps": 0, "train": 0, "data": 1, "eval": 2, "reward": 3, "checkpoint": 4, "rollout": 5, "sync": 6, "score": 7,
}  # fmt: skip


def _share_legend(runs: Sequence[Run]) -> Html:
    names = _part_names(runs)
    items = [tag("li", tag("i", "", cls=f"chip b{_COLOUR_OF_PART.get(n, 6)}"), " ", n) for n in names]
    return tag("ul", *items, cls="legend") if items else join([])


# Precision ------------------------------------------------------------------------------------------------------


def precision(runs: Sequence[Run]) -> Html:
    """The policy table, once for all runs that have the same."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        if run.precision:
            got = [{k: v for k, v in report.items() if k != "when"} for report in run.precision]
            alike.setdefault(json.dumps(got, sort_keys=True), []).append(run)
    parts: list[Html] = []
    for members in alike.values():
        if len(runs) > 1:
            parts.append(tag("h3", ", ".join(run.name for run in members)))
        parts += [_policy(report) for report in members[0].precision]
    return join(parts)


def _policy(report: dict[str, Any]) -> Html:
    rows = [row for row in _listed(report.get("rows")) if isinstance(row, dict)]
    change = f": {report['change']}" if report.get("change") else ""
    title = f"{report.get('when', '')}{change}, on {report.get('device', '?')}, everything else in "
    head = tag("p", tag("b", title + str(report.get("dtype", "?")).upper()))
    header = ["layers", "number", "product", "operand", "format", "bits", "runs", ""]
    cells, before = [], None
    for row in rows[:MOST_POLICY_ROWS]:
        layers_ = row.get("layers")
        first = layers_ != before
        before = layers_
        backend = f" ({row['backend']})" if row.get("backend") and row.get("runs") == "native" else ""
        cells.append(
            [
                tag("td", layers_ if first else "", cls="key"),
                number(row.get("count") if first else ""),
                row.get("product"),
                row.get("operand"),
                row.get("format"),
                number(setting_text(row.get("bits"))),
                f"{row.get('runs')}{backend}",
                row.get("note", ""),
            ]
        )
    pairs = [remark for remark in _listed(report.get("remarks")) if len(_listed(remark)) == 2]
    remarks = [tag("p", f"{layer}: {words}", cls="soft") for layer, words in pairs]
    cut = (
        tag("p", f"{CUT}{len(rows) - MOST_POLICY_ROWS} more rows", cls="soft") if len(rows) > MOST_POLICY_ROWS else None
    )
    return join([head, table(header, cells), cut, remarks])


def _listed(value: Any) -> Sequence[Any]:
    """The value where it is a list, as it should be; else nothing."""
    return value if isinstance(value, (list, tuple)) else ()


# Format error ---------------------------------------------------------------------------------------------------


def error_means(runs: Sequence[Run]) -> Html:
    """The latest means over layers, by run and operand."""
    rows = []
    for i, run in enumerate(runs):
        measured = layers.quantised(run)
        for operand in layers.OPERANDS:
            means = {s: layers.mean_over_layers(measured, operand, s) for s in layers.STATISTICS}
            if any(means.values()):
                values = [number("–" if c is None else short(float(c.values[-1]))) for c in means.values()]
                rows.append(
                    [named(i, run), operand, number(len(layers.latest(measured, operand, "relative_mse"))), *values]
                )
    return table(["run", "operand", "layers", *layers.STATISTICS.values()], rows) if rows else join([])


def error_by_layer(run: Run, most: int) -> Html:
    """Every layer's latest statistics, the worst first."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for m in layers.quantised(run):
        found.setdefault((m.layer, m.operand), {})[m.statistic] = float(m.column.values[-1])
    worst = sorted(found.items(), key=lambda item: -item[1].get("relative_mse", 0.0))
    rows = [
        [tag("td", layer, cls="key"), operand, *(number(short(values.get(s))) for s in layers.STATISTICS)]
        for (layer, operand), values in worst[:most]
    ]
    cut = tag("p", f"{CUT}{len(worst) - most} more, with smaller errors", cls="soft") if len(worst) > most else None
    return join([table(["layer", "operand", *layers.STATISTICS.values()], rows), cut])


# The rest -------------------------------------------------------------------------------------------------------

MISMATCH = (
    ("mismatch/k3_kl", "KL, mean"),
    ("mismatch/mult_prob_error", "mean e^|d|"),
    ("mismatch/abs_max", "greatest |d|"),
    ("correction/truncated", "truncated"),
    ("correction/rejected", "rejected"),
)


def mismatch(runs: Sequence[Run]) -> Html:
    """How far the sampler was from the trainer over the whole run, and at worst."""
    rows = []
    for i, run in enumerate(runs):
        found = {key: run.values(key) for key, _ in MISMATCH}
        if not len(found[MISMATCH[0][0]]):
            continue
        cells: list[Html] = [named(i, run)]
        for key, _ in MISMATCH:
            values = found[key]
            of: Callable[[Any], Any] = np.max if key.endswith("max") else np.mean
            cells.append(number(short(float(of(values))) if len(values) else "–"))
        cells.append(number(short(float(found[MISMATCH[0][0]].max()))))
        rows.append(cells)
    header = ["run", *(name for _, name in MISMATCH), "KL, worst step"]
    return table(header, rows) if rows else join([])


def wire(runs: Sequence[Run]) -> Html:
    """What a rank sends: a step, and estimated over the run."""
    rows = []
    for i, run in enumerate(runs):
        parts = {name: run.values(f"comm/{name}_bytes") for name in ("gradient", "weight", "node")}
        if not any(len(values) for values in parts.values()):
            continue
        means = {name: float(values.mean()) if len(values) else 0.0 for name, values in parts.items()}
        comm = setting_text(run.settings.get("comm.kind", "–"))
        stage = setting_text(run.settings.get("engine.zero_stage", "–"))
        total = sum(means.values()) * (run.last("step") or 0)
        rows.append(
            [named(i, run), comm, number(stage), *(number(size(v)) for v in means.values()), number(size(total))]
        )
    header = [
        "run",
        "comm",
        "ZeRO",
        "gradients a step",
        "weights a step",
        "gradients inside a node",
        "whole run, about",
    ]
    return table(header, rows) if rows else join([])


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return f"{count:.0f} B"


def samples(runs: Sequence[Run]) -> Html:
    """A few generated texts of each run, from its first to its last."""
    parts: list[Html] = []
    for run in runs:
        if not run.samples:
            continue
        last = len(run.samples) - 1
        chosen = sorted({round(i * last / (SAMPLES_SHOWN - 1)) for i in range(SAMPLES_SHOWN)})
        parts += [tag("h3", run.name)] if len(runs) > 1 else []
        parts += [_sample(run.samples[i]) for i in chosen]
    return join(parts)


def _sample(row: dict[str, Any]) -> Html:
    turns = row.get("turns")
    said = "\n".join(map(str, turns)) if isinstance(turns, list) else str(row.get("text", ""))
    about = [f"step {row.get('step', '?')}"]
    about += [
        f"{name} {setting_text(row[name])}" for name in ("reward", "answer", "finish") if row.get(name) is not None
    ]
    return join(
        [
            tag("p", ", ".join(about), cls="soft"),
            tag("pre", tag("span", _cut(str(row.get("prompt", ""))), cls="prompt"), _cut(said)),
        ]
    )


def _cut(words: str) -> str:
    if len(words) <= LONGEST_SAMPLE:
        return words
    return f"{words[:LONGEST_SAMPLE]}{CUT}({len(words) - LONGEST_SAMPLE:,} characters more)"


def settings(runs: Sequence[Run]) -> Html:
    """In what the runs differ; what each changed; everything."""
    parts: list[Html] = []
    if len(runs) > 1:
        keys = differing_settings(runs)
        if keys:
            rows = [[tag("td", key, cls="key"), *_compared(runs, key)] for key in keys]
            parts.append(table(["differs", *(run.name for run in runs)], rows))
        else:
            parts.append(tag("p", "No setting that all have differs.", cls="soft"))
        if partial := partial_settings(runs):
            rows = [[tag("td", key, cls="key"), *_compared(runs, key)] for key in partial]
            title = f"settings of some runs alone ({len(rows)})"
            parts.append(tag("details", tag("summary", title), table(["key", *(run.name for run in runs)], rows)))
    for run in runs:
        if not run.settings:
            continue
        for title, found in (("not the schema's defaults", run.changed), ("everything", run.settings)):
            rows = [[tag("td", key, cls="key"), tag("td", setting_text(v), cls="value")] for key, v in found.items()]
            name = f"{run.name}: " if len(runs) > 1 else ""
            parts.append(tag("details", tag("summary", f"{name}{title} ({len(rows)})"), table(["key", "value"], rows)))
    return join(parts)


def _compared(runs: Sequence[Run], key: str) -> list[Html]:
    """A row of values; those that are not the commonest stand out."""
    values = [setting_text(run.settings.get(key, "–")) for run in runs]
    common = max(values, key=values.count)
    alone = values.count(common) == 1 or len(runs) < 3
    return [tag("td", value, cls="value" if alone or value == common else "value odd") for value in values]
