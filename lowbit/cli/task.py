"""What a command does with a configuration, and the checks before it does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.cli import torchrun
from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import PRETRAIN, Command
from lowbit.configs.schema import RunConfig
from lowbit.configs.validate import check_world, validate


def _pretrain(config: Any, run_dir: Path) -> object:
    from lowbit.trainer.run import pretrain

    return pretrain(config, run_dir)


@dataclass(frozen=True)
class Task:
    """What a command does with a configuration."""

    command: Command[RunConfig] = PRETRAIN
    work: Callable[[Any, Path], object] = _pretrain
    """From a configuration of the command's class, and the run's folder, to what a finished job reached.

    Of that only `asked_to_end` counts here, where it has one: a signal came in its last step, and no job is to follow.
    """
    check: Callable[[Any], None] = validate
    """Raises ConfigError for a configuration that cannot work."""
    joined: bool = True
    """Several processes of a launcher train together, which takes an engine for it."""
    words: tuple[str, ...] = ("pretrain",)
    """The command as it is typed."""
    runs: Callable[[Any], list[RunConfig]] = lambda config: [config]
    """The runs that a configuration describes."""
    shown: Callable[[Path], list[Path]] = lambda folder: [folder]
    """The runs' folders in a job's, for the table at the end of a sweep."""


PRETRAINING = Task()


def checked(overrides: Sequence[str], task: Task = PRETRAINING) -> RunConfig:
    """The configuration of one run, composed and validated. Raises ConfigError."""
    config = compose_for(task.command, overrides)
    task.check(config)
    from lowbit.trainer.imported import check_start  # PyTorch, which most mistakes need not wait for
    from lowbit.trainer.precision import check_precision

    for run in task.runs(config):
        check_start(run)
        check_precision(run)
    if task.joined:
        check_world(config, torchrun.ranks_of(config))
    return config
