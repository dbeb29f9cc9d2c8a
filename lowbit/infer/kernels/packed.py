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
program have other rows and use the same of x. What a turn needs comes through shared memory (`ring`): a thread's codes
and scales by its own copies, x by those of all groups together, for whom a barrier a turn says that it is there:

    x        [stage, member, word, row, j] of 16 bytes of 4 bits, 8 of 8: a thread's numbers of x for a word

The weight's first turns are on their way before the kernel before this one has ended (`chain`). Where a product has few
rows of weights and x many, several programs take a share of the steps each, so that fewer read the same of x from
afar; their sums are added by who reads the product, in their order (`unfinished`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.arrangement import TILE_ROWS
from lowbit.infer.kernels import PACKED_MULTIPLE, PACKED_ROWS
from lowbit.infer.kernels.chain import chained, let_next, wait
from lowbit.infer.kernels.lanes import (
    RESULT_UNIT,
    mma,
    scale_e5m3,
    scale_e8m0,
    unpack_e2m1,
    unpack_e4m3,
)
from lowbit.infer.kernels.ring import (
    COMMIT,
    declaration,
    once,
    send,
    send_if,
    take_four,
    take_one,
    take_two,
    together,
    waiting,
)
from lowbit.infer.unfinished import Unfinished

X_TILE = 8
"""Rows of x that the tensor core takes at once."""
RING_BYTES, RING_BYTES_ALONE = 40 * 1024, 46 * 1024
"""Of the 48 KB that a program has without asking for more: up to 8 are for the sums over the warps of a group, if there
are several."""
PROGRAMS, MOST_SPLITS = 192, 16
"""Programs of a product of a small weight, about; most that share its steps."""


class Shape(NamedTuple):
    """How a product is cut."""

    tiles: int
    """Tiles of rows of W that a warp has."""
    groups: int
    """Of warps that have other tiles than each other, and use the same of x."""
    x_rows: int
    """Of x, at most: 1, or 8 times a power of two."""
    warps: int
    """Of a program; those of a group share its steps."""
    ahead: int = 4
    """Places of the ring, if there is room: turns that are there or on their way."""
    splits: int = 1
    """Programs of the same tiles, each with its share of the steps."""

    @property
    def x_tiles(self) -> int:
        """Tiles of rows of x."""
        return -(-self.x_rows // X_TILE)

    @property
    def members(self) -> int:
        """Warps of a group."""
        return self.warps // self.groups

    @property
    def turn_bytes(self) -> int:
        """Of a program's turn, at most."""
        return self.warps * 32 * self.tiles * (32 + 8) + self.members * self.x_rows * 256

    @property
    def stages(self) -> int:
        """Places of the ring."""
        return min(self.ahead, (RING_BYTES if self.members > 1 else RING_BYTES_ALONE) // self.turn_bytes)


def shape_of(rows: int, tiles: int, steps: int) -> Shape:
    """For so many rows of x, tiles of W and steps: what was fastest for layers of 1B and 8B models, or nearly so
    (docs/LOG.md)."""
    if rows == 1:
        return Shape(1, 1, 1, 4 if steps >= 64 else 2)
    x_rows = X_TILE * triton.next_power_of_2(triton.cdiv(rows, X_TILE))
    if tiles >= 1024 and x_rows <= 16:
        return Shape(2, 4, x_rows, 4, ahead=3)
    programs = triton.cdiv(tiles, 4)
    wanted = max(PROGRAMS // programs, (steps + 16) // 32)  # to keep a GPU busy, and as long as each has much to do
    splits = 1 << (max(1, min(wanted, steps // 4, MOST_SPLITS)).bit_length() - 1)
    return Shape(1, 4, x_rows, 4, splits=1 if tiles >= 1024 else splits)


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
def _send_x(  # type: ignore[no-untyped-def]
    ring, x, x_row, M, thread, stage, step, last,
    BITS: tl.constexpr, X_ROWS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Have x of the warps' steps from `step` on come to a stage of the ring, of which each thread copies a part."""
    NUMBERS: tl.constexpr = 32 // BITS
    PIECES: tl.constexpr = 16 * X_ROWS  # of a step
    lane, member, group = thread % 32, thread // 32 % MEMBERS, thread // (32 * MEMBERS)
    x += tl.minimum(step + member, last) * (8 * NUMBERS)
    ring += (stage * MEMBERS + member) * (PIECES * 2 * NUMBERS)
    for part in tl.static_range((PIECES + 32 * GROUPS - 1) // (32 * GROUPS)):
        piece = (part * GROUPS + group) * 32 + lane
        row, word = piece // 4 % X_ROWS, piece // (4 * X_ROWS)
        start = x + tl.minimum(row, M - 1).to(tl.int64) * x_row + (word * 4 + piece % 4) * (NUMBERS // 2)
        send_if(ring + piece * (2 * NUMBERS), start, piece < PIECES, 2 * NUMBERS)


@triton.jit
def _inputs(x, BITS: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a thread multiplies with a word: four words of x, or two; from a place of the ring, or a pointer."""
    if ASM:
        if BITS == 4:
            return take_four(x)
        else:  # noqa: RET505
            return take_two(x)
    else:
        if BITS == 4:
            return tl.load(x), tl.load(x + 1), tl.load(x + 2), tl.load(x + 3)
        else:  # noqa: RET505
            return tl.load(x), tl.load(x + 1)


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
    WORD: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the product of a turn's words, with their scales, and what is at `x`, WORD further for each."""
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
            _inputs(x + w * WORD, BITS, ASM), BITS, ASM,
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
    row = tl.program_id(1).to(tl.int64) * M + m
    tl.store(y + (row * (all_tiles * 16) + n), out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "all_tiles", "steps", "share"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x, data, scales, after, y, M, all_tiles, steps, share, x_row,
    BITS: tl.constexpr, SCALED: tl.constexpr,
    TILES: tl.constexpr, GROUPS: tl.constexpr, X_ROWS: tl.constexpr, WARPS: tl.constexpr,
    AFTER: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
    STAGES: tl.constexpr, DECLARATION: tl.constexpr, WAITING: tl.constexpr,
):  # fmt: skip
    word = tl.pointer_type(tl.int32)
    data, scales, x = data.to(word), scales.to(word), x.to(word)
    x_row = x_row // 2
    NUMBERS: tl.constexpr = 32 // BITS  # of a word of codes; x has half as many words
    SCALES: tl.constexpr = 32 if BITS == 4 else 8  # words of a step
    THREADS: tl.constexpr = 32 * WARPS
    MEMBERS: tl.constexpr = WARPS // GROUPS
    X_TILES: tl.constexpr = (X_ROWS + 7) // 8
    thread = tl.arange(0, THREADS)[None, None, :]
    lane, member, group = thread % 32, thread // 32 % MEMBERS, thread // (32 * MEMBERS)
    own = tl.arange(0, TILES)[:, None, None]
    tile = tl.minimum((tl.program_id(0) * GROUPS + group) * TILES + own, all_tiles - 1).to(tl.int64)
    begin = tl.program_id(1) * share
    code = data + (tile * steps + begin + member) * 256 + lane * 4
    scale = scales + (tile * steps + begin + member) * SCALES + (lane // 2 * 2 if BITS == 4 else lane // 4)
    steps = tl.minimum(steps - begin, share)
    x += begin * (8 * NUMBERS)
    x_lines = tl.arange(0, X_TILES)[None, :, None] * 8 + lane // 4
    if ASM:
        ring = once(DECLARATION, thread)
        x_ring = ring + STAGES * (TILES * THREADS * 40)
        for stage in tl.static_range(STAGES - 1):
            there = stage * MEMBERS + member < steps
            _send(
                ring, own, thread, stage, code + stage * (MEMBERS * 256), scale + stage * (MEMBERS * SCALES), there,
                BITS, SCALED, TILES, THREADS, STAGES,
            )  # fmt: skip
            once(COMMIT, thread)
        wait(CHAINED)  # weights alone have been read
        for stage in tl.static_range(STAGES - 1):
            _send_x(x_ring, x, x_row, M, thread, stage, stage * MEMBERS, steps - 1, BITS, X_ROWS, GROUPS, MEMBERS)
            once(COMMIT, thread)
        x_place = x_ring + (member * (16 * X_ROWS) + tl.minimum(x_lines, X_ROWS - 1) * 4 + lane % 4) * (2 * NUMBERS)
    else:
        wait(CHAINED)
        x += tl.minimum(x_lines, M - 1).to(tl.int64) * x_row + lane % 4 * (NUMBERS // 2)
    c0 = tl.zeros((TILES, X_TILES, THREADS), tl.float32)
    c1, c2, c3 = c0, c0, c0
    stage = 0
    for first in range(0, steps, MEMBERS):
        if ASM:
            once(WAITING, thread)
            together(member, GROUPS)
            a0, a1, a2, a3, b0, b1, b2, b3, s, t = _take(ring, own, thread, stage, BITS, SCALED, TILES, THREADS, STAGES)
            ahead = tl.where(stage == 0, STAGES - 1, stage - 1)  # the stage that was read a turn ago
            _send(
                ring, own, thread, ahead, code + (STAGES - 1) * (MEMBERS * 256),
                scale + (STAGES - 1) * (MEMBERS * SCALES),
                first + (STAGES - 1) * MEMBERS + member < steps, BITS, SCALED, TILES, THREADS, STAGES,
            )  # fmt: skip
            _send_x(
                x_ring, x, x_row, M, thread, ahead, first + (STAGES - 1) * MEMBERS, steps - 1,
                BITS, X_ROWS, GROUPS, MEMBERS,
            )  # fmt: skip
            once(COMMIT, thread)
            c0, c1, c2, c3 = _add_turn(
                c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, b2, b3, s, t,
                x_place + stage * (MEMBERS * 16 * X_ROWS * 2 * NUMBERS), 4 * X_ROWS * 2 * NUMBERS, BITS, SCALED, ASM,
            )  # fmt: skip
            stage = tl.where(stage == STAGES - 1, 0, stage + 1)
        else:
            a0, a1, a2, a3, b0, b1, b2, b3, s, t = _plain(code, scale, first + member < steps, BITS, SCALED)
            c0, c1, c2, c3 = _add_turn(
                c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, b2, b3, s, t,
                x + tl.minimum(first + member, steps - 1) * (8 * NUMBERS), 2 * NUMBERS, BITS, SCALED, ASM,
            )  # fmt: skip
        code += MEMBERS * 256
        scale += MEMBERS * SCALES
    let_next(CHAINED)

    # Thread 4 r + j has rows r (c0, c1) and r + 8 (c2, c3) of W, rows 2 j and 2 j + 1 of x
    above = tl.join(_over_warps(c0, GROUPS, MEMBERS), _over_warps(c1, GROUPS, MEMBERS))
    below = tl.join(_over_warps(c2, GROUPS, MEMBERS), _over_warps(c3, GROUPS, MEMBERS))
    out = tl.join(above, below)  # [TILES, X_TILES, 32 GROUPS, 2, 2]
    UNIT: tl.constexpr = RESULT_UNIT if BITS == 4 and ASM else 1.0
    _store(out * UNIT, after, y, M, all_tiles, TILES, GROUPS, X_TILES, AFTER)


def begin_product(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    after: Tensor | None,
    asm: bool = True,
    out: torch.dtype = torch.bfloat16,
    shape: Shape | None = None,
) -> Unfinished:
    """x [M, K] W^T -> [M, N], where several programs share the steps as a sum a share.

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
    share = triton.cdiv(steps, cut.splits)
    splits = triton.cdiv(steps, share)
    assert cut.stages >= 2 and rows <= cut.x_rows
    parts = torch.empty(splits, rows, tiles * TILE_ROWS, dtype=out if splits == 1 else torch.float32, device=x.device)
    left = None if splits == 1 else after
    _product_kernel[(triton.cdiv(tiles, cut.tiles * cut.groups), splits)](
        x, data, data if scales is None else scales, data if after is None else after, parts,
        rows, tiles, steps, share, x.stride(0),
        BITS=4 if width == steps * 128 else 8, SCALED=scales is not None, TILES=cut.tiles, GROUPS=cut.groups,
        X_ROWS=cut.x_rows, WARPS=cut.warps, AFTER=Unfinished(parts, after, out).kind if splits == 1 else 0, ASM=asm,
        STAGES=cut.stages, DECLARATION=declaration(cut.stages * cut.turn_bytes), WAITING=waiting(cut.stages - 2),
        num_warps=cut.warps, **chained(x.device),
    )  # fmt: skip
    return Unfinished(parts, left, out)
