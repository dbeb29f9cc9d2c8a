"""Element formats: what each bit pattern of 4, 6 or 8 bits means, as data and as exact decoding and encoding.

A floating format with e exponent bits, m mantissa bits and bias b gives a code sign|E|M the value

    E > 0:  (-1)**sign * 2**(E - b) * (1 + M / 2**m)          normal
    E = 0:  (-1)**sign * 2**(1 - b) * (M / 2**m)              subnormal

Codes of one sign therefore rise by one from each value to the next, across the border of subnormal and normal
numbers: a code is a count of steps. With E' = max(E, 1) the value is k * 2**(E' - b - m), k = M (+ 2**m if normal), and
the code is ((E' - 1) << m) + k. That is the only arithmetic that encoding and decoding need.

| name | bits | e m bias | largest | smallest normal, subnormal | inf | NaN |
|------|------|----------|---------|-----------------------------|-----|-----|
| E2M1 | 4 | 2 1 1 | 6 | 1, 1/2 | - | - |
| E2M3 | 6 | 2 3 1 | 7.5 | 1, 1/8 | - | - |
| E3M2 | 6 | 3 2 3 | 28 | 1/4, 1/16 | - | - |
| E4M3 | 8 | 4 3 7 | 448 | 2**-6, 2**-9 | - | S.1111.111 |
| E5M2 | 8 | 5 2 15 | 57344 | 2**-14, 2**-16 | S.11111.00 | S.11111.xx |
| E8M0 | 8 | 8 0 127 | 2**127 | 2**-127, - | - | 11111111 (no sign, no zero: scales only) |
| INT8 | 8 | integers -127..127 (two's complement; -128 unused, so that the range is symmetric) | | | - | - |

Sources: OCP Microscaling Formats (MX) v1.0 (2023); OCP 8-bit Floating Point Specification (OFP8) v1.0 (2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.quant.bits import INFINITY, MAGNITUDE, QUIET_NAN, SIGN, from_pattern, pattern, power_of_two


@dataclass(frozen=True)
class ElementFormat:
    """One row of the table above. INT8: 7 mantissa bits, steps of 1, no normal numbers."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    """The largest finite value; everything beyond it is saturated to it before encoding."""
    has_inf: bool = False
    has_nan: bool = False
    nan_code: int = 0
    """The code that encoding gives to NaN; only meaningful with `has_nan`."""
    integer: bool = False

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value: one step."""
        return 1.0 if self.integer else 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def code_dtype(self) -> torch.dtype:
        """int8 for INT8, uint8 for the others: one code a byte, in the low bits."""
        return torch.int8 if self.integer else torch.uint8


E2M1 = ElementFormat("E2M1", 4, 2, 1, 1, 6.0)
E2M3 = ElementFormat("E2M3", 6, 2, 3, 1, 7.5)
E3M2 = ElementFormat("E3M2", 6, 3, 2, 3, 28.0)
E4M3 = ElementFormat("E4M3", 8, 4, 3, 7, 448.0, has_nan=True, nan_code=0x7F)
E5M2 = ElementFormat("E5M2", 8, 5, 2, 15, 57344.0, has_inf=True, has_nan=True, nan_code=0x7F)
INT8 = ElementFormat("INT8", 8, 0, 7, -6, 127.0, integer=True)

E8M0 = ElementFormat("E8M0", 8, 8, 0, 127, 2.0**127, has_nan=True, nan_code=0xFF)
"""A power of two for scales; it has `encode_e8m0` and `decode_e8m0` of its own."""

ELEMENT_FORMATS = (E2M1, E2M3, E3M2, E4M3, E5M2, INT8)


def encode(x: Tensor, fmt: ElementFormat) -> Tensor:
    """FP32 values that lie on the format's grid (what `rounding` returns) -> codes, one a byte, same shape.

    NaN becomes the format's NaN, or code 0 where it has none (the block's scale carries the NaN then).
    """
    bits = pattern(x)
    magnitude = bits & MAGNITUDE
    field = (magnitude >> 23).clamp(min=128 - fmt.bias)
    drop = (23 - fmt.mantissa_bits) + field - (magnitude >> 23).clamp(min=1)
    code = ((field - (128 - fmt.bias)) << fmt.mantissa_bits) + (significand(magnitude) >> drop.clamp(max=31))
    negative = bits < 0
    code = torch.where(negative, -code if fmt.integer else code | (1 << (fmt.bits - 1)), code)
    return torch.where(magnitude > INFINITY, fmt.nan_code if fmt.has_nan else 0, code).to(fmt.code_dtype)


def decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Codes (one a byte) -> their exact values, FP32, same shape."""
    if fmt.integer:
        return codes.float()
    code = codes.to(torch.int32)
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    exponent = (magnitude >> fmt.mantissa_bits).clamp(min=1)  # E' of the docstring
    steps = magnitude - ((exponent - 1) << fmt.mantissa_bits)  # k
    value = pattern(steps.float() * power_of_two(exponent - fmt.bias - fmt.mantissa_bits))
    if fmt.has_nan:
        largest = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
        if fmt.has_inf:
            value = torch.where(magnitude == largest, INFINITY, value)
            value = torch.where(magnitude > largest, QUIET_NAN, value)
        else:
            value = torch.where(magnitude == fmt.nan_code, QUIET_NAN, value)
    return from_pattern(torch.where((code >> (fmt.bits - 1)) & 1 == 1, value | SIGN, value))


def significand(magnitude: Tensor) -> Tensor:
    """FP32 magnitude bits -> the 24-bit integer that its exponent field max(field, 1) scales, int32."""
    return torch.where(magnitude >> 23 > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude & 0x7FFFFF)


def encode_e8m0(exponent: Tensor, valid: Tensor) -> Tensor:
    """Integer exponents -> codes exponent + 127 held in 0..254, uint8; 255 (NaN) where not `valid`."""
    return torch.where(valid, (exponent + 127).clamp(0, 254), 255).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """E8M0 codes, uint8 -> 2**(code - 127), FP32; 255 -> NaN. Code 0 is FP32's subnormal 2**-127."""
    code = codes.to(torch.int32)
    bits = torch.where(code > 0, code << 23, 1 << 22)
    return from_pattern(torch.where(code == 255, QUIET_NAN, bits))
