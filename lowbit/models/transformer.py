"""The dense decoder: embedding, L pre-norm blocks, final norm, LM head.

    x = embedding[tokens]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      L times
    hidden = norm(x)                                       (the head is models/lm_head.py, chunked)

No biases anywhere. SwiGLU is down(silu(gate(x)) * up(x)) (arXiv 2002.05202), relu2 is down(relu(up(x))^2)
(arXiv 2109.08668). QK-norm is an RMSNorm over each head's query and key before the rotary embedding, or over all heads
of a token together. With norms placed after (OLMo-2, arXiv 2501.00656) a block is x = x + norm(attention(x));
x = x + norm(mlp(x)).

Initialisation: every matrix, the embedding and the head included, is normal with standard deviation `init_std`;
the two projections that write into the residual stream, `attention.out` and `mlp.down`, have
init_std / sqrt(2 * layers), so that the stream's variance at the end does not grow with depth (GPT-2); norms are 1.
Each tensor has a generator of its own, keyed by (seed, name), so it does not depend on device, engine or order.

One block is compiled once for all layers: nothing in `Block.forward` differs between them but tensors.
"""

import hashlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowbit.configs.schema import MlpKind, ModelConfig, NormPlacement, QkNormScope, Recompute
from lowbit.errors import ConfigError, DataError
from lowbit.models import kernels
from lowbit.models.attention import AttentionMask, attention, cached_mask, prepare_mask
from lowbit.models.cost import head_dim_of, vocab_rows_of
from lowbit.models.layers import Embedding, KVCache, Linear, RMSNorm, project
from lowbit.models.rope import apply_rope, check_rope, rope_frequencies, rope_tables
from lowbit.models.visibility import Visibility

Rope = tuple[Tensor, Tensor]
"""cos and sin, FP32 [B or 1, T, 1, D]: see `rope_tables`."""


def check_model(config: ModelConfig, vocab_size: int) -> None:
    """Raise ConfigError, naming the key, when no model has these settings."""
    for key in ("layers", "width", "heads", "kv_heads", "mlp_width", "max_sequence", "vocab_multiple"):
        if getattr(config, key) < 1:
            raise ConfigError(f"model.{key}={getattr(config, key)} must be at least 1")
    if vocab_size < 1:
        raise ConfigError(f"the vocabulary has {vocab_size} tokens: train or choose a tokenizer that has some")
    if config.head_dim is None and config.width % config.heads:
        raise ConfigError(
            f"model.heads={config.heads} does not divide model.width={config.width}: "
            "choose a divisor, or set model.head_dim"
        )
    if config.head_dim is not None and config.head_dim < 1:
        raise ConfigError(f"model.head_dim={config.head_dim} must be at least 1")
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.kv_heads={config.kv_heads} does not divide model.heads={config.heads}")
    if config.logit_softcap is not None and not config.logit_softcap > 0:
        raise ConfigError(f"model.logit_softcap={config.logit_softcap} must be positive, or null for none")
    if not config.init_std > 0:
        raise ConfigError(f"model.init_std={config.init_std} must be positive")
    if config.vocab_rows is not None and config.vocab_rows < vocab_size:
        raise ConfigError(
            f"model.vocab_rows={config.vocab_rows} is less than the tokenizer's {vocab_size} tokens: use the "
            "tokenizer that the model was trained with, or model.vocab_rows=null"
        )
    check_rope(config.rope, head_dim_of(config))


