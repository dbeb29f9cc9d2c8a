"""Operators that the compiler does not look into: a factor of a product, its codes and back, and rotation signs.

Opaque on purpose. What a linear layer keeps for its backward pass is then what it says, the packed codes, and not
whatever a partitioner finds cheaper; a graph compiles in seconds; and a kernel of its own can do what a loop compiler
cannot, rotate 128 numbers in registers. On the CPU they run `quantise.cpp`, or the PyTorch reference where there is no
compiler; on a GPU, `triton_blocks`. All give the same bits.

A spec travels as text, since an operator takes no Python objects: `spec_text` and `spec_of`.
"""

from functools import cache

import torch
from torch import Tensor

from lowbit.quant.bits import check_readable, round_to_bf16
from lowbit.quant.formats import ELEMENT_FORMATS
from lowbit.quant.hadamard import rotate
from lowbit.quant.kernels import cpu
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.quantise import Memory, quantise_values
from lowbit.quant.quantised import Packed, to_codes
from lowbit.quant.spec import FOUR_OVER_SIX, OUTER_BLOCK, Outer, QuantSpec, Rounding, Scale

BF16_ONLY = ""
"""The text of no spec: round to BF16."""

_NVIDIA = torch.version.hip is None
"""Else `cuda` is ROCm, for which there are no kernels here."""
AMPERE = 8, 0
"""Compute capability of the oldest GPUs that round to BF16 by an instruction, which the kernels do."""
FactorTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def spec_text(spec: QuantSpec | None) -> str:
    """A spec in one line."""
    return BF16_ONLY if spec is None else spec.text


@cache
def spec_of(text: str) -> QuantSpec | None:
    """The inverse of `spec_text`."""
    if text == BF16_ONLY:
        return None
    name, element, rows, columns, scale, outer, rounding, bound, target = text.rsplit(" ", 8)
    fmt = next(f for f in ELEMENT_FORMATS if f.name == element)
    kinds = Scale(scale), Outer(outer), Rounding(rounding)
    return QuantSpec(name, fmt, (int(rows), int(columns)), *kinds, float(bound), float(target))


def takes(x: Tensor, spec: QuantSpec | None = None) -> bool:
    """Whether these operators run where x is, for this spec; six-bit codes have no GPU kernel."""
    return x.device.type == "cpu" or (x.is_cuda and _NVIDIA and (spec is None or spec.element.bits != 6))


def missing(device: torch.device) -> str | None:
    """Why quantisers on this device are the PyTorch reference, some thirty times slower; None: they are kernels."""
    return cpu.missing() if device.type == "cpu" else _missing(device)


@cache
def _missing(device: torch.device) -> str | None:
    if device.type != "cuda" or not _NVIDIA:
        return "there are kernels for CPUs and for NVIDIA's GPUs only"
    major, minor = torch.cuda.get_device_capability(device)
    old = f"they need compute capability {AMPERE[0]}.{AMPERE[1]} or later, and this is {major}.{minor}"
    return old if (major, minor) < AMPERE else None


def lane_of(stream: Stream) -> int:
    """What the stream's words are of, without their purpose (see `philox`)."""
    return int(stream.product) << 8 | int(stream.side) << 4


def stream_of(key: Tensor, clock: Tensor, lane: int) -> Stream:
    """The inverse of `lane_of`."""
    return Stream(key, clock, Product(lane >> 8), Side(lane >> 4 & 15))


