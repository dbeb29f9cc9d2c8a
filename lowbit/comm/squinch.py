"""The 6-bit gradient codecs, written for reading: what their bytes are is defined here.

Encoding a block (8 neighbouring values) takes its largest magnitude m, a scale not far above m, and for every
value the level nearest to |x| / scale in the companded domain (`grid`). Differences between the formats:

* squinch: the scale is the published exp((q_max - 128) / 6) > m.
* sq48: the scale is 2**(s / 8) with s the smallest that reaches m, or s - 1, whichever gives the smaller squared
  error (measured in whole steps, so exactly; a tie keeps the larger). The byte is s relative to the exponent of its
  tile of 4096 values, 1 .. 254: full precision down to 2**-30 of the tile's largest value, gradually nothing over the
  eight octaves below. `search=False` takes the s nearest to 8 log2 m instead and saves the second look (0.3 dB worse).

Signal to noise on normal values: 26.4 and 28.7 dB. All-zero blocks decode to zero. Blocks that hold an Inf or a
NaN decode to NaN, so that checks for overflow see them; in sq48 those with a magnitude above 2**127.875 too.

Stochastic rounding (`noise`) keeps the mean: q goes up with the probability (|x| / unit - level[q]) / (level[q + 1] -
level[q]). It costs 3 to 4 dB a step and pays only where all ranks send almost the same values.

On a CPU and on a GPU the same bytes come from `fast` and `kernels`; this file also serves other devices and noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.comm import message as messages
from lowbit.comm.codec import Codec
from lowbit.comm.grid import (
    CODE_MAX,
    CODE_NAN,
    CODE_ZERO,
    EIGHTHS,
    EIGHTHS_MAX,
    EXPONENT_MAX,
    EXPONENT_MIN,
    HALF_EIGHTHS,
    LARGEST_BITS,
    SHRINK,
    SQ48,
    SQUINCH,
    TILE,
    Grid,
    squinch_reciprocals,
    squinch_thresholds,
    squinch_units,
)
from lowbit.comm.noise import Noise

_FINITE = 0x7F7FFFFF


class Tables(NamedTuple):
    """The numbers of a grid as tensors on one device."""

    codes: Tensor
    """int64 [steps + 1]: level of a value under its block's scale."""
    codes_shrunk: Tensor
    """The same under the second candidate."""
    steps: Tensor
    """int64 [levels + 1]: where the levels lie, in whole steps."""
    steps_shrunk: Tensor
    values: Tensor
    """FP32 [levels + 1]: levels in units of the block's unit."""
    positions: Tensor
    """FP32 [levels + 1]: where the levels lie, in steps, for stochastic rounding."""
    thresholds: Tensor
    units: Tensor
    reciprocals: Tensor


