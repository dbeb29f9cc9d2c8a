"""A quantised tensor: codes and scales, what they stand for, and how they are stored.

The value of an element is code x block scale x outer scale. A matrix product wants it in two parts:

* `operand()`, BF16: what is multiplied. Code x block scale (x outer scale of 128) has few enough bits for BF16 to hold
  it exactly, whatever the device. (One exception: NVFP4_TETRAJET's FP32 outer scale lies inside the sum, and its
  operand is rounded to BF16.)
* `after()`, FP32 or None: the scale of the whole tensor or of each row, which leaves the sum: (a s)(b t)^T = s (a b^T)
  t^T.

`dequantise()` is their product rounded to BF16.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.quant.bits import round_to_bf16
from lowbit.quant.formats import decode, encode
from lowbit.quant.packing import pack_codes, swizzle, unpack_codes, unswizzle
from lowbit.quant.scales import decode_scale, encode_scale
from lowbit.quant.spec import Outer, QuantSpec, Scale


@dataclass(frozen=True)
class Values:
    """A quantised tensor with its numbers as FP32 on their grids, in blocks; what the quantisers compute."""

    elements: Tensor
    """[row blocks, rows a block, column blocks, columns a block]."""
    scale: Tensor
    """[row blocks, 1, column blocks, 1]."""
    outer: Tensor | None
    """[1 or rows, 1, 1 or groups of 128, 1], or None."""
    shape: tuple[int, ...]
    """Of the tensor, before padding."""
    spec: QuantSpec

    def operand(self) -> Tensor:
        """BF16, of the tensor's shape."""
        scale, outer = self.scale, self.outer
        value = self.elements
        if self.spec.outer in (Outer.BLOCK, Outer.BLOCK_POW2):
            assert outer is not None
            outer = spread(outer, scale.shape[2])
            value = value * (outer * scale) if self.spec.outer is Outer.BLOCK else (value * scale) * outer
        elif self.spec.scale is not Scale.FP32:
            value = value * scale
        return self._unblock(round_to_bf16(value).to(torch.bfloat16))

    def after(self) -> Tensor | None:
        """FP32 [1, ..., 1] or [..., 1]: multiply the operand (or its product) by it. None if there is nothing left."""
        if self.spec.after is Outer.NONE:
            return None
        left = self.scale if self.outer is None else self.outer
        if self.spec.after is Outer.ROW:
            return left.reshape(-1)[: math.prod(self.shape[:-1])].reshape(*self.shape[:-1], 1)
        return left.reshape([1] * len(self.shape))

    def dequantise(self) -> Tensor:
        """BF16, of the tensor's shape."""
        operand, after = self.operand(), self.after()
        return operand if after is None else round_to_bf16(operand.float() * after).to(torch.bfloat16)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Each element's number on the element format's grid, and the scale that it is multiplied by; FP32 both, of
        the tensor's shape."""
        scale = self.scale
        if self.outer is not None:
            scale = scale * (spread(self.outer, scale.shape[2]) if self.outer.shape[2] > 1 else self.outer)
        return self._unblock(self.elements), self._unblock(scale.expand_as(self.elements))

    def _unblock(self, value: Tensor) -> Tensor:
        """Blocks -> the tensor's shape, without the padding."""
        row_blocks, rows, column_blocks, columns = value.shape
        matrix = value.reshape(row_blocks * rows, column_blocks * columns)
        wanted = (math.prod(self.shape[:-1]), self.shape[-1])
        if tuple(matrix.shape) != wanted:
            matrix = crop(matrix, *wanted)
        return matrix.reshape(self.shape)


