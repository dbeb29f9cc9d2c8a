"""What one thread does of a product with packed weights: reads, unpacks, and its share of a tensor core's tile.

Triton functions on tensors in which **a thread is an element**: the last dimension is the threads of a program, the
others are its tiles, so that an operation on elements is one of every thread on numbers of its own, in inline assembly
where that says more. Without it (ASM false) they are plain Triton, for the interpreter; so is the tensor core.

Thread 4 r + j of a warp holds, of the tile of 16 x 16 numbers that `mma.m16n8k16` takes (PTX ISA), rows r and r + 8 in
four pairs, and of the other factor row r in two. Which columns a pair is of is free, as long as both factors agree.

**Unpacking** must cost few instructions a number: at 3 TB/s of 4-bit codes a GPU has about five, and for integers half
as many. A code's bits are put where BF16 has exponent and mantissa, which gives the number times a power of two,
subnormals included:

    E2M1  s ee m         sign << 15 | (code & 7) << 6           = value x 2**-126
    E4M3  s eeee mmm     sign << 15 | (code & 127) << 4         = value x 2**-120

Two go through each instruction (Hopper multiplies pairs of BF16, subnormals included); the scales of 4-bit codes are
multiplied with what takes the power of two back: 2**118 here, 2**8 in the end, for 2**126 times a scale may be too
much.

A word of row r and one of row r + 8 have eight numbers each, whose 4-bit codes are not in order but where a shift and
an AND leave two of them as BF16 wants them (`arrangement`): bits {6, 7, 8, 15} of both halves of a word are there
already, {0, 1, 2, 9} are after a shift and {10, 11, 12, 3} after a rotation. No fourth such set is left in 16 bits; but
what is left over in both words, one shifted by two, makes two of them. Scales are bytes E5M3, all of them normal
numbers: a product and a sum with integers make such a byte twice a word of BF16.
"""

import triton
import triton.language as tl

from lowbit.infer.arrangement import SHARED as SHARED_BITS

_UNPACK_E2M1 = f"""
{{
.reg .b32 a, c;
and.b32 a, $8, 0x81C081C0;                                 mul.rn.bf16x2 $0, a, $10;
shl.b32 a, $8, 6;            and.b32 a, a, 0x81C081C0;     mul.rn.bf16x2 $1, a, $10;
shf.r.wrap.b32 a, $8, $8, 4; and.b32 a, a, 0x81C081C0;     mul.rn.bf16x2 $2, a, $10;
and.b32 a, $9, 0x81C081C0;                                 mul.rn.bf16x2 $4, a, $11;
shl.b32 a, $9, 6;            and.b32 a, a, 0x81C081C0;     mul.rn.bf16x2 $5, a, $11;
shf.r.wrap.b32 a, $9, $9, 4; and.b32 a, a, 0x81C081C0;     mul.rn.bf16x2 $6, a, $11;
shr.u32 c, $9, 2;            lop3.b32 c, $8, c, {SHARED_BITS}, 0xE4;
shl.b32 a, c, 4;             and.b32 a, a, 0x81C081C0;     mul.rn.bf16x2 $3, a, $10;
shf.r.wrap.b32 a, c, c, 6;   and.b32 a, a, 0x81C081C0;     mul.rn.bf16x2 $7, a, $11;
}}
"""
_UNPACK_E4M3 = """
{
.reg .b32 a, b, c;
mov.b32 c, 0x7B807B80;
shl.b32 a, $2, 4;  and.b32 a, a, 0x07F007F0;  shl.b32 b, $2, 8;  lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 a, a, c;  mul.rn.bf16x2 $0, a, $3;
shr.u32 a, $2, 4;  and.b32 a, a, 0x07F007F0;  lop3.b32 a, a, $2, 0x80008000, 0xF8;
mul.rn.bf16x2 a, a, c;  mul.rn.bf16x2 $1, a, $3;
}
"""
# A scale twice in a word: of 4-bit codes a byte E5M3 in the unit of UNPACK_E2M1 (the added number is 235 << 7), or E8M0
_E5M3_PAIR = "{ .reg .b32 a; prmt.b32 a, $1, 0, $2; mad.lo.u32 $0, a, 16, 0x75807580; }"
_E8M0_PAIR = "{ .reg .b32 a; prmt.b32 a, $1, 0, $2; shl.b32 a, a, 7; max.u32 $0, a, 0x00400040; }"
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
UNPACK_E2M1, UNPACK_E4M3, MMA = tl.constexpr(_UNPACK_E2M1), tl.constexpr(_UNPACK_E4M3), tl.constexpr(_MMA)
E5M3_PAIR, E8M0_PAIR = tl.constexpr(_E5M3_PAIR), tl.constexpr(_E8M0_PAIR)
RESULT_UNIT = tl.constexpr(2.0**8)
PLACE = tl.constexpr(-0x7E3F7E40)  # 0x81C081C0, where a code is in a BF16
SHARED = tl.constexpr(SHARED_BITS)


