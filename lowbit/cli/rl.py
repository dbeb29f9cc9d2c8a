"""`lowbit rl`: check everything, then let Hydra run the job (`lowbit.cli.job`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lowbit.cli.complete import rl_candidates
from lowbit.cli.settings import Cfg, Multirun, settings

if TYPE_CHECKING:
    from lowbit.cli.task import Task

Overrides = Annotated[
    list[str] | None,
    settings(
        "Settings, such as task=countdown algorithm=gspo precision=nvfp4 init_from=runs/first. Several values need -m.",
        rl_candidates,
    ),
]


def rl(
    overrides: Overrides = None,
    multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:
    """Post-train a model by rewards that can be checked, with a sampler and a trainer in a precision each.

    Alone it teaches a small model to add, in minutes on a CPU. Everything that can be set: docs/configuration.md.
    """
    from lowbit.cli import job

    job.run(overrides or [], _task(), multirun=multirun, cfg=cfg)


def _task() -> "Task":
    from lowbit.cli.task import Task
    from lowbit.configs.overrides import RL
    from lowbit.configs.validate_rl import validate_rl

    def work(config: Any, run_dir: Path) -> object:
        from lowbit.rl.run import train

        return train(config, run_dir)

    def check(config: Any) -> None:
        from lowbit.infer.precision import check_sampler
        from lowbit.quant.resolve import resolve

        validate_rl(config)
        check_sampler(resolve(config.precision))

    return Task(RL, work, check, words=("rl",))