class Attention(nn.Module):
    """Multi-head attention with rotary embedding; grouped-query when kv_heads < heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = head_dim_of(config)
        self.q = Linear(config.width, config.heads * self.head_dim)
        self.k = Linear(config.width, config.kv_heads * self.head_dim)
        self.v = Linear(config.width, config.kv_heads * self.head_dim)
        self.out = Linear(config.heads * self.head_dim, config.width)
        together = config.qk_norm_scope is QkNormScope.layer  # the norm takes all heads of a token at once
        q_width, k_width = (self.head_dim * (heads if together else 1) for heads in (config.heads, config.kv_heads))
        self.q_norm = RMSNorm(q_width, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(k_width, config.norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] -> q [B, H, T, D], k and v [B, Hkv, T, D], normalised and turned; views of [B, T, H, D]."""
        q, k, v = [y.view(*y.shape[:-1], -1, self.head_dim) for y in project(x, self.q, self.k, self.v)]
        q, k = _norm_and_turn(q, self.q_norm, rope), _norm_and_turn(k, self.k_norm, rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, mask: AttentionMask, rope: Rope, cache: KVCache | None = None, layer: int = 0
    ) -> Tensor:
        """x [B, T, width] -> [B, T, width]."""
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.update(layer, k, v)
        y: Tensor = self.out(attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return y


def _norm_and_turn(x: Tensor, norm: RMSNorm | None, rope: Rope) -> Tensor:
    """QK-norm, where there is one, and rotary embedding of x [B, T, H, D]; one kernel on a GPU."""
    if norm is None:
        return apply_rope(x, *rope)
    if norm.weight.shape[0] != x.shape[-1]:
        return apply_rope(norm(x.flatten(2)).view(x.shape), *rope)
    if x.is_cuda and kernels.handles(x):
        turned: Tensor = kernels.head_norm_rope(x, norm.weight, *rope, norm.eps)
        return turned
    return apply_rope(norm(x), *rope)


class Mlp(nn.Module):
    """Feed-forward network: SwiGLU or squared ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_width) if config.mlp is MlpKind.swiglu else None
        self.up = Linear(config.width, config.mlp_width)
        self.down = Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        if self.gate is None:
            hidden = F.relu(self.up(x)).square()
        else:
            gate, up = project(x, self.gate, self.up)
            hidden = F.silu(gate) * up
        y: Tensor = self.down(hidden)
        return y


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config)
        self.norms_after = config.norm_placement is NormPlacement.after
        self.recompute = Recompute.none

    def forward(
        self, x: Tensor, mask: AttentionMask, rope: Rope, cache: KVCache | None = None, layer: int = 0
    ) -> Tensor:
        """x [B, T, width] -> [B, T, width]. `layer` is the cache's and only set with one."""
        if self.recompute is Recompute.none or cache is not None or not torch.is_grad_enabled():
            return self._forward(x, mask, rope, cache, layer)
        # There is no randomness to restore: noise in this project is keyed by counters.
        # The tracer of torch.compile wants `context_fn` spelled out in the call.
        if self.recompute is Recompute.full:
            y = checkpoint(self._forward, x, mask, rope, use_reentrant=False, preserve_rng_state=False)
        else:
            y = checkpoint(
                self._forward,
                x,
                mask,
                rope,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=_selective_contexts,
            )
        assert isinstance(y, Tensor)
        return y

    def _forward(
        self, x: Tensor, mask: AttentionMask, rope: Rope, cache: KVCache | None = None, layer: int = 0
    ) -> Tensor:
        if self.norms_after:
            x = x + self.attention_norm(self.attention(x, mask, rope, cache, layer))
            after: Tensor = x + self.mlp_norm(self.mlp(x))
            return after
        x, h = _add_and_norm(x, self.attention(self.attention_norm(x), mask, rope, cache, layer), self.mlp_norm)
        y: Tensor = x + self.mlp(h)
        return y


def _add_and_norm(x: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + delta, and that normalised; one kernel on a GPU."""
    if x.is_cuda:
        total, normed = kernels.add_norm(x, delta, norm.weight, norm.eps)
        return total, normed
    x = x + delta
    return x, norm(x)


_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
"""Expensive to compute: selective recomputation keeps their results and repeats the element-wise rest."""


def _keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_keep_products)  # type: ignore[no-untyped-call]
    return contexts


class Transformer(nn.Module):
    """A dense decoder with FP32 parameters; call `init_weights`, or load some, before use."""

    def __init__(self, config: ModelConfig, vocab_size: int, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        check_model(config, vocab_size)
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab = vocab_rows_of(config, vocab_size)
        self.compute_dtype = compute_dtype
        self.embedding = Embedding(self.padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied_head else Linear(config.width, self.padded_vocab)
        self._frequencies, self._rope_factor = rope_frequencies(config.rope, head_dim_of(config))
        self._frequency_tensors: dict[torch.device, Tensor] = {}

    @property
    def head_weight(self) -> nn.Parameter:
        """The LM head's weight [padded_vocab, width]: the embedding's when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, visibility: Visibility | None = None, cache: KVCache | None = None) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: int64 [B, T]. visibility: None for plain causal. cache: generation; tokens are then the next T
                of each row, causal, and the caller moves the cache's lengths on afterwards.

        Returns:
            [B, T, width] in `compute_dtype`.

        Raises:
            ConfigError: more tokens than `model.max_sequence`. DataError: visibility of another shape.
        """
        batch, length = tokens.shape
        device = tokens.device
        extent = length if cache is None else cache.extent(length)
        if extent > self.config.max_sequence:
            raise ConfigError(f"a sequence of {extent} tokens exceeds model.max_sequence={self.config.max_sequence}")
        mask: AttentionMask
        if cache is not None:
            if visibility is not None:
                raise DataError("a KV cache is causal: pass visibility or cache, not both")
            mask = cached_mask(cache.lengths, length, extent)
            position = cache.lengths[:, None] + torch.arange(length, device=device)
        else:
            mask = prepare_mask(visibility, batch, length, device)
            position = torch.arange(length, device=device)[None] if visibility is None else visibility.position
        rope = self.rope(position.to(device, non_blocking=True))
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            # Generation's shapes change with every token: it runs the block as written, never the compiled one.
            x = block(x, mask, rope) if cache is None else block.forward(x, mask, rope, cache, layer)
        hidden: Tensor = self.final_norm(x)
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, T] -> the residual stream's start, [B, T, width] in `compute_dtype`."""
        x: Tensor = self.embedding(tokens).to(self.compute_dtype)
        return x

    def rope(self, position: Tensor) -> Rope:
        """Rotary tables of positions [B or 1, T], shared by all layers."""
        frequencies = self._frequency_tensors.get(position.device)
        if frequencies is None:
            frequencies = torch.tensor(self._frequencies, dtype=torch.float32, device=position.device)
            self._frequency_tensors[position.device] = frequencies
        return rope_tables(position, frequencies, self._rope_factor)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter; see the module's docstring for the distribution."""
        small = self.config.init_std / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = small if name.endswith(("attention.out.weight", "mlp.down.weight")) else self.config.init_std
            key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def compile_blocks(self) -> None:
        """Compile each block in place (one graph serves all of them); names of parameters stay as they are."""
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False)

    def set_recompute(self, recompute: Recompute) -> None:
        """What the backward pass recomputes, from now on."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.recompute = recompute
