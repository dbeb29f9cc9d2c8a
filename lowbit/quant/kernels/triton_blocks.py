"""The quantisers as one Triton kernel: rotate, scale, round, dequantise and pack in one pass over a tile.

A program takes a tile of ROWS x 128 numbers; 128 is a multiple of every block and of both rotation sizes, so all that
belongs together is inside. How numbers are rounded, coded, drawn and added is in `triton_numbers`.

Maxima are taken over bit patterns, as integers: NaN is above infinity there, and is not lost as it is by `max`.
"""

import triton
import triton.language as tl

from lowbit.quant.kernels.triton_numbers import (
    FP32_MAX,
    INFINITY,
    MAGNITUDE,
    NEAREST,
    QUIET_NAN,
    STOCHASTIC,
    UP,
    bits_of,
    decode,
    eight_halves,
    encode,
    nan_like,
    number_of,
    philox,
    power_of_two,
    round_bf16,
    round_element,
    round_to,
    sum_of_16,
    sum_of_128,
)
from lowbit.quant.kernels.triton_tile import load_tile

# What `scales` and `quantise` call these, as numbers that a kernel can be specialised on.
E8M0_UP = tl.constexpr(1)
E8M0_FLOOR = tl.constexpr(2)
E4M3_NEAREST = tl.constexpr(3)
E4M3_UP = tl.constexpr(4)
GIVEN_SCALE = tl.constexpr(5)
"""FP32, of rows or the whole tensor: computed before."""
POWER_OF_TWO = tl.constexpr(6)
NO_OUTER = tl.constexpr(0)
GIVEN_OUTER = tl.constexpr(1)
"""FP32, of rows or the whole tensor: computed before."""
OUTER_128 = tl.constexpr(2)
OUTER_128_POW2 = tl.constexpr(3)
ROUND_NEAREST = tl.constexpr(0)
ROUND_STOCHASTIC = tl.constexpr(1)
FOUR_OVER_SIX_MSE = tl.constexpr(2)
FOUR_OVER_SIX_MAE = tl.constexpr(3)
MS_EDEN = tl.constexpr(4)
MS_EDEN_PUBLISHED = tl.constexpr(5)
E4M3_MAX_BITS = tl.constexpr(0x43E00000)


