"""What a backend must show before it is used: known matrices, quantised and multiplied, against the reference.

Codes and scales must be the reference's bit for bit. The product may differ by the rounding of its result and by what
the tensor core drops from its sums; a wrong layout, order of scales or transpose is off by the size of the result.
Sizes are such that padding is needed along every dimension.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowbit.errors import in_a_line
from lowbit.quant.backends.base import Backend
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.product import multiply
from lowbit.quant.quantise import quantise
from lowbit.quant.quantised import Quantised
from lowbit.quant.spec import QuantSpec

ROWS, COLUMNS, DEPTH = 136, 152, 328
"""m, n and k."""
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 2e-3}
"""Largest error of the product relative to the reference's norm: BF16 rounds by 1.7e-3 in this measure."""


@dataclass(frozen=True)
class Trial:
    """One product to try."""

    left: QuantSpec
    right: QuantSpec
    out_dtype: torch.dtype
    fast: bool


def known_matrix(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """BF16: normal numbers, rows and columns of very different size, zeros; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    x[:, 5] *= 30.0
    x[3, :40] = 0.0
    return x.bfloat16().to(device)


def difference(backend: Backend, trial: Trial, device: torch.device) -> str | None:
    """What is wrong with a backend's product, in a few words; None: nothing."""
    key, clock = make_key(0, "selftest").to(device), make_clock().to(device)
    factors: list[Quantised] = []
    try:
        for side, spec, rows in ((Side.LEFT, trial.left, ROWS), (Side.RIGHT, trial.right, COLUMNS)):
            x = known_matrix(rows, DEPTH, int(side), device)
            stream = Stream(key, clock, Product.FPROP, side)
            found, wanted = backend.factor(x, spec, stream=stream), quantise(x, spec, stream)
            if not same_codes(found, wanted):
                return f"its {spec.name} codes are not the reference's"
            pair = backend.factor_pair(x, spec, spec)
            if pair[0] is not None and not same_codes(pair[1], quantise(x.t(), spec, stream)):
                return f"its {spec.name} codes of a transpose are not the reference's"
            factors.append(found)
        product = backend.multiply(factors[0], factors[1], trial.out_dtype, fast=trial.fast)
    except Exception as error:  # whatever a kernel raises: the run goes on without it
        return in_a_line(error)
    wanted_product = reference_product(factors[0], factors[1]).double()
    off = float((product.double() - wanted_product).norm() / wanted_product.norm())
    if (
        product.dtype != trial.out_dtype
        or product.shape != wanted_product.shape
        or not off < TOLERANCE[trial.out_dtype]
    ):
        return f"its {trial.left.name} x {trial.right.name} differs from the reference by {off:.1e} of its norm"
    return None


def reference_product(left: Quantised, right: Quantised) -> Tensor:
    """left [m, k], right [n, k] -> [m, n], FP32: the emulation, whose products of BF16 numbers are exact in FP32."""
    plain = [Quantised(q.codes, q.scales, q.outer, q.shape, q.spec) for q in (left, right)]
    return multiply(plain[0], plain[1], torch.float32)


def same_codes(found: Quantised, wanted: Quantised) -> bool:
    """Whether codes, without their padding, and scales are equal."""
    rows, columns = wanted.shape[0], wanted.shape[-1]
    return (
        found.shape == wanted.shape
        and torch.equal(found.codes[:rows, :columns], wanted.codes[:rows, :columns])
        and torch.equal(found.scales, wanted.scales)
        and (found.outer is None) == (wanted.outer is None)
        and (found.outer is None or wanted.outer is None or torch.equal(found.outer, wanted.outer))
    )


@cache
def check(backend: Backend, trial: Trial, device: torch.device) -> str | None:
    """`difference`, once a process."""
    return difference(backend, trial, device)
