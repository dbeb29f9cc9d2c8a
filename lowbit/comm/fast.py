"""The 6-bit formats on a CPU, quickly: the bytes of `squinch`, at a fraction of its time.

A gradient codec competes with the wire: a gigabit link takes 6 ns for the 6 bits of a value. Written value by value in
tensor operations, coding costs more than that each way. What makes this file faster:

* Values go through in chunks that stay in the cache, in buffers that are used again.
* While encoding, a chunk lies as [pairs of a block][blocks][2]: the maximum over a block, the product with its scale
  and the packing of its codes become operations on long rows, where [blocks][8] would leave a loop of 8 to each block.
  Moving pairs (8 bytes) into that order costs half of moving single values.
* One table look-up a value gives everything the format needs to know about it: its level under either scale, and what
  the second scale would change in its squared error. The table's entry is one 32-bit integer,
  (error_shrunk - error) << c | level_shrunk << b | level, so that a sum over the block decides the search by its sign
  (c leaves room for the sum of the levels below).
* Decoding looks up two values at a time: a byte of codes and two signs are one index into a table of value pairs.

NumPy does the elementwise work, PyTorch the conversions and look-ups (its are faster); both see the same memory.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowbit.comm import message as messages
from lowbit.comm.grid import (
    CODE_MAX,
    CODE_NAN,
    EIGHTHS,
    EIGHTHS_MAX,
    EXPONENT_MAX,
    EXPONENT_MIN,
    FP32_MANTISSA,
    HALF_EIGHTHS,
    SHRINK,
    SQ48,
    SQ96,
    SQUINCH,
    TILE,
    Grid,
    squinch_reciprocals,
    squinch_thresholds,
    squinch_units,
)

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

CHUNK = 8 * TILE
"""Values coded at a time: 128 KB in FP32."""

INFINITY = 0x7F800000
MAGNITUDES = np.uint64(0x7FFFFFFF_7FFFFFFF)
OFFSET = 1016
"""Tables over s, a scale in eighths of an octave, begin at s = -1016: entry s + OFFSET."""

LINEAR = 6 * math.log(2) / FP32_MANTISSA
"""6 ln m lies between LINEAR * (bits of m) - 127 * 6 ln 2 and 0.36 more: ln(1 + f) between f ln 2 and f ln 2 + 0.06."""


def _look_up(table: Tensor, index: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """table[index], index int32 of any shape, contiguous."""
    found: npt.NDArray[Any] = torch.index_select(table, 0, torch.from_numpy(index.reshape(-1))).numpy()
    return found.reshape(index.shape)


class FastTables:
    """A grid's tables. Built once a codec."""

    def __init__(self, grid: Grid, search: bool) -> None:
        self.bits = 4 if grid.levels < 16 else 5
        self.entry = _entries(grid, search, self.bits)
        scales = range(-OFFSET, EIGHTHS_MAX + 2)
        self.scale_bits = torch.tensor([_scale_bits(s, EIGHTHS) for s in scales], dtype=torch.int32)
        self.half_bits = torch.tensor([_scale_bits(s, HALF_EIGHTHS) for s in scales], dtype=torch.int32)
        self.units = self.scale_bits.view(torch.float32)
        lowest = 8 * EXPONENT_MIN - CODE_MAX + 1  # no block has a smaller scale
        reciprocals = [0.0] * (lowest + OFFSET)
        reciprocals += [float(self.units[96 - s + OFFSET] * (grid.steps / 4096)) for s in scales if s >= lowest]
        self.reciprocals = torch.tensor(reciprocals, dtype=torch.float32)
        self.thresholds = torch.tensor([*squinch_thresholds(), math.inf], dtype=torch.float32)
        self.squinch_units = torch.tensor(squinch_units(), dtype=torch.float32)
        self.squinch_reciprocals = torch.tensor(squinch_reciprocals(), dtype=torch.float32)
        self.pairs = _value_pairs(grid)
        self.upper = _upper_parts(grid)


