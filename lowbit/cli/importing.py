"""`lowbit import`: a Hugging Face folder as a run."""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face model.", show_default=False)],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="New folder of a run.", show_default=False)],
) -> None:
    """Write a Hugging Face model as a run, for the commands that take one, or to train on with init_from=RUN."""
    from lowbit.trainer.exported import import_folder

    config = import_folder(folder, run)
    print(f"{config.model.name}: {config.model.layers} layers of width {config.model.width}, in {run}")
