"""RMSNorm over each head followed by the rotary embedding, in one pass over the data.

    n = x / sqrt(mean(x^2) + eps) * weight          x [B, T, H, D], the mean over D
    y_j = n_j cos_j + n_j' sin_j                    j' = (j + D/2) mod D, the partner; tables of `rope_tables`

and backwards, with r = 1 / sqrt(mean(x^2) + eps), h = x r and dn_j = dy_j cos_j + dy_j' sin_j':

    dx = r (dn w - h mean(dn w h)),   dw = sum over rows of dn h

Why by hand: the compiler makes four kernels of this that take 10.4 ms of a 197 ms micro-batch on an H200 (20 layers,
32768 tokens, width 1280), against 3.9 ms for reading and writing each number once. Here forward is one pass (read x,
write y) and backward one (read dy and x, write dx), the gain's gradient in registers until the end. Partners come
from a second load of the same row, which the first-level cache serves. Everything inside is FP32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS = 32
"""Heads of tokens a program holds at once."""
PROGRAMS_PER_SM = 8


@triton.jit
def _rows(index, n_rows, tokens, heads, stride_b, stride_t, stride_h):  # type: ignore[no-untyped-def]
    """Offset of rows (b, t, h) of a strided [B, T, H, D] tensor, and their token number b * T + t."""
    token = index // heads
    return (token // tokens) * stride_b + (token % tokens) * stride_t + (index % heads) * stride_h, token


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, n_rows, tokens, heads, table_tokens, eps,
    stride_b, stride_t, stride_h, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, D)[None, :]
    partner = (column + D // 2) % D
    inside = (index < n_rows)[:, None]
    source, token = _rows(index, n_rows, tokens, heads, stride_b, stride_t, stride_h)
    x = tl.load(x_ptr + source[:, None] + column, inside, 0.0).to(tl.float32)  # [ROWS, D]
    x_partner = tl.load(x_ptr + source[:, None] + partner, inside, 0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / D + tl.cast(eps, tl.float32))[:, None]
    table = (token % table_tokens)[:, None] * D + column
    cos = tl.load(cos_ptr + table, inside, 0.0)
    sin = tl.load(sin_ptr + table, inside, 0.0)
    n = x * r * tl.load(weight_ptr + column)
    n_partner = x_partner * r * tl.load(weight_ptr + partner)
    y = n * cos + n_partner * sin
    tl.store(y_ptr + index[:, None] * D + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, dw_ptr, n_rows, tokens, heads, table_tokens, eps,
    dy_b, dy_t, dy_h, x_b, x_t, x_h, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D)[None, :]
    partner = (column + D // 2) % D
    weight = tl.load(weight_ptr + column)
    dw = tl.zeros((ROWS, D), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        index = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # type: ignore[attr-defined]
        inside = (index < n_rows)[:, None]
        at_dy, token = _rows(index, n_rows, tokens, heads, dy_b, dy_t, dy_h)
        at_x, _ = _rows(index, n_rows, tokens, heads, x_b, x_t, x_h)
        x = tl.load(x_ptr + at_x[:, None] + column, inside, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at_dy[:, None] + column, inside, 0.0).to(tl.float32)
        dy_partner = tl.load(dy_ptr + at_dy[:, None] + partner, inside, 0.0).to(tl.float32)
        table = (token % table_tokens)[:, None] * D
        cos = tl.load(cos_ptr + table + column, inside, 0.0)
        sin_partner = tl.load(sin_ptr + table + partner, inside, 0.0)
        dn = dy * cos + dy_partner * sin_partner
        r = tl.rsqrt(tl.sum(x * x, 1) / D + tl.cast(eps, tl.float32))[:, None]
        h = x * r
        dh = dn * weight
        dx = r * (dh - h * (tl.sum(dh * h, 1) / D)[:, None])
        tl.store(dx_ptr + index[:, None] * D + column, dx.to(dx_ptr.dtype.element_ty), inside)
        dw += dn * h
    tl.store(dw_ptr + tl.program_id(0) * D + tl.arange(0, D), tl.sum(dw, 0))


@triton_op("lowbit::head_norm_rope", mutates_args={})
def head_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Normalise each head, then turn it.

    Args:
        x: [B, T, H, D] with stride 1 in D, D a power of two. weight: FP32 [D].
        cos, sin: FP32 [B or 1, T, 1, D] contiguous, of `rope_tables`.

    Returns:
        [B, T, H, D] contiguous, in the type of x.
    """
    batch, tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows = batch * tokens * heads
    wrap_triton(_forward)[(triton.cdiv(n_rows, ROWS),)](
        x, weight, cos, sin, y, n_rows, tokens, heads, cos.shape[0] * tokens, eps,
        x.stride(0), x.stride(1), x.stride(2), D=dim, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return y


@triton_op("lowbit::head_norm_rope_backward", mutates_args={})
def head_norm_rope_backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `head_norm_rope` with respect to x (contiguous, in its type) and weight (FP32 [D])."""
    batch, tokens, heads, dim = x.shape
    n_rows = batch * tokens * heads
    programs = min(triton.cdiv(n_rows, ROWS), PROGRAMS_PER_SM * _multiprocessors(x.device))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty((programs, dim), dtype=torch.float32, device=x.device)
    wrap_triton(_backward)[(programs,)](
        dy, x, weight, cos, sin, dx, partial, n_rows, tokens, heads, cos.shape[0] * tokens, eps,
        dy.stride(0), dy.stride(1), dy.stride(2), x.stride(0), x.stride(1), x.stride(2), D=dim, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return dx, partial.sum(0)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, cos, sin, ctx.eps = inputs
    ctx.save_for_backward(x, weight, cos, sin)


def _gradients(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    x, weight, cos, sin = ctx.saved_tensors
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    dx, dw = head_norm_rope_backward(dy, x, weight, cos, sin, ctx.eps)
    return dx, dw, None, None, None


head_norm_rope.register_autograd(_gradients, setup_context=_save)
