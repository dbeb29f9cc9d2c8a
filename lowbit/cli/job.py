"""Jobs under Hydra: one run of a command, or a sweep of them.

Hydra provides the run's folder, `.hydra/`, logging and multirun with its sweeper and launcher plug-ins. It is called
the way it wants to be called (`hydra.main` reading `sys.argv`), but only after every configuration has been composed
and validated, so that a mistake leaves no folder behind. Hydra would print a job's exception its own way and exit;
therefore a job keeps its exception (one run) or writes down how it ended (a sweep), and the caller decides.
"""

import json
import logging
import multiprocessing
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.cli import torchrun
from lowbit.cli.ending import say
from lowbit.cli.settings import Shown
from lowbit.cli.start import with_start
from lowbit.configs.compose import CONFIG_MODULE, compose_for, compose_tree, replaced_limits, to_config
from lowbit.configs.overrides import PRETRAIN, Command, expand_sweep, for_hydra, sweep_keys
from lowbit.configs.schema import RunConfig
from lowbit.configs.stored import to_yaml
from lowbit.configs.validate import check_world, validate
from lowbit.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, Interrupted, LowbitError
from lowbit.trainer.files import OUTCOME, RUN_LOG

logger = logging.getLogger("lowbit")

SAME_COMMAND = "the same command goes on"


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
    from lowbit.trainer.precision import check_precision  # PyTorch, which most mistakes need not wait for

    for run in task.runs(config):
        check_precision(run)
    if task.joined:
        check_world(config, torchrun.ranks_of(config))
    return config


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
            _work(tree, task, overrides, replaced)
        except Exception as error:
            _log(error)
            failure.append(error)

    _under_hydra(job, for_hydra(overrides, task.command), task)
    if failure and isinstance(failure[0], Interrupted):
        raise _with_what_to_do(failure[0])
    if failure:
        raise failure[0]


def _with_what_to_do(error: Interrupted) -> Interrupted:
    """The interruption of a job, saying how to go on where it does not say so itself."""
    return error if SAME_COMMAND in str(error) else Interrupted(f"{error}; {SAME_COMMAND} from there")


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
        arguments = ["--multirun", *for_hydra(overrides, task.command), f"hydra.sweep.dir={_quoted(sweep_dir)}"]
        replaced = [replaced_limits(settings, task.command) for settings in jobs]
        _under_hydra(lambda tree: _sweep_job(tree, swept, task, typed, replaced), arguments, task)
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


def _work(tree: Any, task: Task, typed: Sequence[str], replaced: Sequence[str]) -> object:
    """The job itself: from Hydra's configuration to a finished run, and what that reached.

    typed: its settings, should it start ranks. replaced: `replaced_limits`, to be said.
    """
    from hydra.core.hydra_config import HydraConfig

    config, folder = to_config(task.command, tree), Path(HydraConfig.get().runtime.output_dir)
    if task.joined and torchrun.starts_ranks(config):
        torchrun.run_ranks(config, task.words, [*typed, f"hydra.run.dir={_quoted(folder)}"])
        return None
    for line in replaced:
        logger.info("%s", line)
    return task.work(config, folder)


def _sweep_job(
    tree: Any,
    swept: Sequence[str],
    task: Task,
    typed: Sequence[Sequence[str]],
    replaced: Sequence[Sequence[str]],
) -> None:
    """One job of a sweep: failures are printed and written down, interruption ends the sweep.

    typed, replaced: of each job, as `_work` takes them.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    settings = _only(hydra.overrides.task, swept)
    outcome = Outcome(hydra.job.num, settings)
    _allow_children()
    reached: object = None
    try:
        reached = _work(tree, task, typed[hydra.job.num], replaced[hydra.job.num])
    except KeyboardInterrupt:
        outcome = Outcome(hydra.job.num, settings, EXIT_INTERRUPTED, "interrupted")
        raise
    except Exception as error:
        _log(error)
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


def _log(error: Exception) -> None:
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


def _quoted(path: Path) -> str:
    """A path in Hydra's grammar."""
    return "'" + str(path).replace("'", "\\'") + "'"


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


def _under_hydra(job: Callable[[Any], None], arguments: Sequence[str], task: Task) -> None:
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
