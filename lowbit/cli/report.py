"""`lowbit report RUN [RUN ...]`: a table that compares runs, and a web page and a picture about them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Over(StrEnum):
    """What curves are drawn over."""

    tokens = "tokens"
    step = "step"
    hours = "hours"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs or of sweeps, for example runs/pretrain.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where to put the picture, or the page; the other lies beside it.")
    ] = Path("report.png"),
    over: Annotated[
        Over | None, typer.Option(help="What the page's curves are drawn over.", show_default="tokens; rl: step")
    ] = None,
) -> None:
    """Compare runs: print a table, and write a web page that needs no network and a picture of the main curves."""
    from lowbit.trainer.report import report_lines

    for line in report_lines(runs, out, None if over is None else over.value):
        typer.echo(line)
