"""FP8 products of experts: each group of rows times its own matrix, scales of rows, in one kernel (Hopper).

    x [rows, k], weight [experts, n, k], offsets [experts]  ->  y [rows, n],  y_r = x_r weight[e]^T  for r in group e

Scales of rows do not ask which group a row is in, so x is quantised as one matrix and the weights as another. The same
product, with the weights transposed, is dgrad. wgrad sums over the rows of a group: its scales would be of columns
within groups, which no quantiser here makes; it is emulated, expert by expert.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from lowbit.errors import in_a_line
from lowbit.quant.backends.base import Device, Sizes, dotted
from lowbit.quant.backends.fp8 import HOPPER, fp8_product
from lowbit.quant.backends.fp8_codes import MULTIPLE, kind_of, quantise_both
from lowbit.quant.backends.selftest import TOLERANCE, known_matrix, same_codes
from lowbit.quant.policy import Alignment, LinearPolicy
from lowbit.quant.quantise import quantise
from lowbit.quant.spec import FP8_ROW

PRODUCTS = ("fprop", "dgrad")


def refuses(policy: LinearPolicy, sizes: Sizes, device: Device, dtype: torch.dtype) -> str | None:
    """Why experts of this policy and size are not multiplied here, in a few words; None: fprop and dgrad are."""
    for name in PRODUCTS:
        product = getattr(policy, name)
        kinds = kind_of(product.left.spec), kind_of(product.right.spec)
        if kinds != ("row", "row") or product.rotation:
            return f"{name} of experts is FP8 by rows or emulated, not {product.summary}"
    if policy.alignment is not Alignment.ORIGINAL or policy.mean_split:
        return "products of experts take the originals, without a split mean"
    if device.kind != "cuda" or device.capability[0] != HOPPER[0]:
        where = dotted(device.capability) if device.kind == "cuda" else device.kind
        return f"FP8 products of experts are for compute capability 9, not {where}"
    if sizes.in_features % MULTIPLE or sizes.out_features % MULTIPLE:
        return f"in={sizes.in_features} and out={sizes.out_features} must be multiples of {MULTIPLE}"
    if dtype is not torch.bfloat16:
        return "results of FP8 products of experts are BF16"
    return None


@cache
def check(device: torch.device) -> str | None:
    """Multiply known matrices, once a process: what is wrong with the result, in a few words; None: nothing."""
    counts = [5, 0, 40, 3]
    x, weight = known_matrix(sum(counts), 96, 0, device), known_matrix(len(counts) * 32, 96, 1, device)
    try:
        for matrix in (x, weight):
            made, _ = quantise_both(matrix, FP8_ROW, None)
            if made is None or not same_codes(made, quantise(matrix, FP8_ROW)):
                return f"its {FP8_ROW.name} codes are not the reference's"
        offsets = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
        [found] = multiply_rows(x, [weight.view(len(counts), 32, 96)], offsets)
    except Exception as error:  # whatever a kernel raises: the run goes on without it
        return in_a_line(error)
    left, right = (quantise(m, FP8_ROW).dequantise().double() for m in (x, weight))
    groups = zip(torch.split(left, counts), torch.split(right, 32), strict=True)
    wanted = torch.cat([rows @ matrix.t() for rows, matrix in groups])
    off = float((found.double() - wanted).norm() / wanted.norm())
    return None if off < TOLERANCE[torch.bfloat16] else f"it differs from the reference by {off:.1e} of its norm"


def multiply_rows(x: Tensor, weights: Sequence[Tensor], offsets: Tensor, fast: bool = False) -> list[Tensor]:
    """x [rows, k] times each weight [experts, n, k] -> BF16 [rows, n].

    x and weights are BF16 or FP32, offsets int32 [experts], where groups end: rising, and the last one equal to rows,
    which is not checked, because that would wait for the device. k and n are multiples of 16; a group may have any
    number of rows, also none. `fast`: see `Backend.multiply`. Raises ValueError for other sizes.
    """
    for weight in weights:
        experts, n, k = weight.shape
        if k % MULTIPLE or n % MULTIPLE:
            raise ValueError(f"grouped FP8 products need multiples of {MULTIPLE}: k={k}, n={n}")
    if x.shape[0] == 0:
        return [x.new_empty(0, weight.shape[1], dtype=torch.bfloat16) for weight in weights]
    rows, _ = quantise_both(x, FP8_ROW, None)
    assert rows is not None
    products = []
    for weight in weights:
        experts, n, k = weight.shape
        matrices, _ = quantise_both(weight.reshape(experts * n, k), FP8_ROW, None)
        assert matrices is not None
        codes, scales = matrices.codes.reshape(experts, n, k), matrices.scales.reshape(experts, n)
        products.append(fp8_grouped_product(rows.codes, codes, rows.scales.reshape(-1), scales, offsets, fast))
    return products


@torch.library.custom_op("lowbit::fp8_grouped_product", mutates_args=())
def fp8_grouped_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, fast: bool) -> Tensor:
    """E4M3 codes a [rows, k], b [experts, n, k], FP32 scales [rows], [experts, n] -> BF16 [rows, n]."""
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
