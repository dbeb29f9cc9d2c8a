"""`lowbit rl`: check everything, then let Hydra run the job (`lowbit.cli.job`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.complete import rl_candidates
from lowbit.cli.pretrain import Shown
from lowbit.cli.settings import settings

if TYPE_CHECKING:
    from lowbit.cli.job import Task

Overrides = Annotated[
    list[str] | None,
    settings(
        "Settings, such as task=countdown algorithm=gspo precision=nvfp4 init_from=runs/first. Several values need -m.",
        rl_candidates,
    ),
]


def rl(
    overrides: Overrides = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="Run every combination of comma lists.")] = False,
    cfg: Annotated[
        Shown | None,
        typer.Option(help="Print the configuration and stop: as Hydra composed it (job), or resolved and checked."),
    ] = None,
) -> None:
    """Post-train a model by rewards that can be checked, with a sampler and a trainer in a precision each.

    Alone it teaches a small model to add, in minutes on a CPU. Everything that can be set: docs/configuration.md.
    """
    from lowbit.cli import job

    task, given = _task(), overrides or []
    if cfg is not None:
        job.print_config(given, multirun=multirun, resolved=cfg is Shown.resolved, task=task)
    elif multirun:
        job.run_sweep(given, task)
    else:
        job.run_one(given, task)


def _task() -> "Task":
    from lowbit.cli.job import Task
    from lowbit.configs.overrides import RL
    from lowbit.configs.validate_rl import validate_rl

    def work(config: Any, run_dir: Path) -> None:
        from lowbit.rl.run import train

        train(config, run_dir)

    def check(config: Any) -> None:
        from lowbit.infer.precision import check_sampler
        from lowbit.quant.stages import resolve

        validate_rl(config)
        check_sampler(resolve(config.precision))

    return Task(RL, work, check, words=("rl",))
