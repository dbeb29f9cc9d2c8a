"""Settings of `lowbit pipeline`: what its stages share, their two models, and a section of its own for each stage.

A stage's section has every key of the command that the stage is: `pretrain.max_steps` is the `max_steps` of
`lowbit pretrain`, `rl.rollout.samples` the `rollout.samples` of `lowbit rl`. What is set there wins over what is
shared; what is neither shared nor set is at the schema's default (`lowbit.configs.stage_configs` puts them together).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from lowbit.configs.schema import (
    CheckpointConfig,
    CommConfig,
    DataConfig,
    EngineConfig,
    LoggingConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_rl import RlConfig


class Stage(StrEnum):
    """A stage, named like the command that it is."""

    pretrain = "pretrain"
    """The teacher is trained from scratch."""
    distill = "distill"
    """The teacher's cache is made, and the student trained from it."""
    rl = "rl"
    """The student is trained by rewards."""


class OnChange(StrEnum):
    """What becomes of a stage that was made with other settings or inputs than it has now."""

    refuse = "refuse"
    """The command ends with a line that names what changed."""
    anew = "anew"
    """The stage, and with it those after it, is made anew in a folder beside the old one, which stays."""


@dataclass(frozen=True)
class PipelineConfig:
    """A pipeline: pretraining, distillation and reinforcement learning, each from what the one before it left."""

    run_name: str = "pipeline"
    """Name of the pipeline's folder under `runs/`; each stage has a folder in it."""
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    """What is done, in this order. A stage left out is not done again, and the next takes what it left."""
    changed: OnChange = OnChange.refuse
    seed: int = 1
    """Of every stage."""
    deterministic: bool = False
    """Bitwise reproducible, in every stage."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """`forward` and `backward` of pretraining and of the student, `sampler` and `trainer` of reinforcement learning.
    A preset that a stage chooses (`rl.precision=mxfp8`) replaces all of it there, a key (`rl.precision.sampler`)
    itself alone."""
    data: DataConfig = field(default_factory=DataConfig)
    """Documents of the teacher and the student, and the tokenizer of every stage."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    teacher: ModelConfig = field(default_factory=ModelConfig)
    """The model that is pretrained."""
    student: ModelConfig = field(default_factory=ModelConfig)
    """The model that is distilled, and then trained by rewards."""
    pretrain: RunConfig = field(default_factory=RunConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    rl: RlConfig = field(default_factory=RlConfig)
