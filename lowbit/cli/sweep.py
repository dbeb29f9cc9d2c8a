"""Sweeps: every combination of a command's settings as a job of its own; a job that fails is named, the others finish.

A job writes down how it ended (`outcome.json`), because Hydra's launchers may run it in another process.
"""

import json
import logging
import multiprocessing
import shlex
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.cli import torchrun
from lowbit.cli.ending import say
from lowbit.cli.start import with_start
from lowbit.cli.task import PRETRAINING, Task, checked
from lowbit.cli.under_hydra import log_error, quoted, under_hydra, work
from lowbit.configs.compose import compose_tree, replaced_limits
from lowbit.configs.overrides import expand_sweep, for_hydra, sweep_keys
from lowbit.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, Interrupted, LowbitError
from lowbit.trainer.files import OUTCOME, RUN_LOG

logger = logging.getLogger("lowbit")


@dataclass(frozen=True)
class Outcome:
    """How a job of a sweep ended."""

    job: int
    settings: list[str]
    exit_code: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        """`job 3 (optim.lr=0.001 seed=2)`."""
        return f"job {self.job} ({' '.join(self.settings)})"


def run_sweep(given: Sequence[str], task: Task = PRETRAINING) -> None:
    """Train every combination in turn; a failed job does not stop the others.

    Prints a table of the runs at the end. Raises LowbitError naming the failed jobs, if any; Interrupted at once.
    """
    if torchrun.world() > 1:
        raise ConfigError(
            f"-m with {torchrun.world()} processes: a sweep starts its runs from one; leave torchrun out, and "
            "engine.processes=N starts each run on N"
        )
    overrides, typed = with_start(given), expand_sweep(given, task.command)
    jobs = expand_sweep(overrides, task.command)
    swept = sweep_keys(overrides)
    for number, settings in enumerate(jobs):
        try:
            checked(settings, task)
        except ConfigError as error:
            raise ConfigError(f"job {number} ({' '.join(_only(settings, swept))}): {error}") from None
    sweep_dir = _sweep_dir([s for s, key in zip(jobs[0], _keys(jobs[0]), strict=True) if key not in swept], task)
    interrupted, broken = False, None
    try:
        arguments = ["--multirun", *for_hydra(overrides, task.command), f"hydra.sweep.dir={quoted(sweep_dir)}"]
        replaced = [replaced_limits(settings, task.command) for settings in jobs]
        under_hydra(lambda tree: _sweep_job(tree, swept, task, typed, replaced), arguments, task)
    except Interrupted:
        interrupted = True
    except Exception as error:  # a launcher of other processes: one of them was killed, or could not be started
        broken = error
    outcomes = _outcomes(sweep_dir)
    done = [folder for folder, outcome in outcomes if outcome.exit_code == 0]
    ending: Exception | None
    if interrupted:
        setting = shlex.quote(f"hydra.sweep.dir={sweep_dir}")
        reached = f"{len(done)} of {len(jobs)} jobs are done"
        ending = Interrupted(f"the sweep was interrupted: {reached}; the same command with {setting} goes on")
    else:
        names = [Outcome(number, _only(settings, swept)).name for number, settings in enumerate(jobs)]
        ending = _ending([outcome for _, outcome in outcomes], names, broken, sweep_dir)
    try:
        _print_report(sweep_dir, [run for folder in done for run in task.shown(sweep_dir / folder)])
    finally:
        if ending is not None:  # which jobs failed is said whatever became of the report
            raise ending


