"""The stages as a pipeline sees them: where each begins, what goes into it, how it is run, and what it reached.

Nothing is trained here: a stage is the function that its own command calls, with a configuration of that command.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.configs.schema import PrecisionConfig, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import plain
from lowbit.configs.validate_distill import validate_cache
from lowbit.configs.validate_rl import validate_rl
from lowbit.data.dataset import Dataset
from lowbit.errors import CheckpointError, ConfigError, LowbitError
from lowbit.infer.precision import check_sampler
from lowbit.pipeline.identity import tokenizer_digest, weights_of
from lowbit.pipeline.manifest import Manifest, Record, State
from lowbit.quant.resolve import resolve
from lowbit.rl.tasks import fingerprint, make_task
from lowbit.trainer.files import METRICS
from lowbit.trainer.hardware import compute_dtype, pick_device
from lowbit.trainer.imported import beginning
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.loaded import shown_path

if TYPE_CHECKING:
    from lowbit.trainer.run import RunResult

logger = logging.getLogger("lowbit")

GIVEN = {Stage.distill: "distill.teacher.path", Stage.rl: "rl.init_from"}
"""The setting that says where a stage begins, if not where the one before it ended."""


@contextmanager
def naming(stage: Stage) -> Iterator[None]:
    """Errors begin with the stage's name."""
    try:
        yield
    except LowbitError as error:
        raise type(error)(f"{stage}: {error}") from error


def check_sampling(config: PipelineConfig) -> None:
    """Raise ConfigError for a sampler's precision in which rollouts cannot be drawn."""
    if Stage.rl in config.stages:
        check_sampler(resolve(config.rl.precision))


def beginning_of(stage: Stage, config: PipelineConfig, folder: Path, manifest: Manifest) -> Path | None:
    """The folder whose weights a stage takes; None for the first, which takes none.

    That is where `GIVEN` says, or the nearest stage before it that is done, now or in an earlier command.

    Raises LowbitError when there is none yet, or not as it was left: with what makes it, and how to name others.
    """
    if stage is Stage.pretrain:
        return None
    given = config.distill.teacher.path if stage is Stage.distill else config.rl.init_from
    if given:
        return Path(given).expanduser()
    before = [other for other in Stage if list(Stage).index(other) < list(Stage).index(stage)]
    wanted = [other for other in before if other in config.stages or other in manifest.stages]
    if not wanted:
        raise ConfigError(
            f"{stage} takes the weights of a stage before it, and {shown_path(folder)} has none; "
            f"add {before[-1]} to stages, or name a run's folder in {GIVEN[stage]}"
        )
    record = manifest.stages.get(wanted[-1])
    if record is None or record.state is not State.done:
        state = "was not begun" if record is None else f"is {record.state}"
        where = f"{wanted[-1]}, which {state} in {shown_path(folder)}"
        raise LowbitError(f"{stage} takes the weights of {where}: add it to stages")
    place = folder / record.folder
    if wanted[-1] not in config.stages and (why := changed_outputs(record, place)):
        raise LowbitError(
            f"{stage} takes the weights of {wanted[-1]} in {shown_path(place)}, but {why}: put them back, add "
            f"{wanted[-1]} to stages, or name the folder in {GIVEN[stage]} to take it as it is"
        )
    return place


def changed_outputs(record: Record, place: Path) -> str:
    """In words, if what a finished stage left is not there any more; else nothing."""
    try:
        same = weights_of(place) == record.outputs["weights"]
    except CheckpointError as error:
        return f"its weights are gone ({error})"
    return "" if same else "its newest checkpoint is not the one that the pipeline left there"


def complete(stage: Stage, config: PipelineConfig, start: Path | None) -> RunConfig:
    """A stage's configuration with where it begins, as its own command would have it. Raises ConfigError, one line."""
    if stage is Stage.pretrain:
        return config.pretrain
    assert start is not None
    if stage is Stage.distill:
        run: DistillConfig = replace(config.distill, teacher=replace(config.distill.teacher, path=str(start)))
        validate_cache(run)
        return run
    model, tokenizer = beginning(start)
    data = replace(config.rl.data, tokenizer=tokenizer)
    taught: RlConfig = replace(config.rl, init_from=str(start), model=model, data=data)
    validate_rl(taught)
    return taught


