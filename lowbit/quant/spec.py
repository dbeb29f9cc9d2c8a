"""What a quantiser does, as data: `QuantSpec`, and the specs that have a name.

A quantised tensor is  element code x block scale x outer scale.  A spec says which of each, how scales and elements are
rounded, and which blocks share a scale. Blocks lie along the last dimension (the one a product sums over) unless they
have rows too.

| name | element | block | scale | outer scale | rounding |
|------|---------|-------|-------|-------------|----------|
| MXFP8, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4 | E4M3, ... | 1x32 | E8M0, up | - | nearest |
| the same with _FLOOR | | 1x32 | E8M0, OCP's floor rule | - | nearest |
| NVFP4, NVFP4_2D, NVFP4_ROW | E2M1 | 1x16, 16x16, 1x16 | E4M3 | FP32: tensor, tensor, row | nearest |
| NVFP4_TETRAJET, NVFP4_POW2 | E2M1 | 1x16 | E4M3 | FP32, power of two: 1x128 | nearest |
| NVFP4_SR, NVFP4_TETRAJET_SR | E2M1 | 1x16 | E4M3 | FP32: tensor, 1x128 | stochastic, as published: clips |
| NVFP4_POW2_SR | E2M1 | 1x16 | E4M3, up | power of two, 1x128 | stochastic, unbiased |
| NVFP4_46, NVFP4_POW2_46 | E2M1 | 1x16 | E4M3 | FP32 tensor; power of two | four over six (MSE) |
| NVFP4_EDEN, NVFP4_POW2_EDEN | E2M1 | 1x16 | E4M3 | FP32 tensor; power of two | MS-EDEN |
| NVFP4_EDEN_PUBLISHED | E2M1 | 1x16 | E4M3 | FP32 tensor | MS-EDEN, as published: biased (see `eden`) |
| FP8_TENSOR, FP8_ROW | E4M3 | whole tensor, row | FP32 | - | nearest |
| FP8_BLOCK, FP8_BLOCK_2D | E4M3 | 1x128, 128x128 | power of two | - | nearest |
| INT8_ROW | INT8 | row (a weight's output channel, an activation's token) | FP32 | - | nearest |

`VARIANTS` are some of these with another rounding: `_SR`, stochastic, of every format with one scale that clips nothing
(under OCP's floor rule and the nearest E4M3 scale the largest element is clipped: a bias, see `scales`), and `_MAE`,
four over six by the sum of magnitudes.
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from lowbit.errors import ConfigError
from lowbit.quant.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, ElementFormat

EDEN_TARGET = 6 / (17 / 16 * 0.93)
"""MS-EDEN maps a block's largest magnitude to 6.07, a little above E2M1's 6: less error than 6 (arXiv 2601.22813)."""


class Scale(Enum):
    """How a block's scale is stored and rounded."""

    E8M0_UP = "e8m0_up"
    E8M0_FLOOR = "e8m0_floor"
    E4M3_NEAREST = "e4m3_nearest"
    E4M3_UP = "e4m3_up"
    FP32 = "fp32"
    POWER_OF_TWO = "power_of_two"


class Outer(Enum):
    """The second scale above E4M3 block scales."""

    NONE = "none"
    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"
    """1x128, FP32: TetraJet-v2's double block."""
    BLOCK_POW2 = "block_pow2"
    """1x128, a power of two: dequantised values fit BF16 exactly."""


class Rounding(Enum):
    NEAREST = "nearest"
    STOCHASTIC = "stochastic"
    FOUR_OVER_SIX_MSE = "four_over_six_mse"
    FOUR_OVER_SIX_MAE = "four_over_six_mae"
    MS_EDEN = "ms_eden"
    MS_EDEN_PUBLISHED = "ms_eden_published"
    """Quartet II's reference code: the correction's dot products weigh every block of a group alike (see `eden`)."""


FOUR_OVER_SIX = (Rounding.FOUR_OVER_SIX_MSE, Rounding.FOUR_OVER_SIX_MAE)
EDEN = (Rounding.MS_EDEN, Rounding.MS_EDEN_PUBLISHED)
E4M3_SCALES = (Scale.E4M3_NEAREST, Scale.E4M3_UP)
OUTER_BLOCK = 128


