"""Reports on runs, from what they leave in their folders: a table of text, a picture, a web page.

Running, killed and finished runs are read alike, and sweeps as all their jobs. One reader (`read`) serves all three.
`full_report` is what `lowbit report` prints and leaves, and `sweep_report` the same at the end of a sweep.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lowbit.errors import ConfigError, LowbitError
from lowbit.trainer.files import METRICS
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
    "report_lines",
    "sweep_report",
    "write_page",
]

PAGE = (".html", ".htm")


def full_report(
    paths: Sequence[Path], out: Path, over: str | None = None, failed: Sequence[str] | None = None
) -> list[str]:
    """All of `report_lines`."""
    return list(report_lines(paths, out, over, failed))


def report_lines(
    paths: Sequence[Path], out: Path, over: str | None = None, failed: Sequence[str] | None = None
) -> Iterator[str]:
    """Table, page and picture of the runs, or sweeps, in these folders; yields what to print, each as it is made.

    Args:
        out: path of the picture or the page; the other one lies beside it. Without an ending: .png and .html.
        over: what the page's curves are drawn over, see `write_page`.
        failed: jobs to name on the page; None: those that sweeps among `paths` say.

    Raises LowbitError: a folder is no run, or a file cannot be written. Without matplotlib there is no picture.
    """
    runs = read_runs(paths)
    named = failed_jobs(paths) if failed is None else failed
    page = out if out.suffix in PAGE else out.with_suffix(".html")
    yield text_table(runs)
    yield f"report: {write_runs(runs, page, over, named)}"
    try:
        picture = draw_runs(runs, out.with_suffix(".png") if out.suffix in PAGE else out)
    except ConfigError as error:
        yield f"no picture: {error}"
    else:
        yield f"curves: {picture}"


def sweep_report(sweep_dir: Path, folders: Sequence[Path]) -> list[str]:
    """The same of a sweep's jobs that left metrics, as report.html and report.png in its folder; never an error."""
    runs = [folder for folder in folders if (folder / METRICS).is_file()]
    if not runs:
        return []
    lines: list[str] = []
    try:
        for line in report_lines(runs, sweep_dir / "report", failed=failed_jobs([sweep_dir])):
            lines.append(line)
    except Exception as error:  # whatever is wrong with a file: the sweep itself has more to say
        said = error if isinstance(error, LowbitError) else f"{type(error).__name__}: {error}"
        lines.append(f"no report: {' '.join(str(said).split())}")
    return lines