def inputs_of(stage: Stage, run: RunConfig, start: Path | None, data: Dataset | None) -> dict[str, str]:
    """Digests of all that goes into a stage besides its settings. `data`: of the stages that read documents."""
    if isinstance(run, RlConfig):
        assert start is not None
        found = {"weights": weights_of(start)}
        if run.algorithm.reference:
            found["reference"] = weights_of(Path(run.algorithm.reference).expanduser())
        if run.teacher.path:
            found["teacher"] = weights_of(Path(run.teacher.path).expanduser(), run.teacher.checkpoint)
        return found | {"tokenizer": tokenizer_digest(start), "task": fingerprint(make_task(run.task))}
    assert data is not None
    found = {"tokenizer": data.tokenizer.digest, "data": data.fingerprint}
    if isinstance(run, DistillConfig):
        assert start is not None
        found["weights"] = weights_of(start, run.teacher.checkpoint)
        if run.cache.more:
            found["caches"] = _digest_of_caches(run.cache.more)
    return found


def _digest_of_caches(folders: Sequence[str]) -> str:
    """Of what complete caches hold, in their order."""
    from lowbit.distill.shards import open_cache
    from lowbit.distill.student import cache_digest

    whole = "".join(cache_digest(open_cache(Path(folder).expanduser())) for folder in folders)
    return hashlib.sha256(whole.encode()).hexdigest()


def perform(stage: Stage, run: RunConfig, folder: Path) -> "RunResult":
    """Run a stage, or go on with it: the function of its command."""
    if isinstance(run, DistillConfig):
        from lowbit.distill.run import everything

        return everything(run, folder)
    if isinstance(run, RlConfig):
        from lowbit.rl.run import train

        return train(run, folder)
    from lowbit.trainer.run import pretrain

    return pretrain(run, folder)


def reached(stage: Stage, folder: Path) -> dict[str, float]:
    """What a stage's metrics end with: numbers by name, those that it has.

    Evaluations count with their last number; what scatters from step to step, with its mean over the last quarter of
    the logged steps.
    """
    rows = [row for row in read_rows(folder / METRICS) if isinstance(row.get("step"), int)]
    keys = {
        Stage.pretrain: ("step", "tokens", "val_bpb", "val_bpb_bf16"),
        Stage.distill: ("step", "tokens", "val_bpb", "val_bpb_bf16"),
        Stage.rl: ("step", "tokens", "val_reward", "val_accuracy"),
    }[stage]
    found: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: int(row["step"])):
        for key in keys:
            if isinstance(value := row.get(key), (int, float)):
                found[key] = float(value)
                if key == "val_accuracy":
                    found.setdefault("first_accuracy", float(value))
    for key in ("kl", "reward"):
        values = [float(row[key]) for row in rows if isinstance(row.get(key), (int, float))]
        last = values[-max(1, len(values) // 4) :]
        if last:
            found[key] = sum(last) / len(last)
    return found


def in_words(stage: Stage, run: RunConfig) -> str:
    """What a stage computes in."""
    precision = run.precision
    names = _Names(precision, run)
    if stage is Stage.rl:
        sampler = precision.sampler or precision.forward
        if precision.trainer is None:
            return f"sampler {names[sampler]}; trainer {names[sampler]} forward, {names['bf16']} backward"
        return f"sampler {names[sampler]}; trainer {names[precision.trainer]}"
    words = f"forward {names[precision.forward]}, backward {names.backward(precision)}"
    for switch in precision.switch:
        when = f"from step {switch.at_step}" if switch.at is None else f"from {switch.at:.0%}"
        parts = {key: value for key, value in plain(switch).items() if isinstance(value, str)}
        words += f"; {'in the decay' if switch.at_decay else when} "
        words += (
            names[switch.forward]
            if switch.forward == switch.backward and switch.forward
            else ", ".join(f"{key} {names[value]}" for key, value in parts.items())
        )
    return words


class _Names:
    """Precisions by name, where what is not quantised is called by what the device computes in."""

    def __init__(self, precision: PrecisionConfig, run: RunConfig) -> None:
        dtype = compute_dtype(precision, pick_device(run.device))
        self._plain = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}[str(dtype)]

    def __getitem__(self, name: str) -> str:
        return self._plain if name == "bf16" else name

    def backward(self, precision: PrecisionConfig) -> str:
        apart = {"dgrad": precision.dgrad, "wgrad": precision.wgrad}
        words = [f"{key} {self[name]}" for key, name in apart.items() if name is not None]
        return ", ".join([self[precision.backward], *words])
