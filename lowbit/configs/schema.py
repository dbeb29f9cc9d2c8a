"""Every setting of a run, as frozen dataclasses: the single truth about what can be configured.

Here is the run itself; its sections, by subject, are in `schema_model.py`, `schema_data.py`, `schema_optim.py`,
`schema_precision.py` and `schema_engine.py`, and are imported from here. A stage that takes more keys than a run has
a file of its own, imported as such: `schema_distill.py`.

YAML files beside this module are presets and nothing more. `lowbit.configs.compose` merges what Hydra
composed into these classes once; past that point the code sees only `RunConfig`, never a DictConfig.
A field without a reader is a defect: add it together with the code that obeys it.

Units are in the names or the docstrings: *tokens* are tokenizer tokens, *sequences* are rows of a batch,
*steps* are optimizer steps.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from lowbit.configs.schema_data import (
    BatchConfig,
    BatchWarmupConfig,
    DataConfig,
    SourceConfig,
    SourceKind,
    TokenizerConfig,
    TokenizerKind,
)
from lowbit.configs.schema_engine import (
    SIX_BITS,
    VARLEN_WIDEST,
    Z_COLUMNS,
    AttentionKernel,
    CommConfig,
    CommKind,
    CompileMode,
    EngineConfig,
    EngineKind,
    Recompute,
    WeightsDtype,
)
from lowbit.configs.schema_model import (
    GateKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    NormPlacement,
    QkNormScope,
    RopeConfig,
    RopeScaling,
)
from lowbit.configs.schema_optim import MuonConfig, OptimConfig, OptimizerKind, ScheduleConfig, ScheduleKind
from lowbit.configs.schema_precision import (
    AlignmentKind,
    ClampConfig,
    ComputeDtype,
    MatrixBackend,
    OsciDetector,
    OsciResetConfig,
    OutControlConfig,
    PolicyConfig,
    PrecisionConfig,
    PrecisionRule,
    PrecisionSwitch,
    ProductConfig,
    SignsKind,
    StabiliserConfig,
    StatisticsConfig,
)

__all__ = [
    "SIX_BITS",
    "VARLEN_WIDEST",
    "Z_COLUMNS",
    "AlignmentKind",
    "AttentionKernel",
    "BatchConfig",
    "BatchWarmupConfig",
    "CheckpointConfig",
    "ClampConfig",
    "CommConfig",
    "CommKind",
    "CompileMode",
    "ComputeDtype",
    "DataConfig",
    "EngineConfig",
    "EngineKind",
    "EvalConfig",
    "GateKind",
    "LoggingConfig",
    "MatrixBackend",
    "MlpKind",
    "ModelConfig",
    "MoeConfig",
    "MuonConfig",
    "NormPlacement",
    "OptimConfig",
    "OptimizerKind",
    "OsciDetector",
    "OsciResetConfig",
    "OutControlConfig",
    "PolicyConfig",
    "PrecisionConfig",
    "PrecisionRule",
    "PrecisionSwitch",
    "ProductConfig",
    "QkNormScope",
    "Recompute",
    "ResumeDifference",
    "RopeConfig",
    "RopeScaling",
    "RunConfig",
    "ScheduleConfig",
    "ScheduleKind",
    "SignsKind",
    "SourceConfig",
    "SourceKind",
    "StabiliserConfig",
    "StatisticsConfig",
    "TokenizerConfig",
    "TokenizerKind",
    "WandbMode",
    "WeightsDtype",
]


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every_steps: int = 250
    """0 means only at the end and when interrupted."""
    keep_last: int = 2
    """Newest checkpoints kept; at least 1."""
    keep_every_steps: int = 0
    """Checkpoints at multiples of this many steps are kept for good; 0 means none."""
    background: bool = True
    """Write in a background thread while training goes on."""


@dataclass(frozen=True)
class EvalConfig:
    """Validation in the loop."""

    every_steps: int = 250
    """0 means only at the end."""
    max_tokens: int = 65_536
    """Held-out tokens an evaluation in the loop reads; the last one reads `final_tokens`."""
    final_tokens: int = 1_048_576
    sample_tokens: int = 96
    """Length of the text sampled at the end; 0 means none."""
    sample_prompt: str = "def "


class WandbMode(StrEnum):
    """Weights & Biases."""

    online = "online"
    offline = "offline"
    off = "off"


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go; `metrics.jsonl` in the run's folder is always written."""

    every_steps: int = 10
    wandb: WandbMode = WandbMode.off
    wandb_project: str = "lowbit"
    tensorboard: bool = False
    softmax_saturation: bool = True
    """Measure, at each evaluation, the share of attention rows whose largest weight exceeds 0.99."""


class ResumeDifference(StrEnum):
    """What may differ between a checkpoint and the run that goes on from it."""

    tokenizer = "tokenizer"
    data = "data"
    model = "model"


@dataclass(frozen=True)
class RunConfig:
    """A pretraining run."""

    run_name: str = "pretrain"
    """Name of the run's folder under `runs/`."""
    seed: int = 1
    deterministic: bool = False
    """Bitwise reproducible: deterministic kernels, and nothing that depends on the clock."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    max_steps: int | None = None
    max_tokens: int | None = None
    max_minutes: float | None = None
    """The run ends at whichever limit comes first; at least one is needed. One that is given on the command line takes
    the place of the preset's, those under another name too; the run says so."""
    resume: str = "auto"
    """auto: go on from the newest good checkpoint in the run's folder, if any;
    none: start anew, refused where there are some; or a path."""
    init_from: str = ""
    """Begin with the weights, model and tokenizer of a run's newest checkpoint, or of a Hugging Face folder."""
    resume_allow: list[ResumeDifference] = field(default_factory=list)
    """Differences accepted when resuming: any of tokenizer, data, model."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
