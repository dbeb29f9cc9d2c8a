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
    """Keys that all runs with a configuration have, with other values, in the schema's order."""
    configured = [run.settings for run in runs if run.settings]
    return [
        key
        for key in (configured[0] if configured else ())
        if not key.startswith(NOT_SETTINGS)
        and all(key in settings for settings in configured)
        and len({setting_text(settings[key]) for settings in configured}) > 1
    ]


def partial_settings(runs: Sequence[Run]) -> list[str]:
    """Keys that only some of them have: of another command, another source of data."""
    configured = [run.settings for run in runs if run.settings]
    keys = dict.fromkeys(key for settings in configured for key in settings if not key.startswith(NOT_SETTINGS))
    return [key for key in keys if not all(key in settings for settings in configured)]


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
