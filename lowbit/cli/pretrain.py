"""`lowbit pretrain`: check everything, then let Hydra run the job (`lowbit.cli.job`)."""

from typing import Annotated

from lowbit.cli.settings import Cfg, Multirun, settings

Overrides = Annotated[
    list[str] | None,
    settings("Settings, such as preset=gpu model=30m optim.lr=1e-3. Several values (optim.lr=1e-3,3e-4) need -m."),
]


def pretrain(
    overrides: Overrides = None,
    multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:
    """Train a model from scratch, or go on with a run.

    Everything that can be set, with its meaning: docs/configuration.md. A run's folder is runs/RUN_NAME; the same
    command again goes on from its newest checkpoint.
    """
    from lowbit.cli import job

    job.run(overrides or [], multirun=multirun, cfg=cfg)
