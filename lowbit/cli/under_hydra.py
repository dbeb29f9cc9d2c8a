"""A job under Hydra: `hydra.main` called the way it wants to be (reading `sys.argv`), and what is done inside.

Hydra provides the run's folder, `.hydra/`, logging and multirun with its sweeper and launcher plug-ins. It would print
a job's exception its own way and exit; therefore callers keep a job's exception, or write down how it ended.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowbit.cli import torchrun
from lowbit.cli.task import Task
from lowbit.configs.compose import CONFIG_MODULE, to_config
from lowbit.errors import Interrupted, LowbitError

logger = logging.getLogger("lowbit")

SAME_COMMAND = "the same command goes on"


def under_hydra(job: Callable[[Any], None], arguments: Sequence[str], task: Task) -> None:
    """Run `job` through `hydra.main` as if `arguments` had been given to a script of its own."""
    import hydra

    from lowbit.data.storage import DISK_FULL

    name = task.command.name
    with _as_script([name, *arguments]):
        try:
            hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=name)(job)()
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {SAME_COMMAND} from what its folder holds") from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""  # a full disk shows in a write, which has no name
            what = f"{where}the run's folder cannot be written ({error.strerror or error})"
            do = "free some space, or choose" if error.errno in DISK_FULL else "choose"
            raise LowbitError(f"{what}: {do} another place with run_name or hydra.run.dir") from error


@contextmanager
def _as_script(arguments: list[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and only with HYDRA_FULL_ERROR raises its exceptions instead of exiting."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def work(tree: Any, task: Task, typed: Sequence[str], replaced: Sequence[str]) -> object:
    """The job itself: from Hydra's configuration to a finished run, and what that reached.

    typed: its settings, should it start ranks. replaced: `replaced_limits`, to be said.
    """
    from hydra.core.hydra_config import HydraConfig

    config, folder = to_config(task.command, tree), Path(HydraConfig.get().runtime.output_dir)
    if task.joined and torchrun.starts_ranks(config):
        torchrun.run_ranks(config, task.words, [*typed, f"hydra.run.dir={quoted(folder)}"])
        return None
    for line in replaced:
        logger.info("%s", line)
    return task.work(config, folder)


def log_error(error: Exception) -> None:
    """Leave the error in run.log, with its traceback unless it is one we raise on purpose; an interruption is none."""
    for handler in logging.getLogger().handlers:  # the file alone: the console gets its own line from the caller
        expected = isinstance(error, LowbitError)
        record = logger.makeRecord(
            logger.name,
            logging.INFO if isinstance(error, Interrupted) else logging.ERROR,
            __file__,
            0,
            "%s",
            (error,),
            None if expected else (type(error), error, error.__traceback__),
        )
        handler.handle(record)


def quoted(path: Path) -> str:
    """A path in Hydra's grammar."""
    return "'" + str(path).replace("'", "\\'") + "'"
