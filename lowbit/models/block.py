"""One layer of the model: attention and feed-forward network with their norms, and what its backward pass recomputes.

    x = x + attention(norm(x));  x = x + mlp(norm(x))

No biases anywhere. SwiGLU is down(silu(gate(x)) * up(x)) (arXiv 2002.05202), relu2 is down(relu(up(x))^2)
(arXiv 2109.08668). QK-norm is an RMSNorm over each head's query and key before the rotary embedding, or over all heads
of a token together. With norms placed after (OLMo-2, arXiv 2501.00656) a block is x = x + norm(attention(x));
x = x + norm(mlp(x)). In a mixture of experts `mlp` is the router with its experts.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowbit.configs.schema import ModelConfig, NormPlacement, QkNormScope, Recompute
from lowbit.models import kernels
from lowbit.models.attention import AttentionMask, attention
from lowbit.models.cost import head_dim_of, is_moe_layer
from lowbit.models.layers import KVCache, Linear, RMSNorm, project
from lowbit.models.moe import Mlp, Moe
from lowbit.models.rope import apply_rope

Rope = tuple[Tensor, Tensor]
"""cos and sin, FP32 [B or 1, T, 1, D]: see `rope_tables`."""


class BlockOutput(NamedTuple):
    """What a block gives."""

    x: Tensor
    """[B, T, width]."""
    loss: Tensor | None = None
    """FP32 scalar to train for beside the model's own loss, as a mean over tokens."""
    statistics: Tensor | None = None
    """FP32, detached: what the router measured."""


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


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        routed = is_moe_layer(config, layer)
        self.mlp: Mlp | Moe = Moe(config) if routed else Mlp(config.mlp, config.width, config.mlp_width)
        self.norms_after = config.norm_placement is NormPlacement.after
        self.recompute = Recompute.none

    def forward(
        self, x: Tensor, mask: AttentionMask, rope: Rope, cache: KVCache | None = None, layer: int = 0
    ) -> BlockOutput:
        """x [B, T, width] -> [B, T, width] and more. `layer` is the cache's and only set with one."""
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
        return BlockOutput(*y)

    def _forward(
        self, x: Tensor, mask: AttentionMask, rope: Rope, cache: KVCache | None = None, layer: int = 0
    ) -> BlockOutput:
        if self.norms_after:
            x = x + self.attention_norm(self.attention(x, mask, rope, cache, layer))
            h, loss, statistics = self._mlp(x)
            return BlockOutput(x + self.mlp_norm(h), loss, statistics)
        x, h = _add_and_norm(x, self.attention(self.attention_norm(x), mask, rope, cache, layer), self.mlp_norm)
        h, loss, statistics = self._mlp(h)
        return BlockOutput(x + h, loss, statistics)

    def _mlp(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if isinstance(self.mlp, Moe):
            y, loss, statistics = self.mlp(x)
            return y, loss, statistics
        return self.mlp(x), None, None


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
    _aten._grouped_mm.default,
    torch.ops.lowbit.grouped_product.default,
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
