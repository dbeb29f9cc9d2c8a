"""Few rows times a packed weight: a Triton kernel that unpacks in registers, for decoding.

    y [M, N] = x [M, K] W^T,   W = code x block scale (x after)

At few rows a product is as fast as its weight is read, so reading 4.5 or 8.25 bits a number in place of 16 is the whole
gain. Every code times its block's scale is a BF16 number exactly, so the product is the emulation's (a BF16 copy of W)
up to the order of its sums; the scale of the tensor or row multiplies the result.

**Unpacking** must cost few instructions a number: at 3 TB/s of 4-bit codes a GPU has about five. A code's bits are put
where BF16 has exponent and mantissa, which gives the number times a power of two, subnormals included:

    E2M1  s ee m         sign << 15 | (code & 7) << 6           = value x 2**-126
    E4M3  s eeee mmm     sign << 15 | (code & 127) << 4         = value x 2**-120

Two words of 16 bits go through each instruction, in inline assembly (Hopper multiplies pairs of BF16, subnormals
included); scales of 4-bit codes are multiplied with what takes the power of two back: 2**118 here, 2**8 in the end, for
2**126 times a scale may be too much. The same in plain Triton is for its interpreter.

A word has two or four numbers; the first ones of all words make one product, the second ones another, and so on, each
with its columns of x. Codes are arranged so that those columns lie in runs, which are copied to where the tensor core
reads them with no register touched. W is the left factor, which comes from registers. A program has BN rows of W; since
that makes fewer programs than a GPU can run where N is small, K is split, too: the program that finishes a tile's last
part adds all of them, in their order, so that the sum is the same every time.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels import PACKED_MULTIPLE, PACKED_ROWS, PACKED_RUN

PROCESSORS = 132
"""Of an H100 or H200."""
MOST_TILES = 1 << 14


class Shape(NamedTuple):
    """How a product is cut. Few warps a program: they never wait for each other, and many programs hide latency."""

    tile: int
    """Rows of W in a program."""
    step: int
    """Numbers of a row that are read at once."""
    warps: int
    stages: int
    programs: int
    """On a processor at once."""


def _shape(bits: int, width: int) -> Shape:
    """The fastest on an H200 (a sweep over products of 1B and 8B models); no register spills on sm_90."""
    if bits == 4 and width % 256 == 0:
        return Shape(tile=32, step=256, warps=2, stages=3, programs=4)
    return Shape(tile=16, step=128, warps=1, stages=4, programs=8)


_QUARTERS = """
{
.reg .b32 a, b;
shl.b32 a, $4, 6;  and.b32 a, a, 0x01C001C0;  shl.b32 b, $4, 12;  lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, $4, 2;  and.b32 a, a, 0x01C001C0;  shl.b32 b, $4, 8;   lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 $1, a, $5;
shr.u32 a, $4, 2;  and.b32 a, a, 0x01C001C0;  shl.b32 b, $4, 4;   lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 $2, a, $5;
shr.u32 a, $4, 6;  and.b32 a, a, 0x01C001C0;  lop3.b32 a, a, $4, 0x80008000, 0xF8;
mul.rn.bf16x2 $3, a, $5;
}
"""
_HALVES = """
{
.reg .b32 a, b, c;
mov.b32 c, 0x7B807B80;
shl.b32 a, $2, 4;  and.b32 a, a, 0x07F007F0;  shl.b32 b, $2, 8;  lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 $0, a, c;
shr.u32 a, $2, 4;  and.b32 a, a, 0x07F007F0;  lop3.b32 a, a, $2, 0x80008000, 0xF8;
mul.rn.bf16x2 $1, a, c;
}
"""
QUARTERS, HALVES = tl.constexpr(_QUARTERS), tl.constexpr(_HALVES)
SCALE_UNIT, RESULT_UNIT = tl.constexpr(2.0**118), tl.constexpr(2.0**8)


@triton.jit
def _e2m1(code, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes in the low 4 bits, int32 -> their numbers."""
    low = code & 7
    doubled = tl.where(low < 2, low, (2 | (low & 1)) << tl.maximum((low >> 1) - 1, 0))
    return (tl.where(code & 8 != 0, -doubled, doubled).to(tl.float32) * 0.5).to(dtype)


