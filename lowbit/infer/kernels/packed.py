"""Few rows times a packed weight: a Triton kernel that unpacks in registers, for decoding.

    y [M, N] = x [M, K] W^T,   W = code x block scale (x after)

At few rows a product is as fast as its weight is read, so reading 4.5 or 8.25 bits a number in place of 16 is the whole
gain. Every code times its block's scale is a BF16 number exactly, so the product is the emulation's (a BF16 copy of W)
up to the order of its sums; the scale of the tensor or row multiplies the result.

Nothing is laid out anew between threads: every one reads its numbers of W as codes, its numbers of x, and multiplies
them where they are (`lanes`). `arrangement` lays codes and scales down so that a thread's come in one read
and a warp's next to each other, and that the columns of a word of codes are neighbours in x:

    step     of a warp: 128 columns of 4 bits, 64 of 8
    codes    [tiles of 16 rows, steps, half, 8 r, 4 j, word, 4 bytes]
             row 8 half + r, columns 8 (4 word + j) + 0 ... 7 of the step (of 4 bits some bits of the last two lie in
             the other half's word); of 8 bits 4 (4 word + j) + 0 ... 3
    scales   [tiles, steps, 8 r, 2 groups of j, half, word] of 4 bits, [tiles, steps, 8 r, half, 2] of 8

The warps of a group share its rows and take the steps in turns; their sums are added in their order. Other groups of a
program have other rows and read the same of x at about the same time, so that it comes from near. The weight's first
turns are on their way (`ring`) before the kernel before this one has ended (`chain`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels import PACKED_MULTIPLE, PACKED_ROWS, TILE_ROWS
from lowbit.infer.kernels.chain import chained, let_next, wait
from lowbit.infer.kernels.lanes import (
    RESULT_UNIT,
    load_four,
    load_two,
    mma,
    scale_e5m3,
    scale_e8m0,
    unpack_e2m1,
    unpack_e4m3,
)
from lowbit.infer.kernels.ring import COMMIT, declaration, once, send, take_four, take_one, take_two, waiting

X_TILE = 8
"""Rows of x that the tensor core takes at once."""
RING_BYTES = 40 * 1024
"""Of the 48 KB that a program has without asking for more; up to 8 are for the sums over warps."""


class Shape(NamedTuple):
    """How a product is cut."""

    tiles: int
    """Tiles of rows of W that a warp has."""
    groups: int
    """Of warps that have other tiles than each other, and read the same of x."""
    x_tiles: int
    """Tiles of rows of x."""
    warps: int
    """Of a program; those of a group share its steps."""
    ahead: int = 4
    """Places of the ring, if there is room: turns whose codes and scales are there or on their way."""

    @property
    def turn_bytes(self) -> int:
        """Of a program's codes and scales in a turn, at most."""
        return self.warps * 32 * self.tiles * (32 + 8)

    @property
    def stages(self) -> int:
        """Places of the ring."""
        return min(self.ahead, RING_BYTES // self.turn_bytes)


def shape_of(rows: int, tiles: int, steps: int) -> Shape:
    """For so many rows of x, tiles of W and steps: what was fastest for layers of 1B and 8B models (docs/LOG.md)."""
    x_tiles = triton.next_power_of_2(triton.cdiv(rows, X_TILE))
    many = tiles >= 1024
    if x_tiles == 1:
        return Shape(1, 2, 1, 4) if many else Shape(1, 1, 1, 8, ahead=2 if tiles > 256 else 4)
    if x_tiles == 2:
        return Shape(2, 2, 2, 4) if many else Shape(1, 1, 2, 8 if steps >= 64 else 4, ahead=3)
    return Shape(1, 4 if many else 2, x_tiles, 8)


@triton.jit
def _send(  # type: ignore[no-untyped-def]
    ring, tile, thread, stage, code, scale, there,
    BITS: tl.constexpr, SCALED: tl.constexpr, TILES: tl.constexpr, THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Have a turn's codes and scales, which are at these pointers, come to a stage of the ring."""
    place = ring + ((stage * TILES + tile) * (2 * THREADS) + thread) * 16
    send(place, code, there, 16)
    send(place + THREADS * 16, code + 128, there, 16)
    if SCALED:
        place = ring + STAGES * TILES * THREADS * 32 + ((stage * TILES + tile) * THREADS + thread) * 8
        send(place, scale, there, 8 if BITS == 4 else 4)


@triton.jit
def _take(  # type: ignore[no-untyped-def]
    ring, tile, thread, stage,
    BITS: tl.constexpr, SCALED: tl.constexpr, TILES: tl.constexpr, THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What `_send` sent: four words of row r and four of row r + 8, their scales, a byte each."""
    place = ring + ((stage * TILES + tile) * (2 * THREADS) + thread) * 16
    a0, a1, a2, a3 = take_four(place)
    b0, b1, b2, b3 = take_four(place + THREADS * 16)
    s, t = a0, b0
    if SCALED:
        place = ring + STAGES * TILES * THREADS * 32 + ((stage * TILES + tile) * THREADS + thread) * 8
        if BITS == 4:
            s, t = take_two(place)
        else:
            s = take_one(place)
            t = s >> 16
    return a0, a1, a2, a3, b0, b1, b2, b3, s, t


@triton.jit
def _plain(code, scale, there, BITS: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same without assembly."""
    a0, a1 = tl.load(code, there, 0), tl.load(code + 1, there, 0)
    a2, a3 = tl.load(code + 2, there, 0), tl.load(code + 3, there, 0)
    b0, b1 = tl.load(code + 128, there, 0), tl.load(code + 129, there, 0)
    b2, b3 = tl.load(code + 130, there, 0), tl.load(code + 131, there, 0)
    s, t = a0, b0
    if SCALED:
        s = tl.load(scale, there, 0)
        t = tl.load(scale + 1, there, 0) if BITS == 4 else s >> 16
    return a0, a1, a2, a3, b0, b1, b2, b3, s, t


@triton.jit
def _inputs(x, BITS: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a thread multiplies with a word: four words of x, or two."""
    if BITS == 4:
        return load_four(x, ASM)
    else:  # noqa: RET505
        return load_two(x, ASM)


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    c0, c1, c2, c3, a, b, scale_a, scale_b, x, BITS: tl.constexpr, ASM: tl.constexpr
):
    """Add the product of a word of row r, one of row r + 8 and inputs `x`."""
    if BITS == 4:
        x0, x1, x2, x3 = x
        u0, u1, u2, u3, v0, v1, v2, v3 = unpack_e2m1(a, b, scale_a, scale_b, ASM)
        c0, c1, c2, c3 = mma(c0, c1, c2, c3, u0, v0, u1, v1, x0, x1, ASM)
        return mma(c0, c1, c2, c3, u2, v2, u3, v3, x2, x3, ASM)
    else:  # noqa: RET505
        x0, x1 = x
        u0, u1 = unpack_e4m3(a, scale_a, ASM)
        v0, v1 = unpack_e4m3(b, scale_b, ASM)
        return mma(c0, c1, c2, c3, u0, v0, u1, v1, x0, x1, ASM)


@triton.jit
def _add_turn(  # type: ignore[no-untyped-def]
    c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, b2, b3, s, t, x,
    BITS: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the product of a turn's words, with their scales, and what is at `x`."""
    NUMBERS: tl.constexpr = 32 // BITS
    for w in tl.static_range(4):
        if BITS == 4:
            scale_a, scale_b = scale_e5m3(s, w, ASM), scale_e5m3(t, w, ASM)
        elif SCALED:
            scale_a, scale_b = scale_e8m0(s, w // 2, ASM), scale_e8m0(t, w // 2, ASM)
        else:
            scale_a = tl.full((1, 1, 1), 0x3F803F80, tl.int32) if ASM else tl.full((1, 1, 1), 1.0, tl.float32)
            scale_b = scale_a
        c0, c1, c2, c3 = _multiply(
            c0, c1, c2, c3, (a0, a1, a2, a3)[w], (b0, b1, b2, b3)[w], scale_a, scale_b,
            _inputs(x + w * (2 * NUMBERS), BITS, ASM), BITS, ASM,
        )  # fmt: skip
    return c0, c1, c2, c3


@triton.jit
def _over_warps(c, GROUPS: tl.constexpr, MEMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over the warps of a group: [tiles, x tiles, 32 GROUPS]."""
    each = tl.sum(tl.reshape(c, (c.shape[0], c.shape[1], GROUPS, MEMBERS, 32)), axis=3)
    return tl.reshape(each, (c.shape[0], c.shape[1], GROUPS * 32))


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out, after, y, M, all_tiles, TILES: tl.constexpr, GROUPS: tl.constexpr, X_TILES: tl.constexpr, AFTER: tl.constexpr
):
    """Store a program's sums [TILES, X_TILES, 32 GROUPS, 2, 2] times the scale of the tensor or row."""
    thread = tl.arange(0, 32 * GROUPS)[None, None, :, None, None]
    lane = thread % 32
    m = tl.arange(0, X_TILES)[None, :, None, None, None] * 8 + lane % 4 * 2 + tl.arange(0, 2)[None, None, None, :, None]
    tile = (tl.program_id(0) * GROUPS + thread // 32) * TILES + tl.arange(0, TILES)[:, None, None, None, None]
    n = tile * 16 + lane // 4 + tl.arange(0, 2)[None, None, None, None, :] * 8
    inside = (m < M) & (tile < all_tiles)
    if AFTER == 1:
        out = out * tl.load(after)
    if AFTER == 2:
        out = out * tl.load(after + n, mask=inside, other=0.0)
    tl.store(y + (m.to(tl.int64) * (all_tiles * 16) + n), out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "all_tiles", "steps"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x, data, scales, after, y, M, all_tiles, steps, x_row,
    BITS: tl.constexpr, SCALED: tl.constexpr,
    TILES: tl.constexpr, GROUPS: tl.constexpr, X_TILES: tl.constexpr, WARPS: tl.constexpr,
    AFTER: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
    STAGES: tl.constexpr, DECLARATION: tl.constexpr, WAITING: tl.constexpr,
):  # fmt: skip
    let_next(CHAINED)
    word = tl.pointer_type(tl.int32)
    data, scales, x = data.to(word), scales.to(word), x.to(word)
    NUMBERS: tl.constexpr = 32 // BITS  # of a word of codes; x has half as many words
    SCALES: tl.constexpr = 32 if BITS == 4 else 8  # words of a step
    THREADS: tl.constexpr = 32 * WARPS
    MEMBERS: tl.constexpr = WARPS // GROUPS
    thread = tl.arange(0, THREADS)[None, None, :]
    lane, member, group = thread % 32, thread // 32 % MEMBERS, thread // (32 * MEMBERS)
    own = tl.arange(0, TILES)[:, None, None]
    tile = tl.minimum((tl.program_id(0) * GROUPS + group) * TILES + own, all_tiles - 1).to(tl.int64)
    code = data + (tile * steps + member) * 256 + lane * 4
    scale = scales + (tile * steps + member) * SCALES + (lane // 2 * 2 if BITS == 4 else lane // 4)
    if ASM:
        ring = once(DECLARATION, thread)
        for stage in tl.static_range(STAGES - 1):
            there = stage * MEMBERS + member < steps
            _send(
                ring, own, thread, stage, code + stage * (MEMBERS * 256), scale + stage * (MEMBERS * SCALES), there,
                BITS, SCALED, TILES, THREADS, STAGES,
            )  # fmt: skip
            once(COMMIT, thread)
    x_rows = tl.minimum(tl.arange(0, X_TILES)[None, :, None] * 8 + lane // 4, M - 1)
    x += x_rows.to(tl.int64) * (x_row // 2) + lane % 4 * (NUMBERS // 2)
    c0 = tl.zeros((TILES, X_TILES, THREADS), tl.float32)
    c1, c2, c3 = c0, c0, c0
    stage = 0
    wait(CHAINED)  # weights alone have been read
    for first in range(0, steps, MEMBERS):
        if ASM:
            once(WAITING, thread)
            a0, a1, a2, a3, b0, b1, b2, b3, s, t = _take(ring, own, thread, stage, BITS, SCALED, TILES, THREADS, STAGES)
            ahead = tl.where(stage == 0, STAGES - 1, stage - 1)  # the stage that was read a turn ago
            _send(
                ring, own, thread, ahead, code + (STAGES - 1) * (MEMBERS * 256),
                scale + (STAGES - 1) * (MEMBERS * SCALES),
                first + (STAGES - 1) * MEMBERS + member < steps, BITS, SCALED, TILES, THREADS, STAGES,
            )  # fmt: skip
            once(COMMIT, thread)
            stage = tl.where(stage == STAGES - 1, 0, stage + 1)
        else:
            a0, a1, a2, a3, b0, b1, b2, b3, s, t = _plain(code, scale, first + member < steps, BITS, SCALED)
        code += MEMBERS * 256
        scale += MEMBERS * SCALES
        c0, c1, c2, c3 = _add_turn(
            c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, b2, b3, s, t,
            x + tl.minimum(first + member, steps - 1) * (8 * NUMBERS), BITS, SCALED, ASM,
        )  # fmt: skip

    # Thread 4 r + j has rows r (c0, c1) and r + 8 (c2, c3) of W, rows 2 j and 2 j + 1 of x
    above = tl.join(_over_warps(c0, GROUPS, MEMBERS), _over_warps(c1, GROUPS, MEMBERS))
    below = tl.join(_over_warps(c2, GROUPS, MEMBERS), _over_warps(c3, GROUPS, MEMBERS))
    out = tl.join(above, below)  # [TILES, X_TILES, 32 GROUPS, 2, 2]
    UNIT: tl.constexpr = RESULT_UNIT if BITS == 4 and ASM else 1.0
    _store(out * UNIT, after, y, M, all_tiles, TILES, GROUPS, X_TILES, AFTER)


def packed_product(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    after: Tensor | None,
    asm: bool = True,
    out: torch.dtype = torch.bfloat16,
    shape: Shape | None = None,
) -> Tensor:
    """x [M, K] W^T -> [M, N].

    Args:
        x: BF16, M up to PACKED_ROWS, K a multiple of PACKED_MULTIPLE; the numbers of a row lie next to each other.
        data: uint8 [N / 16, steps, 1024], of 4 bits (E2M1) or 8 (E4M3), as `arrangement.arranged` has them.
        scales: uint8, E5M3 [N / 16, steps, 128] of blocks of 16, or E8M0 [N / 16, steps, 32] of 32; None: none.
        after: FP32 [1, 1] or [N, 1].
        asm: unpack and multiply in inline assembly. out: type of the result. shape: how it is cut, if not as usual.
    """
    rows, width = x.shape
    tiles, steps = data.shape[:2]
    assert 0 < rows <= PACKED_ROWS and width % PACKED_MULTIPLE == 0
    assert x.dtype is torch.bfloat16 and width in (steps * 128, steps * 64)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # rows are read in pieces of 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
    cut = shape or shape_of(rows, tiles, steps)
    assert cut.stages >= 2
    y = torch.empty(rows, tiles * TILE_ROWS, dtype=out, device=x.device)
    _product_kernel[(triton.cdiv(tiles, cut.tiles * cut.groups),)](
        x, data, data if scales is None else scales, data if after is None else after, y,
        rows, tiles, steps, x.stride(0),
        BITS=4 if width == steps * 128 else 8, SCALED=scales is not None, TILES=cut.tiles, GROUPS=cut.groups,
        X_TILES=cut.x_tiles, WARPS=cut.warps, AFTER=0 if after is None else 1 if after.numel() == 1 else 2, ASM=asm,
        STAGES=cut.stages, DECLARATION=declaration(cut.stages * cut.turn_bytes), WAITING=waiting(cut.stages - 2),
        num_warps=cut.warps, **chained(x.device),
    )  # fmt: skip
    return y