@torch.library.custom_op("lowbit::factor", mutates_args=(), device_types="cpu")
def factor_op(
    x: Tensor,
    signs: Tensor | None,
    key: Tensor,
    clock: Tensor,
    choice: Tensor | None,
    amax: Tensor | None,
    spec: str,
    lane: int,
    dtype: torch.dtype,
    operand: bool,
    codes: bool,
    again: bool,
) -> FactorTensors:
    """x [rows, k] rotated by `signs` and quantised: (operand, after, data, scales, outer).

    Args:
        choice, amax: see `quantise_values` (a choice, where there is one, is kept).
        operand, codes: which of them are wanted; what is not, or does not exist, has no elements.
        again: a backward pass makes the forward's factor once more. To a compiler that is another call, not a reason
            to keep the first one's result.

    Raises: ValueError for a tensor without elements, which no product needs, for a choice of other blocks, for a static
    range of a format that has none; TypeError for types other than BF16, FP32.
    """
    if not x.numel():
        raise ValueError(f"an operand {list(x.shape)} has no elements: there is nothing to quantise")
    found = spec_of(spec)
    check_given(x, signs, found, choice, amax)
    out = allocate(x, signs, found, dtype, operand, codes)
    if cpu.handles(found):
        padded = padded_columns(operand_width(x.shape[1], signs), found)
        cpu.run_factor(x, found, signs, key, clock, lane, choice, amax, padded, out)
        return out
    return reference(x, signs, found, stream_of(key, clock, lane), choice, amax, dtype, out)


@factor_op.register_fake
def _(
    x: Tensor,
    signs: Tensor | None,
    key: Tensor,
    clock: Tensor,
    choice: Tensor | None,
    amax: Tensor | None,
    spec: str,
    lane: int,
    dtype: torch.dtype,
    operand: bool,
    codes: bool,
    again: bool,
) -> FactorTensors:
    return allocate(x, signs, spec_of(spec), dtype, operand, codes)