@dataclass(frozen=True)
class Quantised:
    """A quantised tensor as codes, one a byte."""

    codes: Tensor
    """uint8 (int8 for INT8) [padded rows, padded columns]; leading dimensions are rows."""
    scales: Tensor
    """uint8 bytes (E8M0, E4M3) or FP32, [row blocks, column blocks]."""
    outer: Tensor | None
    """FP32 [1 or rows, 1 or groups of 128], or None."""
    shape: tuple[int, ...]
    spec: QuantSpec

    def values(self) -> Values:
        """Decoded, in blocks."""
        row_blocks, column_blocks = self.scales.shape
        rows, columns = self.codes.shape
        blocks = (row_blocks, rows // row_blocks, column_blocks, columns // column_blocks)
        scale = decode_scale(self.scales, self.spec)[:, None, :, None]
        outer = None if self.outer is None else self.outer[:, None, :, None]
        return Values(decode(self.codes, self.spec.element).reshape(blocks), scale, outer, self.shape, self.spec)

    def operand(self) -> Tensor:
        """The BF16 operand of a product, of the tensor's shape."""
        return self.values().operand()

    def after(self) -> Tensor | None:
        """What the product still has to be multiplied by (see `Values.after`)."""
        return self.values().after()

    def dequantise(self) -> Tensor:
        """BF16, of the tensor's shape."""
        return self.values().dequantise()

    def pack(self, swizzled: bool = False) -> "Packed":
        """As it is stored. `swizzled` (scale bytes only) puts scales in the 32_4_4 order."""
        if swizzled and self.scales.dtype != torch.uint8:
            raise ValueError(f"{self.spec.name}: only one-byte scales have the 32_4_4 layout")
        data = pack_codes(self.codes, self.spec.element.bits)
        scales = swizzle(self.scales) if swizzled else self.scales
        rows, columns = self.scales.shape
        return Packed(data, scales, self.outer, self.shape, self.spec, (rows, columns), swizzled)


@dataclass(frozen=True)
class Packed:
    """A quantised tensor in the bytes it really takes."""

    data: Tensor
    """uint8 [padded rows, padded columns * bits / 8]."""
    scales: Tensor
    """As in `Quantised`, or uint8 [any] in the 32_4_4 layout."""
    outer: Tensor | None
    shape: tuple[int, ...]
    spec: QuantSpec
    scale_shape: tuple[int, int]
    swizzled: bool

    def unpack(self) -> Quantised:
        element = self.spec.element
        scales = unswizzle(self.scales, *self.scale_shape) if self.swizzled else self.scales
        codes = unpack_codes(self.data, element.bits, element.code_dtype)
        missing = _padded(self.shape[-1], self.spec) - codes.shape[1]
        if missing > 0:  # it was trimmed
            codes = F.pad(codes, (0, missing))
            scales = F.pad(scales, (0, missing // self.spec.block[1]))
        return Quantised(codes, scales, self.outer, self.shape, self.spec)

    def trim(self) -> "Packed":
        """Without the column blocks that hold nothing but padding; `unpack` puts them back."""
        width = self.spec.block[1]
        blocks = -(-self.shape[-1] // width) if width else 0
        rows, columns = self.scale_shape
        if self.swizzled or not 0 < blocks < columns:
            return self
        data = crop(self.data, self.data.shape[0], self.data.shape[1] // columns * blocks)
        return replace(self, data=data, scales=crop(self.scales, rows, blocks), scale_shape=(rows, blocks))

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and outer scales."""
        tensors = (self.data, self.scales, self.outer)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _padded(columns: int, spec: QuantSpec) -> int:
    """Columns with the padding that quantising adds."""
    multiple = spec.column_multiple
    return max(1, -(-columns // multiple)) * multiple


def to_codes(values: Values) -> Quantised:
    """Encode: the other direction of `Quantised.values`."""
    row_blocks, rows, column_blocks, columns = values.elements.shape
    codes = encode(values.elements, values.spec.element).reshape(row_blocks * rows, column_blocks * columns)
    scales = encode_scale(values.scale, values.spec).reshape(row_blocks, column_blocks)
    outer = None if values.outer is None else values.outer.reshape(values.outer.shape[0], values.outer.shape[2])
    return Quantised(codes, scales, outer, values.shape, values.spec)


@torch.library.custom_op("lowbit::crop", mutates_args=())
def crop(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns of a matrix, as a copy of its own.

    An operator that the compiler does not look into: Inductor's C++ backend (torch 2.13) splits a loop over n columns
    that divides the column by 16, 32 or 128 into n // 128 parts and never computes the rest if 128 does not divide n.
    """
    return matrix[:rows, :columns].clone(memory_format=torch.contiguous_format)


@crop.register_fake
def _(matrix: Tensor, rows: int, columns: int) -> Tensor:
    return matrix.new_empty(rows, columns)


def spread(outer: Tensor, blocks: int) -> Tensor:
    """[rows, 1, groups, 1] -> [rows, 1, blocks, 1]: each group's number for each of its blocks."""
    rows, _, groups, _ = outer.shape
    return outer.expand(rows, 1, groups, blocks // groups).reshape(rows, 1, blocks, 1)
