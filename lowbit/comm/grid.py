"""The numbers of the 6-bit formats: block scales, magnitude levels, and where one level ends and the next begins.

Every format holds a block's values as  sign x level[q] x unit,  with q an integer of a few bits, level[q] growing like
q**power, and one 8-bit code of the unit for the block:

| format  | block | levels | power | block scale | bits a value |
|---------|-------|--------|-------|-------------|--------------|
| squinch | 8     | 0..15  | 2     | e**(1/6) steps above the block's largest value | 48 / 8 |
| sq48    | 8     | 0..15  | 1.5   | 2**(1/8) steps, the better of the two next to the largest value | 48 / 8 |

`squinch` is Character.AI's published block (blog.character.ai/squinch, December 2025): an 8-bit logarithm of the
largest magnitude, q_max = clip(floor(6 ln max + 129), 0, 255), meaning exp((q_max - 128) / 6), 8 sign bits, and eight
4-bit magnitudes through a square root. The post does not give the rounding of the magnitudes; we take the nearest in
the square-root domain, q = floor(15 sqrt(|x| / max) + 1/2), which has an exact zero. (The other reading, sixteen cells
decoded at their middle, has none: a coordinate whose gradient is zero would come out as max / 1024, and Adam would turn
that into steps of full size.) We reserve q_max = 0 for blocks of zeros and q_max = 255 for blocks with Inf or NaN.
`sq48` is ours.

Bits must not depend on the device, so rounding is integer arithmetic. The quotient |x| / scale is one FP32 product with
a tabulated reciprocal, rounded to a whole number i of 0..steps (half to even); everything after that is a function of
i. Here q = floor(levels * (i / steps)**(1 / power) + 1/2). `steps` is chosen so that no i comes nearer to a boundary
than 8e-4 of a level: a device's approximate square root or power finds the same q as exact arithmetic.
"""

import math
import struct
from dataclasses import dataclass

FP32_MANTISSA = 1 << 23
SHRINK = 2.0**-0.125
"""The second candidate scale of sq48 relative to the first."""

EIGHTHS = tuple(round(FP32_MANTISSA * (2 ** (j / 8) - 1)) for j in range(8))
"""FP32 mantissas of 2**(j/8): scale s (in eighths of an octave) is 2**(s >> 3) with mantissa EIGHTHS[s & 7]."""

HALF_EIGHTHS = tuple(math.floor(FP32_MANTISSA * (2 ** ((j + 0.5) / 8) - 1)) for j in range(8))
"""Mantissas halfway (in the logarithm) between the scales: above HALF_EIGHTHS[j] the nearest scale is j + 1."""

TILE = 4096
"""sq48: values that share an exponent byte; a block's byte counts eighths of an octave down from it."""

EXPONENT_MIN, EXPONENT_MAX = -80, 128
"""Range of a tile's exponent. Its lower end keeps every scale, its reciprocal and every decoded value normal in FP32:
blocks whose largest magnitude lies under about 2**-112 are sent as zeros."""

EIGHTHS_MAX = 1023
"""The largest scale, 2**127.875. A block with a larger magnitude (FP32 goes 9% further) counts as not finite."""

LARGEST_BITS = 254 << 23 | EIGHTHS[7]
"""Its FP32 bits."""

CODE_ZERO, CODE_MAX, CODE_NAN = 0, 254, 255


def f32(value: float) -> float:
    """A Python number rounded to FP32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def f32_up(value: float) -> float:
    """The smallest FP32 number not below a positive value."""
    near = f32(value)
    if near >= value:
        return near
    return float(struct.unpack("<f", struct.pack("<i", struct.unpack("<i", struct.pack("<f", near))[0] + 1))[0])


@dataclass(frozen=True)
class Grid:
    """How one format cuts magnitudes into levels."""

    name: str
    ident: int
    """The format's number in a message header."""
    block: int
    """Values that share a scale."""
    levels: int
    """The largest q."""
    power: float
    steps: int
    """Resolution at which |x| / scale is rounded before it is given a level."""

    def boundary_position(self, i: int, shrink: float = 1.0) -> float:
        """levels * (i / steps / shrink)**(1 / power) + 1/2, whose floor is q."""
        return self.levels * math.pow(i / self.steps / shrink, 1 / self.power) + 0.5

    def codes(self, shrink: float = 1.0) -> list[int]:
        """q for i = 0..steps, under a scale `shrink` times the one that i was made with."""
        return [min(self.levels, math.floor(self.boundary_position(i, shrink))) for i in range(self.steps + 1)]

    def level_steps(self, shrink: float = 1.0) -> list[int]:
        """Where level q lies, in whole steps: what the search between two scales measures errors by."""
        return [math.floor(self.position(q) * shrink + 0.5) for q in range(self.levels + 1)]

    def position(self, q: int) -> float:
        """Where level q lies, in steps (not rounded)."""
        return self.steps * math.pow(q / self.levels, self.power)

    def level_values(self) -> list[float]:
        """level[q] in units of the block's unit, FP32: q**2 for squinch (unit max / 225), else (q / levels)**power."""
        if self.power == 2:
            return [float(q * q) for q in range(self.levels + 1)]
        return [f32((q / self.levels) ** self.power) for q in range(self.levels + 1)]


SQUINCH = Grid("squinch", 1, block=8, levels=15, power=2.0, steps=4050)
SQ48 = Grid("sq48", 2, block=8, levels=15, power=1.5, steps=2074)


def squinch_maximum(code: int) -> float:
    """exp((code - 128) / 6): what the published 8-bit code means, FP64."""
    return math.exp((code - 128) / 6)


def squinch_thresholds() -> list[float]:
    """FP32 [254]: a block's code is the number of entries not above its largest magnitude m.

    Entry k - 1 is the smallest FP32 number with floor(6 ln m + 129) >= k. Codes end at 254, since 255 says NaN.
    """
    return [f32_up(math.exp((code - 129) / 6)) for code in range(1, CODE_NAN)]


def squinch_units() -> list[float]:
    """FP32 [256]: the unit of decoded values, max / 225; 0 for code 0, NaN for code 255."""
    return [0.0, *(f32(squinch_maximum(code) / 225) for code in range(1, CODE_NAN)), math.nan]


def squinch_reciprocals() -> list[float]:
    """FP32 [256]: steps / max; 0 for codes 0 and 255, whose values carry no magnitudes."""
    return [0.0, *(f32(SQUINCH.steps / squinch_maximum(code)) for code in range(1, CODE_NAN)), 0.0]
