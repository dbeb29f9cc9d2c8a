"""Few rows times a packed weight: a Triton kernel that unpacks in registers, for decoding.

    y [M, N] = x [M, K] W^T,   W = code x block scale (x after)

At few rows a product is as fast as its weight is read, so reading 4.5 or 8.25 bits a number in place of 16 is the whole
gain. Every code times its block's scale is a BF16 number exactly, so the product is the emulation's (a BF16 copy of W)
up to the order of its sums; the scale of the tensor or row multiplies the result.

**Unpacking** must cost few instructions a number: at 3 TB/s of 4-bit codes a GPU has about five. A code's bits are put
where BF16 has exponent and mantissa, which gives the number times a power of two, subnormals included:

    E2M1  s ee m         sign << 15 | (code & 7) << 6           = value x 2**-126
    E4M3  s eeee mmm     sign << 15 | (code & 127) << 4         = value x 2**-120

Two numbers of a register go through each instruction, in inline assembly (`prmt` spreads bytes over half words; Hopper
multiplies pairs of BF16, subnormals included). The same in plain Triton is for its interpreter.

The two numbers in a byte of 4-bit codes belong to neighbouring columns, so x is split in even and odd columns and
multiplied twice. A tile is BN rows of W; since there are fewer tiles than processors where N is small, K is split too:
the program that finishes a tile's last part adds all of them, in their order, so that the sum is the same every time.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

E2M1_BITS, E4M3_BITS = 4, 8
PROCESSORS = 132
"""Of an H100 or H200."""
MOST_TILES = 1 << 14
STEP = 128
"""Numbers of a row that are read at once."""


class Shape(NamedTuple):
    """How a number of rows is cut; chosen so that no register spills (compiled for sm_90)."""

    tile: int
    """Rows of W in a program."""
    warps: int
    stages: int
    programs: int
    """On a processor at once."""


_SHAPES = {
    16: Shape(64, 4, 5, 4),
    32: Shape(64, 4, 4, 2),
    64: Shape(128, 8, 3, 1),
    128: Shape(128, 8, 3, 1),
}
"""By rows of x, padded."""

_HALVES = """
{
.reg .b32 t, u, a, b, c;
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
mov.b32 c, 0x7E807E80;
shl.b32 a, t, 6;  and.b32 a, a, 0x01C001C0;  shl.b32 b, t, 12;  and.b32 b, b, 0x80008000;
or.b32 a, a, b;   mul.rn.bf16x2 $0, a, c;
shl.b32 a, u, 6;  and.b32 a, a, 0x01C001C0;  shl.b32 b, u, 12;  and.b32 b, b, 0x80008000;
or.b32 a, a, b;   mul.rn.bf16x2 $1, a, c;
shl.b32 a, t, 2;  and.b32 a, a, 0x01C001C0;  shl.b32 b, t, 8;   and.b32 b, b, 0x80008000;
or.b32 a, a, b;   mul.rn.bf16x2 $2, a, c;
shl.b32 a, u, 2;  and.b32 a, a, 0x01C001C0;  shl.b32 b, u, 8;   and.b32 b, b, 0x80008000;
or.b32 a, a, b;   mul.rn.bf16x2 $3, a, c;
}
"""
_WHOLE = """
{
.reg .b32 t, u, a, b, c;
prmt.b32 t, $2, 0, 0x4140;
prmt.b32 u, $2, 0, 0x4342;
mov.b32 c, 0x7B807B80;
shl.b32 a, t, 4;  and.b32 a, a, 0x07F007F0;  shl.b32 b, t, 8;   and.b32 b, b, 0x80008000;
or.b32 a, a, b;   mul.rn.bf16x2 $0, a, c;
shl.b32 a, u, 4;  and.b32 a, a, 0x07F007F0;  shl.b32 b, u, 8;   and.b32 b, b, 0x80008000;
or.b32 a, a, b;   mul.rn.bf16x2 $1, a, c;
}
"""
HALVES, WHOLE = tl.constexpr(_HALVES), tl.constexpr(_WHOLE)


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
def _scale_codes(scales, n, block, N, BLOCKS):  # type: ignore[no-untyped-def]
    """The bytes of scales of rows n and blocks `block`, int32 [BN, blocks]; 0 beyond the last."""
    inside = (n[:, None] < N) & (block[None, :] < BLOCKS)
    return tl.load(scales + n[:, None] * BLOCKS + block[None, :], mask=inside, other=0).to(tl.int32)


@triton.jit
def _scale(code, E8M0: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """What they stand for."""
    if E8M0:
        return tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True).to(dtype)
    return _e4m3(code, dtype)


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    x, data, scales, after, y, partial, counters, M, N, K, x_row, part,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
    AFTER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN).to(tl.int64)
    m = tl.arange(0, BM)
    out = tl.zeros((BM, BN), tl.float32)
    begin = tl.program_id(1) * part
    dtype: tl.constexpr = x.dtype.element_ty
    if BLOCK > 0:  # one step ahead: single bytes cannot be copied asynchronously, as the data is
        blocks = tl.arange(0, BK // BLOCK)
        code = _scale_codes(scales, n, begin // BLOCK + blocks, N, K // BLOCK)
    for k in range(begin, tl.minimum(begin + part, K), BK):
        rows = tl.load(x + m[:, None] * x_row + (k + tl.arange(0, BK))[None, :], mask=m[:, None] < M, other=0.0)
        if BITS == 4:
            at = k // 2 + tl.arange(0, BK // 2)
            byte = tl.load(data + n[:, None] * (K // 2) + at[None, :], mask=n[:, None] < N, other=0)
            if ASM:
                low, high = tl.inline_asm_elementwise(
                    HALVES, "=r,=r,=r,=r,r", [byte], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
                )
            else:
                wide = byte.to(tl.int32)
                low, high = _e2m1(wide & 15, dtype), _e2m1(wide >> 4, dtype)
            scale = _scale(code, False, dtype)
            code = _scale_codes(scales, n, (k + BK) // BLOCK + blocks, N, K // BLOCK)
            spread = tl.broadcast_to(scale[:, :, None], (BN, BK // BLOCK, BLOCK // 2))
            spread = tl.reshape(spread, (BN, BK // 2))
            even, odd = tl.split(tl.reshape(rows, (BM, BK // 2, 2)))
            out = tl.dot(even, tl.trans(low * spread), out, input_precision="ieee")
            out = tl.dot(odd, tl.trans(high * spread), out, input_precision="ieee")
        else:
            at = k + tl.arange(0, BK)
            byte = tl.load(data + n[:, None] * K + at[None, :], mask=n[:, None] < N, other=0)
            if ASM:
                number = tl.inline_asm_elementwise(WHOLE, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)
            else:
                number = _e4m3(byte.to(tl.int32), dtype)
            if BLOCK > 0:
                scale = _scale(code, True, dtype)
                code = _scale_codes(scales, n, (k + BK) // BLOCK + blocks, N, K // BLOCK)
                spread = tl.broadcast_to(scale[:, :, None], (BN, BK // BLOCK, BLOCK))
                number = number * tl.reshape(spread, (BN, BK))
            out = tl.dot(rows, tl.trans(number), out, input_precision="ieee")
    inside = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    if PARTS > 1:
        size = tl.cast(M, tl.int64) * N
        tl.store(partial + tl.program_id(1) * size + at, out, mask=inside)
        tl.debug_barrier()  # all of this program's numbers are there before it is counted
        arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived < PARTS - 1:
            return
        tl.store(counters + tl.program_id(0), 0)
        out = tl.zeros((BM, BN), tl.float32)
        for i in range(PARTS):
            out += tl.load(partial + i * size + at, mask=inside, other=0.0, cache_modifier=".cg")
    if AFTER == 1:
        out = out * tl.load(after)
    if AFTER == 2:
        out = out * tl.load(after + n, mask=n < N, other=0.0)[None, :]
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
        x: BF16 (FP32 in the interpreter), M up to 128, K a multiple of 128, numbers of a row next to each other.
        data: uint8 [N, K * bits / 8]. scales: uint8 [N, K / block], E4M3 with 4 bits and E8M0 with 8; None: none.
        after: FP32 [1, 1] or [N, 1]. bits: 4 (E2M1) or 8 (E4M3). block: 0 where there are no block scales.
        asm: unpack in inline assembly.
    """
    rows, width = x.shape
    columns = data.shape[0]
    padded = max(16, triton.next_power_of_2(rows))
    shape = _SHAPES[padded]
    tiles = triton.cdiv(columns, shape.tile)
    parts = max(1, min(shape.programs * PROCESSORS // tiles, width // STEP // 2))
    part = triton.cdiv(width // STEP, parts) * STEP
    parts = triton.cdiv(width, part)
    partial = torch.empty(parts if parts > 1 else 0, rows, columns, dtype=torch.float32, device=x.device)
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _product_kernel[(tiles, parts)](
        x, data, data if scales is None else scales, data if after is None else after, y, partial,
        _counters(x.device), rows, columns, width, x.stride(0), part,
        BITS=bits, BLOCK=block, BM=padded, BN=shape.tile, BK=STEP, ASM=asm,
        AFTER=0 if after is None else 1 if after.numel() == 1 else 2, PARTS=parts,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return y
