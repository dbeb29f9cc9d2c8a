"""One layer of the model: attention and feed-forward network with their norms, and what its backward pass recomputes.

    x = x + attention(norm(x));  x = x + mlp(norm(x))

No biases anywhere. SwiGLU is down(silu(gate(x)) * up(x)) (arXiv 2002.05202), relu2 is down(relu(up(x))^2)
(arXiv 2109.08668). QK-norm is an RMSNorm over each head's query and key before the rotary embedding, or over all heads
of a token together. With norms placed after (OLMo-2, arXiv 2501.00656) a block is x = x + norm(attention(x));
x = x + norm(mlp(x)). In a mixture of experts `mlp` is the router with its experts. Layers may share keys and values
(cross-layer attention, arXiv 2405.12981; YOCO, arXiv 2405.05254), and may look back over a window only.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowbit.configs.schema import ModelConfig, NormPlacement, QkNormScope, Recompute
from lowbit.configs.schema_model import head_dim_of
from lowbit.models import kernels
from lowbit.models.attention import AttentionMask, attention
from lowbit.models.attention_z import attention_with_z
from lowbit.models.cost import is_moe_layer, kv_source
from lowbit.models.layers import KVCache, Linear, RMSNorm, project
from lowbit.models.moe import Mlp, Moe
from lowbit.models.rope import Rope, apply_rope

KV = tuple[Tensor, Tensor]
"""Keys and values of a layer, [B, Hkv, S, D] each, normalised and turned."""


class AttentionOutput(NamedTuple):
    """What attention gives."""

    y: Tensor
    """[B, T, width]."""
    kv: KV | None
    """For the layers that use this one's, if any."""
    loss: Tensor | None
    """Z-Reg, see `BlockOutput.loss`."""
    z: Tensor | None
    """FP32 [2], detached: mean and greatest logsumexp of the attention logits."""


class BlockOutput(NamedTuple):
    """What a block gives."""

    x: Tensor
    """[B, T, width]."""
    kv: KV | None = None
    loss: Tensor | None = None
    """FP32 scalar to train for beside the model's own loss, as a mean over tokens."""
    routing: Tensor | None = None
    """FP32, detached: what the router measured."""
    z: Tensor | None = None


