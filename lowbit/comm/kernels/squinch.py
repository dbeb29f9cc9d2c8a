"""The 6-bit formats on a GPU, each direction in one pass over the data: the bytes of `lowbit.comm.squinch`.

A program codes one tile of 4096 values: it holds them in registers, so that the tile's exponent costs no second read.
Encoding reads 4 bytes a value from memory and writes 0.75, decoding the reverse; the sum of the ranks' messages,
decoded and encoded again, reads 0.75 bytes a rank and value and writes 0.75.

Same bits as the reference, without its tables:

* Rounding to a whole number is adding 2**23 and taking it away again (half to even, like `torch.round`).
* Levels come from the GPU's approximate square root, logarithm and power. They are good to 3e-5 of a level, and no
  step lies within 8e-4 of a boundary between levels (see `grid`).
* The search between two scales needs both levels of a value and what the second would change in the squared error, all
  functions of its whole step: one number from a table (`coder.search_table`). Its arithmetic would take four of these
  approximations a value where one load does, and reaches 55% of the copy bandwidth where the table reaches 64%; with no
  search two approximations are faster than a load.
* With noise the level below a value is looked for among all (`_draw`), and the value's place between two is an exact
  division; the noise is that of `lowbit.comm.noise`, whose 32-bit words a GPU multiplies as they are.
* No product may be contracted with a sum: the kernels are compiled without FP fusion, `tl.fma` is used by name.
"""

import math

import triton
import triton.language as tl

from lowbit.comm.grid import LARGEST_BITS, TILE

ROUND = tl.constexpr(8388608.0)
"""2**23: x + ROUND, 0 <= x < 2**22, holds the nearest whole number in its low bits."""
ROUND_BITS = tl.constexpr(0x4B000000)
INFINITY = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
SIGN = tl.constexpr(-2147483648)
LARGEST = tl.constexpr(LARGEST_BITS)
LINEAR = tl.constexpr(6 * math.log(2) / 2**23)
LINEAR_BIAS = tl.constexpr(128.99 - 127 * 6 * math.log(2))
SIZE = tl.constexpr(TILE)

ENTRIES = tl.constexpr(4096)
"""Of the search's table of levels."""

# Offsets in the table of FP32 numbers, and of int32 ones
LEVEL_VALUES, THRESHOLDS, UNITS, RECIPROCALS, POSITIONS = (tl.constexpr(v) for v in (0, 32, 288, 544, 800))
STEPS_OF_EIGHTHS, STEPS_OF_HALVES = tl.constexpr(0), tl.constexpr(8)


@triton.jit
def _eighths_to_bits(eighth, integers):  # type: ignore[no-untyped-def]
    """FP32 bits of 2**(eighth / 8)."""
    return (((eighth >> 3) + 127) << 23) | tl.load(integers + STEPS_OF_EIGHTHS + (eighth & 7))


