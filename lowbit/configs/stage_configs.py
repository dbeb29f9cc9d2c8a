"""From what was set for a pipeline to the whole configuration of each stage.

    schema's defaults  <-  what stages share  <-  the stage's own section        (the right wins, key by key)

Until here a stage's section holds only what somebody set, in a preset or as an override; here it becomes complete, and
`strict.build` then checks it like the configuration of any run. What a pipeline decides itself (folders, models, where
a stage begins) has one place and cannot be set in a stage.
"""

from collections.abc import Mapping
from typing import Any

from lowbit.configs.schema import DataConfig, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_pipeline import Stage
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import flatten, plain
from lowbit.errors import ConfigError

STAGES: dict[Stage, type[RunConfig]] = {Stage.pretrain: RunConfig, Stage.distill: DistillConfig, Stage.rl: RlConfig}
SHARED = ("seed", "deterministic", "device", "engine", "comm", "checkpoint", "logging")
"""What every stage takes as it stands at the top."""

_NAME = "the folder follows from the pipeline's; set run_name"
_MODEL = "a pipeline has two models: set teacher (pretrained) and student (distilled, then trained by rewards)"
_START = "a stage goes on by itself, from what the one before it left"
_TOKENIZER = "all stages have one tokenizer: set data.tokenizer"
DECIDED = {
    "run_name": _NAME,
    "resume": _START,
    "model": _MODEL,
    "teacher.model": _MODEL,
    "teacher.max_steps": "the teacher's length is that of its stage: set pretrain.max_steps",
    "data.tokenizer": _TOKENIZER,
    "cache.path": "the cache lies in the stage's folder: set run_name",
}
"""Keys of a stage that the pipeline decides, and what to do instead."""
BEGINNINGS = {
    Stage.pretrain: _START,
    Stage.distill: "the student begins anew; name its teacher in distill.teacher.path",
}
"""Stages that cannot be given `init_from`, and why."""


def fill(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The composed tree of a pipeline with its stages' sections complete. Raises ConfigError for what is not theirs."""
    filled = dict(tree)
    for stage, cls in STAGES.items():
        own = tree.get(stage) or {}
        if not isinstance(own, Mapping):
            raise ConfigError(
                f"{stage}={own}: a stage has keys, such as {stage}.max_steps; stages=[...] chooses stages"
            )
        refuse_decided(stage, own)
        filled[stage] = _merged(_beneath(stage, cls, tree, own), own)
        if stage is Stage.rl and isinstance(precision := filled[stage]["precision"], Mapping):
            filled[stage]["precision"] = {**precision, "switch": []}  # a schedule of training from text, whoever set it
    return filled


def _beneath(stage: Stage, cls: type[RunConfig], tree: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What stands under a stage's own keys."""
    base: dict[str, Any] = plain(cls()) | {key: tree[key] for key in SHARED}
    base["run_name"] = f"{tree['run_name']}/{stage}"
    base["model"] = tree["teacher" if stage is Stage.pretrain else "student"]
    base["data"] = tree["data"]
    if "name" not in (own.get("precision") or {}):  # else the stage has chosen a preset of its own
        base["precision"] = tree["precision"]
    if stage is Stage.distill:
        base["teacher"] = base["teacher"] | {"model": tree["teacher"]}
    if stage is Stage.rl:
        base["data"] = plain(DataConfig(sources={})) | {"tokenizer": tree["data"]["tokenizer"]}
    return base


def refuse_decided(stage: Stage, own: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key in a stage's section that the pipeline decides."""
    for key in flatten(own):
        why = next((why for decided, why in DECIDED.items() if f"{key}.".startswith(f"{decided}.")), None)
        if key == "init_from":
            why = BEGINNINGS.get(stage)
        if why is not None:
            raise ConfigError(f"{stage}.{key}: {why}")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merged key by key, all else replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
