"""What a model costs: parameters, floating-point operations, memory. Pure arithmetic, no torch.

FLOPs a token of training (the convention of this project's MFU): 6 for each weight of a matrix product that the token
goes through, the head included, the input embedding and other tokens' experts not (2 forward, 2 each for the gradients
of input and weight), plus attention
    12 * layers * heads * head_dim * T / 2
of which the scores and their product with V are 2 + 2 forward and twice that backward, a head's D numbers over T keys,
halved because a causal query sees half of the keys on average (fewer in a local layer). Kernels that compute the
masked half, and recomputation, do more work; they get no credit for it. Norms, rotations and the softmax are not
counted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from lowbit.configs.schema import MlpKind, ModelConfig, OptimizerKind, QkNormScope, Recompute
from lowbit.configs.schema_model import head_dim_of

HEAD_CHUNK_NUMBERS = 1 << 28
"""Logits that exist at once in the LM head on a GPU: 512 MiB in BF16, so large that adding up dW costs little."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by role."""

    embedding: int
    """Input embedding, padded rows included; with a tied head it is also the head."""
    attention: int
    mlp: int
    """Dense feed-forward networks and shared experts."""
    experts: int
    """Routed experts, all of them."""
    active_experts: int
    """Of those, what one token passes through."""
    router: int
    biases: int
    """Of the routers."""
    norms: int
    head: int
    """0 when tied."""

    @property
    def total(self) -> int:
        return self.hidden_matrices + self.experts + self.router + self.biases + self.norms + self.embedding + self.head

    @property
    def active(self) -> int:
        """What one token's forward pass uses: all but the experts it does not go to."""
        return self.total - self.experts + self.active_experts

    @property
    def hidden_matrices(self) -> int:
        """Weights of the blocks' matrix products, experts apart (what Muon updates)."""
        return self.attention + self.mlp

    @property
    def multiplied(self) -> int:
        """Weights that one token is multiplied with, the head's included."""
        return self.hidden_matrices + self.active_experts + self.router + (self.head or self.embedding)

    @property
    def without_embedding(self) -> int:
        """Total without the input embedding; a tied table still counts once, as the head."""
        return self.total - self.embedding if self.head else self.total