@dataclass(frozen=True)
class QuantSpec:
    """A quantiser. Hashable; a constant of compiled code. Raises ConfigError for a combination that does not exist."""

    name: str
    element: ElementFormat
    block: tuple[int, int]
    """Rows and columns that share a scale; 0 means all of them."""
    scale: Scale
    outer: Outer = Outer.NONE
    rounding: Rounding = Rounding.NEAREST
    bound: float = 448.0
    """The largest E4M3 block scale that the outer scale leaves room for (less where scales grow later)."""
    target: float = 6.0
    """The value that a block's largest magnitude is mapped to, of two-level formats."""
    text: str = field(init=False, repr=False, compare=False)
    """All of it in one line, for operators, which take no Python objects (`kernels.ops.spec_of` is the inverse). Made
    here because a compiler that takes every number for a variable (`dynamic=True`) cannot put numbers into text."""

    def __post_init__(self) -> None:
        kinds = f"{self.scale.value} {self.outer.value} {self.rounding.value} {self.bound!r} {self.target!r}"
        object.__setattr__(self, "text", f"{self.name} {self.element.name} {self.block[0]} {self.block[1]} {kinds}")
        two_level = self.scale in E4M3_SCALES
        problem = ""
        if two_level != (self.outer is not Outer.NONE) or (two_level and self.element is not E2M1):
            problem = "E4M3 block scales, an outer scale and E2M1 elements go together"
        elif self.outer in (Outer.ROW, Outer.BLOCK, Outer.BLOCK_POW2) and self.block[0] != 1:
            problem = f"a {self.outer.value} outer scale needs blocks of one row, not {self.block[0]}"
        elif self.rounding in FOUR_OVER_SIX and not (two_level and self.bound <= 256):
            problem = "four over six needs E4M3 block scales and bound=256, which leaves room for 1.5 times the scale"
        elif self.rounding in EDEN and not (two_level and self.block == (1, 16) and self.bound <= 256):
            problem = "MS-EDEN needs 1x16 blocks, E4M3 block scales and a bound of at most 256"
        elif self.scale is Scale.FP32 and self.block[1] != 0:
            problem = "an FP32 scale is applied after the product, so it must belong to whole rows"
        if problem:
            raise ConfigError(f"quantiser {self.name}: {problem}")

    @property
    def stochastic(self) -> bool:
        """Whether it needs a random stream."""
        return self.rounding is Rounding.STOCHASTIC or self.rounding in EDEN

    @property
    def after(self) -> Outer:
        """The scale that leaves the sum and follows the product: TENSOR's, each ROW's, or NONE."""
        if self.scale is Scale.FP32:
            return Outer.ROW if self.block[0] else Outer.TENSOR
        return self.outer if self.outer in (Outer.TENSOR, Outer.ROW) else Outer.NONE

    @property
    def column_multiple(self) -> int:
        """The last dimension is padded with zeros to a multiple of this."""
        if self.outer in (Outer.BLOCK, Outer.BLOCK_POW2) or self.rounding in EDEN:
            return math.lcm(OUTER_BLOCK, self.block[1])
        return self.block[1] or 1

    @property
    def bits(self) -> float:
        """Bits an element of a large tensor (tensor and row scales count as nothing)."""
        rows, columns = self.block
        shared = rows * columns
        scale_bits = {Scale.FP32: 32, Scale.POWER_OF_TWO: 32}.get(self.scale, 8)
        outer_bits = 32 / OUTER_BLOCK if self.outer in (Outer.BLOCK, Outer.BLOCK_POW2) else 0.0
        return self.element.bits + (scale_bits / shared if shared else 0.0) + outer_bits


def _mx(name: str, element: ElementFormat, scale: Scale = Scale.E8M0_UP) -> QuantSpec:
    return QuantSpec(name, element, (1, 32), scale)


MXFP8 = _mx("MXFP8", E4M3)
MXFP8_FLOOR = _mx("MXFP8_FLOOR", E4M3, Scale.E8M0_FLOOR)
MXFP8_E5M2 = _mx("MXFP8_E5M2", E5M2)
MXFP8_E5M2_FLOOR = _mx("MXFP8_E5M2_FLOOR", E5M2, Scale.E8M0_FLOOR)
MXFP6_E2M3 = _mx("MXFP6_E2M3", E2M3)
MXFP6_E2M3_FLOOR = _mx("MXFP6_E2M3_FLOOR", E2M3, Scale.E8M0_FLOOR)
MXFP6_E3M2 = _mx("MXFP6_E3M2", E3M2)
MXFP6_E3M2_FLOOR = _mx("MXFP6_E3M2_FLOOR", E3M2, Scale.E8M0_FLOOR)
MXFP4 = _mx("MXFP4", E2M1)
MXFP4_FLOOR = _mx("MXFP4_FLOOR", E2M1, Scale.E8M0_FLOOR)

