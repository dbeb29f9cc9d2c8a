"""From the largest magnitude of a block (amax) to its scale.

Every rule gives two FP32 numbers a block: the `scale` that decoding multiplies by, already on the grid of its storage
format, and the `multiplier` that brings the block's elements into the element format's range. A NaN or an infinity in
a block makes its amax, and so its scale, NaN: the block decodes to NaN and never to a large finite number.

**E8M0** (MX): scale = 2**e. Round-up takes the smallest e with amax <= max * 2**e, so that nothing saturates; OCP's
floor rule e = floor(log2 amax) - floor(log2 max) saturates what lies between. multiplier = 2**-e, exact.

**FP32** (FP8 tensor- and row-wise, INT8): multiplier = max / amax, scale = 1 / multiplier, as Transformer Engine's
current scaling. **Power of two** (FP8 blocks): the same with e of the round-up rule.

**E4M3 under an outer scale** (NVFP4). Let t be the value amax is mapped to (6) and b the largest block scale (448).

* FP32 outer of a tensor or a row, Transformer Engine's order of operations:
  S = min(b t / amax_outer, FP32 max), or 1 if amax_outer = 0;  outer = 1 / S;  scale = E4M3(min(amax * (S * (1/t)),
  448)); multiplier = min(1 / (scale * outer), FP32 max). A scale that underflows is 0 and the block decodes to 0;
  under MS-EDEN it becomes 1, so that the block's elements round to 0 (with 0 they would grow without bound in its
  correction).
* FP32 outer of 128 elements, TetraJet-v2's order: outer = amax128 / b / t, or 1 if 0; scale = E4M3(amax / outer / t),
  or 2**-9 if 0; multiplier = min(1 / (outer * scale), FP32 max).
* power-of-two outer of 128 elements: outer = 2**e, the smallest with amax128 <= b t 2**e (e >= -126); scale =
  E4M3((amax / outer) / t), or 2**-9 if 0; elements are x / outer, exact, times 1 / scale. Element x scale x outer then
  has at most 6 significant bits: BF16 holds it exactly.

Quotients are correctly rounded (`bits.divide`), products are FP32.

**Nearest or up.** An E4M3 scale rounded to nearest is too small half of the time: the block's maximum then lies above 6
and is clipped, which no rounding of elements can make good (a shrink of 0.27 % to 0.34 % an operand on Gaussian data).
Rounded up, nothing is clipped and stochastic rounding is unbiased.
"""

import torch
from torch import Tensor

from lowbit.quant.bits import FP32_MAX, MAGNITUDE, divide, exponent_floor, exponent_up, f32, is_finite, pattern
from lowbit.quant.bits import power_of_two as pow2
from lowbit.quant.formats import E4M3, decode, decode_e8m0, encode, encode_e8m0
from lowbit.quant.rounding import round_nearest, round_up
from lowbit.quant.spec import E4M3_SCALES, EDEN, Outer, QuantSpec, Scale

NAN = float("nan")


def finite_or_nan(amax: Tensor) -> Tensor:
    """Infinity becomes NaN."""
    return torch.where(is_finite(amax), amax, NAN)


def one_level(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(scale, multiplier), FP32, of the shape of `amax`, for E8M0, FP32 and power-of-two scales."""
    fmt = spec.element
    valid = is_finite(amax)
    if spec.scale is Scale.FP32:
        multiplier = divide(fmt.max, amax).clamp(max=FP32_MAX)
        multiplier = torch.where(amax == 0, 1.0, multiplier)
        multiplier = torch.where(valid, multiplier, NAN)
        return divide(1.0, multiplier), multiplier
    rule = exponent_floor if spec.scale is Scale.E8M0_FLOOR else exponent_up
    exponent = rule(amax, fmt.max).clamp(-127, 127)
    if spec.scale is Scale.POWER_OF_TWO:
        exponent = torch.where(amax == 0, 0, exponent.clamp(min=-126))
    return torch.where(valid, pow2(exponent), NAN), torch.where(valid, pow2(-exponent), NAN)


def outer_scale(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(outer, inverse), FP32, of the shape of `amax`, the largest magnitude under each outer scale."""
    amax = finite_or_nan(amax)
    if spec.outer is Outer.BLOCK_POW2:
        exponent = exponent_up(amax, f32(spec.bound * spec.target)).clamp(-126, 126)
        valid = is_finite(amax)
        return torch.where(valid, pow2(exponent), NAN), torch.where(valid, pow2(-exponent), NAN)
    if spec.outer is Outer.BLOCK:
        outer = divide(divide(amax, spec.bound), spec.target)
        outer = torch.where(outer == 0, 1.0, outer)
        return outer, divide(1.0, outer)
    inverse = divide(spec.bound * spec.target, amax).clamp(max=FP32_MAX)
    inverse = torch.where(amax == 0, 1.0, inverse)
    return divide(1.0, inverse), inverse


def inner_scale(amax: Tensor, outer: Tensor, inverse: Tensor, spec: QuantSpec, target: float) -> tuple[Tensor, Tensor]:
    """(scale, multiplier) of blocks under an outer scale, FP32, of the shape of `amax`.

    The multiplier applies to x, except under a power-of-two outer scale, where it applies to x / outer.
    """
    rounded = round_up if spec.scale is Scale.E4M3_UP else round_nearest
    if spec.outer in (Outer.TENSOR, Outer.ROW):
        scale = rounded(amax * (inverse * f32(1 / target)), E4M3)
        if spec.rounding in EDEN:
            scale = torch.where(scale == 0, 1.0, scale)
        return scale, divide(1.0, scale * outer).clamp(max=FP32_MAX)
    ratio = amax * inverse if spec.outer is Outer.BLOCK_POW2 else divide(amax, outer)
    scale = rounded(divide(ratio, target), E4M3)
    scale = torch.where(scale == 0, E4M3.smallest_subnormal, scale)
    whole = scale if spec.outer is Outer.BLOCK_POW2 else outer * scale
    return scale, divide(1.0, whole).clamp(max=FP32_MAX)


def encode_scale(scale: Tensor, spec: QuantSpec) -> Tensor:
    """FP32 scales on their grid -> what is stored: a byte (E8M0, E4M3) or the FP32 number itself."""
    if spec.scale in E4M3_SCALES:
        return encode(scale, E4M3)
    if spec.scale in (Scale.E8M0_UP, Scale.E8M0_FLOOR):
        exponent = ((pattern(scale) & MAGNITUDE) >> 23) - 127
        return encode_e8m0(exponent, is_finite(scale))
    return scale


def decode_scale(stored: Tensor, spec: QuantSpec) -> Tensor:
    """The inverse of `encode_scale`."""
    if spec.scale in E4M3_SCALES:
        return decode(stored, E4M3)
    if spec.scale in (Scale.E8M0_UP, Scale.E8M0_FLOOR):
        return decode_e8m0(stored)
    return stored
