"""What stands between the products of a decoding step, in few launches: Triton kernels.

At a few rows each of these takes a GPU two microseconds whatever it does, and a step has hundreds, so what counts is
their number. Numbers are rounded where the model as written rounds them.

    embed            rows of the embedding, in the model's type
    rms_norm         x -> x / sqrt(mean(x^2) + eps) * weight
    add_norm         x, delta -> x + delta, and that normalised
    silu_mul         gate, up -> silu(gate) * up
    turn_and_store   q, k, v -> queries normalised and turned; keys likewise, and values, stored in the cache
    scaled           y -> y * scale of the tensor or of each column
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels.attention import Memory, put_codes
from lowbit.infer.kernels.chain import chained, let_next, wait


@triton.jit
def _embed_kernel(  # type: ignore[no-untyped-def]
    tokens, weight, y, width, token_row, WIDTH: tl.constexpr, CHAINED: tl.constexpr
):
    let_next(CHAINED)
    wait(CHAINED)
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
    x, delta, weight, total, y, width, eps, WIDTH: tl.constexpr, SUM: tl.constexpr, CHAINED: tl.constexpr
):
    let_next(CHAINED)
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0)
    wait(CHAINED)
    number = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    if SUM:
        rounded = (number + tl.load(delta + at + column, mask=inside, other=0.0)).to(total.dtype.element_ty)
        tl.store(total + at + column, rounded, mask=inside)
        number = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(number * number, axis=0) / width + eps)
    tl.store(y + at + column, (number * r * gain).to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width] -> the same shape and type; weight FP32 [width]."""
    return _norm(x, None, weight, eps)[1]


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta [..., width], and that normalised; weight FP32 [width]. A model's own `add_norm`, but chained."""
    return _norm(x, delta.contiguous(), weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What is normalised, and normalised."""
    x = x.contiguous()
    width = x.shape[-1]
    wide = triton.next_power_of_2(width)
    total, y = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    _norm_kernel[(x.numel() // width,)](
        x, x if delta is None else delta, weight, total, y, width, eps,
        WIDTH=wide, SUM=delta is not None, num_warps=max(1, min(16, wide // 256)), **chained(x.device),
    )  # fmt: skip
    return total, y


@triton.jit
def _silu_kernel(  # type: ignore[no-untyped-def]
    gate, up, y, width, gate_row, up_row, STEP: tl.constexpr, CHAINED: tl.constexpr
):
    let_next(CHAINED)
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = column < width
    g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column, (silu * u).to(y.dtype.element_ty), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [rows, width], any row strides -> silu(gate) * up."""
    rows, width = gate.shape
    y = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    grid = (rows, triton.cdiv(width, 1024))
    _silu_kernel[grid](gate, up, y, width, gate.stride(0), up.stride(0), STEP=1024, num_warps=4, **chained(gate.device))
    return y


@triton.jit
def _turned(x, weight, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """One head at x, normalised and turned, FP32 [D]."""
    d = tl.arange(0, D)
    partner = (d + D // 2) % D
    number, other = tl.load(x + d).to(tl.float32), tl.load(x + partner).to(tl.float32)
    c, s = tl.load(cos + d), tl.load(sin + d)
    if NORM:
        c = c * tl.load(weight + d)
        s = s * tl.load(weight + partner)
        r = tl.rsqrt(tl.sum(number * number, axis=0) / D + eps)
        return (number * c + other * s) * r
    return number * c + other * s


@triton.jit
def _turn_kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_weight, k_weight, cos, sin, slots, out, keys, values, key_scales, value_scales,
    q_row, k_row, v_row, eps,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
    LARGEST: tl.constexpr, INTEGER: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next(CHAINED)
    wait(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D)
    if head < H:
        y = _turned(q + row * q_row + head * D, q_weight, cos + row * D, sin + row * D, eps, D, NORM)
        tl.store(out + (row * H + head) * D + d, y.to(out.dtype.element_ty))
    else:
        if head < H + HEADS:
            place = tl.load(slots + row) * HEADS + head - H
            y = _turned(k + row * k_row + (head - H) * D, k_weight, cos + row * D, sin + row * D, eps, D, NORM)
            put_codes(y.to(out.dtype.element_ty), keys, key_scales, place, D, LARGEST, INTEGER)
        else:
            place = tl.load(slots + row) * HEADS + head - H - HEADS
            number = tl.load(v + row * v_row + (head - H - HEADS) * D + d)
            put_codes(number, values, value_scales, place, D, LARGEST, INTEGER)


def turn_and_store(
    qkv: tuple[Tensor, Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    memory: Memory,
    slots: Tensor,
    largest: float | None,
) -> Tensor:
    """Queries [rows, H, D], ready for attention; keys and values go to the cache.

    Args:
        qkv: [rows, heads * D] each, any row strides. norms: weights FP32 [D] of queries and keys, and eps.
        rope: FP32, D numbers a row. memory: of one layer. slots: int64 [rows]. largest: of a code.
    """
    q, k, v = qkv
    keys, values, key_scales, value_scales = memory
    rows, heads, dim = q.shape[0], keys.shape[-2], keys.shape[-1]
    out = torch.empty(rows, q.shape[1] // dim, dim, dtype=q.dtype, device=q.device)
    cos, sin = (table.reshape(rows, dim).contiguous() for table in rope)
    q_weight, k_weight, eps = norms or (cos, cos, 0.0)
    _turn_kernel[(rows, out.shape[1] + 2 * heads)](
        q, k, v, q_weight, k_weight, cos, sin, slots, out, keys, values, key_scales, value_scales,
        q.stride(0), k.stride(0), v.stride(0), eps,
        H=out.shape[1], HEADS=heads, D=dim, NORM=norms is not None,
        LARGEST=largest or 0.0, INTEGER=keys.dtype is torch.int8, num_warps=1, **chained(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _scaled_kernel(  # type: ignore[no-untyped-def]
    y, after, out, SIZE, N, EACH: tl.constexpr, STEP: tl.constexpr, CHAINED: tl.constexpr
):
    let_next(CHAINED)
    wait(CHAINED)
    at = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    inside = at < SIZE
    scale = tl.load(after + at % N, mask=inside, other=0.0) if EACH else tl.load(after)
    number = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + at, number.to(out.dtype.element_ty), mask=inside)


def scaled(y: Tensor, after: Tensor) -> Tensor:
    """y [rows, columns] contiguous times FP32 [1, 1] or [columns, 1], in its type."""
    out = torch.empty_like(y)
    grid = (triton.cdiv(y.numel(), 1024),)
    _scaled_kernel[grid](y, after, out, y.numel(), y.shape[1], EACH=after.numel() > 1, STEP=1024, **chained(y.device))
    return out
