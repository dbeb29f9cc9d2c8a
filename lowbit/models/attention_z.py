"""Attention with its logsumexp, differentiable: what Attention Z-Reg needs.

With logits s_ij and z_i = log sum_j exp(s_ij), Z-Reg (Character.AI, 2025) adds lambda/2 * z_i^2 to what is trained for,
scaled by 1 / (heads * layers * tokens), so that the logits stay small where BF16 is fine: a step is 1/128 at 1 and 1/2
at 64. Only the gradient is ever computed: with g_i = dL/dz_i it is

    dS_ij += g_i P_ij,   so   dS = P * (dO V^T - D + g)   with   D_i = sum_d dO_id O_id

FlexAttention's logsumexp is differentiable, with capped logits, too: z is then theirs. The other kernels take g through
a column that is added in their backward call (models/z_column.py); heads of another type or width than they take are
FlexAttention's (`Transformer.needs_flex`). Logits are never materialised.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowbit.configs.schema import Z_COLUMNS
from lowbit.models.attention import AttentionMask, flex_with_z
from lowbit.models.capped import written_out
from lowbit.models.varlen import Varlen, varlen_with_z
from lowbit.models.z_column import widened

CUDNN_WIDEST = 128
"""Widest head that cuDNN's backward pass takes on Hopper."""
_aten = torch.ops.aten


def attention_with_z(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `attention`, and z [B, H, T], FP32: the logsumexp of each query's visible logits. Both are differentiable."""
    if isinstance(mask, BlockMask):
        return flex_with_z(q, k, v, mask, scale, softcap)
    if isinstance(mask, Varlen):
        assert softcap is None
        return varlen_with_z(q, k, v, mask, scale or q.shape[-1] ** -0.5)
    if softcap is not None:  # the added column knows the slope of the softmax alone, not that of the cap
        return written_out(q, k, v, mask, scale or q.shape[-1] ** -0.5, softcap)
    share = q.shape[1] // k.shape[1]
    if share > 1:  # these kernels want as many heads of k and v as of q
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    out, z = _WithZ.apply(q, k, v, mask, scale or q.shape[-1] ** -0.5)  # type: ignore[no-untyped-call]
    return out, z


class _WithZ(torch.autograd.Function):
    """Attention by a kernel that returns its logsumexp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *more = _forward(q, k, v, mask, scale)
        cum_q, cum_k, max_q, max_k, seed, offset = more or [None] * 6
        ctx.save_for_backward(q, k, v, mask, out, lse, cum_q, cum_k, seed, offset)
        ctx.numbers = (max_q, max_k)
        ctx.scale = scale
        return out, lse.float().reshape(q.shape[:3])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse, *more = ctx.saved_tensors
        wide = widened(grad_out, grad_z, q, k, v, out)
        grads = _backward(*wide, lse, mask, more, ctx.numbers, ctx.scale)
        dq, dk, dv = (grad[..., : q.shape[-1]] for grad in grads)
        return dq, dk, dv, None, None


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Any:
    """(out, logsumexp), and on a GPU what else the backward call wants: cumulative lengths, greatest ones, seeds."""
    if not _on_gpu(q):
        bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=bias, scale=scale
        )
    assert mask is None, "other masks than plain causal are FlexAttention's on a GPU"
    if q.shape[-1] + Z_COLUMNS <= CUDNN_WIDEST:
        found = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    else:
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return found[:8]


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    more: list[Tensor | None],
    numbers: tuple[int, int],
    scale: float,
) -> Any:
    """Gradients of q, k and v, all of them with the added columns."""
    if not _on_gpu(q):
        bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=bias, scale=scale
        )
    cum_q, cum_k, seed, offset = more
    if q.shape[-1] <= CUDNN_WIDEST:
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, *numbers, 0.0, True, scale=scale
        )
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, cum_q, cum_k, *numbers, 0.0, True, seed, offset, scale=scale
    )