def check_given(
    x: Tensor, signs: Tensor | None, spec: QuantSpec | None, choice: Tensor | None, amax: Tensor | None
) -> None:
    """Raise ValueError for a choice that is not one of x's blocks, or a static range where blocks have scales."""
    if spec is None:
        return
    if amax is not None and spec.scale is not Scale.FP32:
        raise ValueError(f"{spec.name} has no static scale: its blocks' scales are not FP32")
    if choice is not None and spec.rounding in FOUR_OVER_SIX:
        columns = padded_columns(operand_width(x.shape[1], signs), spec) // spec.block[1]
        wanted = -(-x.shape[0] // spec.block[0]), columns
        if tuple(choice.shape) != wanted:
            raise ValueError(f"{spec.name}: a choice {list(choice.shape)} of 4 or 6 for {list(wanted)} blocks")


def operand_width(columns: int, signs: Tensor | None) -> int:
    """Columns of the operand: rotation pads."""
    return columns if signs is None else -(-columns // signs.shape[0]) * signs.shape[0]


def padded_columns(width: int, spec: QuantSpec | None) -> int:
    """Columns that the quantiser sees."""
    multiple = 1 if spec is None else spec.column_multiple
    return -(-width // multiple) * multiple


def allocate(
    x: Tensor, signs: Tensor | None, spec: QuantSpec | None, dtype: torch.dtype, operand: bool, codes: bool
) -> FactorTensors:
    """What the operator returns, uninitialised. Raises TypeError for types that a kernel would misread."""
    check_readable(x.dtype)
    check_readable(dtype)
    rows, width = x.shape[0], operand_width(x.shape[1], signs)
    none = 0, torch.float32
    shapes: list[tuple[int | tuple[int, ...], torch.dtype]] = [((rows, width), dtype) if operand else (0, dtype)]
    if spec is None:
        shapes += [none] * 4
    else:
        after = rows if spec.after is Outer.ROW else 1, 1
        shapes.append(none if spec.after is Outer.NONE else (after, torch.float32))
        shapes += code_shapes(rows, width, spec) if codes else [none] * 3
    made = [x.new_empty(shape, dtype=kind) for shape, kind in shapes]
    return made[0], made[1], made[2], made[3], made[4]


def code_shapes(rows: int, width: int, spec: QuantSpec) -> list[tuple[int | tuple[int, ...], torch.dtype]]:
    """Of data, scales and outer scales as `Packed.trim` leaves them."""
    unit = spec.block[0] or rows
    rows = -(-rows // unit) * unit
    block = spec.block[1] or width
    blocks = -(-width // block)
    kind = torch.float32 if spec.scale in (Scale.FP32, Scale.POWER_OF_TWO) else torch.uint8
    outer: tuple[int, ...] | int = 0
    if spec.outer in (Outer.BLOCK, Outer.BLOCK_POW2):
        outer = rows, padded_columns(width, spec) // OUTER_BLOCK
    elif spec.outer is not Outer.NONE:
        outer = (rows if spec.outer is Outer.ROW else 1), 1
    return [
        ((rows, blocks * block * spec.element.bits // 8), torch.uint8),
        ((rows // unit, blocks), kind),
        (outer, torch.float32),
    ]


def reference(
    x: Tensor,
    signs: Tensor | None,
    spec: QuantSpec | None,
    stream: Stream,
    choice: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype,
    out: FactorTensors,
) -> FactorTensors:
    """Without the library."""
    if signs is not None:
        x = rotate(x, signs, signs.shape[0])
    if spec is None:
        out[0].copy_(x if x.dtype == torch.bfloat16 else round_to_bf16(x))
        return out
    values = quantise_values(x, spec, stream, None if choice is None else Memory(choice, 1.0), amax)
    if out[0].numel():
        out[0].copy_(values.operand())
    if (after := values.after()) is not None:
        out[1].copy_(after)
    if out[2].numel():
        packed = to_codes(values).pack().trim()
        out[2].copy_(packed.data)
        out[3].copy_(packed.scales)
        if packed.outer is not None:
            out[4].copy_(packed.outer)
    return out


@torch.library.custom_op("lowbit::unpack", mutates_args=(), device_types="cpu")
def unpack_op(
    data: Tensor, scales: Tensor, outer: Tensor | None, spec: str, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Packed codes -> the operand [rows, width] in `dtype` (`Packed.unpack().operand()`)."""
    found = spec_of(spec)
    assert found is not None
    check_readable(dtype)
    operand = data.new_empty((rows, width), dtype=dtype)
    if cpu.handles(found):
        cpu.run_unpack(data, scales, outer, found, padded_columns(width, found), operand)
        return operand
    return unpack_reference(data, scales, outer, found, operand)


@unpack_op.register_fake
def _(
    data: Tensor, scales: Tensor, outer: Tensor | None, spec: str, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    return data.new_empty((rows, width), dtype=dtype)


def unpack_reference(data: Tensor, scales: Tensor, outer: Tensor | None, spec: QuantSpec, operand: Tensor) -> Tensor:
    """Without a kernel: into `operand` [rows, width]."""
    shape, scale_shape = (operand.shape[0], operand.shape[1]), (scales.shape[0], scales.shape[1])
    return operand.copy_(Packed(data, scales, outer, shape, spec, scale_shape, False).unpack().operand())


@torch.library.custom_op("lowbit::signs", mutates_args=(), device_types="cpu")
def signs_op(key: Tensor, clock: Tensor, lane: int, count: int) -> Tensor:
    """`Stream.signs`: FP32 [count]."""
    stream = stream_of(key, clock, lane)
    if cpu.library() is None:
        return stream.signs(count)
    signs = key.new_empty(count, dtype=torch.float32)
    cpu.run_signs(key, clock, int(stream.product) << 8 | int(Side.SHARED) << 4 | 2, signs)
    return signs


@signs_op.register_fake
def _(key: Tensor, clock: Tensor, lane: int, count: int) -> Tensor:
    return key.new_empty(count, dtype=torch.float32)


@torch.library.custom_op("lowbit::rounded", mutates_args=(), device_types="cpu")
def rounded_op(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 x rounded to BF16, held in `dtype`; a compiler may not leave the rounding out."""
    return x.to(torch.bfloat16).to(dtype)


@rounded_op.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.bfloat16).to(dtype)
