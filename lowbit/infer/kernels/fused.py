"""What stands between the products of a decoding step, in few launches: Triton kernels.

At a few rows each of these takes a GPU two microseconds whatever it does, and a step has hundreds, so what counts is
their number. Numbers are rounded where the model as written rounds them. Products may come unfinished (`unfinished`):
then this is done first.

    embed            rows of the embedding, in the model's type
    rms_norm         x -> x / sqrt(mean(x^2) + eps) * weight
    add_norm         x, delta -> x + delta, and that normalised
    silu_mul         gate, up -> silu(gate) * up
    turn_and_store   q, k, v -> queries normalised and turned; keys likewise, and values, stored in the cache
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels.attention import Memory, put_codes
from lowbit.infer.kernels.chain import chained, let_next, wait
from lowbit.infer.kernels.unfinished import alike, finished, left, reading, scale_of
from lowbit.infer.unfinished import Unfinished


@triton.jit
def _embed_kernel(  # type: ignore[no-untyped-def]
    tokens, weight, y, width, token_row, WIDTH: tl.constexpr, CHAINED: tl.constexpr
):
    wait(CHAINED)
    let_next(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    number = tl.load(weight + tl.load(tokens + row * token_row) * width + column, mask=inside, other=0.0)
    tl.store(y + row * width + column, number.to(y.dtype.element_ty), mask=inside)


def embed(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """tokens int64 [rows], any stride; weight [vocabulary, width], contiguous -> [rows, width]."""
    width = weight.shape[1]
    y = torch.empty(len(tokens), width, dtype=dtype, device=weight.device)
    _embed_kernel[(len(tokens),)](
        tokens, weight, y, width, tokens.stride(0), WIDTH=triton.next_power_of_2(width), num_warps=4,
        **chained(weight.device),
    )  # fmt: skip
    return y


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, delta, after, weight, total, y, width, delta_split, delta_row, eps,
    WIDTH: tl.constexpr, SUM: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = row * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0)
    if SUM:
        scale = scale_of(after, column, inside, AFTER)
    wait(CHAINED)
    let_next(CHAINED)
    number = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    if SUM:
        more = finished(delta, row * delta_row + column, inside, delta_split, scale, PARTS, AFTER)
        rounded = (number + more.to(total.dtype.element_ty).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at + column, rounded, mask=inside)
        number = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(number * number, axis=0) / width + eps)
    tl.store(y + at + column, (number * r * gain).to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width] -> the same shape and type; weight FP32 [width]."""
    return _norm(x, None, weight, eps)[1]


