"""The operators of `ops` on a GPU: launches of `triton_blocks`.

A scale that belongs to whole rows or to the whole tensor needs their largest magnitude first: one more pass over the
data (`triton_amax`); so does a rotation that such a scale comes after. Everything else is one pass.

What no kernel takes (`takes`), six-bit codes above all, stays with the PyTorch reference, and so does all of it on GPUs
before Ampere (`ops.missing`).
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lowbit.quant.bits import f32, is_finite, pattern_of
from lowbit.quant.kernels import ops
from lowbit.quant.kernels import triton_blocks as tb
from lowbit.quant.kernels.triton_amax import largest_magnitudes
from lowbit.quant.philox import Purpose, Side
from lowbit.quant.spec import FOUR_OVER_SIX, OUTER_BLOCK, Outer, QuantSpec, Rounding, Scale

_SCALES = {
    Scale.E8M0_UP: tb.E8M0_UP,
    Scale.E8M0_FLOOR: tb.E8M0_FLOOR,
    Scale.E4M3_NEAREST: tb.E4M3_NEAREST,
    Scale.E4M3_UP: tb.E4M3_UP,
    Scale.FP32: tb.GIVEN_SCALE,
    Scale.POWER_OF_TWO: tb.POWER_OF_TWO,
}
_OUTERS = {
    Outer.NONE: tb.NO_OUTER,
    Outer.TENSOR: tb.GIVEN_OUTER,
    Outer.ROW: tb.GIVEN_OUTER,
    Outer.BLOCK: tb.OUTER_128,
    Outer.BLOCK_POW2: tb.OUTER_128_POW2,
}
_ROUNDINGS = {
    Rounding.NEAREST: tb.ROUND_NEAREST,
    Rounding.STOCHASTIC: tb.ROUND_STOCHASTIC,
    Rounding.FOUR_OVER_SIX_MSE: tb.FOUR_OVER_SIX_MSE,
    Rounding.FOUR_OVER_SIX_MAE: tb.FOUR_OVER_SIX_MAE,
    Rounding.MS_EDEN: tb.MS_EDEN,
    Rounding.MS_EDEN_PUBLISHED: tb.MS_EDEN_PUBLISHED,
}


def takes(spec: QuantSpec | None, padded: int) -> bool:
    """Whether a kernel does this quantiser for rows of `padded` numbers."""
    if spec is None:
        return True
    if spec.element.bits == 6 or 128 % (spec.block[1] or 128):
        return False
    if spec.rounding in FOUR_OVER_SIX and spec.block != (1, 16):
        return False
    return not (spec.rounding is Rounding.STOCHASTIC and padded % 8)


class Given(NamedTuple):
    """Scales of whole rows or of the whole tensor, FP32 [rows, 1] or [1, 1]."""

    outer: Tensor
    """What the product is multiplied by."""
    inverse: Tensor
    """What x is multiplied by: the inverse outer scale, or a one-level format's multiplier."""


def given_scales(x: Tensor, spec: QuantSpec, static: Tensor | None) -> Given:
    """The scales that a tile does not tell; x [rows, columns] is not rotated any more."""
    by_row = spec.after is Outer.ROW
    if 1 in x.stride():
        amax = largest_magnitudes(x, by_row)
    else:
        amax = torch.linalg.vector_norm(x, math.inf, dim=1 if by_row else (0, 1), keepdim=True).float()
    if static is not None:
        amax = torch.where(is_finite(amax), static.float(), amax)
    outer, inverse = torch.empty_like(amax), torch.empty_like(amax)
    largest = spec.element.max if spec.scale is Scale.FP32 else f32(spec.bound * spec.target)
    programs = triton.cdiv(amax.numel(), 256)
    tb.given_kernel[(programs,)](amax, outer, inverse, amax.numel(), LARGEST=largest, ROUND=static is None, SIZE=256)
    return Given(outer, inverse)


