"""A pipeline from configuration to table: each stage begins with the weights that the one before it left.

pipeline's folder            pipeline.yaml (everything that was set), pipeline.json (what was done), run.log
pipeline's folder/STAGE      the stage's run, as its own command leaves it: every command takes it

Before a stage runs, its settings and inputs are compared with what its record in the manifest was made from:

    the same, done            it is kept, and not run
    the same, not done        it goes on where it was (the stages resume by themselves)
    other                     refused, naming what changed; with `changed=anew` it is made in another folder beside it

Refusing is the default because a stage costs hours where a slip of the hand costs a second, and because what it would
replace is somebody's result. Nothing here deletes anything.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.configs.schema import RunConfig
from lowbit.configs.schema_pipeline import OnChange, PipelineConfig, Stage
from lowbit.configs.stored import plain, save_config, to_yaml
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.errors import ConfigError, Interrupted, LowbitError
from lowbit.pipeline import manifest as store
from lowbit.pipeline.identity import deciding, differences, weights_of
from lowbit.pipeline.manifest import Manifest, Record, State
from lowbit.pipeline.plan import require_space
from lowbit.pipeline.stages import (
    beginning_of,
    changed_outputs,
    complete,
    in_words,
    inputs_of,
    naming,
    perform,
    reached,
)
from lowbit.pipeline.table import say_end
from lowbit.trainer.loaded import shown_path
from lowbit.trainer.lock import RunLock

if TYPE_CHECKING:
    from lowbit.trainer.run import RunResult

logger = logging.getLogger("lowbit")

Perform = Callable[[Stage, RunConfig, Path], "RunResult | None"]
"""What runs a stage in its folder, and what that reached where it is known here."""
NOT_DOCUMENTS = ("cache_dir", "pack_workers", "prefetch")
"""Settings of the data that change nothing in them."""


def run(config: PipelineConfig, folder: Path, perform: Perform = perform) -> Manifest:
    """Do every stage that is not done yet; returns what is there then.

    Raises: LowbitError, one line naming the stage; Interrupted when a signal came, and the same command goes on.
    """
    with RunLock(folder):
        pipeline = Pipeline(config, folder, perform)
        for stage in config.stages:
            pipeline.stage(stage)
        pipeline.keep_settings()
    say_end(config, folder, pipeline.manifest, pipeline.kept)
    return pipeline.manifest


class Pipeline:
    """The stages of one folder."""

    def __init__(self, config: PipelineConfig, folder: Path, perform: Perform) -> None:
        self.config = config
        self.folder = folder
        self.manifest = store.read(folder)
        self.kept: set[Stage] = set()
        """Stages that were done before."""
        self._perform = perform
        self._data: dict[str, Dataset] = {}
        self._settings_kept = False

    def stage(self, stage: Stage) -> None:
        """Do a stage, unless it is done."""
        start = beginning_of(stage, self.config, self.folder, self.manifest)
        with naming(stage):
            run = complete(stage, self.config, start)
            inputs = inputs_of(stage, run, start, self._documents(run) if stage is not Stage.rl else None)
        record = self._record(stage, run, inputs)
        if record.state is State.done:
            logger.info("%s: done before, in %s", stage, shown_path(self.folder / record.folder))
            self.kept.add(stage)
            return
        place = self.folder / record.folder
        require_space(stage, run, place)
        self.keep_settings()
        logger.info("%s: %s, in %s", stage, record.precision, shown_path(place))
        self._write(stage, record)
        with self._recording(stage, record):
            ended = self._perform(stage, run, place)
        if ended and ended.asked_to_end and stage is not self.config.stages[-1]:
            after = self.config.stages[list(self.config.stages).index(stage) + 1]
            raise Interrupted(
                f"interrupted by {ended.asked_to_end} when {stage} was done; the same command goes on with {after}"
            )

    def keep_settings(self) -> None:
        """Write pipeline.yaml, once it is known that something is made with these settings, or was."""
        if not self._settings_kept:
            path = self.folder / "pipeline.yaml"
            with store.replacing(path):
                save_config(self.config, path)
            self._settings_kept = True

    def _documents(self, run: RunConfig) -> Dataset:
        """The data of a stage, packed once for all stages that read the same documents and cut them alike."""
        key = to_yaml({key: value for key, value in plain(run.data).items() if key not in NOT_DOCUMENTS})
        if key not in self._data:
            self._data[key] = prepare_data(run.data, logger.info)
        return self._data[key]

    def _record(self, stage: Stage, run: RunConfig, inputs: dict[str, str]) -> Record:
        """The stage's record: the one that is there if it was made from the same, else a new one."""
        fresh = Record(stage.value, State.running, deciding(run), inputs, in_words(stage, run))
        found = self.manifest.stages.get(stage)
        if found is None:
            return self._in_free_folder(fresh)
        place = self.folder / found.folder
        why = differences(run, found.settings, (found.inputs, inputs))
        if not why and found.state is State.done:
            if not place.is_dir():
                logger.warning("%s: %s is gone, so the stage is done again", stage, shown_path(place))
                return replace(found, state=State.running, outputs={}, reached={}, seconds=0.0)
            why = changed_outputs(found, place)
        if not why:
            return found if found.state is State.done else replace(found, state=State.running, error="")
        if self.config.changed is OnChange.anew:
            made = self._in_free_folder(fresh)
            logger.info("%s: %s; made anew in %s, %s stays", stage, why, made.folder, found.folder)
            return made
        raise ConfigError(
            f"{stage} in {shown_path(place)} was {'made' if found.state is State.done else 'begun'} otherwise: {why}. "
            f"Take that back; or choose another run_name; or add changed=anew, which makes {stage} and what "
            "follows anew in folders beside it"
        )

    def _in_free_folder(self, record: Record) -> Record:
        """The record with the first name that nobody has used: distill, distill-2, ..."""
        name, number = record.folder, 1
        while record.folder in self.manifest.folders() or (self.folder / record.folder).exists():
            number += 1
            record = replace(record, folder=f"{name}-{number}")
        return record

    def _write(self, stage: Stage, record: Record) -> None:
        self.manifest = self.manifest.with_record(stage, record)
        store.write(self.folder, self.manifest)

    def _note(self, stage: Stage, record: Record) -> None:
        """Write down how a stage ended while its own error is on the way; that one matters more than another here."""
        try:
            self._write(stage, record)
        except LowbitError as error:
            logger.error("%s", error)

    @contextmanager
    def _recording(self, stage: Stage, record: Record) -> Iterator[None]:
        """Write down how a stage ended, and what it left; what is raised goes on, with the stage's name."""
        started = time.monotonic()

        def ended(state: State, error: str = "") -> Record:
            return replace(record, state=state, seconds=record.seconds + time.monotonic() - started, error=error)

        place = self.folder / record.folder
        try:
            yield
            outputs, numbers = {"weights": weights_of(place)}, reached(stage, place)
        except (KeyboardInterrupt, Interrupted) as error:
            self._note(stage, ended(State.interrupted))
            said = f" ({error})" if str(error) else ""
            raise Interrupted(f"interrupted in {stage}{said}; the same command goes on there") from None
        except LowbitError as error:
            self._note(stage, ended(State.failed, str(error)))
            raise type(error)(f"{stage}: {error}") from error
        except Exception as error:
            self._note(stage, ended(State.failed, f"{type(error).__name__}: {error}"))
            raise
        with naming(stage):
            self._write(stage, replace(ended(State.done), outputs=outputs, reached=numbers))
