"""MXFP8 and NVFP4 products on Blackwell (compute capability 10): `F.scaled_mm` with 1x32 and 1x16 blocks.

**Never run**: no such GPU was at hand. What is tested is the layout of the operands, on the CPU, against torchao's and
against PyTorch's own checks of shapes; the start-up check decides on a real device, and a mismatch means emulation.

| format | matrix | scales |
|---|---|---|
| MXFP8 | E4M3 [m, k] | E8M0, one for 32 along k, in the 32_4_4 order of tiles (`packing.swizzle`) |
| NVFP4, any rounding | two E2M1 a byte [m, k / 2], the first in the low nibble | E4M3, one for 16, in the same order |

A tensor's outer scale goes in as the second level; those of rows are applied to an FP32 result. Blocks of 16x16 are
blocks of 1x16 that repeat their scale. An outer scale for 128 numbers, as in this project's own `nvfp4`, is in no
tensor core.

k is padded with zeros to a multiple of 32, n to a multiple of 16, and the result is cut.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.quant.backends.base import Device, Native, Sizes, dotted
from lowbit.quant.formats import E2M1, E4M3, E5M2
from lowbit.quant.packing import pack_codes, swizzle
from lowbit.quant.philox import Stream
from lowbit.quant.policy import ProductPolicy
from lowbit.quant.quantise import Memory, quantise_values
from lowbit.quant.quantised import Quantised, to_codes
from lowbit.quant.spec import Outer, QuantSpec, Scale

K_MULTIPLE, N_MULTIPLE = 32, 16
BLACKWELL = 10
"""Major compute capability of the data-centre chips."""


def kind_of(spec: QuantSpec | None) -> str | None:
    """mxfp8, mxfp8_e5m2 or nvfp4; None for a format that is none of these."""
    if spec is None:
        return None
    if spec.scale in (Scale.E8M0_UP, Scale.E8M0_FLOOR) and spec.block == (1, 32):
        return {E4M3: "mxfp8", E5M2: "mxfp8_e5m2"}.get(spec.element)
    if spec.element is E2M1 and spec.outer in (Outer.TENSOR, Outer.ROW) and spec.block in ((1, 16), (16, 16)):
        return "nvfp4"
    return None


class TorchBlocks:
    """The backend `torch_blocks`."""

    name = "torch_blocks"
    note = "never run by this project"

    def takes(self, left: QuantSpec | None, right: QuantSpec | None) -> bool:
        """See `Backend`."""
        kinds = {str(kind_of(left)), str(kind_of(right))}
        return kinds == {"nvfp4"} or ("mxfp8" in kinds and kinds <= {"mxfp8", "mxfp8_e5m2"})

    def refuses(self, policy: ProductPolicy, product: str, sizes: Sizes, device: Device) -> str | None:
        """See `Backend`."""
        what = "FP4" if kind_of(policy.left.spec) == "nvfp4" else "MXFP8"
        if device.kind != "cuda":
            return f"{what} tensor cores are in GPUs"
        if device.capability[0] != BLACKWELL:
            return f"PyTorch multiplies {what} on compute capability 10, and this is {dotted(device.capability)}"
        return None

    def factor(
        self,
        x: Tensor,
        spec: QuantSpec,
        amax: Tensor | None = None,
        stream: Stream | None = None,
        memory: Memory | None = None,
    ) -> Quantised:
        """See `Backend`: the reference's own codes."""
        return Native.of(to_codes(quantise_values(x, spec, stream, memory, amax)), self.name)

    def factor_pair(
        self, x: Tensor, spec: QuantSpec, spec_t: QuantSpec, amax: Tensor | None = None
    ) -> tuple[Quantised, Quantised] | tuple[None, None]:
        """See `Backend`."""
        return None, None

    def multiply(
        self, left: Quantised, right: Quantised, out_dtype: torch.dtype, after: Tensor | None = None, fast: bool = False
    ) -> Tensor:
        """See `Backend`."""
        (a, scale_a), (b, scale_b) = layout(left), layout(right, N_MULTIPLE)
        kinds = str(kind_of(left.spec)), str(kind_of(right.spec))
        outer = [left.outer, right.outer]
        inside = left.spec.outer is Outer.TENSOR and right.spec.outer is Outer.TENSOR
        given = [t for t in outer if t is not None] if inside else []
        rest = [after] if inside else [left.outer, None if right.outer is None else right.outer.t(), after]
        factors = [t for t in rest if t is not None]
        y: Tensor = block_product(a, b, scale_a, scale_b, given, *kinds, torch.float32 if factors else out_dtype)
        if y.shape[1] != right.shape[0]:
            y = y[:, : right.shape[0]]
        for factor in factors:
            y = y * factor
        return y.to(out_dtype)


def layout(factor: Quantised, row_multiple: int = 1) -> tuple[Tensor, Tensor]:
    """The bytes of the matrix, uint8 [rows, columns or columns / 2], and of its scales, uint8 in the 32_4_4 order."""
    spec, codes, scales = factor.spec, factor.codes, factor.scales
    rows, width = factor.shape[0], -(-factor.shape[1] // K_MULTIPLE) * K_MULTIPLE
    if spec.block[0] > 1:
        scales = scales.repeat_interleave(spec.block[0], 0)
    codes, scales = codes[:rows, :width], scales[:rows, : width // spec.block[1]]
    missing = width - codes.shape[1], -rows % row_multiple
    if any(missing):
        codes = F.pad(codes, (0, missing[0], 0, missing[1]))
        scales = F.pad(scales, (0, missing[0] // spec.block[1], 0, missing[1]))
    return pack_codes(codes, spec.element.bits), swizzle(scales)


_ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "nvfp4": torch.float4_e2m1fn_x2,
}


@torch.library.custom_op("lowbit::block_product", mutates_args=())
def block_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    outer: list[Tensor],
    kind_a: str,
    kind_b: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Bytes as `layout` makes them, and no or two outer scales [1, 1] -> [m, n]."""
    small, block = torch.float8_e8m0fnu, F.ScalingType.BlockWise1x32
    if kind_a == "nvfp4":
        small, block = torch.float8_e4m3fn, F.ScalingType.BlockWise1x16
    recipe, swizzled = [block], [F.SwizzleType.SWIZZLE_32_4_4]
    scales = [[scale_a.view(small)], [scale_b.view(small)]]
    if outer:
        recipe, swizzled = [block, F.ScalingType.TensorWise], [*swizzled, F.SwizzleType.NO_SWIZZLE]
        scales = [[*scales[0], outer[0]], [*scales[1], outer[1]]]
    matrices = a.view(_ELEMENTS[kind_a]), b.view(_ELEMENTS[kind_b]).t()
    y: Tensor = F.scaled_mm(*matrices, scales[0], recipe, scales[1], recipe, swizzled, swizzled, output_dtype=out_dtype)
    return y


@block_product.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    outer: list[Tensor],
    kind_a: str,
    kind_b: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
