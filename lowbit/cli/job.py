"""What a command does with its settings and options: prints the configuration, does one job, or a sweep of them.

Hydra is called only after every configuration has been composed and validated, so that a mistake leaves no folder
behind.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowbit.cli import torchrun
from lowbit.cli.settings import Shown
from lowbit.cli.start import with_start
from lowbit.cli.sweep import run_sweep
from lowbit.cli.task import PRETRAINING, Task, checked
from lowbit.cli.under_hydra import SAME_COMMAND, log_error, under_hydra, work
from lowbit.configs.compose import compose_tree, replaced_limits
from lowbit.configs.overrides import expand_sweep, for_hydra
from lowbit.configs.stored import to_yaml
from lowbit.errors import Interrupted


def run(given: Sequence[str], task: Task = PRETRAINING, *, multirun: bool = False, cfg: Shown | None = None) -> None:
    """What a command does with its settings and options: prints the configuration, or does one job or a sweep."""
    if cfg is not None:
        print_config(given, multirun=multirun, resolved=cfg is Shown.resolved, task=task)
    elif multirun:
        run_sweep(given, task)
    else:
        run_one(given, task)


def print_config(overrides: Sequence[str], *, multirun: bool, resolved: bool, task: Task = PRETRAINING) -> None:
    """Print the configuration of the run, or of each job of a sweep as one YAML document."""
    from omegaconf import OmegaConf

    overrides = with_start(overrides)
    documents = []
    for settings in expand_sweep(overrides, task.command) if multirun else [list(overrides)]:
        config = checked(settings, task)
        documents.append(to_yaml(config) if resolved else OmegaConf.to_yaml(compose_tree(settings, task.command)))
    print("---\n".join(documents), end="")


def run_one(given: Sequence[str], task: Task = PRETRAINING) -> None:
    """Do one job, with the settings as they were given; whatever it raises is raised here."""
    overrides = with_start(given)
    config = checked(overrides, task)
    if task.joined and torchrun.starts_ranks(config):
        torchrun.run_ranks(config, task.words, given)
        return
    if os.environ.get("RANK", "0") != "0":  # rank 0 has the run's folder, its log and Hydra
        task.work(config, Path())
        return
    failure: list[Exception] = []
    replaced = replaced_limits(overrides, task.command)  # Hydra composes nothing else while it runs a job

    def job(tree: Any) -> None:
        try:
            work(tree, task, overrides, replaced)
        except Exception as error:
            log_error(error)
            failure.append(error)

    under_hydra(job, for_hydra(overrides, task.command), task)
    if failure and isinstance(failure[0], Interrupted):
        raise _with_what_to_do(failure[0])
    if failure:
        raise failure[0]


def _with_what_to_do(error: Interrupted) -> Interrupted:
    """The interruption of a job, saying how to go on where it does not say so itself."""
    return error if SAME_COMMAND in str(error) else Interrupted(f"{error}; {SAME_COMMAND} from there")
