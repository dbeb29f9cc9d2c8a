"""Runs side by side: a table of where each got to and in what they differ, and their curves in one picture.

Everything comes from what a run leaves in its folder, `metrics.jsonl` and `config.yaml`, so that running, killed and
finished runs can be compared alike; a damaged last line is skipped. Curves are drawn over tokens, the axis on which
runs of different batch sizes can be compared.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lowbit.configs.stored import flatten, load_config
from lowbit.errors import ConfigError, LowbitError
from lowbit.trainer.console import duration
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.metrics import FILE

NOT_SETTINGS = ("run_name", "resume", "resume_allow", "logging.", "checkpoint.")
"""Settings that do not make a run another experiment; not compared."""
CURVES = (("loss", "training loss"), ("val_bpb", "validation bits per byte"), ("lr", "learning rate"))
SPEED = ("tokens_per_second", "tokens/s a GPU")


@dataclass(frozen=True)
class Run:
    """What a run's folder says."""

    name: str
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    """The configuration, flat: dotted key -> value; empty when the folder has none."""

    def last(self, key: str) -> float | None:
        """The latest number under `key`."""
        return next((float(row[key]) for row in reversed(self.rows) if _is_number(row.get(key))), None)

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """(tokens, values) of the rows that have both."""
        points = [
            (row["tokens"], row[key]) for row in self.rows if _is_number(row.get("tokens")) and _is_number(row.get(key))
        ]
        return [float(x) for x, _ in points], [float(y) for _, y in points]


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Read the runs' folders; LowbitError for one without metrics, or when none is given."""
    if not run_dirs:
        raise LowbitError("no run to report on: name one or more run folders")
    names = _short_names(run_dirs)
    return [_read_run(path, name) for path, name in zip(run_dirs, names, strict=True)]


def _read_run(run_dir: Path, name: str) -> Run:
    if not (run_dir / FILE).is_file():
        raise LowbitError(f"{run_dir} is not a run's folder: it has no {FILE}")
    rows = [row for row in read_rows(run_dir / FILE) if _is_number(row.get("step"))]
    config = run_dir / "config.yaml"
    settings = flatten(asdict(load_config(config))) if config.is_file() else {}
    return Run(name, sorted(rows, key=lambda row: row["step"]), settings)


def comparison_table(run_dirs: Sequence[Path]) -> str:
    """A table, one line a run: steps, tokens, losses, speed, time, and the settings in which the runs differ."""
    runs = read_runs(run_dirs)
    differing = differing_settings(runs)
    header = ["run", "steps", "tokens", "loss", "best val_bpb", "last val_bpb", "tokens/s", "time", *differing]
    lines = [header] + [_cells(run) + [_text(run.settings.get(key, "-")) for key in differing] for run in runs]
    return _aligned(lines)


def _cells(run: Run) -> list[str]:
    best = min(run.curve("val_bpb")[1], default=None)
    speeds = [row[SPEED[0]] for row in run.rows if _is_number(row.get(SPEED[0]))]
    seconds = run.last("seconds")
    return [
        run.name,
        _number(run.last("step"), ",.0f"),
        _number(run.last("tokens"), ",.0f"),
        _number(run.last("loss"), ".4f"),
        _number(best, ".4f"),
        _number(run.last("val_bpb"), ".4f"),
        _number(median(speeds) if speeds else None, ",.0f"),
        "-" if seconds is None else duration(seconds),
    ]


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Keys whose values are not the same in all runs that have a configuration, in the schema's order."""
    configured = [run.settings for run in runs if run.settings]
    keys = dict.fromkeys(key for settings in configured for key in settings)
    return [
        key
        for key in keys
        if not key.startswith(NOT_SETTINGS) and len({_text(settings.get(key, "-")) for settings in configured}) > 1
    ]


def draw(run_dirs: Sequence[Path], out: Path) -> Path:
    """Draw the runs' curves over tokens into `out` (its ending says the format, .png by default); returns its path.

    Raises:
        ConfigError: matplotlib is not installed.
        LowbitError: a folder is no run, or `out` cannot be written.
    """
    runs = read_runs(run_dirs)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing curves needs a package: pip install 'lowbit[plot]'") from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(2, 2).flat, (*CURVES, SPEED), strict=True):
        for run in runs:
            tokens, values = run.curve(key)
            axes.plot(
                tokens, values, label=run.name, linewidth=1.2, marker="o" if len(values) < 30 else None, markersize=3
            )
        axes.set_xlabel("tokens")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    path = out if out.suffix else out.with_suffix(".png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise LowbitError(f"cannot write the curves to {path}: {error}") from None
    return path


def _short_names(run_dirs: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    parts = [path.resolve().parts for path in run_dirs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in run_dirs]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal width, the first and the settings to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = (
        "  ".join(
            cell.rjust(width) if 0 < column < 8 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _text(value: Any) -> str:
    return format(value, "g") if isinstance(value, float) else str(value)
