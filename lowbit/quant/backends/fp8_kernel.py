"""FP8 codes of a matrix and of its transpose from one reading, as a Triton kernel.

    x [rows, columns]  ->  Q(x) [rows, columns]  and  Q(x^T) [columns, rows]

A program takes a tile of 128 x 128. Scales of blocks (1x128 along either direction, 128x128) are found in the tile;
multipliers of a whole tensor, of rows and of columns are given, since no tile can know them. 2 bytes are read and 1 or
2 written for each BF16 number, where a kernel a direction reads twice.

Rows alone, which is what a sampler quantises, take a program each, which finds the row's scale as well (`launch_rows`).

Maxima are taken over bit patterns as integers, where NaN is above infinity and not lost. The cast rounds to nearest
even as the reference does. Triton's interpreter, in which tests run this kernel on a CPU, casts wrongly: there, with
INTEGER, E4M3 is rounded by integer arithmetic (`kernels.triton_numbers`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.quant.kernels.triton_numbers import NEAREST, encode, round_to

TILE = 128
MOST_COLUMNS = 1 << 15
"""Of a row that a program takes at once."""
GIVEN, BLOCK, SQUARE = 0, 1, 2
"""Where scales come from: multipliers that are given; 1x128 blocks; 128x128 blocks."""


@triton.jit
def _bf16_valued(x):  # type: ignore[no-untyped-def]
    """FP32 rounded to BF16, held in FP32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (tl.minimum(magnitude, 0x7F800000) + 0x7FFF + ((magnitude >> 16) & 1)) & 0x7FFF0000
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC00000, rounded) | (bits ^ magnitude)
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(amax):  # type: ignore[no-untyped-def]
    """Bits of a block's largest magnitude -> (scale, multiplier), FP32: 2**e with amax <= 448 * 2**e, and 2**-e."""
    exponent = (amax >> 23) - 135 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(amax == 0, 0, tl.maximum(exponent, -126))
    valid = amax < 0x7F800000
    scale = tl.where(valid, (127 + exponent) << 23, 0x7FC00000)
    multiplier = tl.where(valid, (127 - exponent) << 23, 0x7FC00000)
    return scale.to(tl.float32, bitcast=True), multiplier.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(y, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """FP32 -> E4M3 codes, uint8: saturating, to nearest even."""
    if INTEGER:
        rounded = round_to(y, 0, NEAREST, 3, 7, 0x43E00000, True, False)
        return encode(rounded, 3, 7, 8, True, 0x7F, False).to(tl.uint8)
    held = tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return held.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    x_ptr, multiplier_ptr, multiplier_t_ptr, codes_ptr, codes_t_ptr, scales_ptr, scales_t_ptr,
    rows, columns, row_stride, column_stride, width, width_t, scale_stride, scale_t_stride, height, height_t,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, FORWARD: tl.constexpr, TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(tl.maximum(width, height_t), 128)
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    r, c = row_tile * 128 + tl.arange(0, 128), column_tile * 128 + tl.arange(0, 128)
    at = r[:, None].to(tl.int64) * row_stride + c[None, :].to(tl.int64) * column_stride
    x = tl.load(x_ptr + at, (r[:, None] < rows) & (c[None, :] < columns), 0.0)
    x = _bf16_valued(x) if x_ptr.dtype.element_ty == tl.float32 else x.to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    y, y_t = x, x
    if KIND == 2:
        scale, multiplier = _power_of_two(tl.max(tl.max(magnitude, 1), 0))
        if FORWARD:
            tl.store(scales_ptr + row_tile * scale_stride + column_tile, scale)
        if TRANSPOSED:
            tl.store(scales_t_ptr + column_tile * scale_t_stride + row_tile, scale)
        y = x * multiplier
        y_t = y
    elif KIND == 1:
        if FORWARD:
            scale, multiplier = _power_of_two(tl.max(magnitude, 1))
            tl.store(scales_ptr + column_tile.to(tl.int64) * scale_stride + r, scale, r < rows)
            y = x * multiplier[:, None]
        if TRANSPOSED:
            scale, multiplier = _power_of_two(tl.max(magnitude, 0))
            tl.store(scales_t_ptr + row_tile.to(tl.int64) * scale_t_stride + c, scale, c < columns)
            y_t = x * multiplier[None, :]
    elif BY_ROW:
        if FORWARD:
            y = x * tl.load(multiplier_ptr + r, r < rows, 0.0)[:, None]
        if TRANSPOSED:
            y_t = x * tl.load(multiplier_t_ptr + c, c < columns, 0.0)[None, :]
    else:
        y = x * tl.load(multiplier_ptr)
        y_t = y
    if FORWARD:
        to = codes_ptr + r[:, None].to(tl.int64) * width + c[None, :]
        tl.store(to, _e4m3(y, INTEGER), (r[:, None] < height) & (c[None, :] < width))
    if TRANSPOSED:
        to = codes_t_ptr + c[None, :].to(tl.int64) * width_t + r[:, None]
        tl.store(to, _e4m3(y_t, INTEGER), (c[None, :] < height_t) & (r[:, None] < width_t))


def launch(
    x: Tensor,
    multiplier: Tensor,
    multiplier_t: Tensor,
    kind: str,
    codes: Tensor,
    codes_t: Tensor,
    scales: Tensor,
    scales_t: Tensor,
    integer: bool = False,
) -> None:
    """Fill codes [rows, width], codes_t [columns, width_t] and the scales of blocks; what is empty is not wanted.

    Args:
        x: [rows, columns], BF16 or FP32, any strides.
        multiplier, multiplier_t: FP32, of rows and columns for kind `row`; [1, 1] for `tensor`; else empty.
        scales, scales_t: FP32; kind `block`: [width/128, rows] and [width_t/128, columns]; `square`: [rows/128,
            columns/128] and its transpose; else empty.
    """
    forward, transposed = codes.numel() > 0, codes_t.numel() > 0
    if forward and transposed and x.dtype == torch.float32 and kind in ("tensor", "square"):
        # Triton 3.6 mixes up the two stores of one set of codes that come from FP32 (a quarter of them wrong, and not
        # the same ones each time): a reading for each.
        none = codes.new_empty(0)
        launch(x, multiplier, multiplier_t, kind, codes, none, scales, scales_t, integer)
        launch(x, multiplier, multiplier_t, kind, none, codes_t, scales, scales_t, integer)
        return
    rows, columns = x.shape
    height, width = codes.shape if forward else (0, 0)
    height_t, width_t = codes_t.shape if transposed else (0, 0)
    tiles = triton.cdiv(max(height, width_t), TILE) * triton.cdiv(max(width, height_t), TILE)
    _codes[(tiles,)](
        x, multiplier, multiplier_t, codes, codes_t, scales, scales_t,
        rows, columns, x.stride(0), x.stride(1), width, width_t,
        scales.shape[-1] if scales.numel() else 0, scales_t.shape[-1] if scales_t.numel() else 0, height, height_t,
        KIND={"tensor": GIVEN, "row": GIVEN, "block": BLOCK, "square": SQUARE}[kind], BY_ROW=kind == "row",
        FORWARD=forward, TRANSPOSED=transposed, INTEGER=integer, num_warps=8, maxnreg=128,
    )  # fmt: skip


@triton.jit
def _row_codes(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, columns, row_stride, width,
    WIDTH: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * row_stride + c, c < columns, 0.0)
    x = _bf16_valued(x) if x_ptr.dtype.element_ty == tl.float32 else x.to(tl.float32)
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    if POWER_OF_TWO:
        scale, multiplier = _power_of_two(amax)
    else:
        multiplier = tl.minimum(
            tl.div_rn(448.0, tl.maximum(amax, 1).to(tl.float32, bitcast=True)), 3.4028234663852886e38
        )
        multiplier = tl.where(amax == 0, 1.0, tl.where(amax < 0x7F800000, multiplier, float("nan")))
        scale = tl.div_rn(1.0, multiplier)
    tl.store(scales_ptr + row, scale)
    tl.store(codes_ptr + row * width + c, _e4m3(x * multiplier, INTEGER), c < width)


def launch_rows(x: Tensor, power_of_two: bool, width: int, integer: bool = False) -> tuple[Tensor, Tensor]:
    """x [rows, columns], BF16 or FP32, numbers of a row next to each other -> codes uint8 [rows, width], padded with
    zeros, and FP32 [rows, 1]. columns up to MOST_COLUMNS."""
    rows, columns = x.shape
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    wide = triton.next_power_of_2(width)
    _row_codes[(rows,)](
        x, codes, scales, columns, x.stride(0), width, WIDTH=wide, POWER_OF_TWO=power_of_two, INTEGER=integer,
        num_warps=max(1, min(16, wide // 512)),
    )  # fmt: skip
    return codes, scales
