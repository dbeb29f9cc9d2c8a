"""One matrix product of quantised factors: the seam where a backend comes in.

    multiply(left [m, k], right [n, k])  ->  left right^T [m, n]

A factor is quantised along k, the dimension that the product sums over. What cannot go inside the sum, the scale of a
whole tensor or of its rows, is applied to the result: (a s)(b t)^T = s (a b^T) t^T. This is the emulation that runs on
any device: BF16 operands, which hold every code times block scale exactly, and an ordinary matrix product. Where a
policy names a backend with hardware for the format, that one makes both factors as codes (`Native`) and multiplies
them.

`factor` makes a factor from a tensor: rotate, then quantise. A transposed view is as good as a tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.quant.backends import NATIVE
from lowbit.quant.backends.base import Native
from lowbit.quant.bits import round_to_bf16
from lowbit.quant.hadamard import rotate
from lowbit.quant.philox import Stream
from lowbit.quant.policy import EMULATED, Operand, Signs
from lowbit.quant.quantise import Memory, quantise_values
from lowbit.quant.quantised import Quantised, Values

TRANSFORMER_ENGINE_SIGNS = 0xD7E8
"""Where its fixed vector of 16 signs is -1, first element in the lowest bit."""


@dataclass(frozen=True)
class Dense:
    """A factor that has been made already, or was never quantised."""

    matrix: Tensor
    """[rows, k], BF16, or FP32 that holds BF16 numbers."""
    scale: Tensor | None = None
    """FP32 [1, 1] or [rows, 1]."""

    def operand(self) -> Tensor:
        """As `Values.operand`."""
        return self.matrix

    def after(self) -> Tensor | None:
        """As `Values.after`."""
        return self.scale


Factor = Values | Quantised | Dense


def signs_of(stream: Stream, size: int, signs: Signs) -> Tensor | None:
    """FP32 [size]: the signs that both factors of the stream's product are rotated with; None for size 0."""
    if size == 0:
        return None
    if signs is Signs.FRESH:
        return stream.signs(size)
    place = torch.arange(16, device=stream.key.device)
    return 1.0 - 2.0 * ((TRANSFORMER_ENGINE_SIGNS >> place) & 1).float()


def bf16_valued(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, BF16 or FP32, rounded to BF16 and held in `dtype` (BF16 or FP32)."""
    return (x if x.dtype == torch.bfloat16 else round_to_bf16(x)).to(dtype)


def factor(
    x: Tensor,
    operand: Operand,
    stream: Stream,
    signs: Tensor | None,
    dtype: torch.dtype,
    memory: Memory | None = None,
    amax: Tensor | None = None,
) -> Factor:
    """x [rows, k], BF16 or FP32, any strides -> rotated and quantised.

    `dtype` holds what stays BF16: that of the product. `memory`, `amax`: see `quantise_values`.
    """
    if signs is not None:
        x = rotate(x, signs, signs.shape[0])
    if operand.spec is None:
        return Dense(bf16_valued(x, dtype))
    if operand.backend != EMULATED:
        return NATIVE[operand.backend].factor(x, operand.spec, amax)
    return quantise_values(x, operand.spec, stream, memory, amax)


def multiply(
    left: Factor,
    right: Factor,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    after: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """left [m, k], right [n, k] -> left right^T [m, n].

    Args:
        dtype: what the product computes in; FP32 is for the CPU, where the operands are the same BF16 numbers.
        out_dtype: of the result; `dtype` when None. FP32 from BF16 operands keeps the sum's precision.
        after: one more FP32 factor of the result, [1, 1], [m, 1] or [1, n].
        fast: a backend may carry the sum in fewer bits than FP32 where it gains by it; not for gradients.
    """
    out_dtype = out_dtype or dtype
    if isinstance(left, Native) and isinstance(right, Native):
        return NATIVE[left.backend].multiply(left, right, out_dtype, after, fast)
    a, b = left.operand(), right.operand().t()
    scales = [left.after(), None if (s := right.after()) is None else s.t(), after]
    if dtype == torch.bfloat16 and out_dtype == torch.float32 and a.is_cuda:
        product = torch.mm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
    else:
        wide = torch.float32 if out_dtype == torch.float32 else dtype
        product = a.to(wide) @ b.to(wide)
    for scale in scales:
        if scale is not None:
            product = product.float() * scale
    return product.to(out_dtype)
