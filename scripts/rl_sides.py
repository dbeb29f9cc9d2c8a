"""Two precisions as settings of `lowbit rl`, and the weights that runs in them begin with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import RL
from lowbit.configs.schema import AlignmentKind, PolicyConfig, PrecisionConfig, ProductConfig
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.validate_rl import warm_start_config
from lowbit.rl.task_run import WarmStart
from lowbit.trainer.distributed import ALONE
from lowbit.trainer.hardware import pick_device
from lowbit.trainer.run import execute


def with_pair(config: RlConfig, sampler: str, trainer: str) -> RlConfig:
    """A sampler, and a trainer with its forward and a BF16 backward on dequantised operands; rules stay."""
    forward = PolicyConfig(base=trainer, dgrad=ProductConfig(), wgrad=ProductConfig(), alignment=AlignmentKind.aligned)
    precision = replace(
        config.precision,
        forward="bf16", backward="bf16", dgrad=None, wgrad=None,
        sampler=sampler, trainer="trainer_side", define=config.precision.define | {"trainer_side": forward},
    )  # fmt: skip
    return replace(config, precision=precision)


def with_sides(config: RlConfig, overrides: Sequence[str], name: str) -> RlConfig:
    """`config`, which `overrides` made, with SAMPLER/TRAINER, or with the whole of a preset of `precision`.

    Raises: ConfigError for a preset that does not exist.
    """
    sampler, both, trainer = name.partition("/")
    if both:
        return with_pair(config, sampler, trainer)
    preset = compose_for(RL, [*overrides, f"precision={name}"]).precision
    return replace(config, precision=replace(preset, compute=config.precision.compute))


def start_of(config: RlConfig, folder: Path) -> RlConfig:
    """`config`, to begin with what its warm start leaves in `folder`; made once, in the precision of `config`."""
    if config.init_from:
        return config
    execute(lambda: WarmStart(warm_start_config(config), folder, ALONE, pick_device(config.device)), folder, ALONE)
    return replace(config, init_from=str(folder), warm_start=replace(config.warm_start, steps=0))


def plain_start(config: RlConfig, out: Path) -> RlConfig:
    """`config`, to begin with what a warm start in BF16 leaves in OUT/start."""
    plain = replace(config, precision=PrecisionConfig(compute=config.precision.compute))
    begun = start_of(plain, out / "start")
    return replace(begun, precision=config.precision)


def own_start(config: RlConfig, out: Path, name: str) -> RlConfig:
    """`config`, to begin with a warm start of its own seed, in its trainer's precision on both sides."""
    _, both, trainer = name.partition("/")
    alike = with_pair(config, trainer, trainer) if both else config
    begun = start_of(alike, out / f"start-{trainer or name}-{config.seed}")
    return replace(begun, precision=config.precision)
