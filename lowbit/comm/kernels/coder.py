"""Calls of the Triton kernels: tables, grids, constants of each format."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from lowbit.comm import message as messages
from lowbit.comm.grid import (
    EIGHTHS,
    HALF_EIGHTHS,
    SHRINK,
    SQ48,
    SQUINCH,
    TILE,
    Grid,
    squinch_reciprocals,
    squinch_thresholds,
    squinch_units,
)
from lowbit.comm.kernels.squinch import ENTRIES, decode_kernel, encode_kernel, sum_kernel
from lowbit.comm.noise import Noise

WARPS = 16
"""One block of 8 values a thread: then no value changes threads between load and store."""


def _constants(grid: Grid) -> dict[str, object]:
    """Compile-time constants of a format."""
    inverse = 1 / grid.power
    return {
        "PUBLISHED": grid is SQUINCH,
        "BLOCK": grid.block,
        "LEVELS": grid.levels,
        "STEPS": grid.steps,
        "INVERSE": inverse,
        "OFFSET": math.log2(grid.levels) - math.log2(grid.steps) * inverse,
    }


def search_table(grid: Grid) -> list[int]:
    """Entry i, for a value of i whole steps: its level, in bits 4 to 7 the one under the smaller scale, and from bit 11
    on what that one would change in the squared error. A block's entries add up to less than zero exactly where its
    changes do, since eight low parts stay below 2**11.
    """
    codes, shrunk = grid.codes(), grid.codes(SHRINK)
    at, at_shrunk = grid.level_steps(), grid.level_steps(SHRINK)
    table: list[int] = [
        ((i - at_shrunk[s]) ** 2 - (i - at[q]) ** 2) << 11 | s << 4 | q
        for i, (q, s) in enumerate(zip(codes, shrunk, strict=True))
    ]
    missing: int = ENTRIES.value - len(table)
    return table + table[-1:] * missing


class TritonCoder:
    """Messages in one grid, on a GPU. Has no state besides its tables."""

    def __init__(self, grid: Grid = SQ48, search: bool = True, warps: int = WARPS) -> None:
        self.grid, self.search, self.warps = grid, search and grid is not SQUINCH, warps
        self.constants = _constants(grid)
        self.header = messages.header_words(grid, 0)[0]
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """FP32 and int32 numbers that the kernels look up, and the table of the search, if there is one."""
        if device not in self._tables:
            values = [*self.grid.level_values(), *[0.0] * 32][:32]
            values += [*squinch_thresholds(), math.inf, math.inf, *squinch_units(), *squinch_reciprocals()]
            values += [self.grid.position(q) for q in range(self.grid.levels + 1)]
            floats = torch.tensor(values, dtype=torch.float32, device=device)
            integers = torch.tensor(EIGHTHS + HALF_EIGHTHS, dtype=torch.int32, device=device)
            searched = torch.tensor(search_table(self.grid) if self.search else [0], dtype=torch.int32, device=device)
            self._tables[device] = floats, integers, searched
        return self._tables[device]

    def encode(self, x: Tensor, rows: int, per_row: int, out: Tensor, noise: Sequence[Noise] | None = None) -> None:
        """x [n], n <= rows * per_row, continued with zeros -> out uint8 [rows, nbytes(per_row)]; `noise` of each row,
        keys of one length.
        """
        at = messages.layout(self.grid, per_row)
        tiles = max(1, triton.cdiv(per_row, TILE))
        encode_kernel[(tiles, rows)](
            x, out, x.numel(), per_row, at.nbytes, at.tiles, at.blocks, at.scales, at.first, at.second, self.header,
            self._keys(noise, x.device), *self.tables(x.device), WORDS=_length(noise), SEARCH=self.search,
            APPROXIMATE=x.is_cuda, **self.constants, num_warps=self.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def decode(self, messages_: Tensor, per_row: int, out: Tensor) -> None:
        """messages_ uint8 [rows, nbytes(per_row)] -> out [n] of any float type, n <= rows * per_row."""
        at = messages.layout(self.grid, per_row)
        rows = triton.cdiv(out.numel(), max(1, per_row))
        if rows:
            decode_kernel[(triton.cdiv(per_row, TILE), rows)](
                messages_, out, out.numel(), per_row, at.nbytes, at.blocks, at.scales, at.first, at.second,
                *self.tables(out.device)[:2], **self._reading(), num_warps=self.warps, enable_fp_fusion=False,
            )  # fmt: skip

    def _reading(self) -> dict[str, object]:
        return {key: self.constants[key] for key in ("PUBLISHED", "BLOCK", "LEVELS")}

    def sum(self, rows: Tensor, n: int, factor: float, out: Tensor, encode: bool, noise: Noise | None = None) -> None:
        """rows uint8 [ranks, nbytes(n)] -> their sum times factor: FP32 [n], or a message, uint8 [nbytes(n)]."""
        drawn = [noise] if noise is not None else None
        at = messages.layout(self.grid, n)
        sum_kernel[(max(1, triton.cdiv(n, TILE)),)](
            rows, out, n, factor, at.nbytes, at.tiles, at.blocks, at.scales, at.first, at.second, self.header,
            self._keys(drawn, rows.device), *self.tables(rows.device), RANKS=rows.shape[0], ENCODE=encode,
            SCALED=factor != 1.0, WORDS=_length(drawn), SEARCH=self.search, APPROXIMATE=rows.is_cuda, **self.constants,
            num_warps=self.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def _keys(self, noise: Sequence[Noise] | None, device: torch.device) -> Tensor:
        """int32 [rows, words], the words of each row's noise; where there is none, any table, which nobody reads."""
        if noise is None:
            return self.tables(device)[1]
        return torch.from_numpy(np.array([one.words() for one in noise], dtype=np.uint32).view(np.int32)).to(device)


def _length(noise: Sequence[Noise] | None) -> int:
    """Words of a row's noise."""
    return len(noise[0].words()) if noise is not None else 0
