"""Look-up tables of the fast CPU path (`fast`): levels, scales, value pairs."""

import math

import torch
from torch import Tensor

from lowbit.comm.grid import (
    CODE_MAX,
    EIGHTHS,
    EIGHTHS_MAX,
    EXPONENT_MIN,
    HALF_EIGHTHS,
    SHRINK,
    Grid,
    squinch_reciprocals,
    squinch_thresholds,
    squinch_units,
)

INFINITY = 0x7F800000
LEVEL_BITS = 4
OFFSET = 1016
"""Tables over s, a scale in eighths of an octave, begin at s = -1016: entry s + OFFSET."""


class FastTables:
    """A grid's tables. Built once a codec."""

    def __init__(self, grid: Grid, search: bool) -> None:
        self.entry = _entries(grid, search)
        scales = range(-OFFSET, EIGHTHS_MAX + 2)
        self.scale_bits = torch.tensor([_scale_bits(s, EIGHTHS) for s in scales], dtype=torch.int32)
        self.half_bits = torch.tensor([_scale_bits(s, HALF_EIGHTHS) for s in scales], dtype=torch.int32)
        self.units = self.scale_bits.view(torch.float32)
        lowest = 8 * EXPONENT_MIN - CODE_MAX + 1  # no block has a smaller scale
        reciprocals = [0.0] * (lowest + OFFSET)
        reciprocals += [float(self.units[96 - s + OFFSET] * (grid.steps / 4096)) for s in scales if s >= lowest]
        self.reciprocals = torch.tensor(reciprocals, dtype=torch.float32).view(torch.int32)
        self.thresholds = torch.tensor([*squinch_thresholds(), math.inf], dtype=torch.float32).view(torch.int32)
        self.squinch_largest = int(self.thresholds[-2])
        self.squinch_units = torch.tensor(squinch_units(), dtype=torch.float32)
        self.squinch_reciprocals = torch.tensor(squinch_reciprocals(), dtype=torch.float32).view(torch.int32)
        self.pairs = _value_pairs(grid)
        self.upper = _upper_parts()


def _entries(grid: Grid, search: bool) -> Tensor:
    """int32: what a value at step i of its block's scale means. Without the search steps go 4.5% beyond the grid; those
    have the highest level.
    """
    above = 2 * LEVEL_BITS + grid.block.bit_length() - 1
    q, q_shrunk = grid.codes(), grid.codes(SHRINK)
    at, at_shrunk = grid.level_steps(), grid.level_steps(SHRINK)
    entries = []
    for i in range(grid.steps + 1):
        difference = (i - at_shrunk[q_shrunk[i]]) ** 2 - (i - at[q[i]]) ** 2
        entries.append(difference << above | q_shrunk[i] << LEVEL_BITS | q[i] if search else q[i])
    return torch.tensor(entries + entries[-1:] * (grid.steps // 8), dtype=torch.int32)


def _scale_bits(s: int, mantissas: tuple[int, ...]) -> int:
    """FP32 bits of 2**(s/8), or of the middle between it and the next scale."""
    return ((s >> 3) + 127) << 23 | mantissas[s & 7] if s >> 3 < 128 else INFINITY


def _value_pairs(grid: Grid) -> Tensor:
    """Two FP32 values as one int64. Index: a byte of codes | two signs << 8."""
    value = torch.tensor(grid.level_values(), dtype=torch.float32)
    code = torch.arange(1024)
    pair = value[torch.stack([code & 15, (code >> 4) & 15], dim=1)]
    pair = torch.where(torch.stack([code >> 8, code >> 9], dim=1) & 1 > 0, -pair, pair)
    return pair.contiguous().view(torch.int64).flatten()


def _upper_parts() -> Tensor:
    """Bits 8 and up of four neighbouring indices into the value pairs, as four int16 in one int64. Index: a byte of
    signs, two bits an index.
    """
    parts = torch.arange(256)[:, None] >> (2 * torch.arange(4)) & 3
    return (parts << 8).to(torch.int16).view(torch.int64).flatten()
