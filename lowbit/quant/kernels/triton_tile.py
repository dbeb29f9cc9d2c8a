"""A tile of a matrix in Triton, rotated: where its numbers lie decides how fast everything after it is.

A quantiser's sums, maxima and butterflies run along a row of 128 numbers. Spread over the threads of a warp, as the
compiler lays out a load, each step of them is a shuffle, or a trip through shared memory where columns are what lies
together in memory. Loaded in pieces, a whole row is one thread's, and they are additions of its own registers.
"""

import triton
import triton.language as tl

from lowbit.quant.kernels.triton_numbers import butterfly, round_bf16


@triton.jit
def _joined(parts):  # type: ignore[no-untyped-def]
    """The first half of the tensors, each joined with its like of the second half along a new last axis."""
    out = ()
    for i in tl.static_range(len(parts) // 2):
        out = out + (tl.join(parts[i], parts[i + len(parts) // 2]),)  # type: ignore[assignment]  # noqa: RUF005
    return out


@triton.jit
def _load_pieces(  # type: ignore[no-untyped-def]
    x_ptr, r, first, rows, columns, row_stride, column_stride,
    WHOLE: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr, JOINS: tl.constexpr,
):  # fmt: skip
    """128 columns of x from `first` on, in pieces of PIECE = 128 >> JOINS columns: [rows, 128].

    The threads that load a row's part of one piece load that of every piece, and joining moves nothing between
    threads: with small pieces a row, with all its butterflies and sums, stays in the registers of one thread, or two.
    A piece is made of runs of RUN columns, so that a thread that loads runs holds RUN << JOINS columns in a row.
    """
    parts = ()
    row = x_ptr + (r * row_stride)[:, None]
    for i in tl.static_range(1 << JOINS):
        k = tl.arange(0, PIECE)
        c = first + (k // RUN) * (RUN << JOINS) + RUN * i + k % RUN
        place = row + (c.to(tl.int64) * column_stride)[None, :]
        if WHOLE:
            piece = tl.load(place)
        else:
            piece = tl.load(place, (r < rows)[:, None] & (c < columns)[None, :], 0.0)
        parts = parts + (piece,)  # type: ignore[assignment]  # noqa: RUF005
    for _ in tl.static_range(JOINS):
        parts = _joined(parts)
    x = tl.permute(tl.reshape(parts[0], (r.shape[0], PIECE // RUN, RUN, 1 << JOINS)), (0, 1, 3, 2))  # type: ignore[misc]
    return tl.reshape(x, (r.shape[0], 128))


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    x_ptr, signs_ptr, r, group, rows, columns, width, row_stride, column_stride,
    ROWS: tl.constexpr, WHOLE: tl.constexpr, ROTATION: tl.constexpr, STAGES: tl.constexpr, ROTATION_SCALE: tl.constexpr,
    PIECE: tl.constexpr, RUN: tl.constexpr, JOINS: tl.constexpr,
):  # fmt: skip
    """x at rows r and the columns of a group, zero outside, as BF16 numbers in FP32, rotated: [ROWS, 128].

    WHOLE: nothing is outside.
    """
    c = group * 128 + tl.arange(0, 128)
    x = _load_pieces(x_ptr, r, group * 128, rows, columns, row_stride, column_stride, WHOLE, PIECE, RUN, JOINS)
    if x_ptr.dtype.element_ty == tl.float32:
        x = round_bf16(x)
    else:
        x = x.to(tl.float32)
    if ROTATION > 0:
        x = x * tl.load(signs_ptr + c % ROTATION)[None, :]
        x = butterfly(tl.reshape(x, (ROWS * 128 // ROTATION, ROTATION)), STAGES)
        x = round_bf16(tl.reshape(x, (ROWS, 128)) * ROTATION_SCALE)
        if not WHOLE:  # what the quantiser adds beyond the rotation's groups are zeros without a sign
            x = tl.where((r < rows)[:, None] & (c < width)[None, :], x, 0.0)
    return x
