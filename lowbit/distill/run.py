"""What the commands of `lowbit distill` do: teacher -> cache -> student, each alone or all in one run.

run folder           the student's run, as `lowbit pretrain` leaves it, and distill.yaml, everything that was set
                     and, in place of what was set of it, what the cache is
run folder/teacher   the teacher's run, where `teacher.path` names none
run folder/cache     the cache, where `cache.path` names none
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowbit.configs.schema import CheckpointConfig, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.stored import flatten, load_config, plain
from lowbit.configs.strict import show
from lowbit.configs.validate_distill import student_config, student_tokens, teacher_config
from lowbit.data.dataset import prepare_data
from lowbit.distill.making import CacheMaker
from lowbit.distill.shards import MANIFEST, Cache, is_there, read_manifest
from lowbit.distill.student import Distillation, describe
from lowbit.distill.teacher import open_teacher
from lowbit.errors import CheckpointError, ConfigError, Interrupted
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.files import CONFIG
from lowbit.trainer.hardware import set_deterministic
from lowbit.trainer.identity import shorten
from lowbit.trainer.launch import Place, local_device, open_ranks
from lowbit.trainer.loaded import shown_path
from lowbit.trainer.memory import explain_out_of_memory
from lowbit.trainer.resume import check_settings
from lowbit.trainer.run import RunResult, execute, pretrain_on

logger = logging.getLogger("lowbit")


def cache(config: DistillConfig, run_dir: Path, device: torch.device | None = None) -> Cache:
    """Make the teacher's cache, or what is missing of it. Several processes share the work without being told.

    Raises: ConfigError, DataError, CheckpointError, one line, for whatever is missing or does not fit.
    """
    if device is None:
        place = Place.of(os.environ)
        device = local_device(config.device, place)
        if place.world > 1 and not config.cache.path:
            raise ConfigError(f"cache.path is empty, and {place.world} processes share a cache by its path: give one")
    set_deterministic(config.deterministic)
    folder = cache_folder(config, run_dir)
    with explain_out_of_memory(lambda: _out_of_memory(config)):
        teacher = open_teacher(config.teacher, config.engine, device)
        teacher.require_length(config.data.sequence_length)  # before anything is written
        data = prepare_data(config.data, logger.info)
        maker = CacheMaker(folder, config, config.cache.tokens or student_tokens(config), teacher, data)
        logger.info("teacher %s: %s", config.teacher.path, teacher.summary())
        try:
            made = maker.make()
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: the finished shards in {shown_path(folder)} are kept, and the same command goes on"
            ) from None
    logger.info("%s", describe(made))
    return made


def train(config: DistillConfig, run_dir: Path) -> RunResult:
    """Train a student from a cache that is there."""
    with open_ranks(config) as (ranks, device):
        return _train(config, Path(ranks.share(str(run_dir))), ranks, device)


def everything(config: DistillConfig, run_dir: Path) -> RunResult:
    """A teacher, if none is named; its cache; the student. What is finished already is not done again."""
    with open_ranks(config) as (ranks, device):
        run_dir = Path(ranks.share(str(run_dir)))
        student, store = student_config(config), CheckpointStore(run_dir / "checkpoints", config.checkpoint)
        ranks.first_does(lambda: check_settings(student, store))  # before teacher, data and cache are made for nothing
        config = with_teacher(config, run_dir, ranks, device)
        cache(config, run_dir, device)
        ranks.gather("cached")  # nobody goes on before all are done
        return _train(config, run_dir, ranks, device)


def with_teacher(config: DistillConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> DistillConfig:
    """The configuration with a teacher that exists: trained here and now unless `teacher.path` names one."""
    if config.teacher.path:
        return config
    folder, run = run_dir / "teacher", teacher_config(config)
    done = ranks.share(_steps_done(folder) if ranks.first else 0)
    if done:
        ranks.first_does(lambda: _check_teacher(run, folder, done))
    if done < config.teacher.max_steps:
        ranks.first_does(lambda: _require_no_cache(config, cache_folder(config, run_dir), done))
        logger.info("teacher: none is named, so one is trained first (%d steps)", config.teacher.max_steps)
        pretrain_on(run, folder, ranks, device).before_more()
    return replace(config, teacher=replace(config.teacher, path=str(folder)))


def _check_teacher(run: RunConfig, folder: Path, done: int) -> None:
    """Compare the teacher that is there with the one that is wanted now. What makes no other model is told alone.

    Raises: CheckpointError, ConfigError where it is another, naming the setting.
    """
    finished = done >= (run.max_steps or 0)
    try:  # nothing of a finished one goes on, so there is nothing to allow
        allow = [] if finished else run.resume_allow
        check_settings(replace(run, resume_allow=allow), CheckpointStore(folder / "checkpoints", run.checkpoint))
    except CheckpointError as error:
        told = str(error).replace(" model.", " teacher.model.")
        if finished:
            told = f"{told.rpartition('. ')[0]}. It is finished: to train another, give another run_name"
        raise CheckpointError(f"{shown_path(folder)}: {told}") from None
    if done > (run.max_steps or 0):
        raise ConfigError(
            f"teacher.max_steps={run.max_steps}: the teacher in {shown_path(folder)} has made {done} steps: go on with "
            f"teacher.max_steps={done}, or give another run_name"
        )
    was, now = (_recipe(config) for config in (load_config(folder / CONFIG), run))
    found = [f"{key}: {show(was.get(key))} then, {show(now[key])} now" for key in now if was.get(key) != now[key]]
    if found and finished:
        logger.warning(
            "the teacher in %s was trained with other settings, and stays as it is: %s",
            shown_path(folder),
            shorten(found),
        )


def _recipe(config: RunConfig) -> dict[str, Any]:
    """How a run was trained, beside its model and data, by key."""
    return flatten({key: plain(getattr(config, key)) for key in ("seed", "batch", "optim", "precision")})


def _require_no_cache(config: DistillConfig, folder: Path, done: int) -> None:
    """Raises ConfigError where a teacher would be trained further than the cache that it made already."""
    if is_there(folder / MANIFEST):
        step = read_manifest(folder)["identity"]["teacher"]["step"]
        onward = f"go on with teacher.max_steps={done}, or " if done else ""
        raise ConfigError(
            f"teacher.max_steps={config.teacher.max_steps}: the teacher is at step {done}, and {shown_path(folder)} "
            f"holds the cache that a teacher made at step {step}: {onward}give another run_name or cache.path"
        )


def _train(config: DistillConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> RunResult:
    folder = cache_folder(config, run_dir)
    logger.info("student: learns from %s", shown_path(folder))
    return execute(lambda: Distillation(config, folder, run_dir, ranks, device), run_dir, ranks)


def cache_folder(config: DistillConfig, run_dir: Path) -> Path:
    """Where the cache is or will be."""
    return Path(config.cache.path).expanduser() if config.cache.path else run_dir / "cache"


def _steps_done(folder: Path) -> int:
    """Steps of a run's newest checkpoint; 0 without one."""
    if not (folder / "checkpoints").is_dir():
        return 0
    names = CheckpointStore(folder / "checkpoints", CheckpointConfig()).list()
    return max((int(path.name.rpartition("_")[2]) for path in names), default=0)


def _out_of_memory(config: DistillConfig) -> str:
    size = config.cache.micro_batch
    smaller = f"cache.micro_batch={max(1, size // 2)}" if size > 1 else "device=cpu"
    return (
        f"out of memory while caching at cache.micro_batch={size}: {smaller} needs less; finished shards are kept, but "
        "a cache has one micro-batch for all of them, so give another cache.path"
    )
