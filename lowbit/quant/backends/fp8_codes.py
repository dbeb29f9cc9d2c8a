"""From a matrix to FP8 codes and scales, along its rows, its columns, or both from one reading.

    codes = E4M3(clamp(x * multiplier)),  round to nearest even: the reference's codes, but for the sign of a NaN

Scales of a tensor and of rows need a maximum first, which is left to PyTorch's reductions (the compiler fuses them with
whatever made x); nothing waits for the device, and the maximum stays on it. The rest is one kernel on a GPU
(`fp8_kernel`), which finds the scales of 128-wide blocks itself. Where x has to be quantised along both dimensions, dY
for both gradients above all, the kernel reads it once. On other devices the same in PyTorch, to test with.

The clamp is needed: where a cast does not saturate, what lies beyond 448 and half a step becomes NaN.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.quant.backends.base import Native
from lowbit.quant.bits import check_readable, is_finite, read_bf16
from lowbit.quant.formats import E4M3
from lowbit.quant.scales import one_level
from lowbit.quant.spec import Outer, QuantSpec, Rounding, Scale

MULTIPLE = 16
"""Codes are padded to so many columns, at least: what the products sum over must be a multiple of it."""
KINDS = {(0, 0): "tensor", (1, 0): "row", (1, 128): "block", (128, 128): "square"}
"""What shares a scale, by a format's blocks."""

Codes = tuple[Tensor, Tensor, Tensor, Tensor]


def kind_of(spec: QuantSpec | None) -> str | None:
    """tensor, row, block or square; None for a format that is none of these."""
    if spec is None or spec.element is not E4M3 or spec.rounding is not Rounding.NEAREST:
        return None
    if spec.outer is not Outer.NONE or spec.scale not in (Scale.FP32, Scale.POWER_OF_TWO):
        return None
    return KINDS.get(spec.block)


def together(spec: QuantSpec | None, spec_t: QuantSpec | None) -> bool:
    """Whether one reading can make both."""
    return kind_of(spec) is not None and kind_of(spec) == kind_of(spec_t)


def quantise_both(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Native | None, Native | None]:
    """(Q(x) in `spec`, Q(x^T) in `spec_t`); None for what is not asked for. Both specs are of one kind.

    Args:
        x: [rows, columns], BF16 or FP32 (read as BF16), any strides.
        amax: FP32 scalar in place of the largest magnitudes, for kinds tensor and row.
    """
    if x.stride(0) == 1 and x.stride(1) != 1:  # it lies transposed in memory
        found_t, found = quantise_both(x.t(), spec_t, spec, amax)
        return found, found_t
    kind = kind_of(spec or spec_t)
    assert kind is not None
    if kind == "row" and spec is not None and spec_t is None and amax is None and x.is_cuda:
        whole = _whole_rows(x, spec)
        if whole is not None:
            return whole, None
    scale = scale_t = multiplier = multiplier_t = x.new_empty(0, dtype=torch.float32)
    if kind == "tensor":
        scale, multiplier = _given(x, (0, 1), spec or spec_t, amax)
        scale_t, multiplier_t = scale, multiplier
    elif kind == "row":
        if spec is not None:
            scale, multiplier = _given(x, (1,), spec, amax)
        if spec_t is not None:
            scale_t, multiplier_t = _given(x, (0,), spec_t, amax)
            scale_t, multiplier_t = scale_t.t(), multiplier_t.t()
    codes, codes_t, scales, scales_t = fp8_codes(
        x, multiplier, multiplier_t, kind, spec is not None, spec_t is not None
    )
    if kind in ("block", "square"):
        scale, scale_t = (scales.t(), scales_t.t()) if kind == "block" else (scales, scales_t)
    rows, columns = x.shape
    return (
        None if spec is None else Native(codes, scale, None, (rows, columns), spec, "fp8"),
        None if spec_t is None else Native(codes_t, scale_t, None, (columns, rows), spec_t, "fp8"),
    )


