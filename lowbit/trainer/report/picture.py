"""The runs' main curves as one picture, for places that take no web page."""

from collections.abc import Sequence
from pathlib import Path

from lowbit.errors import ConfigError, LowbitError
from lowbit.trainer.report.read import Run, read_runs

LEFT = (("loss", "training loss"),)
CANDIDATES = (
    ("val_bpb", "validation bits per byte"),
    ("kl", "KL to the teacher, nats a token"),
    ("reward", "reward"),
    ("val_accuracy", "held-out accuracy"),
    ("lr", "learning rate"),
    ("tokens_per_second", "tokens/s a GPU"),
    ("grad_norm", "gradient norm"),
)


def draw(paths: Sequence[Path], out: Path) -> Path:
    """Draw the runs' curves over tokens into `out` (its ending says the format, .png by default); returns its path.

    Raises:
        ConfigError: matplotlib is not installed.
        LowbitError: a folder is no run, or `out` cannot be written.
    """
    return draw_runs(read_runs(paths), out)


def draw_runs(runs: Sequence[Run], out: Path) -> Path:
    """The same of runs that have been read."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing curves needs a package: pip install 'lowbit[plot]'") from error
    present = [entry for entry in CANDIDATES if any(len(run.values(entry[0])) for run in runs)]
    absent = [entry for entry in CANDIDATES if entry not in present]
    shown = (*LEFT, *[*present, *absent][:3])
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(2, 2).flat, shown, strict=True):
        for run in runs:
            tokens, values = run.curve(key)
            axes.plot(
                tokens, values, label=run.name.replace("$", r"\$"), linewidth=1.2,
                marker="o" if len(values) < 30 else None, markersize=3,
            )  # fmt: skip
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
