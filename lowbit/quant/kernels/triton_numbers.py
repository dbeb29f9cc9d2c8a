"""Numbers in Triton as the reference has them: rounding, codes, Philox, sums and butterflies in a fixed order.

Everything that decides a bit is done as in `lowbit.quant`: rounding by integer arithmetic on the FP32 pattern,
correctly rounded division, butterflies and sums in the same order. Compile what uses it with `enable_fp_fusion=False`:
a contracted multiply-add would round once where the reference rounds twice.

Butterflies and fixed-order sums are written as sums of two along an axis of length two: such a sum has one order, and
the compiler does it in registers or by a shuffle, never through shared memory as a split or a transposition.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SIGN = tl.constexpr(-(1 << 31))
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
FP32_MAX = tl.constexpr(3.4028234663852886e38)
NEAREST = tl.constexpr(0)
UP = tl.constexpr(1)
STOCHASTIC = tl.constexpr(2)


@triton.jit
def bits_of(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number_of(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def nan_like(x):  # type: ignore[no-untyped-def]
    return number_of(tl.zeros_like(bits_of(x)) + QUIET_NAN)


@triton.jit
def round_bf16(x):  # type: ignore[no-untyped-def]
    """FP32 -> nearest BF16 number, FP32 (`bits.round_to_bf16`; a NaN's sign and payload may differ).

    By the processor, two numbers in three instructions where integers take ten each; Triton's interpreter has neither
    the instruction nor a BF16 cast that rounds.
    """
    if INTERPRETED:
        bits = bits_of(x)
        magnitude = bits & MAGNITUDE
        rounded = (tl.minimum(magnitude, INFINITY) + 0x7FFF + ((magnitude >> 16) & 1)) & -65536
        rounded = tl.where(magnitude > INFINITY, QUIET_NAN, rounded)
        nearest = number_of(rounded | (bits & SIGN))
    else:
        nearest = tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return nearest


@triton.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2**exponent, -127..127 (`bits.power_of_two`)."""
    return number_of(tl.where(exponent > -127, (exponent + 127) << 23, 1 << 22))


@triton.jit
def _split_bits(magnitude, M: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exponent field of the step's binade, places to drop, 24-bit significand (`rounding._split`)."""
    exponent = magnitude >> 23
    field = tl.maximum(exponent, 128 - BIAS)
    drop = (23 - M) + field - tl.maximum(exponent, 1)
    fraction = magnitude & 0x7FFFFF
    return field, drop, tl.where(exponent > 0, fraction | 0x800000, fraction)


@triton.jit
def round_to(  # type: ignore[no-untyped-def]
    x, noise, MODE: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr,
    HAS_NAN: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """FP32 -> the format's grid (`rounding`)."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    field, drop, significand = _split_bits(tl.minimum(magnitude, MAX_BITS), M, BIAS)
    one = tl.zeros_like(bits) + 1
    if MODE == STOCHASTIC:
        sixteenths = ((significand >> tl.minimum(drop - 17, 26)) + 1) >> 1
        steps = (sixteenths + noise) >> 16
    else:
        drop = tl.minimum(drop, 26)
        if MODE == UP:
            steps = (significand + (one << drop) - 1) >> drop
        else:
            steps = (significand + (one << (drop - 1)) - 1 + ((significand >> drop) & 1)) >> drop
    value = bits_of(steps.to(tl.float32) * number_of((field - M) << 23))
    sign = bits & SIGN
    if INTEGER:
        sign = tl.where(steps == 0, 0, sign)
    return number_of(tl.where(magnitude > INFINITY, QUIET_NAN if HAS_NAN else 0, value | sign))


@triton.jit
def encode(  # type: ignore[no-untyped-def]
    x, M: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, HAS_NAN: tl.constexpr, NAN_CODE: tl.constexpr,
    INTEGER: tl.constexpr,
):  # fmt: skip
    """Grid values -> codes, int32 (`formats.encode`).

    From the smallest normal number on, exponent and mantissa of FP32 count the same steps; below, so do the last bits
    of the number added to 2**23 steps. An integer format is all below.
    """
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    code = bits_of(number_of(magnitude) + number_of(tl.zeros_like(bits) + ((23 + 128 - BIAS - M) << 23))) & 0xFF
    if INTEGER:
        code = tl.where(bits < 0, -code, code) & 0xFF
    else:
        normal = (magnitude >> (23 - M)) - ((127 - BIAS) << M)
        code = tl.where(magnitude < ((128 - BIAS) << 23), code, normal) | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))
    return tl.where(magnitude > INFINITY, NAN_CODE if HAS_NAN else 0, code)


@triton.jit
def decode(code, M: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, NAN_CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes, int32 -> FP32 values (`formats.decode`), for floating formats; NAN_CODE -1: none."""
    magnitude = code & ((1 << (BITS - 1)) - 1)
    exponent = tl.maximum(magnitude >> M, 1)
    steps = magnitude - ((exponent - 1) << M)
    value = bits_of(steps.to(tl.float32) * number_of((exponent - BIAS - M + 127) << 23))
    if NAN_CODE >= 0:
        value = tl.where(magnitude == NAN_CODE, QUIET_NAN, value)
    return number_of(tl.where((code >> (BITS - 1)) & 1 == 1, value | SIGN, value))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Four uint32 words of `philox.philox4x32`."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def eight_halves(counter, key_ptr, clock_ptr, lane):  # type: ignore[no-untyped-def]
    """Counters, int64 [N, G] -> 16-bit integers, int32 [N, G * 8]: numbers 8 n to 8 n + 7 of `Stream.halves`."""
    c0 = counter.to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = zero + tl.load(clock_ptr).to(tl.uint32)
    c2 = zero + tl.load(clock_ptr + 1).to(tl.uint32)
    c3 = zero + ((tl.load(clock_ptr + 2) << 16) | lane).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        c0, c1, c2, c3, zero + tl.load(key_ptr).to(tl.uint32), zero + tl.load(key_ptr + 1).to(tl.uint32)
    )
    number = tl.arange(0, 8)[None, None, :]
    first = tl.where(number < 2, w0[:, :, None], w1[:, :, None])
    second = tl.where(number < 6, w2[:, :, None], w3[:, :, None])
    word = tl.where(number < 4, first, second)
    half = tl.where(number % 2 == 0, word & 0xFFFF, word >> 16)
    return tl.reshape(half.to(tl.int32), (counter.shape[0], counter.shape[1] * 8))


@triton.jit
def _fold(x):  # type: ignore[no-untyped-def]
    """[N, n] -> [N, n / 2]: x[i] + x[i + n / 2]. A sum of two has one order."""
    return tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1)


@triton.jit
def sum_of_16(x):  # type: ignore[no-untyped-def]
    """[N, 16] -> [N], in the order of `bits.tree_sum`."""
    return tl.sum(_fold(_fold(_fold(x))), 1)


@triton.jit
def sum_of_128(x):  # type: ignore[no-untyped-def]
    """[N, 128] -> [N], in the order of `bits.tree_sum`."""
    return sum_of_16(_fold(_fold(_fold(x))))


@triton.jit
def _stage(x, STRIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(a, b) -> (a + b, a - b) for numbers that lie STRIDE apart.

    Signed zeros count: Triton's minus makes 0 of 0, so -b is b * -1. (In the interpreter its sum makes 0 of -0.)
    """
    pair = tl.arange(0, 2)[None, None, :, None]
    x4 = tl.reshape(x, (x.shape[0], x.shape[1] // (2 * STRIDE), 2, STRIDE))
    total = tl.sum(x4, 2)[:, :, None, :]
    difference = tl.sum(x4 * (1.0 - 2.0 * pair), 2)[:, :, None, :]
    return tl.reshape(tl.where(pair == 0, total, difference), (x.shape[0], x.shape[1]))


@triton.jit
def butterfly(x, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, 2**STAGES] -> its Hadamard transform, unscaled, strides 1, 2, 4, ... (`hadamard`)."""
    for stage in tl.static_range(STAGES):
        x = _stage(x, 1 << stage)
    return x


@triton.jit
def round_nearest(y, M: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`round_to` to nearest, but NaN becomes the largest number, and an integer format's zero keeps its sign.

    Adding 1.5 * 2**23 steps leaves no bits below the step, which is 2**-M of the power of two below.
    """
    bits = bits_of(y)
    magnitude = tl.minimum(bits & MAGNITUDE, MAX_BITS)
    magic = number_of(tl.maximum(magnitude & INFINITY, (128 - BIAS) << 23) + (((23 - M) << 23) + 0x400000))
    return number_of(bits_of((number_of(magnitude) + magic) - magic) | (bits & SIGN))


@triton.jit
def round_element(  # type: ignore[no-untyped-def]
    y, noise, MODE: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr,
    HAS_NAN: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """`round_to`, the fastest way for the format.

    A floating format without NaN makes any number of it: its block's scale is NaN then.
    """
    if MODE == NEAREST:
        rounded = round_nearest(y, M, BIAS, MAX_BITS)
        if INTEGER:
            rounded = tl.where(y == y, rounded + 0.0, 0.0)
        elif HAS_NAN:
            rounded = tl.where(y == y, rounded, nan_like(y))
    else:
        rounded = round_to(y, noise, MODE, M, BIAS, MAX_BITS, HAS_NAN, INTEGER)
    return rounded
