"""Every setting of a run, as frozen dataclasses: the single truth about what can be configured.

YAML files beside this module are presets and nothing more. `lowbit.configs.compose` merges what Hydra
composed into these classes once; past that point the code sees only `RunConfig`, never a DictConfig.
A field without a reader is a defect: add it together with the code that obeys it.

Units are in the names or the docstrings: *tokens* are tokenizer tokens, *sequences* are rows of a batch,
*steps* are optimizer steps.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class MlpKind(StrEnum):
    """Feed-forward non-linearity."""

    swiglu = "swiglu"
    """down(silu(gate(x)) * up(x)), three matrices."""
    relu2 = "relu2"
    """down(relu(up(x))**2), two matrices."""


class NormPlacement(StrEnum):
    """Where a block's two norms stand."""

    before = "before"
    """x + f(norm(x)): pre-norm."""
    after = "after"
    """x + norm(f(x)): OLMo-2's."""


class QkNormScope(StrEnum):
    """What QK-norm takes together."""

    head = "head"
    """The numbers of one head (Qwen3)."""
    layer = "layer"
    """The numbers of all heads (OLMo-2)."""


class RopeScaling(StrEnum):
    """How rotary frequencies are stretched beyond the trained context."""

    none = "none"
    linear = "linear"
    """Positions divided by `factor` (position interpolation)."""
    ntk = "ntk"
    """Base enlarged to theta * factor**(d/(d-2)): high frequencies untouched, low ones interpolated."""
    llama3 = "llama3"
    """Per-frequency interpolation of Llama 3.1, with `low_freq_factor` and `high_freq_factor`."""
    yarn = "yarn"
    """NTK-by-parts with attention temperature (YaRN), with `beta_fast` and `beta_slow`."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling.none
    factor: float = 1.0
    """Context extension: new length / `original_sequence`."""
    original_sequence: int = 2048
    """Context length the unscaled frequencies were trained for (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class GateKind(StrEnum):
    """How router logits become gates."""

    softmax = "softmax"
    """Over all experts."""
    sigmoid = "sigmoid"
    """Of each expert by itself (DeepSeek-V3)."""


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts in place of the feed-forward network."""

    experts: int = 0
    """Routed experts a layer; 0: a dense model."""
    top_k: int = 2
    """Experts that a token goes to."""
    expert_width: int = 256
    """Hidden width of an expert: fine-grained experts are narrow and many."""
    shared: int = 0
    """Experts that every token goes to, as one network of so many times the width."""
    first_dense: int = 0
    """So many first layers keep a dense network, of `mlp_width`."""
    gate: GateKind = GateKind.softmax
    normalise: bool = True
    """The gates of a token's experts sum to 1."""
    gate_scale: float = 1.0
    """What the gates are multiplied by."""
    balance_loss: float = 0.01
    """Weight of the balance loss: experts * sum of (share of choices * mean gate), 1 when balanced."""
    z_loss: float = 1e-3
    """Weight of mean(logsumexp(router logits)**2)."""
    bias_rate: float = 0.0
    """Each step an expert's bias in the choice, not in the gate, moves by this towards an even load; 0: no bias."""
    capacity: float | None = None
    """Most tokens an expert takes in a micro-batch, as a multiple of an even load; later ones skip it. null: all."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder without biases."""

    name: str = "tiny"
    """Preset name, for display."""
    layers: int = 4
    width: int = 256
    """Residual stream width."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 4
    """Key/value heads: = heads is MHA, 1 is MQA, anything between is GQA; must divide `heads`."""
    head_dim: int | None = None
    """Width of a head; None means width / heads."""
    windows: list[int] = field(default_factory=list)
    """Local attention: the window of each layer, in positions, repeated over the layers; 0: global. Empty: all global.
    [1024, 1024, 1024, 1024, 1024, 0] is five local layers to a global one."""
    kv_from: list[int] = field(default_factory=list)
    """Cross-layer sharing: for each layer the number of the layer whose keys and values it uses, itself or an earlier
    one that has its own. Empty: each its own. Neighbours in pairs: [0, 0, 2, 2]; an upper half's: [0, 1, 2, 2]."""
    attention_z: float = 0.0
    """Attention Z-Reg: weight of the mean over tokens, heads and layers of logsumexp(attention logits)**2 / 2, in the
    gradient only; 1e-4 keeps the logits small. 0: none."""
    mlp: MlpKind = MlpKind.swiglu
    mlp_width: int = 704
    """Hidden width of the feed-forward network (of `up`; SwiGLU has a `gate` as wide)."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    qk_norm: bool = True
    """RMSNorm over queries and keys before the rotary embedding."""
    qk_norm_scope: QkNormScope = QkNormScope.head
    norm_placement: NormPlacement = NormPlacement.before
    tied_head: bool = False
    """Share the token embedding and the LM head."""
    logit_softcap: float | None = None
    """Logits become cap * tanh(logits / cap)."""
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_sequence: int = 2048
    """Longest sequence the model takes, in training and in generation."""
    init_std: float = 0.02
    """Standard deviation of all matrices but the output projections, which get init_std / sqrt(2 * layers)."""
    mup_base_width: int | None = None
    """muP: settings were tuned at this width. Matrices of the blocks begin with init_std * sqrt(base / width), learn
    (with AdamW) at lr * base / width, and the head reads its input times base / width. null: none of it."""
    vocab_multiple: int = 64
    """The embedding is padded to a multiple of this many rows; padded rows are never predicted."""
    vocab_rows: int | None = None
    """Rows of the embedding, as an imported checkpoint has them; null: as `vocab_multiple` says."""


class SourceKind(StrEnum):
    """Where documents come from."""

    python_docs = "python_docs"
    """Standard-library sources and documentation of the running Python: on every machine."""
    files = "files"
    """Local .txt .md .py .rst .jsonl .jsonl.zst .parquet files, folders or globs."""
    huggingface = "huggingface"
    """A data set read by the `datasets` library, by hub name or local path."""
    conversations = "conversations"
    """Local .jsonl files, a tree of texts a line: {"prompt": ..., "answers": [...]}, or {"text", "loss", "replies"}.
    Answers that share a prompt share its computation; loss falls on answers, and on texts without "loss": false."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of documents; a mixture has several, by name."""

    kind: SourceKind = SourceKind.python_docs
    path: str = ""
    """files: a file, a folder (searched recursively) or a glob. huggingface: a data set's name or path."""
    text_field: str = "text"
    """Field that holds the document in .jsonl, .parquet and data sets."""
    weight: float = 1.0
    """Share of training tokens, relative to the other sources."""
    subset: str | None = None
    """huggingface: configuration name."""
    split: str = "train"
    """huggingface: split."""
    streaming: bool = False
    """huggingface: stream instead of downloading first (the packer reads it once; training never does)."""
    max_documents: int | None = None
    """Stop after this many documents."""
    document_bytes: int = 1_048_576
    """files: a text file longer than this is cut at line ends into documents of at most so many bytes."""


class TokenizerKind(StrEnum):
    """How text becomes token ids."""

    bytes = "bytes"
    """256 byte values and one end-of-text id."""
    bpe = "bpe"
    """Byte-level BPE, trained on the run's own sources when no file is there yet."""
    file = "file"
    """A Hugging Face `tokenizer.json`, or a folder that holds one."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer of a run."""

    kind: TokenizerKind = TokenizerKind.bpe
    path: str = ""
    """file: the tokenizer. bpe: where the trained one is kept; empty means inside `data.cache_dir`."""
    vocab_size: int = 4096
    """bpe: vocabulary to train, the end-of-text id included."""
    train_bytes: int = 50_000_000
    """bpe: most text read for training it."""
    eot: str | None = None
    """file: the token that separates documents; None means look for the usual names."""


@dataclass(frozen=True)
class DataConfig:
    """Documents, tokenizer, packing and the order of training samples."""

    sources: dict[str, SourceConfig] = field(default_factory=lambda: {"python_docs": SourceConfig()})
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    sequence_length: int = 256
    """Tokens a training sequence."""
    document_mask: bool = True
    """Attention stays inside a document; false: plain causal attention across packed documents."""
    held_out: float = 0.02
    """Share of documents (by content hash) kept for evaluation."""
    cache_dir: str = "data"
    """Folder of packed shards and trained tokenizers."""
    pack_workers: int = 0
    """Processes that tokenize and pack; 0 means one a core."""
    shard_tokens: int = 16_777_216
    """Most tokens in one shard."""
    prefetch: int = 4
    """Micro-batches prepared ahead in the background; 0 means none."""


@dataclass(frozen=True)
class BatchWarmupConfig:
    """One stage of a batch-size warm-up."""

    until_tokens: int = 0
    """This stage lasts until so many tokens were trained on."""
    sequences: int = 0
    """Sequences an optimizer step in this stage."""


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences an optimizer step takes."""

    sequences: int = 16
    """Sequences an optimizer step, over all ranks and micro-batches."""
    micro_batch: int = 16
    """Sequences a rank processes at once; must divide each step's share."""
    warmup: list[BatchWarmupConfig] = field(default_factory=list)
    """Stages before the full batch, in order of `until_tokens`."""


class OptimizerKind(StrEnum):
    """Optimizer of the 2-D hidden matrices; everything else always takes AdamW."""

    adamw = "adamw"
    muon = "muon"


class ScheduleKind(StrEnum):
    """Shape of the learning rate over the run, after warm-up."""

    wsd = "wsd"
    """Constant, then linear down to `final_fraction` over the last `decay_fraction` of the run."""
    cosine = "cosine"
    constant = "constant"


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule, as a function of the run's progress."""

    kind: ScheduleKind = ScheduleKind.wsd
    warmup_steps: int = 20
    decay_fraction: float = 0.3
    final_fraction: float = 0.0
    """Last learning rate over the peak."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon's own settings (`torch.optim.Muon`)."""

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0
    ns_steps: int = 5
    match_rms_adamw: bool = False
    """Scale updates by 0.2 * sqrt(max(rows, cols)), so that AdamW learning rates apply."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, its schedule, clipping and weight averaging."""

    kind: OptimizerKind = OptimizerKind.adamw
    lr: float = 3e-3
    """AdamW's peak learning rate (with Muon: of embeddings, head and norms)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; on matrices only, never on embeddings or norms."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, evaluated beside them; None means none."""
    z_loss: float = 0.0
    """Weight of mean(logsumexp(logits)**2), added to the training loss only."""


class ComputeDtype(StrEnum):
    """Type of activations and matrix products (master weights are always FP32)."""

    auto = "auto"
    """bf16 where the device multiplies it fast, otherwise fp32."""
    bf16 = "bf16"
    fp32 = "fp32"


class MatrixBackend(StrEnum):
    """Who multiplies quantised matrices."""

    auto = "auto"
    """Hardware that has the format and passes its start-up check, else the emulation; layers that FP8 would slow down
    stay in BF16. The run's start says which."""
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
    """Accept formats in dgrad and wgrad whose rounding is biased."""


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
    """All of them: 14 bytes a weight while a window is open."""
    efficient = "efficient"
    """The `tracked` share of each weight tensor that lies nearest to an edge between two grid values."""


@dataclass(frozen=True)
class OsciResetConfig:
    """Weights that flip between two grid values are put back on the nearest one (TetraJet-v2, arXiv 2510.27527)."""

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
    """Input channels with outliers stay in MXFP8 in fprop and wgrad (TetraJet-v2, arXiv 2510.27527)."""

    enabled: bool = False
    share: float = 0.1
    """Share of a layer's input channels, those of the largest L2 norm."""
    first_step: int = 501
    """First optimizer step (from 1) whose inputs are measured; needs an extra forward pass in each such step."""
    steps: int = 50
    """Optimizer steps measured; from the next on the channels are fixed for good."""


@dataclass(frozen=True)
class ClampConfig:
    """INT8 training of squared-ReLU networks with a bound that follows from the weights, not from the data."""

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
    """What quantising does to each layer's operands, measured now and then by an extra, uncompiled pass."""

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


class EngineKind(StrEnum):
    """What runs forward, backward and the optimizer step."""

    local = "local"
    """One process, plain PyTorch."""
    deepspeed = "deepspeed"
    """Any number of processes, started by torchrun, on DeepSpeed's ZeRO."""


class Recompute(StrEnum):
    """Activation checkpointing."""

    none = "none"
    full = "full"
    """Keep each block's input; recompute the block in the backward pass."""
    selective = "selective"
    """Keep matrix products and attention outputs; recompute the element-wise rest."""


class CompileMode(StrEnum):
    """Whether blocks go through `torch.compile`."""

    auto = "auto"
    """On a GPU, yes; on a CPU, no: it costs 20 s or more at the start and needs a C++ compiler."""
    on = "on"
    off = "off"


@dataclass(frozen=True)
class EngineConfig:
    """Execution."""

    kind: EngineKind = EngineKind.local
    compile: CompileMode = CompileMode.auto
    recompute: Recompute = Recompute.none
    zero_stage: int = 1
    """deepspeed: what ranks share instead of each keeping all of it: 0 nothing, 1 optimizer states and master weights,
    2 gradients too, 3 weights too (gathered layer by layer in each pass)."""
    bucket_mib: int = 200
    """deepspeed: gradients are reduced in buckets of about so many MiB (of FP32), while the backward pass goes on."""
    expert_parallel: bool = False
    """deepspeed, ZeRO 1 and 2: every rank keeps its share of each layer's experts, and tokens travel to them."""
    rank_timeout_seconds: float = 600.0
    """deepspeed: when no rank moves on for so long, the job ends with an error that names the one that hangs."""


class CommKind(StrEnum):
    """What gradients are while they travel between ranks; sums are FP32 in all of them but bf16."""

    none = "none"
    """FP32, as they are."""
    bf16 = "bf16"
    """Rounded to BF16, and summed in it."""
    squinch = "squinch"
    """6 bits a value: 8 values in 48 bits, as published by Character.AI."""
    sq48 = "sq48"
    """6 bits a value: the same size with finer scales and a search, 2 dB less error."""
    auto = "auto"
    """bf16 or sq48, whichever a measurement of the link at the start says is faster."""


class WeightsDtype(StrEnum):
    """What weights are while they travel between ranks (ZeRO 1, 2 and 3); masters stay FP32."""

    auto = "auto"
    """bf16 where the run computes in BF16, which rounds every weight to it anyway; otherwise fp32."""
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(frozen=True)
class CommConfig:
    """Communication between ranks."""

    kind: CommKind = CommKind.none
    weights: WeightsDtype = WeightsDtype.auto
    exact_below: int = 65_536
    """Gradients of fewer numbers than this, and all vectors (norms), travel as FP32 whatever `kind` says."""


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
    """The run ends at whichever limit comes first; at least one is needed."""
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


class Estimator(StrEnum):
    """How a few targets stand for a teacher's distribution."""

    varopt = "varopt"
    """The likeliest exactly, the tail by threshold sampling; unbiased with the least variance, weights sum to one."""
    gumbel = "gumbel"
    """Gumbel top-k, weighed by inclusion probabilities; unbiased."""
    multinomial = "multinomial"
    """Draws with replacement (RS-KD); unbiased."""
    topk = "topk"
    """The likeliest tokens: biased towards them. A baseline, and what reverse_kl and jsd need."""


class Divergence(StrEnum):
    """What a student minimises between the teacher p and itself, s."""

    forward_kl = "forward_kl"
    """KL(p || s): linear in p, so sampled targets leave it unbiased."""
    reverse_kl = "reverse_kl"
    """KL(s || p) over the stored tokens and one bucket for all others; topk caches only."""
    jsd = "jsd"
    """Jensen-Shannon divergence over the stored tokens and one bucket for all others; topk caches only."""


@dataclass(frozen=True)
class TeacherConfig:
    """Whose distribution is distilled."""

    path: str = ""
    """Folder of a run, or of a Hugging Face model; empty: `lowbit distill` trains a teacher of its own first."""
    checkpoint: str = "latest"
    """Which checkpoint of a run."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """What the teacher computes in while it is cached, whatever it was trained in."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Without `path`: the teacher to train, on the student's data and with its optimizer."""
    max_steps: int = 400
    """Without `path`: optimizer steps it is trained for."""


@dataclass(frozen=True)
class CacheConfig:
    """The stored targets of a teacher over the first samples of the data, in the order of `cache.seed`."""

    path: str = ""
    """Folder; empty means `cache` in the run's folder."""
    more: list[str] = field(default_factory=list)
    """Folders of more caches over the same tokens, by other teachers: a student learns from the average of all."""
    estimator: Estimator = Estimator.varopt
    targets: int = 16
    """Targets kept a position."""
    temperature: float = 1.0
    """The teacher's logits are divided by it, and so are the student's when it learns from them."""
    tokens: int | None = None
    """Positions to cache; null: as many as the student trains on. A longer training goes over them again."""
    seed: int = 1
    """Order of the samples, and the sampling noise."""
    micro_batch: int = 16
    """Sequences the teacher reads at once."""
    shard_tokens: int = 262_144
    """Positions a shard holds, rounded to whole micro-batches: what is lost at most when caching is killed."""


@dataclass(frozen=True)
class DistillLossConfig:
    """What the student is trained for."""

    divergence: Divergence = Divergence.forward_kl
    alpha: float = 1.0
    """Share of the divergence; the rest is cross-entropy with the data."""


@dataclass(frozen=True)
class DistillConfig(RunConfig):
    """A distillation: the keys of a run are the student's; then its teacher, the teacher's cache, and the loss."""

    run_name: str = "distill"
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    loss: DistillLossConfig = field(default_factory=DistillLossConfig)