@triton.jit
def _spread(v, BR: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """One number a block, [row blocks, column blocks] -> one an element."""
    rows: tl.constexpr = v.shape[0] * BR
    columns: tl.constexpr = v.shape[1] * BC
    wide = tl.broadcast_to(v[:, None, :, None], (v.shape[0], BR, v.shape[1], BC))
    return tl.reshape(wide, (rows, columns))


@triton.jit
def _at_most(x, limit):  # type: ignore[no-untyped-def]
    """min(x, limit) that keeps NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def _exponent(bits, LARGEST_BITS: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, FLOOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """`bits.exponent_floor` and `exponent_up` of a magnitude's pattern."""
    exponent = (bits >> 23) - 127 - LARGEST_EXPONENT
    if not FLOOR:
        exponent += ((bits & 0x7FFFFF) > (LARGEST_BITS & 0x7FFFFF)).to(tl.int32)
    return exponent


@triton.jit
def _e4m3(x, UP_RULE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block scale on the E4M3 grid."""
    return round_to(x, 0, UP if UP_RULE else NEAREST, 3, 7, E4M3_MAX_BITS, True, False)


@triton.jit
def _inner(  # type: ignore[no-untyped-def]
    amax, outer, inverse, target, OUTER: tl.constexpr, UP_RULE: tl.constexpr, INVERSE_TARGET: tl.constexpr,
    EDEN: tl.constexpr,
):  # fmt: skip  # type: ignore[no-untyped-def]
    """(scale, multiplier) of blocks under an outer scale (`scales.inner_scale`)."""
    if OUTER == GIVEN_OUTER:
        scale = _e4m3(amax * (inverse * INVERSE_TARGET), UP_RULE)
        if EDEN:
            scale = tl.where(scale == 0, 1.0, scale)
        whole = scale * outer
    else:
        if OUTER == OUTER_128_POW2:
            ratio = amax * inverse
        else:
            ratio = tl.div_rn(amax, outer + tl.zeros_like(amax))
        scale = _e4m3(tl.div_rn(ratio, tl.zeros_like(ratio) + target), UP_RULE)
        scale = tl.where(scale == 0, 0.001953125, scale)
        whole = scale if OUTER == OUTER_128_POW2 else outer * scale
    return scale, _at_most(tl.div_rn(tl.zeros_like(whole) + 1.0, whole), FP32_MAX)


@triton.jit
def _block_error(elements, scale, units, MSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Error of each 1x16 block, [ROWS, 8] (`quantise._error`)."""
    difference = (elements * _spread(scale, 1, 16)).to(units.dtype) - units
    error = difference * difference if MSE else tl.abs(difference)
    return tl.reshape(sum_of_16(tl.reshape(error, (units.shape[0] * 8, 16))), (units.shape[0], 8))


@triton.jit
def _correction(x, v):  # type: ignore[no-untyped-def]
    """EDEN's c of each row of 128, FP32 [ROWS, 1] (`eden.correction`)."""
    top, bottom = sum_of_128(x * x)[:, None], sum_of_128(x * v)[:, None]
    safe = tl.where(bottom == 0, tl.zeros_like(bottom) + 1.0, bottom)
    if x.dtype == tl.float64:
        quotient = (top / safe).to(tl.float32)
    else:
        quotient = tl.div_rn(top, safe)
    return tl.where(bottom == 0, 1.0, quotient)


@triton.jit
def one_level(  # type: ignore[no-untyped-def]
    x, amax_bits, multiplier_of_row, noise, MODE: tl.constexpr, SCALE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    M: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, MAX_EXPONENT: tl.constexpr, HAS_NAN: tl.constexpr,
    INTEGER: tl.constexpr,
):  # fmt: skip
    """(elements, scale, value) of formats without an outer scale (`scales.one_level`)."""
    if SCALE == GIVEN_SCALE:
        scale = multiplier_of_row
        elements = round_element(x * multiplier_of_row, noise, MODE, M, BIAS, MAX_BITS, HAS_NAN, INTEGER)
        value = elements
    else:
        exponent = _exponent(amax_bits, MAX_BITS, MAX_EXPONENT, SCALE == E8M0_FLOOR)
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
        if SCALE == POWER_OF_TWO:
            exponent = tl.where(amax_bits == 0, 0, tl.maximum(exponent, -126))
        valid = amax_bits < INFINITY
        scale = tl.where(valid, power_of_two(exponent), nan_like(amax_bits))
        multiplier = tl.where(valid, power_of_two(-exponent), nan_like(amax_bits))
        y = x * _spread(multiplier, BR, BC)
        elements = round_element(y, noise, MODE, M, BIAS, MAX_BITS, HAS_NAN, INTEGER)
        value = elements * _spread(scale, BR, BC)
    return elements, scale, value


@triton.jit
def outer_of_128(  # type: ignore[no-untyped-def]
    amax_bits, OUTER: tl.constexpr, BOUND: tl.constexpr, TARGET: tl.constexpr, LIMIT_BITS: tl.constexpr,
    LIMIT_EXPONENT: tl.constexpr,
):  # fmt: skip
    """(outer, inverse) of each row of 128, [ROWS, 1], from the maxima of its blocks (`scales.outer_scale`)."""
    most = tl.max(amax_bits, 1)[:, None]
    valid = most < INFINITY
    nan = nan_like(most)
    if OUTER == OUTER_128_POW2:
        exponent = _exponent(most, LIMIT_BITS, LIMIT_EXPONENT, False)
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
        outer = tl.where(valid, power_of_two(exponent), nan)
        inverse = tl.where(valid, power_of_two(-exponent), nan)
    else:
        largest = tl.where(valid, number_of(most), nan)
        outer = tl.div_rn(tl.div_rn(largest, tl.zeros_like(largest) + BOUND), tl.zeros_like(largest) + TARGET)
        outer = tl.where(outer == 0, 1.0, outer)
        inverse = tl.div_rn(tl.zeros_like(outer) + 1.0, outer)
    return outer, inverse


@triton.jit
def two_level(  # type: ignore[no-untyped-def]
    x, amax, outer, inverse, noise, scale_noise, choice,
    MODE: tl.constexpr, SCALE: tl.constexpr, OUTER: tl.constexpr, ROUNDING: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, TARGET: tl.constexpr,
    INVERSE_TARGET: tl.constexpr,
):  # fmt: skip
    """(elements, scale, value) of E4M3 block scales under an outer scale (`quantise._two_level`)."""
    UP_RULE: tl.constexpr = SCALE == E4M3_UP
    scaled = x
    if OUTER == OUTER_128_POW2:
        scaled = x * _spread(inverse, BR, 128)
    units = scaled
    if ROUNDING >= FOUR_OVER_SIX_MSE and OUTER != OUTER_128_POW2:
        units = x.to(tl.float64) * _spread(inverse, BR, 128).to(tl.float64)
    scale, multiplier = _inner(amax, outer, inverse, TARGET, OUTER, UP_RULE, INVERSE_TARGET, ROUNDING >= MS_EDEN)
    y = scaled * _spread(multiplier, BR, BC)
    elements = round_element(y, noise, MODE, M, BIAS, MAX_BITS, False, False)
    if ROUNDING == FOUR_OVER_SIX_MSE or ROUNDING == FOUR_OVER_SIX_MAE:
        scale4, multiplier4 = _inner(amax, outer, inverse, 4.0, OUTER, UP_RULE, 0.25, False)
        elements4 = round_element(scaled * _spread(multiplier4, BR, BC), 0, NEAREST, M, BIAS, MAX_BITS, False, False)
        MSE: tl.constexpr = ROUNDING == FOUR_OVER_SIX_MSE
        better = _block_error(elements4, scale4, units, MSE) < _block_error(elements, scale, units, MSE)
        better = tl.where(choice == 0, better.to(tl.int32), (choice == 4).to(tl.int32))  # as before, if it is known
        elements = tl.where(_spread(better, BR, BC) != 0, elements4, elements)
        scale = tl.where(better != 0, scale4, scale)
    elif ROUNDING == MS_EDEN or ROUNDING == MS_EDEN_PUBLISHED:
        if ROUNDING == MS_EDEN:
            factor = _correction(units, (elements * _spread(scale, BR, BC)).to(units.dtype))
        else:
            factor = _correction(y.to(tl.float64), elements.to(tl.float64))
        scale = round_to(scale * factor, scale_noise, STOCHASTIC, 3, 7, E4M3_MAX_BITS, True, False)
    if OUTER == OUTER_128 or OUTER == OUTER_128_POW2:
        value = elements * _spread(outer * scale, BR, BC)
    else:
        value = elements * _spread(scale, BR, BC)
    return elements, scale, value


@triton.jit
def store_scales(scales_ptr, scale, at, block, mask, blocks, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block scales as they are stored (`scales.encode_scale`)."""
    place = scales_ptr + at[:, None] * blocks + block[None, :]
    if SCALE == POWER_OF_TWO:
        tl.store(place, scale, mask)
    elif SCALE == E8M0_UP or SCALE == E8M0_FLOOR:
        bits = bits_of(scale) & MAGNITUDE
        tl.store(place, tl.where(bits < INFINITY, tl.minimum(bits >> 23, 254), 255).to(tl.uint8), mask)
    else:
        tl.store(place, encode(scale, 3, 7, 8, True, 0x7F, False).to(tl.uint8), mask)


@triton.jit
def factor_kernel(  # type: ignore[no-untyped-def]
    x_ptr, signs_ptr, key_ptr, clock_ptr, outer_in_ptr, inverse_ptr, choice_ptr,
    operand_ptr, data_ptr, scales_ptr, outer_ptr,
    rows, columns, row_stride, column_stride, width, padded, padded_rows, stored, blocks, given_stride, lane,
    ROWS: tl.constexpr, WHOLE: tl.constexpr, ROTATION: tl.constexpr, STAGES: tl.constexpr,
    ROTATION_SCALE: tl.constexpr, QUANTISED: tl.constexpr, OPERAND: tl.constexpr, CODES: tl.constexpr,
    CHOICE: tl.constexpr, ROW_MAJOR: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr, JOINS: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
    SCALE: tl.constexpr, OUTER: tl.constexpr, ROUNDING: tl.constexpr,
    M: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, MAX_BITS: tl.constexpr, MAX_EXPONENT: tl.constexpr,
    HAS_NAN: tl.constexpr, NAN_CODE: tl.constexpr, INTEGER: tl.constexpr,
    BOUND: tl.constexpr, TARGET: tl.constexpr, INVERSE_TARGET: tl.constexpr, LIMIT_BITS: tl.constexpr,
    LIMIT_EXPONENT: tl.constexpr,
):  # fmt: skip
    """A factor of a product: this program's tile of x [rows, columns], rotated, quantised, dequantised, packed."""
    groups = tl.cdiv(padded, 128)
    if ROW_MAJOR:
        row_tile, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    else:  # neighbours in memory are rows
        row_tiles = tl.cdiv(padded_rows, ROWS)
        row_tile, group = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    RB: tl.constexpr = ROWS // BR
    NB: tl.constexpr = 128 // BC
    r = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = group * 128 + tl.arange(0, 128)
    row_block = row_tile.to(tl.int64) * RB + tl.arange(0, RB)
    block = group * NB + tl.arange(0, NB)
    x = load_tile(
        x_ptr, signs_ptr, r, group, rows, columns, width, row_stride, column_stride,
        ROWS, WHOLE, ROTATION, STAGES, ROTATION_SCALE, PIECE, RUN, JOINS,
    )  # fmt: skip
    value = x
    if QUANTISED:
        amax_bits = tl.max(tl.max(tl.reshape(bits_of(x) & MAGNITUDE, (RB, BR, NB, BC)), 3), 1)  # [RB, NB]
        noise = 0
        if ROUNDING == ROUND_STOCHASTIC:
            eighth = group * 16 + tl.arange(0, 16)
            noise = eight_halves(r[:, None] * (padded // 8) + eighth.to(tl.int64)[None, :], key_ptr, clock_ptr, lane)
        MODE: tl.constexpr = STOCHASTIC if ROUNDING == ROUND_STOCHASTIC else NEAREST
        if OUTER == NO_OUTER:
            given = 0.0
            if SCALE == GIVEN_SCALE:
                given = tl.load(inverse_ptr + r * given_stride, r < rows, 1.0)[:, None]
            elements, scale, value = one_level(
                x, amax_bits, given, noise, MODE, SCALE, BR, BC, M, BIAS, MAX_BITS, MAX_EXPONENT, HAS_NAN, INTEGER
            )
        else:
            if OUTER == GIVEN_OUTER:
                first = row_block * BR
                outer = tl.load(outer_in_ptr + first * given_stride, first < rows, 1.0)[:, None]
                inverse = tl.load(inverse_ptr + first * given_stride, first < rows, 1.0)[:, None]
            else:
                outer, inverse = outer_of_128(amax_bits, OUTER, BOUND, TARGET, LIMIT_BITS, LIMIT_EXPONENT)
                if CODES:
                    tl.store(outer_ptr + row_block[:, None] * groups + group, outer, (row_block < rows)[:, None])
            scale_noise = 0
            if ROUNDING >= MS_EDEN:
                scale_noise = eight_halves((r * (padded // 128) + group)[:, None], key_ptr, clock_ptr, lane | 1)
            choice = tl.zeros((RB, NB), tl.int32)
            if CHOICE:
                known = (row_block * BR < padded_rows)[:, None] & (block * BC < padded)[None, :]
                choice = tl.load(choice_ptr + row_block[:, None] * (padded // BC) + block[None, :], known, 0).to(
                    tl.int32
                )
            elements, scale, value = two_level(
                x, number_of(amax_bits), outer, inverse, noise, scale_noise, choice,
                MODE, SCALE, OUTER, ROUNDING, BR, BC, M, BIAS, MAX_BITS, TARGET, INVERSE_TARGET,
            )  # fmt: skip
        if CODES:
            if not HAS_NAN and not INTEGER:
                elements = tl.where(_spread((scale == scale).to(tl.int32), BR, BC) != 0, elements, 0.0)
            code = encode(elements, M, BIAS, BITS, HAS_NAN, NAN_CODE, INTEGER)
            there = (r < padded_rows)[:, None]
            if BITS == 4:
                shifted = tl.reshape(code, (ROWS, 64, 2)) << (tl.arange(0, 2) * 4)[None, None, :]
                byte = group * 64 + tl.arange(0, 64)
                place = data_ptr + r[:, None] * (stored // 2) + byte[None, :]
                tl.store(place, tl.sum(shifted, 2).to(tl.uint8), there & (byte * 2 < stored)[None, :])
            else:
                tl.store(data_ptr + r[:, None] * stored + c[None, :], code.to(tl.uint8), there & (c < stored)[None, :])
            if SCALE != GIVEN_SCALE:
                mask = (row_block * BR < padded_rows)[:, None] & (block < blocks)[None, :]
                store_scales(scales_ptr, scale, row_block, block, mask, blocks, SCALE)
    if OPERAND:
        wanted = (r < rows)[:, None] & (c < width)[None, :]
        if OUTER == OUTER_128:  # otherwise BF16 holds the value
            value = round_bf16(value)
        tl.store(operand_ptr + r[:, None] * width + c[None, :], value.to(operand_ptr.dtype.element_ty), wanted)


@triton.jit
def unpack_kernel(  # type: ignore[no-untyped-def]
    data_ptr, scales_ptr, outer_ptr, operand_ptr, rows, width, stored, blocks, groups,
    ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SCALE: tl.constexpr, OUTER: tl.constexpr,
    M: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, NAN_CODE: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Packed codes -> the operand [rows, width], as `factor_kernel` stores it."""
    per_row = tl.cdiv(width, 128)
    row_tile, group = tl.program_id(0) // per_row, tl.program_id(0) % per_row
    r = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = group * 128 + tl.arange(0, 128)
    if BITS == 4:
        byte = group * 64 + tl.arange(0, 64)
        mask = (r < rows)[:, None] & (byte * 2 < stored)[None, :]
        both = tl.load(data_ptr + r[:, None] * (stored // 2) + byte[None, :], mask, 0).to(tl.int32)
        code = tl.reshape(tl.join(both & 15, both >> 4), (ROWS, 128))
    else:
        mask = (r < rows)[:, None] & (c < stored)[None, :]
        code = tl.load(data_ptr + r[:, None] * stored + c[None, :], mask, 0).to(tl.int32)
    if INTEGER:
        value = (code << 24 >> 24).to(tl.float32)
    else:
        value = decode(code, M, BIAS, BITS, NAN_CODE)
    if SCALE != GIVEN_SCALE:
        RB: tl.constexpr = ROWS // BR
        NB: tl.constexpr = 128 // BC
        at = row_tile.to(tl.int64) * RB + tl.arange(0, RB)
        block = group * NB + tl.arange(0, NB)
        mask = (at * BR < rows)[:, None] & (block < blocks)[None, :]
        stored_scale = tl.load(scales_ptr + at[:, None] * blocks + block[None, :], mask, 0)
        if SCALE == POWER_OF_TWO:
            scale = stored_scale
        elif SCALE == E8M0_UP or SCALE == E8M0_FLOOR:
            e = stored_scale.to(tl.int32)
            scale = number_of(tl.where(e == 255, QUIET_NAN, tl.where(e > 0, e << 23, 1 << 22)))
        else:
            scale = decode(stored_scale.to(tl.int32), 3, 7, 8, 0x7F)
        if OUTER >= OUTER_128:
            outer = tl.load(outer_ptr + at[:, None] * groups + group, (at < rows)[:, None], 0.0)
            if OUTER == OUTER_128_POW2:
                value = (value * _spread(scale, BR, BC)) * _spread(outer, BR, 128)
            else:
                value = value * _spread(outer * scale, BR, BC)
        else:
            value = value * _spread(scale, BR, BC)
    mask = (r < rows)[:, None] & (c < width)[None, :]
    tl.store(operand_ptr + r[:, None] * width + c[None, :], round_bf16(value).to(operand_ptr.dtype.element_ty), mask)


@triton.jit
def given_kernel(  # type: ignore[no-untyped-def]
    amax_ptr, outer_ptr, inverse_ptr, count, LARGEST: tl.constexpr, ROUND: tl.constexpr, SIZE: tl.constexpr
):
    """FP32 scales of rows or of a tensor from their largest magnitudes (`scales.one_level`, `outer_scale`).

    ROUND: they are of numbers that are not read as BF16 yet; a range that was given is not.
    """
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    amax = tl.load(amax_ptr + i, i < count, 0.0)
    if ROUND:
        amax = round_bf16(amax)
    inverse = _at_most(tl.div_rn(tl.zeros_like(amax) + LARGEST, amax), FP32_MAX)
    inverse = tl.where(amax == 0, 1.0, inverse)
    inverse = tl.where((bits_of(amax) & MAGNITUDE) < INFINITY, inverse, nan_like(amax))
    tl.store(inverse_ptr + i, inverse, i < count)
    tl.store(outer_ptr + i, tl.div_rn(tl.zeros_like(inverse) + 1.0, inverse), i < count)


@triton.jit
def signs_kernel(key_ptr, clock_ptr, out_ptr, lane, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`Stream.signs`, count <= SIZE = 128 of them: one Philox call has as many bits."""
    i = tl.arange(0, SIZE)
    zero = tl.zeros((SIZE,), tl.uint32)
    c1 = zero + tl.load(clock_ptr).to(tl.uint32)
    c2 = zero + tl.load(clock_ptr + 1).to(tl.uint32)
    c3 = zero + ((tl.load(clock_ptr + 2) << 16) | lane).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        zero, c1, c2, c3, zero + tl.load(key_ptr).to(tl.uint32), zero + tl.load(key_ptr + 1).to(tl.uint32)
    )
    word = tl.where(i < 32, w0, tl.where(i < 64, w1, tl.where(i < 96, w2, w3)))
    bit = (word >> (i % 32).to(tl.uint32)) & 1
    tl.store(out_ptr + i, 1.0 - 2.0 * bit.to(tl.float32), i < count)