def run_factor(
    x: Tensor,
    spec: QuantSpec | None,
    signs: Tensor | None,
    key: Tensor,
    clock: Tensor,
    lane: int,
    choice: Tensor | None,
    amax: Tensor | None,
    padded: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """x [rows, columns], any strides, into `out`: operand, after, data, scales, outer; what is empty is not wanted."""
    _, after, _, scales, outer = out
    if x.numel() == 0:
        return
    given = None
    if spec is not None and spec.after is not Outer.NONE:
        if signs is not None:
            rotated = x.new_empty((x.shape[0], ops.operand_width(x.shape[1], signs)), dtype=torch.bfloat16)
            empty = tuple(tensor.new_empty(0) for tensor in out[1:])
            run_factor(x, None, signs, key, clock, lane, None, None, rotated.shape[1], (rotated, *empty))  # type: ignore[arg-type]
            x, signs = rotated, None
        given = given_scales(x, spec, amax)
        for kept in (after, scales if spec.scale is Scale.FP32 else outer):
            if kept.numel():
                kept.copy_(given.outer.reshape(kept.shape))
    _launch(x, spec, signs, key, clock, lane, choice, given, padded, out)


def _launch(
    x: Tensor,
    spec: QuantSpec | None,
    signs: Tensor | None,
    key: Tensor,
    clock: Tensor,
    lane: int,
    choice: Tensor | None,
    given: Given | None,
    padded: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    operand, _, data, scales, outer = out
    rows, columns = x.shape
    constants = _constants(spec)
    block_rows = int(constants["BR"])
    padded_rows = -(-rows // block_rows) * block_rows
    row_major = x.stride(1) == 1
    rotation = 0 if signs is None else signs.shape[0]
    tile = _tile(spec, block_rows, row_major, rotation, x.element_size())
    stored = 0 if spec is None else data.shape[-1] * 8 // spec.element.bits
    blocks = scales.shape[1] if scales.ndim == 2 else 0
    by_row = given is not None and given.inverse.numel() > 1
    programs = triton.cdiv(padded_rows, tile.rows) * triton.cdiv(padded, 128)
    tb.factor_kernel[(programs,)](
        x,
        x if signs is None else signs,
        key,
        clock,
        x if given is None else given.outer,
        x if given is None else given.inverse,
        x if choice is None else choice.to(torch.int8).contiguous(),
        operand,
        data,
        scales,
        outer,
        rows,
        columns,
        x.stride(0),
        x.stride(1),
        ops.operand_width(columns, signs),
        padded,
        padded_rows,
        stored,
        blocks,
        int(by_row),
        lane,
        ROWS=tile.rows,
        WHOLE=rows % tile.rows == 0 and columns % 128 == 0,
        PIECE=tile.piece,
        RUN=tile.run,
        JOINS=(128 // tile.piece).bit_length() - 1,
        ROTATION=rotation,
        STAGES=rotation.bit_length() - 1,
        ROTATION_SCALE=f32(rotation**-0.5) if rotation else 1.0,
        OPERAND=operand.numel() > 0,
        CODES=data.numel() > 0,
        CHOICE=choice is not None,
        ROW_MAJOR=row_major,
        **constants,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )


class _Tile(NamedTuple):
    """What a program takes."""

    rows: int
    piece: int
    """Columns that are loaded together (`triton_tile`)."""
    run: int
    """Those of them that lie together."""
    warps: int


def _tile(spec: QuantSpec | None, block_rows: int, row_major: bool, rotation: int, element_size: int) -> _Tile:
    """The fastest of a dozen on an H200 for BF16 [32768, 1280] (docs/LOG.md); the numbers are the same in each.

    Sixteen threads share a row, eight where it is rotated by 128. Where columns are what lies together in memory, eight
    do, and a row that is rotated is one thread's: an exchange between threads would go through shared memory there.
    """
    run = 16 // element_size  # what a thread loads at once
    rounding = None if spec is None else spec.rounding
    if block_rows > 1:
        rows = max(block_rows, 16 if row_major else 32)
        return _Tile(rows, 128, 128, 2 if rows <= 32 else 8)
    if row_major:
        return _Tile(16, 4 * run, run, 2) if rotation == 128 else _Tile(16, 8 * run, run, 4)
    if rotation:
        return _Tile(64, 1, 1, 2)
    return _Tile(32, 128, 128, 8) if rounding in FOUR_OVER_SIX else _Tile(32, 8, 8, 4)


@cache
def _constants(spec: QuantSpec | None) -> dict[str, int | float | bool]:
    """What the kernel is specialised on."""
    e = None if spec is None else spec.element
    largest = 1.0 if e is None else e.max
    limit = 1.0 if spec is None else f32(spec.bound * spec.target)
    return {
        "QUANTISED": spec is not None,
        "BR": 1 if spec is None else spec.block[0] or 1,
        "BC": 128 if spec is None else spec.block[1] or 128,
        "SCALE": 0 if spec is None else _SCALES[spec.scale].value,
        "OUTER": 0 if spec is None else _OUTERS[spec.outer].value,
        "ROUNDING": 0 if spec is None else _ROUNDINGS[spec.rounding].value,
        "M": 1 if e is None else e.mantissa_bits,
        "BIAS": 1 if e is None else e.bias,
        "BITS": 4 if e is None else e.bits,
        "MAX_BITS": pattern_of(largest),
        "MAX_EXPONENT": math.frexp(largest)[1] - 1,
        "HAS_NAN": e is not None and e.has_nan,
        "NAN_CODE": 0 if e is None else e.nan_code,
        "INTEGER": e is not None and e.integer,
        "BOUND": 448.0 if spec is None else f32(spec.bound),
        "TARGET": 6.0 if spec is None else f32(spec.target),
        "INVERSE_TARGET": 1.0 if spec is None else f32(1 / spec.target),
        "LIMIT_BITS": pattern_of(limit),
        "LIMIT_EXPONENT": math.frexp(limit)[1] - 1,
    }


def run_unpack(
    data: Tensor, scales: Tensor, outer: Tensor | None, spec: QuantSpec, padded: int, operand: Tensor
) -> None:
    """Packed codes into `operand` [rows, width]."""
    rows, width = operand.shape
    if operand.numel() == 0:
        return
    constants = {
        name: _constants(spec)[name] for name in ("BR", "BC", "SCALE", "OUTER", "M", "BIAS", "BITS", "INTEGER")
    }
    tile_rows = max(int(constants["BR"]), 16)
    tb.unpack_kernel[(triton.cdiv(rows, tile_rows) * triton.cdiv(width, 128),)](
        data,
        scales,
        data if outer is None else outer,
        operand,
        rows,
        width,
        data.shape[1] * 8 // spec.element.bits,
        scales.shape[1],
        -(-padded // OUTER_BLOCK),
        ROWS=tile_rows,
        **constants,
        NAN_CODE=spec.element.nan_code if spec.element.has_nan else -1,
        num_warps=4 if tile_rows <= 16 else 8,
        enable_fp_fusion=False,
    )


def run_signs(key: Tensor, clock: Tensor, lane: int, out: Tensor) -> None:
    """`Stream.signs` into `out`, FP32, at most 128."""
    tb.signs_kernel[(1,)](key, clock, out, lane, out.numel(), SIZE=128, num_warps=1)


@ops.factor_op.register_kernel("cuda")
def _factor(
    x: Tensor,
    signs: Tensor | None,
    key: Tensor,
    clock: Tensor,
    choice: Tensor | None,
    amax: Tensor | None,
    spec: str,
    lane: int,
    dtype: torch.dtype,
    operand: bool,
    codes: bool,
    again: bool,
) -> ops.FactorTensors:
    found = ops.spec_of(spec)
    ops.check_given(x, signs, found, choice, amax)
    out = ops.allocate(x, signs, found, dtype, operand, codes)
    padded = ops.padded_columns(ops.operand_width(x.shape[1], signs), found)
    if ops.missing(x.device) is None and takes(found, padded):
        run_factor(x, found, signs, key, clock, lane, choice, amax, padded, out)
        return out
    return ops.reference(x, signs, found, ops.stream_of(key, clock, lane), choice, amax, dtype, out)


@ops.unpack_op.register_kernel("cuda")
def _unpack(
    data: Tensor, scales: Tensor, outer: Tensor | None, spec: str, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    found = ops.spec_of(spec)
    assert found is not None
    operand = data.new_empty((rows, width), dtype=dtype)
    if ops.missing(data.device) is not None:
        return ops.unpack_reference(data, scales, outer, found, operand)
    run_unpack(data, scales, outer, found, ops.padded_columns(width, found), operand)
    return operand


@ops.signs_op.register_kernel("cuda")
def _signs(key: Tensor, clock: Tensor, lane: int, count: int) -> Tensor:
    stream = ops.stream_of(key, clock, lane)
    if ops.missing(key.device) is not None:
        return stream.signs(count)
    product = int(stream.product)
    out = key.new_empty(count, dtype=torch.float32)
    run_signs(key, clock, product << 8 | int(Side.SHARED) << 4 | int(Purpose.SIGNS), out)
    return out