class Attention(nn.Module):
    """Multi-head attention with rotary embedding; grouped-query when kv_heads < heads.

    A layer that uses another's keys and values (`model.kv_from`) has queries only.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = head_dim_of(config)
        source = kv_source(config, layer)
        self.borrows = source != layer
        self.lends = any(kv_source(config, other) == layer for other in range(layer + 1, config.layers))
        self.q = Linear(config.width, config.heads * self.head_dim)
        self.k = None if self.borrows else Linear(config.width, config.kv_heads * self.head_dim)
        self.v = None if self.borrows else Linear(config.width, config.kv_heads * self.head_dim)
        self.out = Linear(config.heads * self.head_dim, config.width)
        together = config.qk_norm_scope is QkNormScope.layer  # the norm takes all heads of a token at once
        q_width, k_width = (self.head_dim * (heads if together else 1) for heads in (config.heads, config.kv_heads))
        self.q_norm = RMSNorm(q_width, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(k_width, config.norm_eps) if config.qk_norm and not self.borrows else None
        self.softcap = config.attention_softcap
        self.z_weight = config.attention_z / (2 * config.heads * config.layers)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """x [B, T, width] -> q [B, H, T, D], normalised and turned; a view of [B, T, H, D]."""
        return self._turned(self.q(x), self.q_norm, rope)

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] -> q [B, H, T, D], k and v [B, Hkv, T, D], normalised and turned; views of [B, T, H, D]."""
        assert self.k is not None and self.v is not None
        q, k, v = project(x, self.q, self.k, self.v)
        v = v.view(*v.shape[:-1], -1, self.head_dim).transpose(1, 2)
        return self._turned(q, self.q_norm, rope), self._turned(k, self.k_norm, rope), v

    def _turned(self, x: Tensor, norm: RMSNorm | None, rope: Rope) -> Tensor:
        return _norm_and_turn(x.view(*x.shape[:-1], -1, self.head_dim), norm, rope).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        rope: Rope,
        borrowed: KV | None = None,
        cache: KVCache | None = None,
        slot: int = 0,
    ) -> AttentionOutput:
        """x [B, T, width] -> [B, T, width] and more. `slot`: which of the cache's layers is this one's."""
        if cache is not None:
            q, *own = (self.queries(x, rope),) if self.borrows else self.project(x, rope)
            y = cache.attend(slot, q, (own[0], own[1]) if own else None, mask)
            return AttentionOutput(self.out(y.transpose(1, 2).flatten(2)), None, None, None)
        if borrowed is not None:
            q, (k, v) = self.queries(x, rope), borrowed
        else:
            q, k, v = self.project(x, rope)
        loss = statistics = None
        if self.z_weight:
            y, z = attention_with_z(q, k, v, mask, softcap=self.softcap)
            loss = self.z_weight * z.square().sum(1).mean()
            statistics = torch.stack((z.mean(), z.amax())).detach()
        else:
            y = attention(q, k, v, mask, softcap=self.softcap)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return AttentionOutput(out, (k, v) if self.lends else None, loss, statistics)


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
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        routed = is_moe_layer(config, layer)
        self.mlp: Mlp | Moe = Moe(config) if routed else Mlp(config.mlp, config.width, config.mlp_width)
        self.norms_after = config.norm_placement is NormPlacement.after
        self.recompute = Recompute.none

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        rope: Rope,
        borrowed: KV | None = None,
        cache: KVCache | None = None,
        slot: int = 0,
    ) -> BlockOutput:
        """x [B, T, width] -> [B, T, width] and more.

        Args:
            borrowed: the keys and values of the layer whose this one uses, if it uses another's. cache, slot: of
                generation.
        """
        if self.recompute is Recompute.none or cache is not None or not torch.is_grad_enabled():
            return self._forward(x, mask, rope, borrowed, cache, slot)
        # There is no randomness to restore: noise in this project is keyed by counters.
        # The tracer of torch.compile wants `context_fn` spelled out in the call.
        if self.recompute is Recompute.full:
            y = checkpoint(self._forward, x, mask, rope, borrowed, use_reentrant=False, preserve_rng_state=False)
        else:
            y = checkpoint(
                self._forward,
                x,
                mask,
                rope,
                borrowed,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=_selective_contexts,
            )
        return BlockOutput(*y)

    def _forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        rope: Rope,
        borrowed: KV | None = None,
        cache: KVCache | None = None,
        slot: int = 0,
    ) -> BlockOutput:
        if self.norms_after:
            a = self.attention(x, mask, rope, borrowed, cache, slot)
            x = x + self.attention_norm(a.y)
            h, loss, routing = self._mlp(x)
            x = x + self.mlp_norm(h)
        else:
            a = self.attention(self.attention_norm(x), mask, rope, borrowed, cache, slot)
            x, h = self.mlp_norm.with_sum(x, a.y)
            h, loss, routing = self._mlp(h)
            x = self._ending(x, h)
        if a.loss is not None:
            loss = a.loss if loss is None else loss + a.loss
        return BlockOutput(x, a.kv, loss, routing, a.z)

    def _ending(self, x: Tensor, delta: Tensor) -> Tensor:
        return x + delta

    def _mlp(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if isinstance(self.mlp, Moe):
            y, loss, statistics = self.mlp(x)
            return y, loss, statistics
        return self.mlp(x), None, None


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
    torch.ops.lowbit.varlen_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""Expensive to compute: selective recomputation keeps their results and repeats the element-wise rest."""


def _keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_keep_products)  # type: ignore[no-untyped-call]
    return contexts
