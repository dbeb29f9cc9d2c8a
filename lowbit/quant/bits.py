"""FP32 arithmetic that gives the same bits on a CPU, on a GPU, in eager mode and compiled.

A compiler may contract a*b+c into one rounding, drop a conversion to BF16 and back, or divide approximately; each
changes last bits, and a last bit decides a tie. So what must be exact is done here in ways that leave no choice:

* rounding to BF16 and powers of two by integer arithmetic on the FP32 pattern sign(1) | exponent(8) | mantissa(23);
* quotients through FP64: 53 bits are more than twice 24 plus 2, so FP32(FP64(a) / FP64(b)) is the correctly rounded
  FP32 quotient (Figueroa, "When is double rounding innocuous?", 1995);
* sums of products only where each product fits FP32 exactly, so that contraction changes nothing, added up by
  halving: the second half of a row onto the first until one element is left.
"""

import math
import struct

import torch
from torch import Tensor

SIGN = -(1 << 31)
MAGNITUDE = 0x7FFFFFFF
MANTISSA = 0x007FFFFF
INFINITY = 0x7F800000
QUIET_NAN = 0x7FC00000
FP32_MAX = 3.4028234663852886e38


def f32(value: float) -> float:
    """A Python number rounded to FP32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def pattern_of(value: float) -> int:
    """The FP32 bits of a Python number >= 0."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def pattern(x: Tensor) -> Tensor:
    """FP32 tensor -> its bits, int32, same shape."""
    return x.contiguous().view(torch.int32)


def from_pattern(bits: Tensor) -> Tensor:
    """int32 bits -> FP32 tensor, same shape."""
    return bits.to(torch.int32).contiguous().view(torch.float32)


def is_finite(x: Tensor) -> Tensor:
    """FP32 -> bool: neither NaN nor infinite."""
    return (pattern(x) & MAGNITUDE) < INFINITY


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The correctly rounded FP32 quotient of FP32 numbers (at least one a tensor) on every backend."""
    # CUDA divides by a Python number as it multiplies by its rounded inverse, so that one becomes a tensor first.
    # The fill that makes it does not wait for the device.
    if not isinstance(b, Tensor):
        assert isinstance(a, Tensor)
        b = torch.full((), f32(b), dtype=torch.float64, device=a.device)
    top = a.double() if isinstance(a, Tensor) else f32(a)
    quotient = (top / b.double()).float()
    # The compiler of torch 2.11 drops FP32 between conversions from and to FP64, as in a quotient of a quotient, unless
    # something is done to its bits: keeping them all is enough.
    return from_pattern(pattern(quotient) & -1)


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, for what the forward of an `autograd.Function` returns.

    Where nothing is to be converted, `x.to(dtype)` is x itself. The compiler of torch 2.11 then takes one tensor for
    two outputs of the function, and the gradient of the one that is used arrives as zeros, without a word.
    """
    return x if x.dtype == dtype else x.to(dtype)


def round_to_bf16(x: Tensor) -> Tensor:
    """FP32 -> the nearest BF16 number (ties to even), still FP32. Overflow is infinity, NaN quiet."""
    bits = pattern(x)
    magnitude = bits & MAGNITUDE
    rounded = (magnitude.clamp(max=INFINITY) + 0x7FFF + ((magnitude >> 16) & 1)) & ~0xFFFF
    rounded = torch.where(magnitude > INFINITY, QUIET_NAN, rounded)
    return from_pattern(rounded | (bits & SIGN))


def check_readable(dtype: torch.dtype) -> None:
    """Raise TypeError for a type that no quantiser reads."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"a quantiser reads bfloat16 or float32, not {dtype}: convert the tensor first")


def read_bf16(x: Tensor) -> Tensor:
    """What every quantiser reads: BF16, held as FP32. An FP32 input is rounded; other types are refused."""
    check_readable(x.dtype)
    return x.float() if x.dtype == torch.bfloat16 else round_to_bf16(x)


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent for integer exponents -127..127, FP32 (2**-127 is the subnormal)."""
    exponent = exponent.to(torch.int32)
    return from_pattern(torch.where(exponent > -127, (exponent + 127) << 23, 1 << 22))


def exponent_floor(amax: Tensor, largest: float) -> Tensor:
    """floor(log2 amax) - floor(log2 largest), int32: the OCP rule. FP32 subnormals and 0 count as 2**-127."""
    return (pattern(amax) >> 23) - 127 - (math.frexp(largest)[1] - 1)


def exponent_up(amax: Tensor, largest: float) -> Tensor:
    """The smallest integer e with amax <= largest * 2**e, int32, from the bits. Below 2**-126 it may be too large."""
    over = (pattern(amax) & MANTISSA) > (pattern_of(largest) & MANTISSA)
    return exponent_floor(amax, largest) + over.to(torch.int32)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension (a power of two) in a fixed order: x[i] += x[i + n/2], then n/4, ... [..., n] ->
    [..., 1].
    """
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x