@triton.jit
def _scales(largest, floats, integers, PUBLISHED: tl.constexpr, SEARCH: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitudes (0 where not finite) -> scale bytes, reciprocals, the tile's exponent byte."""
    if PUBLISHED:
        low = tl.fma(largest.to(tl.float32), LINEAR, LINEAR_BIAS)
        code = tl.minimum(tl.maximum(low, 0.0), 254.0).to(tl.int32)
        reached = largest.to(tl.float32, bitcast=True) >= tl.load(floats + THRESHOLDS + code)
        code += reached.to(tl.int32)
        reciprocal = tl.load(floats + RECIPROCALS + code)
        exponent = 0
    else:
        if SEARCH:
            eighth = (tl.maximum(largest - 1, 0) >> 20) + 1
            middle = tl.load(integers + STEPS_OF_EIGHTHS + (eighth & 7))
        else:
            eighth = (largest + 524288) >> 20
            middle = tl.load(integers + STEPS_OF_HALVES + (eighth & 7))
        eighth += (largest > (((eighth >> 3) << 23) | middle)).to(tl.int32)
        eighth -= 1016
        highest = tl.max(eighth, axis=0)
        exponent = tl.minimum(tl.maximum((highest + 7) >> 3, -80), 128)
        base = 8 * exponent - 254
        eighth = tl.maximum(eighth, base + 1)
        reciprocal = _eighths_to_bits(96 - eighth, integers).to(tl.float32, bitcast=True) * (STEPS / 4096)
        code = eighth - base
    return code, reciprocal, exponent + 127


@triton.jit
def _approximate(x, OF: tl.constexpr, APPROXIMATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The GPU's own root, logarithm or power of two; exact ones in the interpreter."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(OF + ".approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    if OF == "sqrt":
        return tl.sqrt(x)
    return tl.log2(x) if OF == "lg2" else tl.exp2(x)


@triton.jit
def _computed(  # type: ignore[no-untyped-def]
    x, reciprocal, PUBLISHED: tl.constexpr, LEVELS: tl.constexpr, STEPS: tl.constexpr, INVERSE: tl.constexpr,
    OFFSET: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """Part of the blocks [blocks, part] -> the bits of 2**23 + q."""
    ratio = tl.abs(x) * reciprocal[:, None]
    if PUBLISHED:
        step = tl.minimum(ratio, STEPS) + ROUND
        q = _approximate((step - ROUND) * (LEVELS * LEVELS / STEPS), "sqrt", APPROXIMATE) + ROUND
    else:
        step = ratio + ROUND
        logarithm = tl.fma(_approximate(step - ROUND, "lg2", APPROXIMATE), INVERSE, OFFSET)
        q = _approximate(logarithm, "ex2", APPROXIMATE) + ROUND
    return q.to(tl.int32, bitcast=True)


@triton.jit
def _looked_up(x, reciprocal, levels):  # type: ignore[no-untyped-def]
    """Part of the blocks [blocks, part] -> their entries in the search's table of levels."""
    whole = (tl.abs(x) * reciprocal[:, None] + ROUND).to(tl.int32, bitcast=True)
    return tl.load(levels + (whole & (ENTRIES - 1)))  # what is not finite finds some entry, too


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    """`lowbit.comm.noise._mix` of uint32 words."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    x, reciprocal, place, keys, floats, LEVELS: tl.constexpr, WORDS: tl.constexpr
):
    """Levels of x [blocks, part] rounded up or down by chance. place: of each value in its message."""
    ratio = tl.abs(x) * reciprocal[:, None]
    low = tl.zeros_like(place)
    for step in tl.static_range(4):
        higher = low + (8 >> step)
        low = tl.where(ratio >= tl.load(floats + POSITIONS + higher), higher, low)
    low = tl.minimum(low, LEVELS - 1)
    below = tl.load(floats + POSITIONS + low)
    rise = tl.div_rn(ratio - below, tl.load(floats + POSITIONS + 1 + low) - below)
    word = place.to(tl.uint32, bitcast=True)
    for k in tl.static_range(WORDS):
        word = _mix(word ^ tl.load(keys + k).to(tl.uint32, bitcast=True))
    chance = (word >> 8).to(tl.float32) * (1 / 16777216)
    return low + (chance < rise).to(tl.int32)


@triton.jit
def _nibbles(x, q, first: tl.constexpr, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values and levels [blocks, 4] (the bits of 2**23 + q where biased) -> code word, its low 16 bits in use, and sign
    bits [blocks].
    """
    j = tl.arange(0, 4)[None, :]
    word = tl.sum(q << (4 * j), axis=1)
    if BIASED:  # 2**23 adds ROUND_BITS << 4 j, of which two terms are not zero in 32 bits
        word += 83886080  # 2**32 - (0x4B000000 + 0xB0000000)
    signs = tl.sum((x.to(tl.int32, bitcast=True) >> (31 - j - first)) & (1 << (j + first)), axis=1)
    return word, signs


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    """The larger of two, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, ON_GPU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitudes [blocks] of x [blocks, part], NaN's where there is one."""
    if ON_GPU:  # the magnitude is free in a floating-point instruction; the interpreter takes for ever
        return tl.reduce(tl.abs(x), 1, _larger).to(tl.int32, bitcast=True)
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    x0, x1, out, n, tile, tiles, blocks, scales_at, first_at, second_at, header, keys, floats, integers, levels,
    WORDS: tl.constexpr, PUBLISHED: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    STEPS: tl.constexpr, INVERSE: tl.constexpr, OFFSET: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """First and second halves of a tile's blocks, FP32 [blocks of a tile, block / 2] -> the tile's part of the message.

    The first tile also writes the header, the last one zeros after the exponents. `keys`: WORDS words of noise, if any.
    """
    COUNT: tl.constexpr = SIZE // BLOCK
    largest = tl.maximum(_largest(x0, APPROXIMATE), _largest(x1, APPROXIMATE))
    finite = largest < INFINITY if PUBLISHED else largest <= LARGEST
    largest = tl.where(finite, largest, 0)
    code, reciprocal, exponent = _scales(largest, floats, integers, PUBLISHED, SEARCH or WORDS > 0, STEPS)
    carries = largest > 0
    if PUBLISHED:
        carries = code > 0
    if WORDS > 0:
        HALF: tl.constexpr = BLOCK // 2
        place = tile * SIZE + tl.arange(0, COUNT)[:, None] * BLOCK + tl.arange(0, HALF)[None, :]
        q0 = _draw(x0, reciprocal, place, keys, floats, LEVELS, WORDS)
        q1 = _draw(x1, reciprocal, place + HALF, keys, floats, LEVELS, WORDS)
    elif SEARCH:
        q0, q1 = _looked_up(x0, reciprocal, levels), _looked_up(x1, reciprocal, levels)
        shrink = (tl.sum(q0, axis=1) + tl.sum(q1, axis=1) < 0) & (code > 1)
        code -= shrink.to(tl.int32)
        shift = shrink.to(tl.int32)[:, None] * 4
        q0, q1 = (q0 >> shift) & 15, (q1 >> shift) & 15
    else:
        q0 = _computed(x0, reciprocal, PUBLISHED, LEVELS, STEPS, INVERSE, OFFSET, APPROXIMATE)
        q1 = _computed(x1, reciprocal, PUBLISHED, LEVELS, STEPS, INVERSE, OFFSET, APPROXIMATE)
    block = tile * COUNT + tl.arange(0, COUNT)
    inside = block < blocks
    code = tl.where(carries, code, tl.where(finite, 0, 255))
    tl.store(out + scales_at + block, code.to(tl.uint8), inside)
    word0, signs0 = _nibbles(x0, q0, 0, not SEARCH and WORDS == 0)
    word1, signs1 = _nibbles(x1, q1, 4, not SEARCH and WORDS == 0)
    signs = tl.where(carries, signs0 | signs1, 0)
    word = tl.where(carries, word0 | (word1 << 16), 0)
    tl.store(out + first_at + block, signs.to(tl.uint8), inside)
    tl.store((out + second_at).to(tl.pointer_type(tl.int32)) + block, word, inside)
    if not PUBLISHED:
        tl.store(out + 16 + tile, tl.cast(exponent, tl.uint8))
        if tile == tiles - 1:  # unused exponents are zero
            rest = tiles + tl.arange(0, 16)
            tl.store(out + 16 + rest, tl.zeros((16,), tl.uint8), rest < (tiles + 15) // 16 * 16)
    if tile == 0:
        words = out.to(tl.pointer_type(tl.int32))
        tl.store(words, header)
        tl.store(words + 1, tl.cast(n, tl.int32))
        tl.store(words + 2, tl.cast(tl.cast(n, tl.int64) >> 32, tl.int32))
        tl.store(words + 3, 0)


@triton.jit
def _value(q, sign, unit, floats, PUBLISHED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels [blocks, part], signs (bit 31), units [blocks] -> FP32 [blocks, part]."""
    if PUBLISHED:
        root = (q | ROUND_BITS).to(tl.float32, bitcast=True) - ROUND
        level = root * root
    else:
        level = tl.load(floats + LEVEL_VALUES + q)
    value = level * unit[:, None]
    return (value.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    message, tile, blocks, scales_at, first_at, second_at, floats, integers,
    PUBLISHED: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """A tile's part of the message -> both halves of its blocks, FP32 [blocks of a tile, block / 2]."""
    COUNT: tl.constexpr = SIZE // BLOCK
    block = tile * COUNT + tl.arange(0, COUNT)
    inside = block < blocks
    code = tl.load(message + scales_at + block, inside, 0).to(tl.int32)
    if PUBLISHED:
        unit = tl.load(floats + UNITS + code)
    else:
        exponent = tl.load(message + 16 + tile).to(tl.int32) - 127
        eighth = tl.minimum(tl.maximum(code - 254 + 8 * exponent, -1008), 1023)
        bits = _eighths_to_bits(eighth, integers)
        bits = tl.where(code == 0, 0, tl.where(code == 255, QUIET_NAN, bits))
        unit = bits.to(tl.float32, bitcast=True)
    j = tl.arange(0, 4)[None, :]
    word = tl.load((message + second_at).to(tl.pointer_type(tl.int32)) + block, inside, 0)[:, None]
    signs = tl.load(message + first_at + block, inside, 0).to(tl.int32)[:, None]
    x0 = _value((word >> (4 * j)) & 15, (signs << (31 - j)) & SIGN, unit, floats, PUBLISHED)
    x1 = _value((word >> (4 * j + 16)) & 15, (signs << (27 - j)) & SIGN, unit, floats, PUBLISHED)
    return x0, x1


@triton.jit
def encode_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, n, per_row, row_bytes, tiles, blocks, scales_at, first_at, second_at, header, keys, floats,
    integers, levels, WORDS: tl.constexpr,
    PUBLISHED: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    STEPS: tl.constexpr, INVERSE: tl.constexpr, OFFSET: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    HALF: tl.constexpr = BLOCK // 2
    within = tl.arange(0, SIZE // BLOCK)[:, None] * BLOCK + tl.arange(0, HALF)[None, :]
    begin = row * per_row + tl.cast(tile, tl.int64) * SIZE
    left = tl.minimum(per_row - tl.cast(tile, tl.int64) * SIZE, tl.cast(n, tl.int64) - begin)
    if left >= SIZE:
        x0 = tl.load(x_ptr + begin + within).to(tl.float32)
        x1 = tl.load(x_ptr + begin + HALF + within).to(tl.float32)
    else:
        x0 = tl.load(x_ptr + begin + within, within < left, 0.0).to(tl.float32)
        x1 = tl.load(x_ptr + begin + HALF + within, within + HALF < left, 0.0).to(tl.float32)
    _write(
        x0, x1, out_ptr + row * row_bytes, per_row, tile, tiles, blocks, scales_at, first_at, second_at, header,
        keys + row * WORDS, floats, integers, levels, WORDS,
        PUBLISHED, SEARCH, BLOCK, LEVELS, STEPS, INVERSE, OFFSET, APPROXIMATE,
    )  # fmt: skip


@triton.jit
def _store(x0, x1, out, left, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Halves of a tile's blocks -> out, of which `left` values exist."""
    HALF: tl.constexpr = BLOCK // 2
    within = tl.arange(0, SIZE // BLOCK)[:, None] * BLOCK + tl.arange(0, HALF)[None, :]
    x0, x1 = x0.to(out.dtype.element_ty), x1.to(out.dtype.element_ty)
    if left >= SIZE:
        tl.store(out + within, x0)
        tl.store(out + HALF + within, x1)
    else:
        tl.store(out + within, x0, within < left)
        tl.store(out + HALF + within, x1, within + HALF < left)


@triton.jit
def decode_kernel(  # type: ignore[no-untyped-def]
    message_ptr, out_ptr, n, per_row, row_bytes, blocks, scales_at, first_at, second_at, floats, integers,
    PUBLISHED: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    x0, x1 = _read(
        message_ptr + row * row_bytes, tile, blocks, scales_at, first_at, second_at, floats, integers,
        PUBLISHED, BLOCK, LEVELS,
    )  # fmt: skip
    begin = row * per_row + tl.cast(tile, tl.int64) * SIZE
    left = tl.minimum(per_row - tl.cast(tile, tl.int64) * SIZE, tl.cast(n, tl.int64) - begin)
    _store(x0, x1, out_ptr + begin, left, BLOCK)


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, out_ptr, n, factor, row_bytes, tiles, blocks, scales_at, first_at, second_at, header, keys, floats,
    integers, levels, RANKS: tl.constexpr, ENCODE: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr,
    PUBLISHED: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    STEPS: tl.constexpr, INVERSE: tl.constexpr, OFFSET: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    x0, x1 = _read(rows_ptr, tile, blocks, scales_at, first_at, second_at, floats, integers, PUBLISHED, BLOCK, LEVELS)
    for r in range(1, RANKS):
        y0, y1 = _read(
            rows_ptr + tl.cast(r, tl.int64) * row_bytes, tile, blocks, scales_at, first_at, second_at, floats, integers,
            PUBLISHED, BLOCK, LEVELS,
        )  # fmt: skip
        x0, x1 = x0 + y0, x1 + y1
    if SCALED:
        x0, x1 = x0 * factor, x1 * factor
    if ENCODE:
        _write(
            x0, x1, out_ptr, n, tile, tiles, blocks, scales_at, first_at, second_at, header, keys, floats, integers,
            levels, WORDS, PUBLISHED, SEARCH, BLOCK, LEVELS, STEPS, INVERSE, OFFSET, APPROXIMATE,
        )  # fmt: skip
    else:
        begin = tl.cast(tile, tl.int64) * SIZE
        _store(x0, x1, out_ptr + begin, tl.cast(n, tl.int64) - begin, BLOCK)