def _entries(grid: Grid, search: bool, bits: int) -> Tensor:
    """int32: what a value at step i of its block's scale means. Steps go up to 9% beyond the grid, where scales
    saturate; those have the highest level.
    """
    above = 2 * bits + grid.block.bit_length() - 1
    q, q_shrunk = grid.codes(), grid.codes(SHRINK)
    at, at_shrunk = grid.level_steps(), grid.level_steps(SHRINK)
    entries = []
    for i in range(grid.steps + 1):
        difference = (i - at_shrunk[q_shrunk[i]]) ** 2 - (i - at[q[i]]) ** 2
        entries.append(difference << above | q_shrunk[i] << bits | q[i] if search else q[i])
    return torch.tensor(entries + entries[-1:] * (grid.steps // 8), dtype=torch.int32)


def _scale_bits(s: int, mantissas: tuple[int, ...]) -> int:
    """FP32 bits of 2**(s/8), or of the middle between it and the next scale."""
    return ((s >> 3) + 127) << 23 | mantissas[s & 7] if s >> 3 < 128 else INFINITY


def _value_pairs(grid: Grid) -> Tensor:
    """Two FP32 values as one int64. Index: a byte of codes | two signs << 8; for sq96 the pair code, 0..2047."""
    value = torch.tensor(grid.level_values(), dtype=torch.float32)
    if grid is SQ96:
        side = 2 * grid.levels + 1
        code = torch.arange(2048).clamp(max=side * side - 1)
        signed = torch.stack([code // side, code % side], dim=1) - grid.levels
        pair = torch.where(signed < 0, -value[signed.abs()], value[signed.abs()])
    else:
        code = torch.arange(1024)
        pair = value[torch.stack([code & 15, (code >> 4) & 15], dim=1)]
        pair = torch.where(torch.stack([code >> 8, code >> 9], dim=1) & 1 > 0, -pair, pair)
    return pair.contiguous().view(torch.int64).flatten()


def _upper_parts(grid: Grid) -> Tensor:
    """Bits 8 and up of four neighbouring indices into the value pairs, as four int16 in one int64. Index: a byte of
    signs, two bits an index; for sq96 twelve high bits, three an index.
    """
    width, count = (3, 4096) if grid is SQ96 else (2, 256)
    parts = torch.arange(count)[:, None] >> (width * torch.arange(4)) & (1 << width) - 1
    return (parts << 8).to(torch.int16).view(torch.int64).flatten()


class Planes:
    """The parts of one message (uint8 [nbytes]) that hold values begin .. begin + CHUNK."""

    def __init__(self, grid: Grid, message: Bytes, n: int, begin: int) -> None:
        at = messages.layout(grid, n)
        first = begin // grid.block
        last = min(at.blocks, first + CHUNK // grid.block)
        tile = at.exponents + begin // TILE
        self.exponents = message[tile : min(tile + CHUNK // TILE, at.exponents + at.tiles)]
        self.scales = message[at.scales + first : at.scales + last]
        a, b = (8, 3) if grid is SQ96 else (1, 4)
        self.first = message[at.first + a * first : at.first + a * last]
        self.second = message[at.second + b * first : at.second + b * last]


class FastCoder:
    """Messages in one grid, on a CPU. Has no state besides its tables."""

    def __init__(self, grid: Grid = SQ48, search: bool = True) -> None:
        self.grid, self.search = grid, search and grid is not SQUINCH
        self.tables = FastTables(grid, self.search)

    def encode(self, x: Tensor, n: int, out: Tensor) -> None:
        """x [m], m <= n, continued with zeros to n values -> out uint8 [nbytes(n)]."""
        work = Encoding(self)
        message = self._begin(n, out)
        for begin in range(0, n, CHUNK):
            chunk = work.fill(x[begin : begin + CHUNK], min(CHUNK, n - begin))
            work.encode(chunk, Planes(self.grid, message, n, begin))

    def decode(self, message: Tensor, n: int, out: Tensor) -> None:
        """message uint8 [nbytes(n)] -> its first values, out [m] of any float type, m <= n."""
        work = Decoding(self)
        for begin in range(0, out.numel(), CHUNK):
            part = out[begin : begin + CHUNK]
            part.copy_(work.decode(Planes(self.grid, message.numpy(), n, begin))[: part.numel()])

    def sum_decode(self, rows: Tensor, n: int, factor: float, out: Tensor) -> None:
        """rows uint8 [ranks, nbytes(n)] -> out FP32 [n], their sum times factor."""
        work = Decoding(self)
        for begin in range(0, n, CHUNK):
            part = out[begin : begin + CHUNK]
            part.copy_(work.sum(rows, n, begin, factor)[: part.numel()])

    def sum_encode(self, rows: Tensor, n: int, factor: float, out: Tensor) -> None:
        """The same sum as a message, out uint8 [nbytes(n)]: the values never leave the cache."""
        work, again = Decoding(self), Encoding(self)
        message = self._begin(n, out)
        for begin in range(0, n, CHUNK):
            chunk = work.sum(rows, n, begin, factor)
            again.encode(chunk, Planes(self.grid, message, n, begin))

    def _begin(self, n: int, out: Tensor) -> Bytes:
        """out as an array, its header and unused bytes written."""
        message: Bytes = out.numpy()
        at = messages.layout(self.grid, n)
        message[: messages.HEADER.size] = np.frombuffer(messages.header(self.grid, n), np.uint8)
        message[at.exponents + at.tiles : at.scales] = 0
        return message


class Encoding:
    """Buffers for encoding a chunk, and the steps of it. Belongs to one call."""

    def __init__(self, coder: FastCoder) -> None:
        self.grid, self.search, self.t = coder.grid, coder.search, coder.tables
        self.pairs = self.grid.block // 2
        self.flat = torch.empty(CHUNK, dtype=torch.float32)
        self.ratio = torch.empty(CHUNK, dtype=torch.float32)
        self.index = torch.empty(CHUNK, dtype=torch.int32)
        self.entries = torch.empty(CHUNK, dtype=torch.int32)
        self.twice = np.empty((CHUNK // self.grid.block, 2), np.float32)

    def fill(self, x: Tensor, n: int) -> Tensor:
        """x [m], m <= n, as contiguous FP32, continued with zeros to whole blocks and a multiple of 16 of them."""
        unit = messages.BLOCKS_MULTIPLE * self.grid.block
        size = -(-n // unit) * unit
        if x.numel() == size and x.dtype == torch.float32 and x.is_contiguous():
            return x
        flat = self.flat[:size]
        flat[: x.numel()] = x
        flat[x.numel() :] = 0
        return flat

    def encode(self, x: Tensor, planes: Planes) -> None:
        """x FP32 [blocks * block] -> planes."""
        grid, size = self.grid, x.numel()
        blocks = size // grid.block
        values = x.numpy()
        ratio = self.ratio[:size].numpy().reshape(self.pairs, blocks, 2)
        np.bitwise_and(
            values.view(np.uint64).reshape(blocks, self.pairs).T,
            MAGNITUDES,
            out=ratio.view(np.uint64).reshape(self.pairs, blocks),
        )
        by_pair = ratio.view(np.int32).max(axis=0)
        largest = np.maximum(by_pair[:, 0], by_pair[:, 1])  # [blocks], FP32 bits
        bad = np.empty(0, bool)
        if (highest := largest.max()) >= INFINITY:
            bad = largest >= INFINITY
            largest[bad] = 0
            ratio[:, bad] = 0
        if grid is SQUINCH:
            scale, reciprocal = self._squinch_scale(largest)
        else:
            scale, reciprocal = self._eighth_scale(largest, planes)
        twice = self.twice[:blocks]
        twice[:, 0] = reciprocal
        twice[:, 1] = reciprocal
        np.multiply(ratio, twice, out=ratio)
        np.rint(ratio, out=ratio)
        if grid is SQUINCH and highest > self.t.thresholds[CODE_MAX - 1 - 1].view(torch.int32):
            np.minimum(ratio, grid.steps, out=ratio)  # beyond the published range
        index = self.index[:size].copy_(self.ratio[:size])
        entry = torch.index_select(self.t.entry, 0, index, out=self.entries[:size]).numpy()
        shrink = self._shrink(entry.reshape(self.pairs, blocks, 2), scale) if self.search else None
        zero = scale == 0
        zero = zero if grid is SQUINCH else largest == 0
        if grid is SQ96:
            self._pack_pairs(entry, shrink, values, planes)
        else:
            self._pack_nibbles(entry, shrink, values, planes)
        self._clear(zero, bad, scale, planes)

    def _shrink(self, entry: Ints, scale: Ints) -> npt.NDArray[np.bool_]:
        """Whether the second scale is better [blocks]; scale bytes are lowered where it is."""
        difference = entry.sum(axis=0, dtype=np.int32)
        shrink: npt.NDArray[np.bool_] = np.less(difference[:, 0] + difference[:, 1], 0)
        np.logical_and(shrink, scale > 1, out=shrink)
        np.subtract(scale, shrink, out=scale)
        return shrink

    def _pack_nibbles(self, entry: Ints, shrink: npt.NDArray[np.bool_] | None, x: Any, planes: Planes) -> None:
        """Levels (in table entries) and signs -> sign and code planes."""
        np.copyto(planes.first, np.packbits(np.less(x.view(np.int32), 0), bitorder="little"))
        wide = entry.view(np.uint64).reshape(4, -1)  # even value | odd value << 32
        if shrink is not None:
            np.bitwise_and(wide, np.uint64(0xFF_000000FF), out=wide)
        for k in (1, 2, 3):
            np.left_shift(wide[k], np.uint64(8 * k), out=wide[k])
            np.bitwise_or(wide[0], wide[k], out=wide[0])
        word = wide[0]
        if shrink is not None:
            np.right_shift(word, np.uint64(4), out=word, where=shrink)
            np.bitwise_and(word, np.uint64(0x0F0F0F0F_0F0F0F0F), out=word)
        np.bitwise_or(word, word >> np.uint64(28), out=word)
        np.copyto(planes.second.view(np.uint32), word, casting="unsafe")

    def _pack_pairs(self, entry: Ints, shrink: npt.NDArray[np.bool_] | None, x: Any, planes: Planes) -> None:
        """sq96: two signed levels are one of 45**2 codes; low bytes and high bits of eight make a block."""
        blocks = entry.size // 16
        level = entry.reshape(8, blocks, 2)
        if shrink is not None:
            np.right_shift(level, 5, out=level, where=shrink[:, None])
            np.bitwise_and(level, 31, out=level)
        negative = np.less(x.view(np.int32), 0).view(np.uint16).reshape(blocks, 8).T
        negative = np.ascontiguousarray(negative).view(np.bool_).reshape(8, blocks, 2)
        np.negative(level, out=level, where=negative)
        pair = (level[:, :, 0] * 45 + level[:, :, 1] + 22 * 46).astype(np.uint64)
        low, high = np.zeros(blocks, np.uint64), np.zeros(blocks, np.uint64)
        for k in range(8):
            low |= (pair[k] & np.uint64(255)) << np.uint64(8 * k)
            high |= (pair[k] >> np.uint64(8)) << np.uint64(3 * k)
        np.copyto(planes.first.view(np.uint64), low)
        np.copyto(planes.second.reshape(blocks, 3), high.view(np.uint8).reshape(blocks, 8)[:, :3])

    def _clear(self, zero: npt.NDArray[np.bool_], bad: npt.NDArray[np.bool_], scale: Ints, planes: Planes) -> None:
        """Blocks of zeros and blocks that are not finite carry nothing besides their scale byte."""
        empty = zero
        if zero.any():
            scale[zero] = 0
        if bad.size:
            scale[bad] = CODE_NAN
            empty = zero | bad
        np.copyto(planes.scales, scale, casting="unsafe")
        if not empty.any():
            return
        if self.grid is SQ96:
            code = 22 * 46
            planes.first.reshape(-1, 8)[empty] = code & 255
            high = sum((code >> 8) << (3 * k) for k in range(8))
            planes.second.reshape(-1, 3)[empty] = list(high.to_bytes(3, "little"))
        else:
            planes.first[empty] = 0
            planes.second.reshape(-1, 4)[empty] = 0

    def _squinch_scale(self, largest: Ints) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Bits of the largest magnitudes -> published codes and reciprocals."""
        estimate = largest * np.float32(LINEAR)
        estimate += np.float32(128.99 - 127 * 6 * math.log(2))
        np.maximum(estimate, 0, out=estimate)
        np.minimum(estimate, CODE_MAX, out=estimate)
        code: Ints = estimate.astype(np.int32)  # this code or the next
        np.add(code, largest.view(np.float32) >= _look_up(self.t.thresholds, code), out=code)
        return code, _look_up(self.t.squinch_reciprocals, code)

    def _eighth_scale(self, largest: Ints, planes: Planes) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Bits of the largest magnitudes -> scale bytes and reciprocals; the tiles' exponents -> planes.

        The upper part of the bits is 8 log2 m + OFFSET within a step, since the mantissa nearly is the logarithm's
        fraction; one comparison with the exact bits of that scale says the rest.
        """
        if self.search:
            eighth = largest - 1
            np.maximum(eighth, 0, out=eighth)
            np.right_shift(eighth, 20, out=eighth)
            np.add(eighth, 1, out=eighth)
            np.add(eighth, largest > _look_up(self.t.scale_bits, eighth), out=eighth)
        else:
            eighth = largest + (1 << 19)
            np.right_shift(eighth, 20, out=eighth)
            np.add(eighth, largest > _look_up(self.t.half_bits, eighth), out=eighth)
        np.minimum(eighth, EIGHTHS_MAX + OFFSET, out=eighth)
        per_tile = TILE // self.grid.block
        starts = np.arange(0, eighth.size, per_tile)
        highest = np.maximum.reduceat(eighth, starts)
        exponent = np.clip((highest - OFFSET + 7) >> 3, EXPONENT_MIN, EXPONENT_MAX).astype(np.int32)
        np.copyto(planes.exponents, exponent + 127, casting="unsafe")
        base = (8 * exponent + (OFFSET - CODE_MAX)).repeat(per_tile)[: eighth.size]
        np.maximum(eighth, base + 1, out=eighth)
        reciprocal = _look_up(self.t.reciprocals, eighth)
        np.subtract(eighth, base, out=eighth)
        return eighth, reciprocal


class Decoding:
    """Buffers for decoding a chunk, and the steps of it. Belongs to one call."""

    def __init__(self, coder: FastCoder) -> None:
        self.grid, self.t = coder.grid, coder.tables
        self.index = torch.empty(CHUNK // 2, dtype=torch.int32)
        self.values = torch.empty(CHUNK, dtype=torch.float32)
        self.total = torch.empty(CHUNK, dtype=torch.float32)

    def decode(self, planes: Planes, add: bool = False) -> Tensor:
        """planes -> FP32 [blocks * block]: the values, or with `add` the running sum. Overwritten next time."""
        grid = self.grid
        blocks = planes.scales.size
        if grid is SQ96:
            word = np.zeros((blocks, 4), np.uint8)
            word[:, :3] = planes.second.reshape(blocks, 3)
            high = word.view(np.int32)
            upper = _look_up(self.t.upper, np.concatenate([high & 4095, high >> 12], axis=1))
            low = planes.first
        else:
            upper = _look_up(self.t.upper, planes.first.astype(np.int32))
            low = planes.second
        index = self.index[: low.size]
        np.bitwise_or(low, upper.view(np.int16).reshape(-1), out=index.numpy())
        target = (self.values if add else self.total)[: 2 * low.size]
        torch.index_select(self.t.pairs, 0, index, out=target.view(torch.int64))
        value = target.numpy().reshape(blocks, grid.block)
        np.multiply(value, self._units(planes)[:, None], out=value)
        if not add:
            return target
        return self.total[: 2 * low.size].add_(target)

    def sum(self, rows: Tensor, n: int, begin: int, factor: float) -> Tensor:
        """One chunk of the rows' sum, FP32 [blocks * block]."""
        for r in range(rows.shape[0]):
            total = self.decode(Planes(self.grid, rows[r].numpy(), n, begin), add=r > 0)
        return total.mul_(factor) if factor != 1.0 else total

    def _units(self, planes: Planes) -> npt.NDArray[np.float32]:
        """FP32 [blocks]: what level 1 (squinch) or the highest level (sq48, sq96) stands for."""
        scale = planes.scales
        at = scale.astype(np.int32)
        if self.grid is SQUINCH:
            return _look_up(self.t.squinch_units, at)
        base = 8 * (planes.exponents.astype(np.int32) - 127) + (OFFSET - CODE_MAX)
        np.add(at, base.repeat(TILE // self.grid.block)[: at.size], out=at)
        np.maximum(at, 8, out=at)
        np.minimum(at, OFFSET + EIGHTHS_MAX, out=at)
        unit: npt.NDArray[np.float32] = _look_up(self.t.units, at)
        if scale.min() == 0:
            unit[scale == 0] = 0
        if scale.max() == CODE_NAN:
            unit[scale == CODE_NAN] = np.nan
        return unit
