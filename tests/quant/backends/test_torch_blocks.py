"""Operands of PyTorch's block-scaled products: bytes as torchao lays them out, shapes as PyTorch checks them.

No kernel runs here. A stand-in for `F.scaled_mm` reads the bytes with ml_dtypes and torchao and multiplies in FP64.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torchao.prototype.mx_formats.kernels import pack_uint4
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from lowbit.quant import spec as S
from lowbit.quant.backends.base import Native, bind
from lowbit.quant.backends.selftest import reference_product
from lowbit.quant.backends.torch_blocks import TorchBlocks, kind_of, layout
from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.quantise import quantise
from lowbit.quant.spec import Outer, QuantSpec

BACKEND = TorchBlocks()
KEY, CLOCK = make_key(1, "blocks.0.mlp.up"), make_clock(3)
MX = S.MXFP8
FP4 = (S.NVFP4, S.NVFP4_2D, S.NVFP4_SR, S.NVFP4_46, S.NVFP4_EDEN_PUBLISHED, S.NVFP4_ROW)
PAIRS = [
    (MX, MX),
    (S.MXFP8_E5M2, MX),
    (MX, S.MXFP8_E5M2_FLOOR),
    (S.NVFP4, S.NVFP4_2D),
    (S.NVFP4_SR, S.NVFP4),
    (S.NVFP4_ROW, S.NVFP4_46),
    (S.NVFP4_EDEN_PUBLISHED, S.NVFP4_EDEN_PUBLISHED),
    (S.NVFP4_EDEN, S.NVFP4),
]
SIZES = [(128, 128, 256), (136, 152, 328), (17, 40, 72)]


def stream(side: Side) -> Stream:
    return Stream(KEY, CLOCK, Product.FPROP, side)


def numbers(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * torch.exp2(torch.randint(-6, 7, (rows, 1)).float())


@pytest.mark.parametrize("spec", [MX, S.MXFP8_E5M2, *FP4], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(128, 256), (136, 328), (17, 72)], ids=str)
def test_bytes_are_laid_out_as_torchao_does(spec: QuantSpec, shape: tuple[int, int]) -> None:
    rows, columns = shape
    q = quantise(numbers(rows, columns), spec, stream(Side.LEFT))
    data, scales = layout(q, 16)
    padded, height = -(-columns // 32) * 32, -(-rows // 16) * 16
    codes = torch.zeros(height, padded, dtype=torch.uint8)
    codes[:rows, : q.codes.shape[1]] = q.codes[:rows, :padded]
    assert torch.equal(data, pack_uint4(codes) if spec.element is S.E2M1 else codes)
    by_row = torch.zeros(height, padded // spec.block[1], dtype=torch.uint8)
    by_row[:rows, : q.scales.shape[1]] = q.scales.repeat_interleave(spec.block[0], 0)[:rows, : by_row.shape[1]]
    assert torch.equal(scales, to_blocked(by_row, use_triton_kernel=False).view(torch.uint8))
    if spec.block[0] == 1 and rows % 16 == 0 and columns % 128 == 0:
        packed = q.pack(swizzled=True)
        assert torch.equal(data, packed.data) and torch.equal(scales, packed.scales)


class Blackwell:
    """`F.scaled_mm` with blocks, read from the documented layout; remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: list[Tensor],
        recipe_a: list[F.ScalingType],
        scale_b: list[Tensor],
        recipe_b: list[F.ScalingType],
        swizzle_a: list[F.SwizzleType],
        swizzle_b: list[F.SwizzleType],
        output_dtype: torch.dtype,
    ) -> Tensor:
        arguments = a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b
        self.calls.append((*arguments, output_dtype))
        assert recipe_a == recipe_b and swizzle_a == swizzle_b and a.stride(1) == 1 and b.stride(0) == 1
        levels = [F.ScalingType.TensorWise] * (len(scale_a) - 1)
        block = F.ScalingType.BlockWise1x16 if a.dtype == torch.float4_e2m1fn_x2 else F.ScalingType.BlockWise1x32
        assert recipe_a == [block, *levels]
        assert swizzle_a == [F.SwizzleType.SWIZZLE_32_4_4, *[F.SwizzleType.NO_SWIZZLE] * len(levels)]
        left, right = self.read(a, scale_a), self.read(b.t(), scale_b)
        return torch.from_numpy(left @ right.T).to(output_dtype)

    def read(self, matrix: Tensor, scales: list[Tensor]) -> np.ndarray:
        """FP64 [rows, k]."""
        if matrix.dtype == torch.float4_e2m1fn_x2:
            pairs = matrix.view(torch.uint8).numpy()
            codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(pairs.shape[0], -1)
            values, block, kind = codes.view(ml_dtypes.float4_e2m1fn), 16, ml_dtypes.float8_e4m3fn
            assert scales[0].dtype == torch.float8_e4m3fn
        else:
            element = ml_dtypes.float8_e4m3fn if matrix.dtype == torch.float8_e4m3fn else ml_dtypes.float8_e5m2
            values, block, kind = matrix.view(torch.uint8).numpy().view(element), 32, ml_dtypes.float8_e8m0fnu
            assert scales[0].dtype == torch.float8_e8m0fnu
        rows, columns = values.shape
        assert columns % 32 == 0 and scales[0].numel() == -(-rows // 128) * 128 * -(-(columns // block) // 4) * 4
        flat = from_blocked(scales[0].view(torch.uint8), -(-rows // 128) * 128, -(-(columns // block) // 4) * 4)
        scale = flat.contiguous().numpy().view(kind).astype(np.float64)[:rows, : columns // block]
        product = values.astype(np.float64) * np.repeat(scale, block, 1)
        return product * (scales[1].double().item() if len(scales) > 1 else 1.0)


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda s: s.name)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_from_the_bytes(
    left: QuantSpec, right: QuantSpec, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = Blackwell()
    monkeypatch.setattr(F, "scaled_mm", hardware)
    m, n, k = sizes
    assert BACKEND.takes(left, right)
    a = BACKEND.factor(numbers(m, k), left, stream=stream(Side.LEFT))
    b = BACKEND.factor(numbers(n, k), right, stream=stream(Side.RIGHT))
    assert isinstance(a, Native) and a.backend == "torch_blocks"
    wanted = reference_product(a, b).double()
    for after in (None, torch.tensor([[0.3]]), torch.rand(m, 1)):
        exact = wanted if after is None else wanted * after
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 3e-3)):
            found = BACKEND.multiply(a, b, dtype, after)
            assert found.dtype == dtype and found.shape == (m, n)
            assert float((found.double() - exact).norm() / exact.norm()) < bound
    levels = {len(call[2]) for call in hardware.calls}  # type: ignore[arg-type]
    assert levels == ({2} if left.outer is right.outer is Outer.TENSOR else {1})


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda s: s.name)
def test_pytorch_accepts_the_shapes(left: QuantSpec, right: QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own checks, which a device would make, on tensors without data."""
    hardware = Blackwell()
    monkeypatch.setattr(F, "scaled_mm", hardware)
    m, n, k = SIZES[1]
    a = BACKEND.factor(numbers(m, k), left, stream=stream(Side.LEFT))
    b = BACKEND.factor(numbers(n, k), right, stream=stream(Side.RIGHT))
    BACKEND.multiply(a, b, torch.bfloat16)
    monkeypatch.undo()
    *arguments, dtype = hardware.calls[0]
    with FakeTensorMode() as mode:
        fakes = [without_data(mode, x) for x in arguments]
        found = F.scaled_mm(*fakes, output_dtype=dtype)
        assert found.shape == (m, -(-n // 16) * 16)
        fakes[2] = [fakes[2][0][1:], *fakes[2][1:]]
        with pytest.raises(RuntimeError, match="scale_a must have"):
            F.scaled_mm(*fakes, output_dtype=dtype)


def without_data(mode: FakeTensorMode, x: object) -> object:
    if isinstance(x, list):
        return [without_data(mode, item) for item in x]
    return mode.from_tensor(x) if isinstance(x, Tensor) else x


def run(policy: LinearPolicy, x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (y,) = linear_products(x, [weight], [KEY], CLOCK, policy)
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_nvidia", "nvfp4_quartet2"])
def test_layers_equal_the_emulation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic formats too: the noise is the same."""
    monkeypatch.setattr(F, "scaled_mm", Blackwell())
    x, weight, dy = torch.randn(136, 160), torch.randn(96, 160), torch.randn(136, 96)
    policy = PRESETS[name]
    bound = bind(policy, *["torch_blocks"] * 3)
    for a, b in zip(run(bound, x, weight, dy), run(policy, x, weight, dy), strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-6


def test_kinds() -> None:
    taken = {spec.name for spec in S.SPECS.values() if kind_of(spec)}
    assert taken == {f"MXFP8{e}{r}" for e in ("", "_E5M2") for r in ("", "_FLOOR")} | {s.name for s in FP4} | {
        "NVFP4_EDEN"
    }
    assert not BACKEND.takes(S.MXFP8_E5M2, S.MXFP8_E5M2), "no tensor core multiplies E5M2 by E5M2"
    assert not BACKEND.takes(MX, S.NVFP4) and not BACKEND.takes(None, S.NVFP4)
    assert not BACKEND.takes(S.NVFP4_POW2, S.NVFP4_POW2), "an outer scale of 128 numbers is in no tensor core"
    assert kind_of(replace(S.MXFP8, block=(32, 32))) is None
