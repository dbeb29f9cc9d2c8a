"""Decoding attention over a cache in blocks, and the write into it: Triton kernels.

One query a row, so attention reads each key and value once and multiplies little: what counts is that exactly the
row's own tokens are read, in the bytes they are stored in. A program takes one head of keys (with all query heads that
share it, padded to the 16 rows that a tensor core wants) and one piece of CHUNK tokens of one row; a second kernel
puts the pieces together by their logsumexp:

    o = sum_i exp(l_i - l) o_i,   l = log sum_i exp(l_i)                 (Flash-Decoding, T. Dao et al., 2023)

Probabilities are rounded to BF16 relative to the greatest score so far, which depends on how many keys are looked at
together: as many here as in FlexAttention's kernel on Hopper (TILE), and in powers of two as there, so that a trainer
and a sampler whose products quantise what comes next do not part at once.

Pieces are cut at fixed places, so a row's result is the same sum whatever else is in the batch, and the grid depends on
the width of the table alone, so it can be part of a CUDA graph; programs beyond a row's end return at once.

Codes of 8 bits go into the products as they are, BF16 holds them exactly; the keys' scales multiply the scores, the
values' scales the probabilities.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels.chain import chained, let_next, wait

Memory = tuple[Tensor, Tensor, Tensor, Tensor]

CHUNK = 256
"""Tokens of a piece."""
CROWD = 264
"""Programs, two for each processor of an H200, up to which each begins with all the reads that it has room for."""
OWN_BYTES = 24 * 1024
"""Shared memory of a program beside what it reads ahead: queries and probabilities on their way to the products."""
LOG2_E = tl.constexpr(1.44269504)


@triton.jit
def put_codes(number, memory, scales, place, D: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a head's D numbers to a place of the cache, as `KvCodec.encode` makes them."""
    offsets = tl.arange(0, D)
    if LARGEST == 0:
        tl.store(memory + place * D + offsets, number.to(memory.dtype.element_ty))
    else:
        wide = number.to(tl.float32)
        amax = tl.max(tl.abs(wide), axis=0) + 0.0 * tl.sum(wide, axis=0)  # the greatest leaves out what is no number
        inverse = tl.where(amax > 0, tl.div_rn(LARGEST * 1.0, amax), 0.0)
        scaled = tl.minimum(tl.maximum(wide * inverse, -LARGEST), LARGEST)
        if INTEGER:
            scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest integer, ties to even
        tl.store(memory + place * D + offsets, scaled.to(memory.dtype.element_ty))
        tl.store(scales + place, tl.div_rn(amax, LARGEST * 1.0))


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    k, v, keys, values, key_scales, value_scales, slots,
    k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr, INTEGER: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    let_next(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(slots + row) * HEADS + head
    d = tl.arange(0, D)
    put_codes(tl.load(k + row * k_row + head * k_head + d), keys, key_scales, place, D, LARGEST, INTEGER)
    put_codes(tl.load(v + row * v_row + head * v_head + d), values, value_scales, place, D, LARGEST, INTEGER)


def store(k: Tensor, v: Tensor, memory: Memory, slots: Tensor, largest: float | None) -> None:
    """Write k, v [R, Hkv, D] to places int64 [R] of one layer; see `PagedCache.store`."""
    keys, values, key_scales, value_scales = memory
    rows, heads, dim = k.shape
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _store_kernel[(rows, heads)](
        k, v, keys, values, key_scales, value_scales, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, D=dim, LARGEST=largest or 0.0, INTEGER=keys.dtype is torch.int8,
        num_warps=1, **chained(k.device),
    )  # fmt: skip


@triton.jit
def _piece_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, table, start, partial, logsums, whole,
    q_row, q_head, table_row, start_row, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    CAP: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    let_next(CHAINED)
    row, head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(start + row * start_row).to(tl.int32) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begin = piece * CHUNK
    end = tl.minimum(begin + CHUNK, length)
    if end <= tl.maximum(begin, first):
        return
    group, d, inside = tl.arange(0, PADDED), tl.arange(0, D), tl.arange(0, TILE)
    query = tl.load(
        q + row * q_row + (head * GROUP + group)[:, None] * q_head + d[None, :], mask=group[:, None] < GROUP, other=0.0
    )
    most = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    out = tl.zeros((PADDED, D), tl.float32)
    ALIGNED: tl.constexpr = BLOCK % TILE == 0 and CHUNK % BLOCK == 0  # a block has all of a tile, a piece whole blocks
    if ALIGNED:
        which = tl.arange(0, CHUNK // BLOCK)
        blocks = tl.load(table + row * table_row + begin // BLOCK + which, begin + which * BLOCK < length, 0)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        here = at + inside
        seen = (here < length) & (here >= first)
        if ALIGNED:  # reads that wait for no other read can be begun early
            block = tl.sum(tl.where(which == (at - begin) // BLOCK, blocks, 0), axis=0)
        else:
            block = tl.load(table + row * table_row + here // BLOCK, mask=here < length, other=0)
        place = (block * BLOCK + here % BLOCK) * HEADS + head
        key = tl.load(keys + place[None, :] * D + d[:, None], mask=seen[None, :], other=0.0)
        score = tl.dot(query, key.to(tl.float32).to(query.dtype), input_precision="ieee") * scale
        if SCALED:
            score = score * tl.load(key_scales + place, mask=seen, other=0.0)[None, :]
        if CAP > 0:  # CAP * tanh(score / CAP)
            score = CAP - 2.0 * CAP / (1.0 + tl.exp2(score * (2.0 * LOG2_E / CAP)))
        score = tl.where(seen[None, :], score * LOG2_E, float("-inf"))
        now = tl.maximum(most, tl.max(score, axis=1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(most - safe)
        total = total * shrink + tl.sum(p, axis=1)
        if SCALED:
            p = p * tl.load(value_scales + place, mask=seen, other=0.0)[None, :]
        value = tl.load(values + place[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
        value = value.to(tl.float32).to(query.dtype)
        out = out * shrink[:, None] + tl.dot(p.to(query.dtype), value, input_precision="ieee")
        most = now
    line = (row * HEADS + head) * GROUP + group  # query heads, in order
    kept = group < GROUP
    out = out / total[:, None]
    if PIECES == 1:
        tl.store(whole + line[:, None] * D + d[None, :], out.to(whole.dtype.element_ty), mask=kept[:, None])
        return
    tl.store(partial + (line * PIECES + piece)[:, None] * D + d[None, :], out, mask=kept[:, None])
    tl.store(logsums + line * PIECES + piece, most / LOG2_E + tl.log(total), mask=kept)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    partial, logsums, start, out, start_row,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, WINDOW: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    let_next(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(start + row * start_row).to(tl.int32) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    d = tl.arange(0, D)
    line = row * H + head
    most = tl.load(logsums + line * PIECES + first // CHUNK)
    total = 1.0
    joined = tl.load(partial + (line * PIECES + first // CHUNK) * D + d)
    for piece in range(first // CHUNK + 1, tl.minimum((length - 1) // CHUNK + 1, PIECES)):
        logsum = tl.load(logsums + line * PIECES + piece)
        now = tl.maximum(most, logsum)
        old, new = tl.exp(most - now), tl.exp(logsum - now)
        joined = joined * old + tl.load(partial + (line * PIECES + piece) * D + d) * new
        total = total * old + new
        most = now
    tl.store(out + line * D + d, (joined / total).to(out.dtype.element_ty))


def stages_of(programs: int, tile_bytes: int, shared_bytes: int) -> int:
    """Tiles of keys and values that are read, or on their way, at once, and the one that is multiplied.

    Args:
        programs: of the launch. tile_bytes: of a tile's keys and values. shared_bytes: that a program may have.
    """
    room = max(1, (shared_bytes - OWN_BYTES) // tile_bytes)
    return 1 + min(3 if programs <= CROWD else 2, room)


@cache
def _shared_bytes(device: torch.device) -> int:
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def decode(
    q: Tensor,
    memory: Memory,
    table: Tensor,
    start: Tensor,
    block: int,
    window: int,
    largest: float | None,
    softcap: float | None = None,
) -> Tensor:
    """q [R, H, D], one token of each row, over the row's own keys, the token's included -> [R, H, D].

    Args:
        memory: of one layer. table: int64 [R, n], any row stride. start: int64 [R], any stride, tokens before this one.
        block: tokens of a block. window: tokens that are seen, 0 for all. largest: of a code; None: no codes.
        softcap: scores become cap * tanh(scores / cap).
    """
    keys, values, key_scales, value_scales = memory
    rows, heads, dim = q.shape
    shared = keys.shape[-2]
    pieces = -(-table.shape[1] * block // CHUNK)
    q = q if q.stride(2) == 1 else q.contiguous()
    partial = torch.empty(rows, heads, pieces, dim, dtype=torch.float32, device=q.device)
    logsums = torch.empty(rows, heads, pieces, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    group, tile = heads // shared, 128 if dim <= 64 else 64
    tile_bytes = 2 * tile * dim * keys.element_size()
    stages = stages_of(rows * shared * pieces, tile_bytes, _shared_bytes(q.device)) if q.is_cuda else 1
    _piece_kernel[(rows, shared, pieces)](
        q, keys, values, key_scales, value_scales, table, start, partial, logsums, out,
        q.stride(0), q.stride(1), table.stride(0), start.stride(0), 1 / math.sqrt(dim),
        HEADS=shared, GROUP=group, PADDED=max(16, triton.next_power_of_2(group)), D=dim, BLOCK=block,
        TILE=tile, CHUNK=CHUNK, PIECES=pieces, WINDOW=window, SCALED=largest is not None,
        CAP=softcap or 0.0, STAGES=stages,
        num_warps=4, **chained(q.device),
    )  # fmt: skip
    if pieces == 1:
        return out
    _join_kernel[(rows, heads)](
        partial, logsums, start, out, start.stride(0),
        H=heads, D=dim, CHUNK=CHUNK, PIECES=pieces, WINDOW=window, num_warps=1, **chained(q.device),
    )  # fmt: skip
    return out
