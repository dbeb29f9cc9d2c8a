"""Settings of the precision: what each matrix product computes in, when that changes, and what keeps it stable.

`lowbit.quant.resolve` turns them into a policy for each stage of a model's life; presets are `precision/*.yaml`.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class ComputeDtype(StrEnum):
    """Type of activations and matrix products (master weights are always FP32)."""

    auto = "auto"
    """bf16 where the device multiplies it fast, otherwise fp32."""
    bf16 = "bf16"
    fp32 = "fp32"


class MatrixBackend(StrEnum):
    """Who multiplies quantised matrices."""

    auto = "auto"
    """Hardware that has the format and passes its start-up check, else the emulation; layers that FP8 was measured to
    slow down stay in BF16 (none so far). The run's start says which."""
    emulated = "emulated"
    """Ordinary products of the dequantised numbers, everywhere."""
    fp8 = "fp8"
    """FP8 tensor cores; whatever they cannot multiply is an error, here and below."""
    torch_blocks = "torch_blocks"
    """PyTorch's MXFP8 and NVFP4 products on Blackwell."""
    te = "te"
    """Transformer Engine's layers (pip install 'lowbit[te]'); needs engine.compile=off."""


class AlignmentKind(StrEnum):
    """What the backward pass quantises for its W^T and X^T."""

    aligned = "aligned"
    """The forward's dequantised operands: the expected gradient is that of the function computed (TetraJet)."""
    original = "original"
    """W and X themselves (NVIDIA)."""


class SignsKind(StrEnum):
    """Signs of a Hadamard rotation."""

    fresh = "fresh"
    """Drawn anew every micro-batch."""
    fixed = "fixed"
    """Transformer Engine's vector of 16."""


@dataclass(frozen=True)
class ProductConfig:
    """One matrix product of a linear layer. Formats: BF16 (not quantised) or a name of lowbit/quant/spec.py."""

    left: str = "BF16"
    """Format of X (fprop), dY (dgrad), dY^T (wgrad)."""
    right: str = "BF16"
    """Format of W (fprop), W^T (dgrad), X^T (wgrad)."""
    rotation: int = 0
    """Size of the Hadamard rotation of both factors: 0 (none), 16 or 128."""
    signs: SignsKind = SignsKind.fresh


@dataclass(frozen=True)
class PolicyConfig:
    """A linear layer's three products, described; `precision.forward` and the others may name it."""

    base: str = "bf16"
    """The preset or description that what is null here comes from."""
    fprop: ProductConfig | None = None
    dgrad: ProductConfig | None = None
    wgrad: ProductConfig | None = None
    alignment: AlignmentKind | None = None
    mean_split: bool | None = None
    """Take the mean over tokens out of X before quantising it (Averis)."""
    allow_bias: bool | None = None
    """Accept four over six in dgrad or wgrad. Other biased roundings, to nearest above all, need no permission."""


@dataclass(frozen=True)
class PrecisionRule:
    """Layers that compute in something else. Of several rules the first that matches decides."""

    match: str = ""
    """Regular expression that must match a layer's whole name, such as blocks.3.mlp.down."""
    policy: str = "bf16"
    """Preset or description: its forward and its backward."""
    last_blocks: float = 1.0
    """Only layers in the last share of the blocks, rounded to whole blocks."""
    optional: bool = False
    """The rule may decide no layer; otherwise that is an error."""


@dataclass(frozen=True)
class PrecisionSwitch:
    """A change during the run, from the first step at which its time has come; layers with a rule keep theirs."""

    at: float | None = None
    """Share of the run done."""
    at_step: int | None = None
    """Optimizer steps done."""
    at_decay: bool = False
    """When the learning rate begins to fall (`wsd` schedules)."""
    forward: str | None = None
    backward: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None
    """Preset or description, as in `precision`; null: as before."""


class OsciDetector(StrEnum):
    """Which weights OsciReset watches in a window."""

    full = "full"
    """All of them: 14 bytes a weight while a window is open, 16 in formats with a scale of the tensor or of rows."""
    efficient = "efficient"
    """The `tracked` share of each weight tensor that lies nearest to an edge between two grid values."""


