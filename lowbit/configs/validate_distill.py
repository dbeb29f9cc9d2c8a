"""Distillations that cannot work, found before anything is loaded: the student's and the teacher's runs by `validate`,
here what is the distillation's own."""

from dataclasses import replace
from pathlib import Path

from lowbit.configs.checks import COUNT, FRACTION, Range, check_ranges, refuse
from lowbit.configs.nearest import nearest_path
from lowbit.configs.schema import RunConfig
from lowbit.configs.schema_distill import DistillConfig, Divergence, Estimator
from lowbit.configs.validate import validate
from lowbit.errors import ConfigError

RANGES = {
    "teacher.max_steps": COUNT,
    "cache.targets": Range(1, 255),
    "cache.temperature": Range(0.01, 100),
    "cache.tokens": Range(1, 2**40),
    "cache.seed": Range(0, 2**32 - 1),
    "cache.micro_batch": Range(1, 2**20),
    "cache.shard_tokens": Range(1, 2**40),
    "loss.alpha": FRACTION,
}


def validate_distill(config: DistillConfig) -> None:
    """Raise ConfigError for the first setting that cannot work."""
    _validate(config)
    path = config.cache.path  # a cache that is there says itself what its targets are
    exact = config.cache.estimator is Estimator.topk or (path and _is_folder(config, "cache.path", path))
    if config.loss.divergence is not Divergence.forward_kl and not exact:
        keys = ("loss.divergence", "cache.estimator")
        why = "sampled targets would bias it"
        works = "loss.divergence=forward_kl or cache.estimator=topk would work"
        raise refuse(config, *keys, why=why, works=works)


def _validate(config: DistillConfig) -> None:
    """All but what the cache decides."""
    validate(student_config(config))
    check_ranges(config, RANGES)
    if config.cache.tokens is None:
        student_tokens(config)
    folders = [Path(path).expanduser().absolute() for path in (config.cache.path, *config.cache.more) if path]
    if len(set(folders)) < len(folders):
        why = "a cache is named twice, and an average takes each once"
        raise refuse(config, "cache.path", "cache.more", why=why, works="leave it out of cache.more")
    path = config.teacher.path
    if path and not _is_folder(config, "teacher.path", path):
        why = f"no such folder{nearest_path(path)}"
        raise refuse(config, "teacher.path", why=why, works="for example teacher.path=runs/pretrain")
    if not config.teacher.path:
        try:
            validate(teacher_config(config))
        except ConfigError as error:
            raise ConfigError(f"teacher: {error}") from None


def validate_cache(config: DistillConfig) -> None:
    """The same for `lowbit distill cache`, which needs a teacher and to know how much to cache."""
    if not config.teacher.path:
        works = "name the folder of a run or of a Hugging Face model, for example teacher.path=runs/pretrain"
        why = "there is nothing to cache (`lowbit distill` alone trains a teacher first)"
        raise refuse(config, "teacher.path", why=why, works=works)
    validate_distill(config)


def validate_train(config: DistillConfig) -> None:
    """The same for `lowbit distill train`, which needs a cache and no teacher."""
    _validate(replace(config, teacher=replace(config.teacher, path=config.teacher.path or ".")))
    folders = [config.cache.path, *config.cache.more]
    for folder in folders if config.cache.path else folders[1:]:
        key = "cache.path" if folder == config.cache.path else "cache.more"
        if not _is_folder(config, key, folder):
            why = f"no such folder{nearest_path(folder)}"
            raise refuse(config, key, why=why, works="make it with `lowbit distill cache`")


def _is_folder(config: DistillConfig, key: str, path: str) -> bool:
    """Whether there is one. Raises ConfigError where that cannot be seen."""
    try:
        return Path(path).expanduser().is_dir()
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or error}"
        raise refuse(config, key, why=why, works="make it readable, or give another") from None


def student_config(config: DistillConfig) -> RunConfig:
    """The student's run: what its folder keeps as config.yaml."""
    return RunConfig(**{name: getattr(config, name) for name in RunConfig.__dataclass_fields__})


def teacher_config(config: DistillConfig) -> RunConfig:
    """The run of the teacher that is trained where none is given: the student's, but for its model and length."""
    return replace(
        student_config(config),
        run_name=f"{config.run_name}/teacher",
        model=config.teacher.model,
        max_steps=config.teacher.max_steps,
        max_tokens=None,
        max_minutes=None,
        resume="auto",
        init_from="",
    )


def token_limit(config: DistillConfig) -> int | None:
    """Positions that the student trains on, by its own limits; None where time alone limits it."""
    step = config.batch.sequences * config.data.sequence_length
    limits = [config.max_tokens, config.max_steps and config.max_steps * step]
    return min((limit for limit in limits if limit), default=None)


def student_tokens(config: DistillConfig) -> int:
    """The same. Raises ConfigError when the limits do not say."""
    limit = token_limit(config)
    if limit is None:
        why = "how many positions to cache does not follow from a limit of time"
        raise refuse(config, "cache.tokens", "max_minutes", why=why, works="cache.tokens=1000000 would work")
    return limit
