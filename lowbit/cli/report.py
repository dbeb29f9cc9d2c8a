"""`lowbit report RUN [RUN ...]`: a table that compares runs, and their curves as a picture."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, for example runs/pretrain.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to draw the curves.")] = Path("report.png"),
) -> None:
    """Compare runs: print a table and draw their curves to a picture."""
    from lowbit.trainer.report import comparison_table, draw

    typer.echo(comparison_table(runs))
    typer.echo(f"curves: {draw(runs, out)}")
