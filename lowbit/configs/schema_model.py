"""Settings of the model: its shape, attention, positions and experts."""

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
    attention_softcap: float | None = None
    """Attention logits become cap * tanh(logits / cap), after scaling and before masking, as in Gemma 2 (50)."""
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
    """Logits of the LM head become cap * tanh(logits / cap)."""
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


def head_dim_of(config: ModelConfig) -> int:
    """Width of an attention head."""
    return config.width // config.heads if config.head_dim is None else config.head_dim