@triton.jit
def _e4m3(code):  # type: ignore[no-untyped-def]
    """Codes in the low 8 bits, int32 -> their numbers, FP32; NaN is not among them (a NaN becomes 480)."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    whole = tl.where(exponent > 0, mantissa + 8, mantissa).to(tl.float32)
    unit = ((tl.maximum(exponent, 1) + (127 - 10)) << 23).to(tl.float32, bitcast=True)
    return tl.where(code & 128 != 0, -whole, whole) * unit


@triton.jit
def _pair(low, high):  # type: ignore[no-untyped-def]
    """Two FP32 that are BF16 numbers -> one word."""
    return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _low(word):  # type: ignore[no-untyped-def]
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):  # type: ignore[no-untyped-def]
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _turned(word, by: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 rotated to the right."""
    bits = word.to(tl.uint32, bitcast=True)
    return ((bits >> by) | (bits << (32 - by))).to(tl.int32, bitcast=True)


@triton.jit
def _times(word, scale):  # type: ignore[no-untyped-def]
    """Two codes where BF16 has them, each times an FP32 scale."""
    codes = word & PLACE
    return _pair(_low(codes) * 2.0**126 * scale, _high(codes) * 2.0**126 * scale)


@triton.jit
def scale_e5m3(scales, byte: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale in one byte of words: a pair of BF16 in `UNPACK_E2M1`'s unit; in plain Triton FP32."""
    if ASM:
        selector = 0x4040 + 0x0101 * byte
        return tl.inline_asm_elementwise(E5M3_PAIR, "=&r,r,r", [scales, selector], dtype=tl.int32, is_pure=True, pack=1)
    else:  # noqa: RET505
        code = (scales >> (8 * byte)) & 255
        return ((code << 20) + ((127 - 10) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def scale_e8m0(scales, byte: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale in one byte of words: a pair of BF16; in plain Triton FP32."""
    if ASM:
        selector = 0x4040 + 0x0101 * byte
        return tl.inline_asm_elementwise(E8M0_PAIR, "=&r,r,r", [scales, selector], dtype=tl.int32, is_pure=True, pack=1)
    else:  # noqa: RET505
        code = (scales >> (8 * byte)) & 255
        return tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def unpack_e2m1(a, b, scale_a, scale_b, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of row r and one of row r + 8 (see the module), times their scales: four pairs of each row, in the order
    of their columns."""
    if ASM:
        return tl.inline_asm_elementwise(
            UNPACK_E2M1, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [a, b, scale_a, scale_b],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505
        shared = (a & SHARED) | ((b >> 2) & ~SHARED)
        return (
            _times(a, scale_a), _times(a << 6, scale_a), _times(_turned(a, 4), scale_a), _times(shared << 4, scale_a),
            _times(b, scale_b), _times(b << 6, scale_b), _times(_turned(b, 4), scale_b),
            _times(_turned(shared, 6), scale_b),
        )  # fmt: skip


@triton.jit
def unpack_e4m3(word, scale, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four codes of 8 bits times their scale: two pairs."""
    if ASM:
        return tl.inline_asm_elementwise(
            UNPACK_E4M3, "=&r,=&r,r,r", [word, scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return (
            _pair(_e4m3(word) * scale, _e4m3(word >> 16) * scale),
            _pair(_e4m3(word >> 8) * scale, _e4m3(word >> 24) * scale),
        )


@triton.jit
def mma(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """c + A B of each warp: 16 rows, 8 columns, 16 terms, in the tensor core's arrangement; see the module."""
    if ASM:
        return tl.inline_asm_elementwise(
            MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505
        top0, top1 = _terms(a0, a2, b0, b1, c0)
        bottom0, bottom1 = _terms(a1, a3, b0, b1, c0)
        return c0 + top0, c1 + top1, c2 + bottom0, c3 + bottom1


@triton.jit
def _terms(a0, a1, b0, b1, like):  # type: ignore[no-untyped-def]
    """Eight of the sixteen rows: threads 4 r + j hold row r of A, and row r of B^T, at the columns of j."""
    tiles: tl.constexpr = like.shape[0]
    x_tiles: tl.constexpr = like.shape[1]
    warps: tl.constexpr = like.shape[2] // 32
    total = tl.zeros((tiles, x_tiles, warps, 8, 8), tl.float32)
    for half in tl.static_range(2):
        wide_a = tl.broadcast_to(a0 if half == 0 else a1, like.shape)
        wide_b = tl.broadcast_to(b0 if half == 0 else b1, like.shape)
        left = tl.reshape(wide_a, (tiles, x_tiles, warps, 8, 1, 4))
        right = tl.reshape(wide_b, (tiles, x_tiles, warps, 1, 8, 4))
        total += tl.sum(_low(left) * _low(right) + _high(left) * _high(right), axis=5)
    pairs = tl.reshape(total, (tiles, x_tiles, warps * 32, 2))  # thread 4 r + j: columns 2 j and 2 j + 1
    return tl.split(pairs)
