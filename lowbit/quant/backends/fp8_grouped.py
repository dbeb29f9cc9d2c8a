"""FP8 products of experts: each group of rows times its own matrix, scales of rows, in one kernel (Hopper).

    x [rows, k], weight [experts, n, k], offsets [experts]  ->  y [rows, n],  y_r = x_r weight[e]^T  for r in group e

Scales of rows do not ask which group a row is in, so x is quantised as one matrix and the weights as another. The same
product, with the weights transposed, is dgrad. wgrad sums over the rows of a group: its scales would be of columns
within groups, which no quantiser here makes; it stays in BF16 (`F.grouped_mm`).
"""

from itertools import pairwise

import torch
from torch import Tensor

from lowbit.quant.backends.fp8 import fp8_product
from lowbit.quant.backends.fp8_codes import MULTIPLE, quantise_both
from lowbit.quant.spec import FP8_ROW


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor, fast: bool = False) -> Tensor:
    """x [rows, k], weight [experts, n, k], BF16 or FP32; offsets int32 [experts], where groups end -> BF16 [rows, n].

    k and n are multiples of 16; a group may have any number of rows, also none. `fast`: see `Backend.multiply`.
    Raises ValueError for other sizes.
    """
    experts, n, k = weight.shape
    if k % MULTIPLE or n % MULTIPLE:
        raise ValueError(f"grouped FP8 products need multiples of {MULTIPLE}: k={k}, n={n}")
    rows, _ = quantise_both(x, FP8_ROW, None)
    matrices, _ = quantise_both(weight.reshape(experts * n, k), FP8_ROW, None)
    assert rows is not None and matrices is not None
    codes, scales = matrices.codes.reshape(experts, n, k), matrices.scales.reshape(experts, n)
    y: Tensor = fp8_grouped_product(rows.codes, codes, rows.scales.reshape(-1), scales, offsets, fast)
    return y


@torch.library.custom_op("lowbit::fp8_grouped_product", mutates_args=())
def fp8_grouped_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, fast: bool) -> Tensor:
    """E4M3 codes a [rows, k], b [experts, n, k], FP32 scales [rows], [experts, n] -> BF16 [rows, n]."""
    if a.shape[0] == 0:
        return a.new_empty(0, b.shape[1], dtype=torch.bfloat16)
    if a.is_cuda:
        left, right = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).transpose(1, 2)
        return torch._scaled_grouped_mm(
            left, right, scale_a, scale_b, offsets, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    y = a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for expert, (begin, end) in enumerate(pairwise([0, *offsets.tolist()])):
        if end > begin:
            scales = scale_a[begin:end].reshape(1, -1), scale_b[expert].reshape(1, -1)
            y[begin:end] = fp8_product(a[begin:end], b[expert], *scales, "row", torch.bfloat16, fast)
    return y


@fp8_grouped_product.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
