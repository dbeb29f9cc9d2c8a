"""Reports on runs, from what they leave in their folders: a table of text, a picture, a web page.

Running, killed and finished runs are read alike, and sweeps as all their jobs. One reader (`read`) serves all three.
`full_report` is what `lowbit report` prints and leaves, and `sweep_report` the same at the end of a sweep.
"""

from collections.abc import Sequence
from pathlib import Path

from lowbit.errors import ConfigError, LowbitError
from lowbit.trainer.metrics import FILE
from lowbit.trainer.report.compare import comparison_table, differing_settings, text_table
from lowbit.trainer.report.page import write_page, write_runs
from lowbit.trainer.report.picture import draw, draw_runs
from lowbit.trainer.report.read import Run, failed_jobs, read_runs

__all__ = [
    "Run",
    "comparison_table",
    "differing_settings",
    "draw",
    "failed_jobs",
    "full_report",
    "read_runs",
    "sweep_report",
    "write_page",
]

PAGE = (".html", ".htm")


def full_report(
    paths: Sequence[Path], out: Path, over: str | None = None, failed: Sequence[str] | None = None
) -> list[str]:
    """Table, page and picture of the runs, or sweeps, in these folders; returns what to print.

    Args:
        out: path of the picture or the page; the other one lies beside it. Without an ending: .png and .html.
        over: what the page's curves are drawn over, see `write_page`.
        failed: jobs to name on the page; None: those that sweeps among `paths` say.

    Raises LowbitError: a folder is no run, or a file cannot be written. Without matplotlib there is no picture.
    """
    runs = read_runs(paths)
    named = failed_jobs(paths) if failed is None else failed
    page = out if out.suffix in PAGE else out.with_suffix(".html")
    lines = [text_table(runs), f"report: {write_runs(runs, page, over, named)}"]
    try:
        lines.append(f"curves: {draw_runs(runs, out.with_suffix('') if out.suffix in PAGE else out)}")
    except ConfigError as error:
        lines.append(f"no picture: {error}")
    return lines


def sweep_report(sweep_dir: Path, folders: Sequence[Path]) -> list[str]:
    """The same of a sweep's jobs that left metrics, as report.html and report.png in its folder; never an error."""
    runs = [folder for folder in folders if (folder / FILE).is_file()]
    if not runs:
        return []
    try:
        return full_report(runs, sweep_dir / "report", failed=failed_jobs([sweep_dir]))
    except LowbitError as error:
        return [f"no report: {error}"]
