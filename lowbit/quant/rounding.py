"""Rounding FP32 numbers to a format's grid: to nearest, upwards, and stochastically; by integer arithmetic.

Let step be the distance between the grid's points around |x|, a power of two. In FP32's bits, |x| / step is the
24-bit significand shifted right by `drop` places; the bits that fall off are the fraction f of a step. The rules
differ only in what is added before the shift:

    nearest     half a step, less one unit if the number below is even: ties go to even
    up          one step less one unit: away from zero (for scales, which are positive)
    stochastic  uniform noise in [0, 1) step: P(up) = f, so that E[round(x)] = x

Every magnitude is held to the format's largest value first (saturation), so that no rounding can go beyond it. For
|x| <= max this removes nothing: stochastic rounding stays unbiased up to max itself. NaN stays NaN where the format has
one and becomes 0 elsewhere; the caller's scale carries it.

Stochastic rounding takes 16 random bits an element: P(up) is f rounded to a multiple of 2**-16, so the bias is at most
2**-17 of a step (and none where f is such a multiple). Hardware conversions to FP4 use 8 bits an element.
"""

import torch
from torch import Tensor

from lowbit.quant.bits import INFINITY, MAGNITUDE, QUIET_NAN, SIGN, from_pattern, pattern, pattern_of, power_of_two
from lowbit.quant.formats import ElementFormat, significand


def round_nearest(x: Tensor, fmt: ElementFormat) -> Tensor:
    """FP32 -> nearest grid value, ties to even, saturating; FP32, same shape. Signed zeros keep their sign."""
    field, drop, integer = _split(x, fmt)
    drop = drop.clamp(max=26)  # beyond, the result is 0 just as well
    one = torch.ones_like(drop)
    return _join(x, fmt, field, (integer + (one << (drop - 1)) - 1 + ((integer >> drop) & 1)) >> drop)


def round_up(x: Tensor, fmt: ElementFormat) -> Tensor:
    """FP32 -> the smallest grid magnitude that is not below |x|, saturating; FP32, same shape."""
    field, drop, integer = _split(x, fmt)
    drop = drop.clamp(max=26)
    one = torch.ones_like(drop)
    return _join(x, fmt, field, (integer + (one << drop) - 1) >> drop)


def round_stochastic(x: Tensor, fmt: ElementFormat, noise: Tensor) -> Tensor:
    """FP32 -> one of the two grid values around x, the upper magnitude with probability f; FP32, same shape.

    `noise`: integers 0..65535, int32, uniform, the shape of x.
    """
    field, drop, integer = _split(x, fmt)
    sixteenths = ((integer >> (drop - 17).clamp(max=26)) + 1) >> 1  # |x| / step in units of 2**-16, rounded
    return _join(x, fmt, field, (sixteenths + noise) >> 16)


def _split(x: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Exponent field of the step's binade, places to drop (>= 17 in every format), 24-bit significand."""
    magnitude = (pattern(x) & MAGNITUDE).clamp(max=pattern_of(fmt.max))
    field = (magnitude >> 23).clamp(min=128 - fmt.bias)
    drop = (23 - fmt.mantissa_bits) + field - (magnitude >> 23).clamp(min=1)
    return field, drop, significand(magnitude)


def _join(x: Tensor, fmt: ElementFormat, field: Tensor, steps: Tensor) -> Tensor:
    """steps * 2**(field - 127 - m) with the sign of x."""
    bits = pattern(x)
    sign = torch.where(steps == 0, 0, bits & SIGN) if fmt.integer else bits & SIGN  # integers have one zero
    value = pattern(steps.float() * power_of_two(field - (127 + fmt.mantissa_bits))) | sign
    return from_pattern(torch.where((bits & MAGNITUDE) > INFINITY, QUIET_NAN if fmt.has_nan else 0, value))