NVFP4 = QuantSpec("NVFP4", E2M1, (1, 16), Scale.E4M3_NEAREST, Outer.TENSOR)
NVFP4_2D = replace(NVFP4, name="NVFP4_2D", block=(16, 16))
NVFP4_ROW = replace(NVFP4, name="NVFP4_ROW", outer=Outer.ROW)
NVFP4_TETRAJET = replace(NVFP4, name="NVFP4_TETRAJET", outer=Outer.BLOCK)
NVFP4_POW2 = replace(NVFP4, name="NVFP4_POW2", outer=Outer.BLOCK_POW2)
NVFP4_SR = replace(NVFP4, name="NVFP4_SR", rounding=Rounding.STOCHASTIC)
NVFP4_TETRAJET_SR = replace(NVFP4_TETRAJET, name="NVFP4_TETRAJET_SR", rounding=Rounding.STOCHASTIC)
NVFP4_POW2_SR = replace(NVFP4_POW2, name="NVFP4_POW2_SR", scale=Scale.E4M3_UP, rounding=Rounding.STOCHASTIC)
NVFP4_46 = replace(NVFP4, name="NVFP4_46", rounding=Rounding.FOUR_OVER_SIX_MSE, bound=256.0)
NVFP4_POW2_46 = replace(NVFP4_46, name="NVFP4_POW2_46", outer=Outer.BLOCK_POW2)
NVFP4_EDEN = replace(NVFP4, name="NVFP4_EDEN", rounding=Rounding.MS_EDEN, bound=255.99, target=EDEN_TARGET)
NVFP4_EDEN_PUBLISHED = replace(NVFP4_EDEN, name="NVFP4_EDEN_PUBLISHED", rounding=Rounding.MS_EDEN_PUBLISHED)
NVFP4_POW2_EDEN = replace(NVFP4_EDEN, name="NVFP4_POW2_EDEN", outer=Outer.BLOCK_POW2)

FP8_TENSOR = QuantSpec("FP8_TENSOR", E4M3, (0, 0), Scale.FP32)
FP8_ROW = QuantSpec("FP8_ROW", E4M3, (1, 0), Scale.FP32)
FP8_BLOCK = QuantSpec("FP8_BLOCK", E4M3, (1, 128), Scale.POWER_OF_TWO)
FP8_BLOCK_2D = QuantSpec("FP8_BLOCK_2D", E4M3, (128, 128), Scale.POWER_OF_TWO)
INT8_ROW = QuantSpec("INT8_ROW", INT8, (1, 0), Scale.FP32)

SPECS = {
    spec.name: spec
    for spec in (
        *(
            MXFP8,
            MXFP8_FLOOR,
            MXFP8_E5M2,
            MXFP8_E5M2_FLOOR,
            MXFP6_E2M3,
            MXFP6_E2M3_FLOOR,
            MXFP6_E3M2,
            MXFP6_E3M2_FLOOR,
            MXFP4,
            MXFP4_FLOOR,
        ),
        *(NVFP4, NVFP4_2D, NVFP4_ROW, NVFP4_TETRAJET, NVFP4_POW2, NVFP4_SR, NVFP4_TETRAJET_SR, NVFP4_POW2_SR),
        *(NVFP4_46, NVFP4_POW2_46, NVFP4_EDEN, NVFP4_EDEN_PUBLISHED, NVFP4_POW2_EDEN),
        *(FP8_TENSOR, FP8_ROW, FP8_BLOCK, FP8_BLOCK_2D, INT8_ROW),
    )
}
"""By name."""


def _variant(spec: QuantSpec, ending: str, rounding: Rounding) -> QuantSpec:
    return replace(spec, name=f"{spec.name}_{ending}", rounding=rounding)


_ONE_LEVEL = (MXFP8, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4, FP8_TENSOR, FP8_ROW, FP8_BLOCK, FP8_BLOCK_2D, INT8_ROW)
VARIANTS = {
    spec.name: spec
    for spec in (
        *(_variant(spec, "SR", Rounding.STOCHASTIC) for spec in _ONE_LEVEL),
        *(_variant(spec, "MAE", Rounding.FOUR_OVER_SIX_MAE) for spec in (NVFP4_46, NVFP4_POW2_46)),
    )
}
"""By name."""
