"""What is left of a product, done by the kernel that reads it, or by one of its own: Triton (`infer.unfinished`).

scale_of    the scale of each column, which changes with the weights alone, so that it may be read early
finished    the numbers themselves, FP32, which the caller rounds to the product's type
finish      a kernel for readers that cannot
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels.chain import chained, let_next, wait
from lowbit.infer.unfinished import Unfinished

STEP = 512
"""Columns of a program of `finish`."""


@triton.jit
def scale_of(after, column, inside, AFTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of these columns; AFTER is `Unfinished.kind`."""
    if AFTER == 1:
        return tl.load(after)
    elif AFTER == 2:  # noqa: RET505
        return tl.load(after + column, mask=inside, other=0.0)
    else:
        return 1.0


@triton.jit
def finished(parts, at, inside, split, scale, PARTS: tl.constexpr, AFTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers at `at` of the first part, of which each further one is `split` behind."""
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * split + at, mask=inside, other=0.0)
    if AFTER > 0:
        total *= scale
    return total


@triton.jit
def _finish_kernel(  # type: ignore[no-untyped-def]
    parts, after, y, columns, split, row_stride,
    PARTS: tl.constexpr, AFTER: tl.constexpr, STEP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = column < columns
    row = tl.program_id(0).to(tl.int64)
    scale = scale_of(after, column, inside, AFTER)
    wait(CHAINED)
    let_next(CHAINED)
    total = finished(parts, row * row_stride + column, inside, split, scale, PARTS, AFTER)
    tl.store(y + row * columns + column, total.to(y.dtype.element_ty), mask=inside)


def finish(product: Unfinished) -> Tensor:
    """[rows, columns], see `Unfinished.written_out`."""
    _, rows, columns = product.parts.shape
    if product.finished or product.parts.numel() == 0:
        return product.parts[0].to(product.dtype)
    y = torch.empty(rows, columns, dtype=product.dtype, device=product.parts.device)
    _finish_kernel[(rows, triton.cdiv(columns, STEP))](
        *reading(product), y, columns, product.parts.stride(0), product.parts.stride(1),
        **left(product), STEP=STEP, num_warps=4, **chained(y.device),
    )  # fmt: skip
    return y


def reading(product: Unfinished) -> tuple[Tensor, Tensor]:
    """Parts and scale as arguments of a kernel; something else stands for a scale that there is not."""
    return product.parts, product.parts if product.after is None else product.after


def left(product: Unfinished) -> dict[str, Any]:
    """What is left, as constants of a kernel."""
    return {"PARTS": len(product.parts), "AFTER": product.kind}


def alike(*products: Unfinished) -> tuple[Unfinished, ...]:
    """The same, finished if what is left of them is not of one kind: one kernel reads them all in one way."""
    if len({(p.kind, p.parts.dtype, p.parts.stride(0) if len(p.parts) > 1 else None) for p in products}) == 1:
        return products
    return tuple(Unfinished.of(finish(product)) for product in products)