def _whole_rows(x: Tensor, spec: QuantSpec) -> Native | None:
    """Q(x) by a kernel that finds the scales as well, on a GPU; None where a compiler fuses the maxima with what made
    x, or rows are too long."""
    from lowbit.quant.backends.fp8_kernel import MOST_COLUMNS, launch_rows

    width = _up(x.shape[1], MULTIPLE)
    if torch.compiler.is_compiling() or x.numel() == 0 or x.stride(1) != 1 or width > MOST_COLUMNS:
        return None
    check_readable(x.dtype)
    codes, scales = launch_rows(x, spec.scale is Scale.POWER_OF_TWO, width)
    return Native(codes, scales, None, (x.shape[0], x.shape[1]), spec, "fp8")


def _given(
    x: Tensor, dimensions: tuple[int, ...], spec: QuantSpec | None, static: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(scale, multiplier), FP32, of the whole of x or along one of its dimensions, which stay with size 1."""
    assert spec is not None
    amax = read_bf16(x.abs().amax(dimensions, keepdim=True))
    if static is not None:
        amax = torch.where(is_finite(amax), static, amax)
    return one_level(amax, spec)


@torch.library.custom_op("lowbit::fp8_codes", mutates_args=())
def fp8_codes(x: Tensor, multiplier: Tensor, multiplier_t: Tensor, kind: str, forward: bool, transposed: bool) -> Codes:
    """x [rows, columns] -> codes of x [rows, padded columns] and of x^T [columns, padded rows], uint8, and the scales
    of blocks, FP32: `block` [blocks, rows] and [blocks, columns]; `square` [row blocks, column blocks] and transposed.

    What is not wanted has no elements. multiplier: [rows, 1] or [1, 1]; multiplier_t: [columns, 1] or [1, 1].
    """
    out = _allocate(x, kind, forward, transposed)
    if x.numel() == 0:
        return tuple(tensor.zero_() for tensor in out)  # type: ignore[return-value]
    if x.is_cuda:
        from lowbit.quant.backends.fp8_kernel import launch

        launch(x, multiplier, multiplier_t, kind, *out)
    else:
        for wanted, matrix, by, at in ((forward, x, multiplier, 0), (transposed, x.t(), multiplier_t, 1)):
            if wanted:
                plain(matrix, by, kind, out[at], out[2 + at])
    return out


@fp8_codes.register_fake
def _(x: Tensor, multiplier: Tensor, multiplier_t: Tensor, kind: str, forward: bool, transposed: bool) -> Codes:
    return _allocate(x, kind, forward, transposed)


def _allocate(x: Tensor, kind: str, forward: bool, transposed: bool) -> Codes:
    codes, scales = [], []
    for wanted, (rows, columns) in ((forward, x.shape), (transposed, (x.shape[1], x.shape[0]))):
        width = _up(columns, MULTIPLE if kind in ("tensor", "row") else 128)
        height = _up(rows, 128) if kind == "square" else rows
        shape: tuple[int, ...] = (0,)
        if wanted and kind == "block":
            shape = width // 128, rows
        elif wanted and kind == "square":
            shape = height // 128, width // 128
        codes.append(x.new_empty((height, width) if wanted else 0, dtype=torch.uint8))
        scales.append(x.new_empty(shape, dtype=torch.float32))
    return codes[0], codes[1], scales[0], scales[1]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def plain(x: Tensor, multiplier: Tensor, kind: str, codes: Tensor, scales: Tensor) -> None:
    """One direction in PyTorch, into `codes` and `scales`."""
    values = read_bf16(x)
    values = F.pad(values, (0, codes.shape[1] - x.shape[1], 0, codes.shape[0] - x.shape[0]))
    if kind in ("block", "square"):
        spec = QuantSpec("", E4M3, (1, 128) if kind == "block" else (128, 128), Scale.POWER_OF_TWO)
        (rows, columns), (high, wide) = values.shape, spec.block
        values = values.reshape(rows // high, high, columns // wide, wide)
        scale, multiplier = one_level(values.abs().amax((1, 3), keepdim=True), spec)
        scale = scale.reshape(rows // high, columns // wide)
        scales.copy_(scale.t() if kind == "block" else scale)
    codes.copy_(cast(values * multiplier).reshape(codes.shape))


def cast(y: Tensor) -> Tensor:
    """FP32 -> E4M3 codes, uint8: saturating, to nearest even."""
    return y.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)