def is_moe_layer(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts."""
    return config.moe.experts > 0 and layer >= config.moe.first_dense


def mup_ratio(config: ModelConfig) -> float:
    """Base width over width, 1 without muP."""
    return 1.0 if config.mup_base_width is None else config.mup_base_width / config.width


def window_of(config: ModelConfig, layer: int) -> int:
    """Window of a layer's attention, 0 for a global one."""
    return config.windows[layer % len(config.windows)] if config.windows else 0


def kv_source(config: ModelConfig, layer: int) -> int:
    """The layer whose keys and values a layer uses."""
    return config.kv_from[layer] if config.kv_from else layer


def kv_owners(config: ModelConfig) -> list[int]:
    """The layers that have keys and values of their own, in order."""
    return [layer for layer in range(config.layers) if kv_source(config, layer) == layer]


def vocab_rows_of(config: ModelConfig, vocab_size: int) -> int:
    """Rows of the embedding and the head, those that are never predicted included."""
    return config.vocab_rows or -(-vocab_size // config.vocab_multiple) * config.vocab_multiple


def parameter_parts(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Parameters of a model by role; the padded rows of the vocabulary are included, a tied table counts once."""
    head_dim = head_dim_of(config)
    table = vocab_rows_of(config, vocab_size) * config.width
    owners = len(kv_owners(config))
    attention = config.width * head_dim * (2 * config.heads * config.layers + 2 * config.kv_heads * owners)
    matrices = 3 if config.mlp is MlpKind.swiglu else 2
    moe, routed = config.moe, sum(is_moe_layer(config, layer) for layer in range(config.layers))
    expert = matrices * config.width * moe.expert_width
    dense = matrices * config.width * config.mlp_width
    together = config.qk_norm_scope is QkNormScope.layer
    normed = config.layers * (config.heads if together else 1) + owners * (config.kv_heads if together else 1)
    norms = 2 * config.width * config.layers + (normed * head_dim if config.qk_norm else 0)
    return ParameterCount(
        embedding=table,
        attention=attention,
        mlp=(config.layers - routed) * dense + routed * moe.shared * expert,
        experts=routed * moe.experts * expert,
        active_experts=routed * moe.top_k * expert,
        router=routed * moe.experts * config.width,
        biases=routed * moe.experts if moe.bias_rate else 0,
        norms=norms + config.width,
        head=0 if config.tied_head else table,
    )


def flops_per_token(config: ModelConfig, vocab_size: int, sequence_length: int) -> int:
    """Floating-point operations a token, forward and backward, in the convention above."""
    parts = parameter_parts(config, vocab_size)
    return 6 * parts.multiplied + attention_flops_per_token(config, sequence_length)


def attention_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """The part of `flops_per_token` that grows with the sequence."""
    twice_keys = 0  # that a query sees on average: T of a global layer, 2 w - w^2 / T of a window w < T
    for layer in range(config.layers):
        window = min(window_of(config, layer) or sequence_length, sequence_length)
        twice_keys += 2 * window - window * window // sequence_length
    return 6 * config.heads * head_dim_of(config) * twice_keys


def kv_cache_bytes_per_token(config: ModelConfig, number_bytes: int = 2) -> int:
    """Bytes of keys and values a token of one sequence."""
    return 2 * len(kv_owners(config)) * config.kv_heads * head_dim_of(config) * number_bytes


@dataclass(frozen=True)
class LowBit:
    """What low-bit layers change in the memory of training (`quant.memory`)."""

    dropped: int = 0
    """Numbers a token that linear layers no longer keep in the compute type."""
    packed: float = 0.0
    """Bytes a token that they keep instead."""
    weights: int = 0
    """Weights of which the backward pass keeps no rounded copy."""
    windows: int = 0
    """Bytes of OsciReset's windows."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device, by what they hold."""

    parameters: int
    """FP32 masters."""
    gradients: int
    """FP32."""
    optimizer: int
    """FP32: two moments for AdamW; one momentum for the matrices Muon updates."""
    rounded_weights: int
    """Copies in the compute type that the backward pass keeps; 0 in FP32."""
    activations: int
    """What the blocks keep for the backward pass, and one block's worth of working space."""
    head_chunk: int
    """LM head: a chunk's logits, the gradient of the whole weight and of the hidden states."""
    windows: int = 0
    """What OsciReset remembers of weights while a window is open."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


def training_memory(
    config: ModelConfig,
    vocab_size: int,
    micro_batch: int,
    sequence_length: int,
    compute_bytes: int,
    recompute: Recompute,
    optimizer: OptimizerKind,
    low: LowBit = LowBit(),
) -> TrainingMemory:
    """Estimate of the peak memory of training on one device, without fragmentation and the libraries' own (about 1 GB).

    Args:
        micro_batch: sequences at once. sequence_length: tokens each. compute_bytes: 2 for BF16, 4 for FP32.
        low: of low-bit layers; what is recomputed keeps no packed inputs either.
    """
    parts = parameter_parts(config, vocab_size)
    tokens = micro_batch * sequence_length
    blocks = [_block_numbers(config, is_moe_layer(config, layer)) for layer in range(config.layers)]
    most = max(every for every, _ in blocks)
    kept = {
        Recompute.none: sum(every for every, _ in blocks),
        Recompute.selective: sum(products for _, products in blocks),
        Recompute.full: config.layers * config.width,
    }[recompute]
    working = most if recompute is Recompute.none else 2 * most  # one block recomputed, and its gradients
    activations = tokens * (kept + working + config.width) * compute_bytes
    if recompute is Recompute.none:
        activations += math.ceil(tokens * low.packed) - tokens * low.dropped * compute_bytes
    if recompute is not Recompute.full:
        activations += tokens * config.layers * config.heads * 4  # the softmax statistics of attention, FP32
    table = parts.head or parts.embedding
    logits = min(tokens * vocab_size, HEAD_CHUNK_NUMBERS)
    moments = 2 * parts.total
    if optimizer is OptimizerKind.muon:
        moments -= parts.hidden_matrices
    rounded = parts.hidden_matrices + parts.experts + table - low.weights
    return TrainingMemory(
        parameters=4 * parts.total,
        gradients=4 * parts.total,
        optimizer=4 * moments,
        rounded_weights=0 if compute_bytes == 4 else compute_bytes * rounded,
        activations=activations,
        head_chunk=2 * logits * compute_bytes + 4 * table + 2 * tokens * config.width * compute_bytes,
        windows=low.windows,
    )


def _block_numbers(config: ModelConfig, routed: bool) -> tuple[int, int]:
    """Numbers a token that one block keeps for the backward pass: (everything, results of products only).

    Everything: the two residual inputs and their norms (4 width), q, k, v and the attention's result, q and k once
    more before their norm and rotation, gate, up and the hidden activation. Products only: the block's input, q,
    k, v, the attention's result, the result of `attention.out`, gate and up (`mlp.down` feeds only a sum). With
    experts, for each of a token's choices: the copied input, gate, up and hidden, and the result that its gate weighs;
    and the router's scores (FP32, in two places).
    """
    query = config.heads * head_dim_of(config)
    key = config.kv_heads * head_dim_of(config)
    ups = 2 if config.mlp is MlpKind.swiglu else 1
    before_norm = query + key if config.qk_norm else 0
    every = 4 * config.width + before_norm + 2 * query + 2 * key
    products = 3 * config.width + 2 * query + 2 * key
    if not routed:
        return every + (ups + 1) * config.mlp_width, products + ups * config.mlp_width
    moe = config.moe
    width = moe.shared * moe.expert_width + moe.top_k * moe.expert_width
    every += (ups + 1) * width + 2 * moe.top_k * config.width + 4 * moe.experts
    products += ups * width + moe.top_k * config.width + 4 * moe.experts
    return every, products


def largest_micro_batch(
    free_bytes: int,
    config: ModelConfig,
    vocab_size: int,
    sequence_length: int,
    compute_bytes: int,
    recompute: Recompute,
    optimizer: OptimizerKind,
    low: LowBit = LowBit(),
) -> int:
    """Most sequences a micro-batch may have so that `training_memory` stays within `free_bytes`; 0: not even one."""

    def fits(micro_batch: int) -> bool:
        shape = (config, vocab_size, micro_batch, sequence_length)
        memory = training_memory(*shape, compute_bytes, recompute, optimizer, low)
        return memory.total <= free_bytes

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Largest n >= 0 that fits, by doubling and bisection; `fits` is true up to it and false beyond."""
    if not fits(1):
        return 0
    high = 2
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
