"""Residual addition followed by RMSNorm, in one pass over the data each way.

    s = x + delta,  y = s r * weight,  r = 1 / sqrt(mean(s^2) + eps)          x, delta [N, width]

and backwards, with h = s r and the gradients ds of s and dy of y:

    dx = ddelta = ds + r (dy w - h mean(dy w h)),   dw = sum over rows of dy h

The compiler's backward takes 2.9 ms of a 190 ms micro-batch on an H200 (20 layers, 32768 tokens, width 1280); reading
ds, dy and s and writing dx once takes 1.6 ms. A program of the backward goes through many rows and keeps the gain's
gradient in registers. Everything inside is FP32; s is rounded to its type before it is normalised, as in
`x = x + delta; y = norm(x)`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from lowbit.models.kernels.eager import bare

PROGRAMS_PER_SM = 8


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, weight_ptr, s_ptr, y_ptr, width, eps, WIDTH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    x = tl.load(x_ptr + at + column, inside, 0.0).to(tl.float32)
    delta = tl.load(delta_ptr + at + column, inside, 0.0).to(tl.float32)
    rounded = (x + delta).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + at + column, rounded, inside)
    s = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(s * s, 0) / width + tl.cast(eps, tl.float32))
    y = s * r * tl.load(weight_ptr + column, inside, 0.0)
    tl.store(y_ptr + at + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    ds_ptr, dy_ptr, s_ptr, weight_ptr, dx_ptr, dw_ptr, rows, width, eps, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = column < width
    weight = tl.load(weight_ptr + column, inside, 0.0)
    dw = tl.zeros((WIDTH,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width
        s = tl.load(s_ptr + at + column, inside, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at + column, inside, 0.0).to(tl.float32)
        ds = tl.load(ds_ptr + at + column, inside, 0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(s * s, 0) / width + tl.cast(eps, tl.float32))
        h = s * r
        dh = dy * weight
        dx = ds + r * (dh - h * (tl.sum(dh * h, 0) / width))
        tl.store(dx_ptr + at + column, dx.to(dx_ptr.dtype.element_ty), inside)
        dw += dy * h
    tl.store(dw_ptr + tl.program_id(0) * width + column, dw, inside)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm).

    Args:
        x, delta: [..., width], of one type. weight: FP32 [width].

    Returns:
        Two tensors [..., width], contiguous, in the type of x.
    """
    if bare():
        return _launched(_forward, x, delta, weight, eps)
    y: tuple[Tensor, Tensor] = _operator(x, delta, weight, eps)
    return y


@triton_op("lowbit::add_norm", mutates_args={})
def _operator(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launched(wrap_triton(_forward), x, delta, weight, eps)


def _launched(kernel: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, delta = x.contiguous(), delta.contiguous()
    width = x.shape[-1]
    s, y = torch.empty_like(x), torch.empty_like(x)
    kernel[(x.numel() // width,)](x, delta, weight, s, y, width, eps, WIDTH=triton.next_power_of_2(width), num_warps=4)
    return s, y


@triton_op("lowbit::add_norm_backward", mutates_args={})
def add_norm_backward(ds: Tensor, dy: Tensor, s: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradient of `add_norm` with respect to x, which is delta's too (in the type of s), and to weight (FP32)."""
    ds, dy = ds.contiguous(), dy.contiguous()
    width = s.shape[-1]
    rows = s.numel() // width
    sms = torch.cuda.get_device_properties(s.device).multi_processor_count
    programs = min(rows, PROGRAMS_PER_SM * sms)
    dx = torch.empty_like(s)
    partial = torch.empty((programs, width), dtype=torch.float32, device=s.device)
    wrap_triton(_backward)[(programs,)](
        ds, dy, s, weight, dx, partial, rows, width, eps, WIDTH=triton.next_power_of_2(width), num_warps=4
    )
    return dx, partial.sum(0)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight)


def _gradients(ctx, ds: Tensor, dy: Tensor):  # type: ignore[no-untyped-def]
    s, weight = ctx.saved_tensors
    dx, dw = add_norm_backward(ds, dy, s, weight, ctx.eps)
    return dx, dx, dw, None


_operator.register_autograd(_gradients, setup_context=_save)