def add_norm(x: Tensor, delta: Unfinished, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta [..., width], and that normalised; delta of as many rows; weight FP32 [width]."""
    return _norm(x, delta, weight, eps)


def _norm(x: Tensor, delta: Unfinished | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What is normalised, and normalised."""
    x = x.contiguous()
    width = x.shape[-1]
    wide = triton.next_power_of_2(width)
    total, y = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    more = Unfinished.of(x.view(-1, width)) if delta is None else delta
    _norm_kernel[(x.numel() // width,)](
        x, *reading(more), weight, total, y, width, more.parts.stride(0), more.parts.stride(1), eps,
        WIDTH=wide, SUM=delta is not None, **left(more), num_warps=max(1, min(16, wide // 256)), **chained(x.device),
    )  # fmt: skip
    return total, y


@triton.jit
def _silu_kernel(  # type: ignore[no-untyped-def]
    gate, gate_after, up, up_after, y, width, split, gate_row, up_row,
    STEP: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = column < width
    gate_scale = scale_of(gate_after, column, inside, AFTER)
    up_scale = scale_of(up_after, column, inside, AFTER)
    wait(CHAINED)
    let_next(CHAINED)
    g = finished(gate, row * gate_row + column, inside, split, gate_scale, PARTS, AFTER)
    u = finished(up, row * up_row + column, inside, split, up_scale, PARTS, AFTER)
    g, u = g.to(y.dtype.element_ty).to(tl.float32), u.to(y.dtype.element_ty).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column, (silu * u).to(y.dtype.element_ty), mask=inside)


def silu_mul(gate: Unfinished, up: Unfinished) -> Tensor:
    """gate, up [rows, width] -> silu(gate) * up."""
    gate, up = alike(gate, up)
    _, rows, width = gate.parts.shape
    y = torch.empty(rows, width, dtype=gate.dtype, device=gate.parts.device)
    _silu_kernel[(rows, triton.cdiv(width, 1024))](
        *reading(gate), *reading(up), y, width, gate.parts.stride(0), gate.parts.stride(1), up.parts.stride(1),
        STEP=1024, **left(gate), num_warps=4, **chained(y.device),
    )  # fmt: skip
    return y


@triton.jit
def _head(x, after, column, split, PARTS: tl.constexpr, AFTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """These columns of a row, all of which there are."""
    return finished(x, column, column >= 0, split, scale_of(after, column, column >= 0, AFTER), PARTS, AFTER)


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    x, after, first, split, weight, cos, sin, eps,
    D: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One head of a row x, from column `first` on, normalised and turned, FP32 [D]."""
    d = tl.arange(0, D)
    partner = (d + D // 2) % D
    number = _head(x, after, first + d, split, PARTS, AFTER)
    other = _head(x, after, first + partner, split, PARTS, AFTER)
    number, other = number.to(TYPE).to(tl.float32), other.to(TYPE).to(tl.float32)
    c, s = tl.load(cos + d), tl.load(sin + d)
    if NORM:
        c = c * tl.load(weight + d)
        s = s * tl.load(weight + partner)
        r = tl.rsqrt(tl.sum(number * number, axis=0) / D + eps)
        return (number * c + other * s) * r
    return number * c + other * s


@triton.jit
def _turn_kernel(  # type: ignore[no-untyped-def]
    q, q_after, k, k_after, v, v_after, q_weight, k_weight, cos, sin, slots,
    out, keys, values, key_scales, value_scales, split, q_row, k_row, v_row, eps,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
    LARGEST: tl.constexpr, INTEGER: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    let_next(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D)
    cos, sin = cos + row * D, sin + row * D
    TYPE: tl.constexpr = out.dtype.element_ty
    if head < H:
        y = _turned(q + row * q_row, q_after, head * D, split, q_weight, cos, sin, eps, D, NORM, PARTS, AFTER, TYPE)
        tl.store(out + (row * H + head) * D + d, y.to(TYPE))
    else:
        if head < H + HEADS:
            place = tl.load(slots + row) * HEADS + head - H
            first = (head - H) * D
            y = _turned(k + row * k_row, k_after, first, split, k_weight, cos, sin, eps, D, NORM, PARTS, AFTER, TYPE)
            put_codes(y.to(TYPE), keys, key_scales, place, D, LARGEST, INTEGER)
        else:
            place = tl.load(slots + row) * HEADS + head - H - HEADS
            number = _head(v + row * v_row, v_after, (head - H - HEADS) * D + d, split, PARTS, AFTER)
            put_codes(number.to(TYPE), values, value_scales, place, D, LARGEST, INTEGER)


def turn_and_store(
    qkv: tuple[Unfinished, Unfinished, Unfinished],
    norms: tuple[Tensor, Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    memory: Memory,
    slots: Tensor,
    largest: float | None,
) -> Tensor:
    """Queries [rows, H, D], ready for attention; keys and values go to the cache.

    Args:
        qkv: [rows, heads * D] each. norms: weights FP32 [D] of queries and keys, and eps.
        rope: FP32, D numbers a row. memory: of one layer. slots: int64 [rows]. largest: of a code.
    """
    q, k, v = alike(*qkv)
    keys, values, key_scales, value_scales = memory
    rows, heads, dim = q.parts.shape[1], keys.shape[-2], keys.shape[-1]
    out = torch.empty(rows, q.parts.shape[2] // dim, dim, dtype=q.dtype, device=q.parts.device)
    cos, sin = (table.reshape(rows, dim).contiguous() for table in rope)
    q_weight, k_weight, eps = norms or (cos, cos, 0.0)
    _turn_kernel[(rows, out.shape[1] + 2 * heads)](
        *reading(q), *reading(k), *reading(v), q_weight, k_weight, cos, sin, slots,
        out, keys, values, key_scales, value_scales,
        q.parts.stride(0), q.parts.stride(1), k.parts.stride(1), v.parts.stride(1), eps,
        H=out.shape[1], HEADS=heads, D=dim, NORM=norms is not None,
        LARGEST=largest or 0.0, INTEGER=keys.dtype is torch.int8, **left(q), num_warps=1, **chained(out.device),
    )  # fmt: skip
    return out
