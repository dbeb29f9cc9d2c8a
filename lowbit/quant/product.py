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
from enum import Enum

import torch
from torch import Tensor

from lowbit.quant.backends import NATIVE
from lowbit.quant.backends.base import Native
from lowbit.quant.bits import in_type, round_to_bf16
from lowbit.quant.hadamard import rotate
from lowbit.quant.kernels import ops
from lowbit.quant.philox import Stream
from lowbit.quant.policy import EMULATED, Operand, Signs
from lowbit.quant.quantise import Memory, quantise_values
from lowbit.quant.quantised import Packed, Quantised, Values, to_codes
from lowbit.quant.spec import Outer, QuantSpec

TRANSFORMER_ENGINE_SIGNS = 0xD7E8
"""Where its fixed vector of 16 signs is -1, first element in the lowest bit."""


class Wanted(Enum):
    """What of a factor is needed."""

    OPERAND = 0
    """To multiply."""
    CODES = 1
    """To store."""
    BOTH = 2


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


@dataclass(frozen=True)
class Fused:
    """A factor that one kernel made (`kernels.ops`)."""

    spec: QuantSpec
    shape: tuple[int, int]
    """[rows, k], k as rotation padded it."""
    matrix: Tensor
    """The operand, in the type of the product; without elements if it was not asked for, like the codes."""
    scale: Tensor
    data: Tensor
    scales: Tensor
    outer: Tensor

    def operand(self) -> Tensor:
        """As `Values.operand`."""
        return self.matrix

    def after(self) -> Tensor | None:
        """As `Values.after`."""
        return None if self.scale.numel() == 0 else self.scale

    def dequantise(self) -> Tensor:
        """As `Values.dequantise`, in the type of the product."""
        after = self.after()
        return self.matrix if after is None else bf16_valued(self.matrix.float() * after, self.matrix.dtype)

    def pack(self) -> Packed:
        """As it is stored, trimmed."""
        outer = self.outer if self.outer.numel() else None
        rows, columns = self.scales.shape
        return Packed(self.data, self.scales, outer, self.shape, self.spec, (rows, columns), False)

    @classmethod
    def unpack(cls, packed: Packed, dtype: torch.dtype) -> "Fused":
        """The factor from what is stored."""
        spec, (rows, width) = packed.spec, packed.shape
        matrix = ops.unpack_op(packed.data, packed.scales, packed.outer, ops.spec_text(spec), rows, width, dtype)
        none = packed.data.new_empty(0)
        scale = none.float()
        if spec.after is not Outer.NONE:
            scale = packed.scales if packed.outer is None else packed.outer
        return cls(spec, (rows, width), matrix, scale, none, none, none)


Factor = Values | Quantised | Dense | Fused
Pair = tuple[Factor, Factor] | tuple[None, None]


def signs_of(stream: Stream, size: int, signs: Signs) -> Tensor | None:
    """FP32 [size]: the signs that both factors of the stream's product are rotated with; None for size 0."""
    if size == 0:
        return None
    if signs is Signs.FRESH:
        if ops.takes(stream.key):
            drawn: Tensor = ops.signs_op(stream.key, stream.clock, ops.lane_of(stream), size)
            return drawn
        return stream.signs(size)
    place = torch.arange(16, device=stream.key.device)
    return 1.0 - 2.0 * ((TRANSFORMER_ENGINE_SIGNS >> place) & 1).float()


def bf16_valued(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, BF16 or FP32, rounded to BF16 and held in `dtype` (BF16 or FP32)."""
    if x.dtype == torch.bfloat16:
        return x.to(dtype)
    return ops.rounded_op(x, dtype) if x.device.type == "cpu" else round_to_bf16(x).to(dtype)


def factor(
    x: Tensor,
    operand: Operand,
    stream: Stream,
    signs: Tensor | None,
    dtype: torch.dtype,
    memory: Memory | None = None,
    amax: Tensor | None = None,
    wanted: Wanted = Wanted.OPERAND,
    again: bool = False,
) -> Factor:
    """x [rows, k], BF16 or FP32, any strides -> rotated and quantised.

    Args:
        dtype: that of the product. memory, amax: see `quantise_values`. again: see `ops.factor_op`.
    """
    spec = operand.spec
    emulated = operand.backend == EMULATED
    fused = emulated and ops.takes(x, spec) and (memory is None or memory.margin == 1)
    if fused and (spec is not None or signs is not None):
        choice = None if memory is None else memory.choice
        settings = (
            ops.spec_text(spec),
            ops.lane_of(stream),
            dtype,
            wanted is not Wanted.CODES,
            wanted is not Wanted.OPERAND,
            again,
        )
        matrix, scale, *codes = ops.factor_op(x, signs, stream.key, stream.clock, choice, amax, *settings)
        if spec is None:
            return Dense(matrix)
        return Fused(spec, (x.shape[0], ops.operand_width(x.shape[1], signs)), matrix, scale, *codes)
    if signs is not None:
        x = rotate(x, signs, signs.shape[0])
    if spec is None:
        return Dense(bf16_valued(x, dtype))
    if not emulated:
        return NATIVE[operand.backend].factor(x, spec, amax, stream, memory)
    return quantise_values(x, spec, stream, memory, amax)


def pack(made: Factor) -> Packed:
    """A quantised factor as it is stored, trimmed."""
    if isinstance(made, Fused):
        return made.pack()
    assert not isinstance(made, Dense)
    return (to_codes(made) if isinstance(made, Values) else made).pack().trim()


def factor_pair(x: Tensor, operand: Operand, operand_t: Operand, amax: Tensor | None = None) -> Pair:
    """The factors of x and of x^T, unrotated, from one reading of x; (None, None) where no backend can."""
    if operand.spec is None or operand_t.spec is None or operand.backend != operand_t.backend:
        return None, None
    if operand.backend == EMULATED:
        return None, None
    return NATIVE[operand.backend].factor_pair(x, operand.spec, operand_t.spec, amax)


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
    product = _summed(a, b, dtype, out_dtype)
    for scale in scales:
        if scale is not None:
            product = product.float() * scale
    return in_type(product, out_dtype)


def _summed(a: Tensor, b: Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """a [m, k], b [k, n] -> a b [m, n] as `multiply` wants it, whatever autocast would make of it."""
    kind = a.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return _summed(a, b, dtype, out_dtype)
    if dtype == torch.bfloat16 and out_dtype == torch.float32 and a.is_cuda:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
    wide = torch.float32 if out_dtype == torch.float32 else dtype
    return a.to(wide) @ b.to(wide)
