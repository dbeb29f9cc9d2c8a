"""The reference: quantised numbers as BF16 ones, and an ordinary product. It takes every format on every device.

`product` computes so wherever a policy names no other backend; here is the same by itself, for others to be held
against: in FP32 throughout, where products of BF16 numbers are exact and only their sums round.
"""

import torch
from torch import Tensor

from lowbit.quant.philox import Stream
from lowbit.quant.product import multiply
from lowbit.quant.quantise import quantise
from lowbit.quant.quantised import Quantised
from lowbit.quant.spec import QuantSpec


def reference_factor(x: Tensor, spec: QuantSpec, stream: Stream) -> Quantised:
    """x [rows, k] -> codes and scales."""
    return quantise(x, spec, stream)


def reference_product(left: Quantised, right: Quantised) -> Tensor:
    """left [m, k], right [n, k] -> [m, n], FP32."""
    plain = [Quantised(q.codes, q.scales, q.outer, q.shape, q.spec) for q in (left, right)]
    return multiply(plain[0], plain[1], torch.float32)