@triton.jit
def _e4m3(code, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes, int32 -> their numbers; NaN is not among them."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    whole = tl.where(exponent > 0, mantissa + 8, mantissa).to(tl.float32)
    unit = ((tl.maximum(exponent, 1) + (127 - 10)) << 23).to(tl.float32, bitcast=True)
    return (tl.where(code & 128 != 0, -whole, whole) * unit).to(dtype)


@triton.jit
def _scale_codes(scales, n, block, BLOCKS):  # type: ignore[no-untyped-def]
    """The bytes of scales of rows n and blocks `block`, int32 [BN, blocks]; beyond the last, its."""
    block = tl.minimum(block, BLOCKS - 1)
    return tl.load(scales + n[:, None] * BLOCKS + block[None, :]).to(tl.int32)


@triton.jit
def _scale(code, E8M0: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """What they stand for, FP32; for `QUARTERS` in its unit."""
    if E8M0:
        return tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)
    scale = _e4m3(code, tl.float32)
    if ASM:
        scale = scale * SCALE_UNIT
    return scale


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    x, data, scales, after, y, partial, counters, M, N, K, x_row, part,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
    AFTER: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    tile_n, tile_m = tl.program_id(0) * BN + tl.arange(0, BN).to(tl.int64), tl.arange(0, BM)
    n, m = tl.minimum(tile_n, N - 1), tl.minimum(tile_m, M - 1)  # so that no load needs a mask
    PER: tl.constexpr = 16 // BITS  # numbers of a word of 16 bits
    words = tl.arange(0, BK // PER)
    packed = data.to(tl.pointer_type(tl.int16)) + n[:, None] * (K // PER)
    out = tl.zeros((BN, BM), tl.float32)
    begin, parts = tl.program_id(1) * part, tl.num_programs(1)
    dtype: tl.constexpr = x.dtype.element_ty
    if BLOCK > 0:  # one step ahead: single bytes cannot be copied asynchronously, as the data is
        blocks = tl.arange(0, BK // BLOCK)
        code = _scale_codes(scales, n, begin // BLOCK + blocks, K // BLOCK)
    for k in range(begin, tl.minimum(begin + part, K), BK):
        column = k // PER + words
        word = tl.load(packed + column[None, :])
        if BLOCK > 0:
            scale = _scale(code, BITS == 8, ASM)
            code = _scale_codes(scales, n, (k + BK) // BLOCK + blocks, K // BLOCK)
            wide = tl.broadcast_to(scale.to(dtype)[:, :, None], (BN, BK // BLOCK, BLOCK // PER))
            spread = tl.reshape(wide, (BN, BK // PER))
        first = x + m[None, :] * x_row + (k + words // RUN * (RUN * PER) + words % RUN)[:, None]
        x0, x1 = tl.load(first), tl.load(first + RUN)
        if BITS == 4:
            if ASM:
                w0, w1, w2, w3 = tl.inline_asm_elementwise(
                    QUARTERS, "=r,=r,=r,=r,r,r", [word, spread],
                    dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
                )  # fmt: skip
            else:
                wide_word = word.to(tl.int32)
                w0, w1 = _e2m1(wide_word & 15, dtype) * spread, _e2m1((wide_word >> 4) & 15, dtype) * spread
                w2, w3 = _e2m1((wide_word >> 8) & 15, dtype) * spread, _e2m1((wide_word >> 12) & 15, dtype) * spread
            x2, x3 = tl.load(first + 2 * RUN), tl.load(first + 3 * RUN)
            out = tl.dot(w2, x2, out, input_precision="ieee")
            out = tl.dot(w3, x3, out, input_precision="ieee")
        else:
            if ASM:
                w0, w1 = tl.inline_asm_elementwise(
                    HALVES, "=r,=r,r", [word], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
                )
            else:
                w0, w1 = _e4m3(word.to(tl.int32) & 255, dtype), _e4m3((word.to(tl.int32) >> 8) & 255, dtype)
            if BLOCK > 0:
                w0, w1 = w0 * spread, w1 * spread
        out = tl.dot(w0, x0, out, input_precision="ieee")
        out = tl.dot(w1, x1, out, input_precision="ieee")
    inside = (tile_m[None, :] < M) & (tile_n[:, None] < N)
    at = tile_m[None, :].to(tl.int64) * N + tile_n[:, None]
    size = tl.cast(M, tl.int64) * N
    arrived = parts - 1
    if parts > 1:
        tl.store(partial + tl.program_id(1) * size + at, out, mask=inside)
        tl.debug_barrier()  # all of this program's numbers are there before it is counted
        arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
    if arrived < parts - 1:
        return
    if parts > 1:
        tl.store(counters + tl.program_id(0), 0)
        out = tl.zeros((BN, BM), tl.float32)
        for i in range(parts):
            out += tl.load(partial + i * size + at, mask=inside, other=0.0, cache_modifier=".cg")
    if BITS == 4 and ASM:
        out = out * RESULT_UNIT
    if AFTER == 1:
        out = out * tl.load(after)
    if AFTER == 2:
        out = out * tl.load(after + n)[:, None]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@cache
def _counters(device: torch.device) -> Tensor:
    """How many parts of each tile have come; each product leaves zeros. Products of one stream at a time."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def packed_product(
    x: Tensor, data: Tensor, scales: Tensor | None, after: Tensor | None, bits: int, block: int, asm: bool = True
) -> Tensor:
    """x [M, K] W^T -> [M, N] in the type of x.

    Args:
        x: BF16 (FP32 in the interpreter), M up to PACKED_ROWS, K a multiple of PACKED_MULTIPLE; the numbers of a row
            lie next to each other.
        data: uint8 [N, K * bits / 8], arranged for this kernel (`packed.arranged`).
        scales: uint8 [N, K / block], E4M3 with 4 bits and E8M0 with 8; None: none.
        after: FP32 [1, 1] or [N, 1]. bits: 4 (E2M1) or 8 (E4M3). block: 0 where there are no block scales.
        asm: unpack in inline assembly.
    """
    rows, width = x.shape
    columns = data.shape[0]
    assert 0 < rows <= PACKED_ROWS and x.stride(1) == 1 and width % PACKED_MULTIPLE == 0
    shape = _shape(bits, width)
    tiles = triton.cdiv(columns, shape.tile)
    parts = max(1, min(shape.programs * PROCESSORS // tiles, width // shape.step // 2))
    part = triton.cdiv(width // shape.step, parts) * shape.step
    parts = triton.cdiv(width, part)
    partial = torch.empty(parts if parts > 1 else 0, rows, columns, dtype=torch.float32, device=x.device)
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _product_kernel[(tiles, parts)](
        x, data, data if scales is None else scales, data if after is None else after, y, partial,
        _counters(x.device), rows, columns, width, x.stride(0), part,
        BITS=bits, BLOCK=block, BM=PACKED_ROWS, BN=shape.tile, BK=shape.step, ASM=asm,
        AFTER=0 if after is None else 1 if after.numel() == 1 else 2, RUN=PACKED_RUN[bits],
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return y