def _ending(
    outcomes: Sequence[Outcome], names: Sequence[str], broken: Exception | None, sweep_dir: Path
) -> Exception | None:
    """What a sweep that went through ends with: an error, or None. broken: what the launcher raised.

    A job that left no outcome is named on the console at once; the others have done so themselves.
    """
    ended = {outcome.job for outcome in outcomes}
    silent = [f"{name} without a word" for number, name in enumerate(names) if number not in ended]
    if broken is not None and (not silent or not outcomes or isinstance(broken, LowbitError)):
        return broken
    failed = [outcome.name for outcome in outcomes if outcome.exit_code] + silent
    if not failed:
        return None
    for name in silent:
        say(name, EXIT_FAILED)
    reason = ""
    if broken is not None:
        logger.error("the launcher of the jobs failed", exc_info=broken)
        lines = str(broken).strip().splitlines()
        reason = f"; {type(broken).__name__}: {lines[0]}" if lines else f"; {type(broken).__name__}"
    error = LowbitError(
        f"{len(failed)} of {len(names)} jobs failed: {', '.join(failed)}{reason}; see {sweep_dir}/*/{RUN_LOG}"
    )
    error.__cause__ = broken
    return error


def _sweep_job(
    tree: Any,
    swept: Sequence[str],
    task: Task,
    typed: Sequence[Sequence[str]],
    replaced: Sequence[Sequence[str]],
) -> None:
    """One job of a sweep: failures are printed and written down, interruption ends the sweep.

    typed, replaced: of each job, as `work` takes them.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    settings = _only(hydra.overrides.task, swept)
    outcome = Outcome(hydra.job.num, settings)
    _allow_children()
    reached: object = None
    try:
        reached = work(tree, task, typed[hydra.job.num], replaced[hydra.job.num])
    except KeyboardInterrupt:
        outcome = Outcome(hydra.job.num, settings, EXIT_INTERRUPTED, "interrupted")
        raise
    except Exception as error:
        log_error(error)
        code = error.exit_code if isinstance(error, LowbitError) else EXIT_FAILED
        outcome = Outcome(hydra.job.num, settings, code, " ".join(str(error).split()) or type(error).__name__)
        if isinstance(error, LowbitError):
            say(f"{outcome.name}: {outcome.error}", code)
        else:
            traceback.print_exc()
        if isinstance(error, Interrupted):  # KeyboardInterrupt is what Hydra's launchers let through
            raise KeyboardInterrupt from error
    finally:
        (folder / OUTCOME).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    if getattr(reached, "asked_to_end", ""):  # this job is done, and nothing is to follow it
        raise KeyboardInterrupt


def _allow_children() -> None:
    """Joblib starts jobs in a way of its own (loky) that their own processes, which pack documents, would not find."""
    if multiprocessing.get_start_method(allow_none=True) not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method("spawn", force=True)


def _outcomes(sweep_dir: Path) -> list[tuple[str, Outcome]]:
    """Folder and outcome of each job that ended, in the order of the sweep."""
    found = []
    for file in sweep_dir.glob(f"*/{OUTCOME}"):
        with suppress(
            OSError, ValueError, TypeError
        ):  # half-written by a job that was killed: as if it had said nothing
            found.append((file.parent.name, Outcome(**json.loads(file.read_text(encoding="utf-8")))))
    return sorted(found, key=lambda pair: pair[1].job)


def _print_report(sweep_dir: Path, run_dirs: list[Path]) -> None:
    from lowbit.trainer.report import sweep_report

    for line in sweep_report(sweep_dir, run_dirs):
        print(line)


def _keys(settings: Sequence[str]) -> list[str]:
    return [s.lstrip("+~").partition("=")[0].rpartition("@")[2] for s in settings]


def _only(settings: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The settings of these keys: what tells one job of a sweep from another."""
    return [
        s.lstrip("+").removeprefix(_group(s)) for s, key in zip(settings, _keys(settings), strict=True) if key in keys
    ]


def _group(setting: str) -> str:
    """`model@` of `model@teacher=tiny`, which is how Hydra writes the choice of another name; else nothing."""
    return "".join(setting.partition("=")[0].rpartition("@")[:2])


def _sweep_dir(overrides: Sequence[str], task: Task) -> Path:
    """The folder of this sweep, its date resolved once and for all."""
    tree = compose_tree(overrides, task.command, with_hydra=True)
    return Path(str(tree.hydra.sweep.dir))