class ReferenceSquinch(Codec):
    """One of the formats in plain PyTorch operations, on any device."""

    def __init__(self, grid: Grid = SQ48, search: bool = True) -> None:
        self.grid = grid
        self.search = search and grid is not SQUINCH
        self.name = grid.name if search or grid is SQUINCH else f"{grid.name}_fast"
        self.bits = 6.0 if grid is SQUINCH else 6.0 + 8 / TILE
        self.align = messages.BLOCKS_MULTIPLE * grid.block
        self._tables: dict[torch.device, Tables] = {}

    def nbytes(self, n: int) -> int:
        return messages.layout(self.grid, n).nbytes

    def tables(self, device: torch.device) -> Tables:
        if device not in self._tables:
            g = self.grid

            def integers(values: list[int]) -> Tensor:
                return torch.tensor(values, dtype=torch.int64, device=device)

            def floats(values: list[float]) -> Tensor:
                return torch.tensor(values, dtype=torch.float32, device=device)

            self._tables[device] = Tables(
                integers(g.codes()),
                integers(g.codes(SHRINK)),
                integers(g.level_steps()),
                integers(g.level_steps(SHRINK)),
                floats(g.level_values()),
                floats([g.position(q) for q in range(g.levels + 1)]),
                floats(squinch_thresholds()),
                floats(squinch_units()),
                floats(squinch_reciprocals()),
            )
        return self._tables[device]

    # Encoding

    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        n, grid = x.numel(), self.grid
        at = messages.layout(grid, n)
        t = self.tables(x.device)
        blocks = torch.zeros(at.blocks * grid.block, dtype=torch.float32, device=x.device)
        blocks[:n] = x
        blocks = blocks.view(at.blocks, grid.block)
        largest = blocks.abs().amax(1)  # NaN where one value is
        finite = largest.view(torch.int32) <= (_FINITE if grid is SQUINCH else LARGEST_BITS)
        largest = torch.where(finite, largest, 0.0)
        blocks = torch.where(finite[:, None], blocks, 0.0)
        exponents = torch.zeros(0, dtype=torch.uint8, device=x.device)
        if grid is SQUINCH:
            scale = torch.bucketize(largest, t.thresholds, right=True)
            q = self._levels(blocks, t.reciprocals[scale], t, noise)
        else:
            eighth, exponent = self._scales(largest, at.tiles, exact=self.search or noise is not None)
            q = self._levels(blocks, _power(8 * 12 - eighth) * (grid.steps / 4096), t, noise)
            scale = eighth - 8 * exponent + CODE_MAX
            if self.search and noise is None:
                q, scale = self._search(blocks, eighth, q, scale, t)
            scale = torch.where(largest > 0, scale, CODE_ZERO)
            exponents = (exponent[:: TILE // grid.block] + 127).to(torch.uint8)
        scale = torch.where(finite, scale, CODE_NAN)
        q = torch.where((scale > CODE_ZERO)[:, None] & finite[:, None], q, 0)
        negative = (blocks.view(torch.int32) < 0) & (scale > CODE_ZERO)[:, None] & finite[:, None]
        out = torch.zeros(at.nbytes, dtype=torch.uint8, device=x.device)
        out[: messages.HEADER.size] = torch.tensor(list(messages.header(grid, n)), dtype=torch.uint8)
        out[at.exponents : at.exponents + at.tiles] = exponents
        out[at.scales : at.first] = scale.to(torch.uint8)
        first, second = _pack_signed(q, negative)
        out[at.first : at.second] = first
        out[at.second :] = second
        return out

    def _scales(self, largest: Tensor, tiles: int, exact: bool) -> tuple[Tensor, Tensor]:
        """Largest magnitudes [blocks] -> scale in eighths of an octave and the tile's exponent, both int64 [blocks]."""
        bits = largest.view(torch.int32).long()
        steps = torch.tensor(EIGHTHS if exact else HALF_EIGHTHS, device=largest.device)
        eighth = 8 * ((bits >> 23) - 127) + ((bits & 0x7FFFFF)[:, None] > steps).sum(1)
        per_tile = TILE // self.grid.block
        padded = torch.nn.functional.pad(eighth, (0, tiles * per_tile - eighth.numel()), value=-2048)
        highest = padded.view(tiles, per_tile).amax(1) if tiles else padded
        exponent = ((highest + 7) >> 3).clamp(EXPONENT_MIN, EXPONENT_MAX).repeat_interleave(per_tile)[: eighth.numel()]
        return torch.maximum(eighth, 8 * exponent - CODE_MAX + 1), exponent

    def _levels(self, blocks: Tensor, reciprocal: Tensor, t: Tables, noise: Noise | None) -> Tensor:
        """Levels int64 [blocks, block] of values under reciprocal = steps / scale [blocks]."""
        ratio = blocks.abs() * reciprocal[:, None]
        if noise is None:
            return t.codes[ratio.round().clamp(max=self.grid.steps).long()]
        low = (torch.bucketize(ratio, t.positions, right=True) - 1).clamp(0, self.grid.levels - 1)
        gap = t.positions[1:] - t.positions[:-1]
        rise = (ratio - t.positions[low]) / gap[low]
        return low + (noise.uniform(ratio.numel(), ratio.device).view_as(ratio) < rise)

    def _search(self, blocks: Tensor, eighth: Tensor, q: Tensor, scale: Tensor, t: Tables) -> tuple[Tensor, Tensor]:
        """Levels and scale bytes, from the scale itself or the next smaller one."""
        ratio = blocks.abs() * (_power(8 * 12 - eighth) * (self.grid.steps / 4096))[:, None]
        i = ratio.round().clamp(max=self.grid.steps).long()
        q_shrunk = t.codes_shrunk[i]
        error = (i - t.steps[q]).square().sum(1)
        error_shrunk = (i - t.steps_shrunk[q_shrunk]).square().sum(1)
        shrink = (error_shrunk < error) & (scale > 1)
        return torch.where(shrink[:, None], q_shrunk, q), scale - shrink.long()

    # Decoding

    def decode(self, message: Tensor, n: int) -> Tensor:
        grid = self.grid
        if not message.is_cuda:
            messages.check_header(grid, n, message)
        at = messages.layout(grid, n)
        t = self.tables(message.device)
        scale = message[at.scales : at.first].long()
        if grid is SQUINCH:
            unit = t.units[scale]
        else:
            exponent = message[at.exponents : at.exponents + at.tiles].long() - 127
            exponent = exponent.repeat_interleave(TILE // grid.block)[: at.blocks]
            unit = _power((scale - CODE_MAX + 8 * exponent).clamp(8 * -126, EIGHTHS_MAX))
            unit = torch.where(scale == CODE_ZERO, 0.0, torch.where(scale == CODE_NAN, torch.nan, unit))
        q, negative = _unpack_signed(message[at.first : at.second], message[at.second :])
        value = t.values[q] * unit[:, None]
        return torch.where(negative, -value, value).flatten()[:n]


def _power(eighths: Tensor) -> Tensor:
    """2**(eighths / 8) rounded to FP32, for eighths int64 in 8 * -126 .. 1023."""
    mantissa = torch.tensor(EIGHTHS, device=eighths.device)[eighths & 7]
    return ((((eighths >> 3) + 127) << 23) | mantissa).to(torch.int32).view(torch.float32)


def _pack_signed(q: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Levels and signs [blocks, 8] -> sign bytes [blocks], code bytes [4 blocks]."""
    bit = torch.arange(8, device=q.device)
    signs = (negative.long() << bit).sum(1)
    return signs.to(torch.uint8), (q[:, 0::2] | (q[:, 1::2] << 4)).flatten().to(torch.uint8)


def _unpack_signed(signs: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    bit = torch.arange(8, device=signs.device)
    negative = (signs.long()[:, None] >> bit) & 1 > 0
    codes = codes.long().view(-1, 4)
    return torch.stack([codes & 15, codes >> 4], dim=-1).view(-1, 8), negative
