"""Largest magnitudes of a matrix's rows, or of all of it, in one pass at the speed of memory.

Over bit patterns, as integers: NaN is above infinity there and is not lost. Maxima have no order, so what programs find
is put together by atomic operations and is still the same every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.quant.kernels.triton_numbers import MAGNITUDE, bits_of

ROWS, COLUMNS, TURNS = 16, 256, 4
"""A tile, and how many of them a program takes."""


@triton.jit
def amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, rows, columns, row_stride,
    ALL: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """x [rows, columns], columns next to each other -> patterns of the maxima, of ALL, or DOWN columns, or of rows."""
    r = tl.program_id(0).to(tl.int64) * ROWS * (TURNS if DOWN else 1) + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS * (1 if DOWN else TURNS) + tl.arange(0, COLUMNS)
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    for _ in tl.static_range(TURNS):
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + (r * row_stride)[:, None] + c[None, :], inside, 0.0)
        most = tl.maximum(most, bits_of(x.to(tl.float32)) & MAGNITUDE)
        if DOWN:
            r += ROWS
        else:
            c += COLUMNS
    if ALL:
        tl.atomic_max(out_ptr, tl.max(tl.max(most, 1), 0), sem="relaxed")
    elif DOWN:
        tl.atomic_max(out_ptr + c, tl.max(most, 0), c < columns, sem="relaxed")
    else:
        tl.atomic_max(out_ptr + r, tl.max(most, 1), r < rows, sem="relaxed")


def largest_magnitudes(x: Tensor, by_row: bool) -> Tensor:
    """max |x| of each row, FP32 [rows, 1], or of all, [1, 1]; x [rows, columns] with a stride of 1, BF16 or FP32."""
    down = x.stride(1) != 1
    matrix = x.t() if down else x
    rows, columns = matrix.shape
    out = torch.zeros(x.shape[0] if by_row else 1, 1, dtype=torch.int32, device=x.device)
    turned = (TURNS, 1) if down and by_row else (1, TURNS)
    grid = (triton.cdiv(rows, ROWS * turned[0]), triton.cdiv(columns, COLUMNS * turned[1]))
    amax_kernel[grid](
        matrix,
        out,
        rows,
        columns,
        matrix.stride(0),
        ALL=not by_row,
        DOWN=down and by_row,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TURNS=TURNS,
        num_warps=4,
    )
    return out.view(torch.float32)
