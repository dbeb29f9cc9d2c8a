"""Pipelines that cannot work, found before anything is loaded: each stage by the rules of its own command.

Where a stage begins is known when it does; until then its tokenizer stands for one that will be there.
"""

from dataclasses import replace
from pathlib import Path

from lowbit.configs.checks import refuse
from lowbit.configs.nearest import nearest_path
from lowbit.configs.schema import RunConfig, TokenizerConfig, TokenizerKind
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.validate import check_world, validate
from lowbit.configs.validate_distill import validate_cache
from lowbit.configs.validate_rl import validate_rl
from lowbit.errors import ConfigError


def validate_pipeline(config: PipelineConfig) -> None:
    """Raise ConfigError for the first setting that cannot work, behind the name of its stage."""
    order = [stage for stage in Stage if stage in config.stages]
    if not config.stages or config.stages != order:
        works = f"stages=[{','.join(order or Stage)}] would work"
        raise refuse(config, "stages", why="each stage once, in the order pretrain, distill, rl", works=works)
    for stage in config.stages:
        try:
            _check(stage, config)
        except ConfigError as error:
            raise ConfigError(f"{stage}: {error}") from None


def runs_of(config: PipelineConfig) -> dict[Stage, RunConfig]:
    """The configurations of the stages that are to be done."""
    return {stage: getattr(config, stage) for stage in config.stages}


def _check(stage: Stage, config: PipelineConfig) -> None:
    if stage is Stage.pretrain:
        validate(config.pretrain)
    elif stage is Stage.distill:
        path = config.distill.teacher.path or "."  # what is pretrained is not there yet
        validate_cache(replace(config.distill, teacher=replace(config.distill.teacher, path=path)))
    else:
        tokenizer = config.rl.data.tokenizer
        if tokenizer.kind is TokenizerKind.bpe:  # trained by an earlier stage
            tokenizer = TokenizerConfig(kind=TokenizerKind.bytes)
        validate_rl(replace(config.rl, data=replace(config.rl.data, tokenizer=tokenizer)))
        start = config.rl.init_from
        if start and not Path(start).expanduser().is_dir():
            why = f"no such folder{nearest_path(start)}"
            raise refuse(config.rl, "init_from", why=why, works="for example rl.init_from=runs/distill")
    run = runs_of(config)[stage]
    check_world(run, run.engine.processes)
