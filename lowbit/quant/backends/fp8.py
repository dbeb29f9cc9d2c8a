"""FP8 products on the tensor cores of Hopper, Ada and later: `torch._scaled_mm` and `F.scaled_mm`.

| left x right | scales, and their layout as the kernels want it | where |
|---|---|---|
| tensor x tensor | FP32, one each | Ada (8.9) and later |
| row x row, or tensor in place of either | [m, 1] and [1, n], contiguous | Ada and later; FP32 results on Hopper only |
| 1x128 x 128x128, or reverse | [m, k/128], m fastest; [n/128, k/128], k fastest, padded to 4 | Hopper (9.0) |
| 1x128 x 1x128 | [m, k/128] and [n, k/128], rows fastest | Hopper |

The left matrix is [m, k] with k fastest, the right one [k, n] with k fastest: what a factor is anyway. k must be a
multiple of 16, and so must n: codes are padded with zeros, which add nothing, and the result is cut. For 128-wide
blocks m is padded to 16 too, since the kernels read scales 16 bytes at a time.

Quantising is in `fp8_codes`.

**Sums.** Hopper's FP8 tensor cores carry about 14 bits of a sum along; every 128 products it is added to FP32 unless
`fast` is given. A gradient's sums are not `fast`, nor are those of 128-wide blocks ever.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.quant.backends.base import Device, Sizes, dotted
from lowbit.quant.backends.fp8_codes import MULTIPLE, kind_of, quantise_both, together
from lowbit.quant.philox import Stream
from lowbit.quant.policy import ProductPolicy
from lowbit.quant.quantise import Memory
from lowbit.quant.quantised import Quantised
from lowbit.quant.spec import QuantSpec

ADA, HOPPER = (8, 9), (9, 0)
ROWS_IN_FP32 = (12, 9)
"""The CUDA whose cuBLAS scales rows."""
RECIPES = {
    ("tensor", "tensor"): "tensor",
    ("tensor", "row"): "row",
    ("row", "tensor"): "row",
    ("row", "row"): "row",
    ("block", "square"): "block_square",
    ("square", "block"): "square_block",
    ("block", "block"): "block_block",
}


class Fp8:
    """The backend `fp8`."""

    name = "fp8"
    note = ""

    def takes(self, left: QuantSpec | None, right: QuantSpec | None) -> bool:
        """See `Backend`."""
        return (str(kind_of(left)), str(kind_of(right))) in RECIPES

    def refuses(self, policy: ProductPolicy, product: str, sizes: Sizes, device: Device) -> str | None:
        """See `Backend`."""
        recipe = RECIPES[str(kind_of(policy.left.spec)), str(kind_of(policy.right.spec))]
        if device.kind != "cuda":
            return "FP8 tensor cores are in GPUs"
        if device.capability < ADA:
            return f"compute capability {dotted(device.capability)} has no FP8 tensor cores (8.9 and later have)"
        cublas = device.capability[0] == HOPPER[0] and device.cuda >= ROWS_IN_FP32
        if "_" in recipe and not cublas:
            return "PyTorch multiplies 128-wide FP8 blocks on compute capability 9.0 with CUDA 12.9 and later only"
        if recipe == "row" and product == "wgrad" and not cublas:
            return "row-wise FP8 gives FP32, which wgrad needs, on compute capability 9.0 with CUDA 12.9 and later only"
        return None

    def factor(
        self,
        x: Tensor,
        spec: QuantSpec,
        amax: Tensor | None = None,
        stream: Stream | None = None,
        memory: Memory | None = None,
    ) -> Quantised:
        """See `Backend`. Codes are padded to a multiple of 16 columns, or of 128 where blocks are."""
        codes, _ = quantise_both(x, spec, None, amax)
        assert codes is not None
        return codes

    def factor_pair(
        self, x: Tensor, spec: QuantSpec, spec_t: QuantSpec, amax: Tensor | None = None
    ) -> tuple[Quantised, Quantised] | tuple[None, None]:
        """See `Backend`."""
        if not together(spec, spec_t):
            return None, None
        codes, codes_t = quantise_both(x, spec, spec_t, amax)
        assert codes is not None and codes_t is not None
        return codes, codes_t

    def multiply(
        self, left: Quantised, right: Quantised, out_dtype: torch.dtype, after: Tensor | None = None, fast: bool = False
    ) -> Tensor:
        """See `Backend`."""
        kinds = str(kind_of(left.spec)), str(kind_of(right.spec))
        recipe = RECIPES[kinds]
        rows, columns = left.shape[0], right.shape[0]
        alone = after is not None and after.numel() == 1  # it fits into the left scale
        scale = left.scales * after if after is not None and alone else left.scales
        a = left.codes if recipe in ("tensor", "row") else pad_rows(left.codes)
        b = pad_rows(right.codes)
        scale_a = layout(scale, kinds[0], recipe, a.shape[0])
        scale_b = layout(right.scales, kinds[1], recipe, b.shape[0])
        rest = None if alone else after
        y: Tensor = fp8_product(a, b, scale_a, scale_b, recipe, torch.float32 if rest is not None else out_dtype, fast)
        if y.shape != (rows, columns):
            y = y[:rows, :columns]
        return y if rest is None else (y * rest).to(out_dtype)


def pad_rows(matrix: Tensor) -> Tensor:
    """Zero rows up to a multiple of 16."""
    missing = -matrix.shape[0] % MULTIPLE
    return F.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def layout(scales: Tensor, kind: str, recipe: str, rows: int) -> Tensor:
    """A factor's scales as `fp8_product` takes them, for `rows` rows of codes."""
    if recipe == "tensor":
        return scales
    if recipe == "row":
        scales = scales.expand(rows, 1) if kind == "tensor" else scales
    if kind == "square":
        return F.pad(scales, (0, -scales.shape[1] % 4))
    missing = rows - scales.shape[0]
    return (F.pad(scales, (0, 0, 0, missing)) if missing else scales).t().contiguous()


@torch.library.custom_op("lowbit::fp8_product", mutates_args=())
def fp8_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """E4M3 codes a [m, k], b [n, k] and their scales -> [m, n] in BF16 or FP32.

    One operator for all recipes, so that the compiler sees dense matrices and nothing of the kernels' layouts. Scales:
    tensor [1, 1]; row [1, m or n]; block [k/128, m or n]; square [m/128 or n/128, k/128 padded to 4].
    """
    left, right = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).t()
    if recipe == "row":
        scale_a = scale_a.reshape(-1, 1)
    if recipe in ("tensor", "row"):
        return torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    first, second = (_SCALING[kind] for kind in recipe.split("_"))
    return F.scaled_mm(left, right, _turned(scale_a), first, _turned(scale_b), second, output_dtype=out_dtype)


def _turned(scales: Tensor) -> Tensor:
    """The transposed view of a dense matrix, with the strides that cuBLAS asks for even where a dimension is 1."""
    rows, columns = scales.shape
    return scales.contiguous().as_strided((columns, rows), (1, columns))


@fp8_product.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


_SCALING = {"block": F.ScalingType.BlockWise1x128, "square": F.ScalingType.BlockWise128x128}
