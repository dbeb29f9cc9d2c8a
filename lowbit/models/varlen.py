"""Causal attention inside packed documents by flash attention's kernel for sequences of varying length.

That kernel is told where documents begin and how long the longest is, and knows nothing of rows: a batch is one list of
tokens. The list of beginnings belongs to a rule (`Visibility.with_ends`), made on the CPU where the loader makes the
rule. Inside compiled blocks nothing about it may differ between batches but data: the list has room for as many
documents as tokens, and the two numbers that the kernel's launch depends on travel in a tensor that stays on the CPU,
where reading them waits for nothing. They are rounded up, since documents without tokens are no harm, so that a few
CUDA graphs serve all batches.

The operator gives the logsumexp z besides; where z has a gradient, its backward pass takes the column that Attention
Z-Reg adds (models/z_column.py). On a CPU it is the same arithmetic, document by document: no model uses it there, but
what is around it can be tested.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.configs.schema import VARLEN_WIDEST
from lowbit.models.z_column import widened

HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten


class Varlen(NamedTuple):
    """A mask: causal inside documents, and within a window of so many tokens."""

    ends: Tensor
    """int32 [B T + 1]; see `Visibility.ends`."""
    sizes: Tensor
    """int64 [2], on the CPU; see `Visibility.sizes`."""
    window: int
    """0: all of the document."""


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel computes heads of this type and width."""
    return dtype in HALF and head_dim % 8 == 0 and head_dim <= VARLEN_WIDEST


def varlen_with_z(q: Tensor, k: Tensor, v: Tensor, mask: Varlen, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [B, H, T, D] over k and v [B, Hkv, T, D], and z [B, H, T], FP32. Both are differentiable."""
    listed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # a view where tokens come before heads in memory
    out, z = forward(*listed, *mask, scale)
    batch, heads, length, width = q.shape
    return out.view(batch, length, heads, width).transpose(1, 2), z.view(heads, batch, length).transpose(0, 1)


@torch.library.custom_op("lowbit::varlen_attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """q [N, H, D], k and v [N, Hkv, D] of all tokens of a batch -> the same shape as q, and z, FP32 [H, N]."""
    where = _forward_on_gpu if q.is_cuda else _forward_on_cpu
    return where(q, k, v, ends, sizes, window, scale)


@forward.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("lowbit::varlen_attention_grad", mutates_args=())
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    z: Tensor,
    ends: Tensor,
    sizes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, of what `forward` took and gave."""
    where = _backward_on_gpu if q.is_cuda else _backward_on_cpu
    return where(grad, q, k, v, out, z, ends, sizes, window, scale)


@backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # without one of z, heads stay as wide as they are


def _gradients(ctx: Any, grad: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, ends, sizes, out, z = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    tensors = (grad, q, k, v, out) if grad_z is None else widened(grad, grad_z.t(), q, k, v, out)
    found = backward(*tensors, z, ends, sizes, ctx.window, ctx.scale)
    dq, dk, dv = (x[..., : q.shape[-1]] for x in found)
    return dq, dk, dv, None, None, None, None


forward.register_autograd(_gradients, setup_context=_keep)


def _forward_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    documents, longest = sizes.tolist()
    begin = ends[: documents + 1]
    out, z, *_ = _aten._flash_attention_forward(
        q, k, v, begin, begin, longest, longest, 0.0, window == 0, False, scale=scale,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return out, z


def _backward_on_gpu(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    z: Tensor,
    ends: Tensor,
    sizes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    documents, longest = sizes.tolist()
    begin = ends[: documents + 1]
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # no dropout
    found: tuple[Tensor, Tensor, Tensor] = _aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, z, begin, begin, longest, longest, 0.0, window == 0, seed, unused, scale=scale,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return found


def _each(ends: Tensor, sizes: Tensor, window: int) -> Iterator[tuple[slice, Tensor]]:
    """The tokens of each document, and which of them sees which, bool [n, n]."""
    for begin, end in pairwise(ends[: int(sizes[0]) + 1].tolist()):
        if begin == end:
            continue
        index = torch.arange(end - begin)
        behind = index[:, None] - index
        yield slice(begin, end), (behind >= 0) & (behind < (window or end - begin))


def _logits(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Of one document, FP32 [H, n, n]."""
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (torch.einsum("ihd,jhd->hij", q.float(), keys) * scale).masked_fill(~seen, float("-inf"))


def _forward_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    out, z = torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    for here, seen in _each(ends, sizes, window):
        logits = _logits(q[here], k[here], seen, scale)
        values = v[here].float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        z[:, here] = logits.logsumexp(-1)
        out[here] = torch.einsum("hij,jhd->ihd", logits.softmax(-1), values).to(q.dtype)
    return out, z


def _backward_on_cpu(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    z: Tensor,
    ends: Tensor,
    sizes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P * (dO V^T - sum_d dO O), as kernels compute it, from the O and z they are given."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    share, heads = q.shape[1] // k.shape[1], k.shape[1]
    for here, seen in _each(ends, sizes, window):
        p = torch.exp(_logits(q[here], k[here], seen, scale) - z[:, here, None])
        g, keys, values = grad[here].float(), k[here].float(), v[here].float()
        dp = torch.einsum("ihd,jhd->hij", g, values.repeat_interleave(share, dim=1))
        ds = p * (dp - (g * out[here].float()).sum(-1).t()[..., None]) * scale
        dq[here] = torch.einsum("hij,jhd->ihd", ds, keys.repeat_interleave(share, dim=1)).to(q.dtype)
        dk[here] = _shared(torch.einsum("hij,ihd->jhd", ds, q[here].float()), heads).to(k.dtype)
        dv[here] = _shared(torch.einsum("hij,ihd->jhd", p, g), heads).to(v.dtype)
    return dq, dk, dv


def _shared(x: Tensor, heads: int) -> Tensor:
    """Sum over the query heads that share a head of keys: [n, H, D] -> [n, Hkv, D]."""
    return x.view(len(x), heads, -1, x.shape[-1]).sum(2)