@dataclass(frozen=True)
class OsciResetConfig:
    """Weights that flip between two grid values are put back on the nearest one (TetraJet-v2, arXiv 2510.27527).

    Those of experts (MoE) are left alone.
    """

    enabled: bool = False
    detector: OsciDetector = OsciDetector.full
    start: float = 0.6
    """Share of the run done before the first window: the learning rate should be low by then."""
    start_step: int | None = None
    """Optimizer steps done before the first window; null: `start` decides."""
    period: int = 200
    """Optimizer steps from the start of one window to that of the next."""
    window: int = 50
    """Optimizer steps a window watches."""
    threshold: float = 8.0
    """A weight is reset when its quantised value travelled at least so many times as far as the weight itself."""
    tracked: float = 0.1
    """efficient: share of the weights that are watched."""
    hysteresis: float = 0.0
    """Four over six: from the start on a weight block keeps its 4 or 6 until the other's error is smaller by this
    share; 0: chosen anew every step."""


@dataclass(frozen=True)
class OutControlConfig:
    """Input channels with outliers stay in MXFP8 in fprop and wgrad (TetraJet-v2, arXiv 2510.27527).

    Experts (MoE) quantise all of theirs.
    """

    enabled: bool = False
    share: float = 0.1
    """Share of a layer's input channels, those of the largest L2 norm."""
    first_step: int = 501
    """First optimizer step (from 1) whose inputs are measured; needs an extra forward pass in each such step."""
    steps: int = 50
    """Optimizer steps measured; from the next on the channels are fixed for good."""


@dataclass(frozen=True)
class ClampConfig:
    """INT8 training of squared-ReLU networks with a bound that follows from the weights, not from the data.

    Experts (MoE) have none.
    """

    enabled: bool = False
    deviations: float = 4.0
    """The bound of relu(up(x)), in standard deviations that isotropic x of unit RMS would give up(x)."""


@dataclass(frozen=True)
class StabiliserConfig:
    """What keeps low-bit training stable beside rounding and rotation."""

    oscireset: OsciResetConfig = field(default_factory=OsciResetConfig)
    outcontrol: OutControlConfig = field(default_factory=OutControlConfig)
    clamp: ClampConfig = field(default_factory=ClampConfig)


@dataclass(frozen=True)
class StatisticsConfig:
    """What quantising does to each layer's operands, measured now and then by an extra, uncompiled pass.

    Experts (MoE) are not measured.
    """

    every_steps: int = 0
    """0: never."""
    sequences: int = 1
    """Sequences of the step's first micro-batch that the extra pass reads."""
    gradients: bool = True
    """Measure gradients too, by an extra backward pass."""


@dataclass(frozen=True)
class PrecisionConfig:
    """What the linear layers of the blocks compute in, for each stage of a model's life.

    Embeddings, norms, attention and the LM head compute in `compute`. A name is a preset of lowbit/quant/presets.py
    (bf16, fp8_tensor, fp8_row, fp8_block, mxfp8, nvfp4_nvidia, nvfp4_tetrajet, nvfp4_quartet2, nvfp4, int8, and
    weight-only nvfp4_w4a16, mxfp8_w8a16, fp8_w8a16) or an entry of `define`.
    """

    name: str = "auto"
    """Preset name, for display."""
    compute: ComputeDtype = ComputeDtype.auto
    backend: MatrixBackend = MatrixBackend.auto
    forward: str = "bf16"
    """Whose forward product training takes (fprop)."""
    backward: str = "bf16"
    """Whose backward products training takes (dgrad and wgrad)."""
    dgrad: str | None = None
    """Whose gradient of the input; null: as `backward`."""
    wgrad: str | None = None
    """Whose gradient of the weight; null: as `backward`."""
    sampler: str | None = None
    """Whose forward the RL sampler takes; null: as `forward`."""
    trainer: str | None = None
    """What the RL trainer takes; null: the sampler's forward, and a BF16 backward on its dequantised operands."""
    define: dict[str, PolicyConfig] = field(default_factory=dict)
    """Descriptions of your own, by name."""
    rules: list[PrecisionRule] = field(default_factory=list)
    """Layers that compute in something else, in every stage."""
    switch: list[PrecisionSwitch] = field(default_factory=list)
    """Changes during the run; of those whose time has come later ones win."""
    stabilisers: StabiliserConfig = field(default_factory=StabiliserConfig)
    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)
