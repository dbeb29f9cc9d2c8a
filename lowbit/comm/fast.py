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
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowbit.comm import message as messages
from lowbit.comm.fast_tables import OFFSET, FastTables
from lowbit.comm.grid import (
    CODE_MAX,
    CODE_NAN,
    EIGHTHS_MAX,
    EXPONENT_MAX,
    EXPONENT_MIN,
    FP32_MANTISSA,
    LARGEST_BITS,
    SQ48,
    SQUINCH,
    TILE,
    Grid,
)

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

W = TypeVar("W", "Encoding", "Decoding")

CHUNK = 32 * TILE
"""Values coded at a time: 512 KB in FP32. Less would fit a smaller cache, but each of some sixty steps costs a
microsecond however short the rows are.
"""

FINITE = 0x7F7FFFFF
"""Bits of the largest FP32 number."""

MAGNITUDES = np.uint64(0x7FFFFFFF_7FFFFFFF)
LINEAR = 6 * math.log(2) / FP32_MANTISSA
"""6 ln m lies between LINEAR * (bits of m) - 127 * 6 ln 2 and 0.36 more: ln(1 + f) between f ln 2 and f ln 2 + 0.06."""


class Planes:
    """The parts of one message (uint8 [nbytes]) that hold `blocks` blocks from value `begin` on."""

    def __init__(self, grid: Grid, message: Bytes, n: int, begin: int, blocks: int) -> None:
        at = messages.layout(grid, n)
        first = begin // grid.block
        last = first + blocks
        tile = at.exponents + begin // TILE
        self.exponents = message[tile : min(tile + -(-blocks * grid.block // TILE), at.exponents + at.tiles)]
        self.scales = message[at.scales + first : at.scales + last]
        self.first = message[at.first + first : at.first + last]
        self.second = message[at.second + 4 * first : at.second + 4 * last]


class FastCoder:
    """Messages in one grid, on a CPU. Safe to use from several threads."""

    def __init__(self, grid: Grid = SQ48, search: bool = True) -> None:
        self.grid, self.search = grid, search and grid is not SQUINCH
        self.tables = FastTables(grid, self.search)
        self._spare: dict[tuple[type, int], list[Any]] = {}

    def encode(self, x: Tensor, n: int, out: Tensor) -> None:
        """x [m], m <= n, continued with zeros to n values -> out uint8 [nbytes(n)]."""
        message = self._begin(n, out)
        for begin, blocks in self._chunks(n):
            work = self._take(Encoding, blocks)
            work.encode(work.fill(x[begin : begin + CHUNK]), Planes(self.grid, message, n, begin, blocks))
            self._give(work)

    def decode(self, message: Tensor, n: int, out: Tensor) -> None:
        """message uint8 [nbytes(n)] -> its first values, out [m] of any float type, m <= n."""
        for begin, blocks in self._chunks(n):
            part = out[begin : begin + CHUNK]
            if part.numel() == 0:
                break
            work = self._take(Decoding, blocks)
            planes = Planes(self.grid, message.numpy(), n, begin, blocks)
            if part.dtype == torch.float32 and part.numel() == blocks * self.grid.block and part.is_contiguous():
                work.decode(planes, part)
            else:
                part.copy_(work.decode(planes, work.total)[: part.numel()])
            self._give(work)

    def sum_decode(self, rows: Tensor, n: int, factor: float, out: Tensor) -> None:
        """rows uint8 [ranks, nbytes(n)] -> out FP32 [n], their sum times factor."""
        for begin, blocks in self._chunks(n):
            work = self._take(Decoding, blocks)
            part = out[begin : begin + CHUNK]
            part.copy_(work.sum(rows, n, begin, factor)[: part.numel()])
            self._give(work)

    def sum_encode(self, rows: Tensor, n: int, factor: float, out: Tensor) -> None:
        """The same sum as a message, out uint8 [nbytes(n)]: the values never leave the cache."""
        message = self._begin(n, out)
        for begin, blocks in self._chunks(n):
            work, again = self._take(Decoding, blocks), self._take(Encoding, blocks)
            again.encode(work.sum(rows, n, begin, factor), Planes(self.grid, message, n, begin, blocks))
            self._give(work)
            self._give(again)

    def _chunks(self, n: int) -> list[tuple[int, int]]:
        """First value and blocks of each chunk."""
        total = messages.layout(self.grid, n).blocks
        return [
            (begin, min(CHUNK // self.grid.block, total - begin // self.grid.block)) for begin in range(0, n, CHUNK)
        ]

    def _begin(self, n: int, out: Tensor) -> Bytes:
        """out as an array, its header and unused bytes written."""
        message: Bytes = out.numpy()
        at = messages.layout(self.grid, n)
        message[: messages.HEADER.size] = np.frombuffer(messages.header(self.grid, n), np.uint8)
        message[at.exponents + at.tiles : at.scales] = 0
        return message

    def _take(self, kind: type[W], blocks: int) -> W:
        """Buffers that nobody uses. Fresh memory costs more than coding, so whole chunks' buffers are kept."""
        spare = self._spare.setdefault((kind, blocks), [])
        try:
            taken: W = spare.pop()
        except IndexError:
            return kind(self, blocks)
        return taken

    def _give(self, work: "Encoding | Decoding") -> None:
        if work.blocks * self.grid.block == CHUNK:
            self._spare[type(work), work.blocks].append(work)


class Encoding:
    """Buffers for encoding a chunk, and the steps of it."""

    def __init__(self, coder: FastCoder, blocks: int) -> None:
        self.grid, self.search, self.t, self.blocks = coder.grid, coder.search, coder.tables, blocks
        pairs, size = self.grid.block // 2, blocks * self.grid.block
        self.pairs = pairs
        self.finite = FINITE if self.grid is SQUINCH else LARGEST_BITS
        self.flat = torch.empty(size, dtype=torch.float32)
        self.ratios = torch.empty(size, dtype=torch.float32)
        self.index = torch.empty(size, dtype=torch.int32)
        self.entries = self.ratios.view(torch.int32)  # when these come, ratios are done with
        # Views of them, [pairs, blocks, 2] and [pairs, blocks]
        self.ratio = self.ratios.numpy().reshape(pairs, blocks, 2)
        self.ratio_bits = self.ratio.view(np.int32)
        self.ratio_pairs = self.ratio.view(np.uint64).reshape(pairs, blocks)
        self.entry: Ints = self.entries.numpy().reshape(pairs, blocks, 2)
        self.entry_pairs: Words = self.entries.numpy().view(np.uint64).reshape(pairs, blocks)
        # One number a block
        self.by_pair = np.empty((blocks, 2), np.int32)
        self.twice = np.empty((blocks, 2), np.float32)
        self.largest = np.empty(blocks, np.int32)
        per_tile = TILE // self.grid.block
        tiles = torch.zeros(-(-blocks // per_tile), per_tile, dtype=torch.int32)  # unused blocks are below all others
        self.by_tile: Ints = tiles.numpy()
        self.scales = tiles.view(-1)[:blocks]
        self.scale: Ints = self.scales.numpy()
        self.estimate = np.empty(blocks, np.float32)
        self.found = torch.empty(blocks, dtype=torch.int32)
        self.looked_up: Ints = self.found.numpy()
        self.flag = np.empty(blocks, np.bool_)
        self.negative = np.empty(size, np.bool_)
        self.word = np.empty(blocks, np.uint64)

    def fill(self, x: Tensor) -> Tensor:
        """x [m] as contiguous FP32 [blocks * block], zeros after its end."""
        if x.numel() == self.flat.numel() and x.dtype == torch.float32 and x.is_contiguous():
            return x
        self.flat[: x.numel()] = x
        self.flat[x.numel() :] = 0
        return self.flat

    def encode(self, x: Tensor, planes: Planes) -> None:
        """x FP32 [blocks * block] -> planes."""
        values = x.numpy()
        largest, ratio = self.largest, self.ratio
        pairs = values.view(np.uint64).reshape(self.blocks, self.pairs)
        np.bitwise_and(pairs.T, MAGNITUDES, out=self.ratio_pairs)
        np.maximum.reduce(self.ratio_bits, axis=0, out=self.by_pair)
        np.maximum(self.by_pair[:, 0], self.by_pair[:, 1], out=largest)
        bad = None
        if (highest := largest.max()) > self.finite:
            bad = largest > self.finite
            largest[bad] = 0
            ratio[:, bad] = 0
        reciprocal = self._squinch_scale() if self.grid is SQUINCH else self._eighth_scale(planes)
        self.twice[:, 0] = reciprocal
        self.twice[:, 1] = reciprocal
        np.multiply(ratio, self.twice, out=ratio)
        np.rint(ratio, out=ratio)
        if self.grid is SQUINCH and highest > self.t.squinch_largest:
            np.minimum(ratio, self.grid.steps, out=ratio)  # beyond the published range
        self.index.copy_(self.ratios)
        torch.index_select(self.t.entry, 0, self.index, out=self.entries)
        if self.search:
            self._shrink()
        np.less(values.view(np.int32), 0, out=self.negative)
        self._pack_nibbles(planes)
        self._finish(bad, planes)

    def _shrink(self) -> None:
        """self.flag: whether the second scale is better. Scale bytes are lowered where it is."""
        difference = np.add.reduce(self.entry, axis=0, out=self.by_pair)
        total = np.add(difference[:, 0], difference[:, 1], out=self.looked_up)
        np.less(total, 0, out=self.flag)
        if self.scale.min() <= 1:
            np.logical_and(self.flag, self.scale > 1, out=self.flag)
        np.subtract(self.scale, self.flag, out=self.scale)

    def _pack_nibbles(self, planes: Planes) -> None:
        """Levels (in table entries) and signs -> sign and code planes."""
        planes.first[:] = np.packbits(self.negative, bitorder="little")
        wide, word = self.entry_pairs, self.word  # even value | odd value << 32
        if self.search:
            np.bitwise_and(wide, np.uint64(0xFF_000000FF), out=wide)
        for k in (1, 2, 3):
            np.left_shift(wide[k], np.uint64(8 * k), out=word)
            np.bitwise_or(wide[0], word, out=wide[0])
        if self.search:
            np.multiply(self.flag, np.uint64(4), out=word)
            np.right_shift(wide[0], word, out=wide[0])
            np.bitwise_and(wide[0], np.uint64(0x0F0F0F0F_0F0F0F0F), out=wide[0])
        np.right_shift(wide[0], np.uint64(28), out=word)
        np.bitwise_or(wide[0], word, out=word)
        np.copyto(planes.second.view(np.uint32), word, casting="unsafe")

    def _finish(self, bad: npt.NDArray[np.bool_] | None, planes: Planes) -> None:
        """Scale bytes. Blocks of zeros and blocks that are not finite carry nothing else."""
        empty = None
        if self.grid is SQUINCH:
            empty = self.scale == 0 if self.scale.min() == 0 else None
        elif self.largest.min() == 0:
            empty = self.largest == 0
        if empty is not None:
            self.scale[empty] = 0
        if bad is not None:
            self.scale[bad] = CODE_NAN
        np.copyto(planes.scales, self.scale, casting="unsafe")
        if empty is None:
            return
        planes.first[empty] = 0
        planes.second.reshape(-1, 4)[empty] = 0

    def _look_up(self, table: Tensor) -> Ints:
        """table[self.scales], int32 bits."""
        torch.index_select(table, 0, self.scales, out=self.found)
        return self.looked_up

    def _squinch_scale(self) -> npt.NDArray[np.float32]:
        """self.largest -> published codes in self.scale; returns reciprocals."""
        estimate = self.estimate
        np.copyto(estimate, self.largest)
        np.multiply(estimate, np.float32(LINEAR), out=estimate)
        np.add(estimate, np.float32(128.99 - 127 * 6 * math.log(2)), out=estimate)
        np.maximum(estimate, 0, out=estimate)
        np.minimum(estimate, CODE_MAX, out=estimate)
        np.copyto(self.scale, estimate, casting="unsafe")  # this code or the next
        np.greater_equal(self.largest, self._look_up(self.t.thresholds), out=self.flag)
        np.add(self.scale, self.flag, out=self.scale)
        return self._look_up(self.t.squinch_reciprocals).view(np.float32)

    def _eighth_scale(self, planes: Planes) -> npt.NDArray[np.float32]:
        """self.largest -> scale bytes in self.scale, the tiles' exponents in planes; returns reciprocals.

        The upper part of the bits is 8 log2 m + OFFSET within a step, since the mantissa nearly is the logarithm's
        fraction; one comparison with the exact bits of that scale says the rest.
        """
        largest, eighth = self.largest, self.scale
        if self.search:
            np.add(largest, (1 << 20) - 1, out=eighth)
            np.right_shift(eighth, 20, out=eighth)
            np.greater(largest, self._look_up(self.t.scale_bits), out=self.flag)
        else:
            np.add(largest, 1 << 19, out=eighth)
            np.right_shift(eighth, 20, out=eighth)
            np.greater(largest, self._look_up(self.t.half_bits), out=self.flag)
        np.add(eighth, self.flag, out=eighth)
        by_tile = self.by_tile  # [tiles, blocks of a tile]
        highest = np.maximum.reduce(by_tile, axis=1)
        exponent = np.minimum(np.maximum((highest - OFFSET + 7) >> 3, EXPONENT_MIN), EXPONENT_MAX)
        planes.exponents[:] = exponent + 127
        base = (8 * exponent + (OFFSET - CODE_MAX))[:, None]
        np.maximum(by_tile, base + 1, out=by_tile)
        reciprocal = self._look_up(self.t.reciprocals)
        np.subtract(by_tile, base, out=by_tile)
        return reciprocal.view(np.float32)


class Decoding:
    """Buffers for decoding a chunk, and the steps of it."""

    def __init__(self, coder: FastCoder, blocks: int) -> None:
        self.grid, self.t, self.blocks = coder.grid, coder.tables, blocks
        size = blocks * self.grid.block
        self.index = torch.empty(size // 2, dtype=torch.int32)
        self.values = torch.empty(size, dtype=torch.float32)
        self.total = torch.empty(size, dtype=torch.float32)
        self.upper_index = torch.empty(blocks, dtype=torch.int32)
        self.upper = torch.empty(blocks, dtype=torch.int64)
        self.scales = torch.empty(blocks, dtype=torch.int32)
        self.scale: Ints = self.scales.numpy()
        self.units = torch.empty(blocks, dtype=torch.float32)
        self.unit: npt.NDArray[np.float32] = self.units.numpy()

    def decode(self, planes: Planes, out: Tensor) -> Tensor:
        """planes -> out FP32 [blocks * block]."""
        np.copyto(self.upper_index.numpy(), planes.first)
        torch.index_select(self.t.upper, 0, self.upper_index, out=self.upper)
        np.bitwise_or(planes.second, self.upper.numpy().view(np.int16).reshape(-1), out=self.index.numpy())
        torch.index_select(self.t.pairs, 0, self.index, out=out.view(torch.int64))
        self._units(planes)
        value = out.numpy().reshape(self.blocks, self.grid.block)
        np.multiply(value, self.unit[:, None], out=value)
        return out

    def sum(self, rows: Tensor, n: int, begin: int, factor: float) -> Tensor:
        """One chunk of the rows' sum, FP32 [blocks * block]."""
        for r in range(rows.shape[0]):
            planes = Planes(self.grid, rows[r].numpy(), n, begin, self.blocks)
            if r == 0:
                self.decode(planes, self.total)
            else:
                self.total.add_(self.decode(planes, self.values))
        return self.total.mul_(factor) if factor != 1.0 else self.total

    def _units(self, planes: Planes) -> None:
        """self.unit: what level 1 (squinch) or the highest level (sq48) stands for."""
        scale = planes.scales
        np.copyto(self.scale, scale)
        if self.grid is SQUINCH:
            torch.index_select(self.t.squinch_units, 0, self.scales, out=self.units)
            return
        per_tile = TILE // self.grid.block
        base = 8 * planes.exponents.astype(np.int32) + (OFFSET - CODE_MAX - 8 * 127)
        np.add(self.scale, np.repeat(base, per_tile)[: self.blocks], out=self.scale)
        np.maximum(self.scale, 8, out=self.scale)
        np.minimum(self.scale, OFFSET + EIGHTHS_MAX, out=self.scale)
        torch.index_select(self.t.units, 0, self.scales, out=self.units)
        if scale.min() == 0:
            self.unit[scale == 0] = 0
        if scale.max() == CODE_NAN:
            self.unit[scale == CODE_NAN] = np.nan
