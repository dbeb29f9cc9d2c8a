"""`lowbit pretrain`: check everything, then let Hydra run the job (`lowbit.cli.job`)."""

from enum import StrEnum
from typing import Annotated

import typer

from lowbit.cli.settings import settings


class Shown(StrEnum):
    """What `--cfg` prints."""

    job = "job"
    resolved = "resolved"


Overrides = Annotated[
    list[str] | None,
    settings("Settings, such as preset=gpu model=30m optim.lr=1e-3. Several values (optim.lr=1e-3,3e-4) need -m."),
]


def pretrain(
    overrides: Overrides = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="Run every combination of comma lists.")] = False,
    cfg: Annotated[
        Shown | None,
        typer.Option(help="Print the configuration and stop: as Hydra composed it (job), or resolved and checked."),
    ] = None,
) -> None:
    """Train a model from scratch, or go on with a run.

    Everything that can be set, with its meaning: docs/configuration.md. A run's folder is runs/RUN_NAME; the same
    command again goes on from its newest checkpoint.
    """
    from lowbit.cli import job

    given = overrides or []
    if cfg is not None:
        job.print_config(given, multirun=multirun, resolved=cfg is Shown.resolved)
    elif multirun:
        job.run_sweep(given)
    else:
        job.run_one(given)
