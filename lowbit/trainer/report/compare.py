"""Runs side by side: where each got to, and the settings in which they differ; as cells, and as a table of text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.trainer.aligned import columns
from lowbit.trainer.console import duration
from lowbit.trainer.report.read import Run, read_runs

NOT_SETTINGS = ("run_name", "resume", "resume_allow", "logging.", "checkpoint.")
"""Settings that do not make a run another experiment; not compared."""

MOST_COLUMNS, LONGEST = 10, 32
"""Settings in a table of text, and letters of their values."""

QUALITY: tuple[tuple[str, str, Callable[[Run], float | None]], ...] = (
    ("loss", ".4f", lambda run: run.last("loss")),
    ("kl", ".4f", lambda run: run.last("kl")),
    ("best val_bpb", ".4f", lambda run: _extreme(run, "val_bpb", np.min)),
    ("last val_bpb", ".4f", lambda run: run.last("val_bpb")),
    ("reward", ".3f", lambda run: run.last("reward")),
    ("best accuracy", ".1%", lambda run: _extreme(run, "val_accuracy", np.max)),
    ("last accuracy", ".1%", lambda run: run.last("val_accuracy")),
)
"""Columns of what was reached: heading, format, value. Those that no run has are left out."""


def _extreme(run: Run, key: str, of: Callable[[Any], Any]) -> float | None:
    values = run.values(key)
    return float(of(values)) if len(values) else None


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row of cells for each run: how far it came, what it reached, how fast."""
    reached = [(name, form, [value(run) for run in runs]) for name, form, value in QUALITY]
    reached = [column for column in reached if any(value is not None for value in column[2])]
    header = ["run", "steps", "tokens", *(name for name, _, _ in reached), "tokens/s", "time"]
    rows = []
    for i, run in enumerate(runs):
        speeds, seconds = run.values("tokens_per_second"), run.last("seconds")
        rows.append(
            [
                run.name,
                _number(run.last("step"), ",.0f"),
                _number(run.last("tokens"), ",.0f"),
                *(_number(values[i], form) for _, form, values in reached),
                _number(float(np.median(speeds)) if len(speeds) else None, ",.0f"),
                "-" if seconds is None else duration(seconds),
            ]
        )
    return header, rows


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Keys that all runs with a configuration have, with other values, in the schema's order.

    Where several runs are of one command (a sweep of pipelines), runs are compared with those of their own command:
    that pretraining is no reinforcement learning says nothing about the sweep.
    """
    return _keys(runs, lambda group, key: all(key in run.settings for run in group) and _values(group, key) > 1)


def partial_settings(runs: Sequence[Run]) -> list[str]:
    """Keys that only some of them have: of another command, another source of data. Compared as above."""
    return _keys(runs, lambda group, key: not all(key in run.settings for run in group))


def _keys(runs: Sequence[Run], wanted: Callable[[Sequence[Run], str], bool]) -> list[str]:
    """Keys that are wanted of some group of comparable runs, each once."""
    configured = [run for run in runs if run.settings]
    groups = [[run for run in configured if run.kind == kind] for kind in dict.fromkeys(run.kind for run in configured)]
    if all(len(group) == 1 for group in groups):
        groups = [configured]
    found: dict[str, None] = {}
    for group in groups:
        keys = dict.fromkeys(key for run in group for key in run.settings if not key.startswith(NOT_SETTINGS))
        found |= dict.fromkeys(key for key in keys if wanted(group, key))
    return list(found)


def _values(runs: Sequence[Run], key: str) -> int:
    """How many different values a key has. What lies in the folder beside a run's own (the stage of a pipeline that it
    begins from) is the same for all of them."""
    texts = (setting_text(run.settings[key]).replace(str(run.folder.resolve().parent), "..") for run in runs)
    return len(set(texts))


def comparison_table(paths: Sequence[Path]) -> str:
    """A table, one line a run: steps, tokens, losses, speed, time, and the settings in which the runs differ.

    `paths` are folders of runs, or of sweeps.
    """
    return text_table(read_runs(paths))


def text_table(runs: Sequence[Run]) -> str:
    """The same of runs that have been read."""
    header, rows = summary(runs)
    differing = differing_settings(runs)
    shown, more = differing[:MOST_COLUMNS], len(differing[MOST_COLUMNS:]) + len(partial_settings(runs))
    cells = [
        row + [_cut(setting_text(run.settings.get(key, "-"))) for key in shown]
        for row, run in zip(rows, runs, strict=True)
    ]
    table = "\n".join(columns([header + shown, *cells], range(1, len(header))))
    return f"{table}\n{more} more settings differ, or are those of some runs alone" if more else table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"


def setting_text(value: Any) -> str:
    """A setting's value, as short as it can be said."""
    return format(value, "g") if isinstance(value, float) else str(value)
