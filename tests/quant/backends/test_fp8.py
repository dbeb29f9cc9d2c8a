"""FP8 codes against the reference quantiser and ml_dtypes, products against FP64, layers against the emulation.

PyTorch multiplies FP8 with scales of a tensor on the CPU, with scales of rows from version 2.13 on. Products of
128-wide blocks exist on Hopper only; here a stand-in for `F.scaled_mm` reads its operands as PyTorch documents them.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.quant import spec as S
from lowbit.quant.backends import fp8
from lowbit.quant.backends.base import Native, bind
from lowbit.quant.backends.fp8_codes import cast, kind_of, quantise_both, together
from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import Alignment, LinearPolicy
from lowbit.quant.presets import PRESETS, uniform
from lowbit.quant.quantise import quantise
from lowbit.quant.quantised import Quantised
from lowbit.quant.spec import QuantSpec

FORMATS = [S.FP8_TENSOR, S.FP8_ROW, S.FP8_BLOCK, S.FP8_BLOCK_2D]
SHAPES = [(128, 256), (17, 40), (1, 8), (130, 129), (300, 16)]
BACKEND = fp8.Fp8()
each_format = pytest.mark.parametrize("spec", FORMATS, ids=lambda s: s.name)
KEYS, CLOCK = [make_key(1, "blocks.0.mlp.up"), make_key(1, "blocks.0.mlp.gate")], make_clock()


def rows_on_this_cpu() -> bool:
    """Whether PyTorch scales rows of FP8 products on the CPU."""
    one = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(one, one.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.float32)
    except (RuntimeError, ValueError):
        return False
    return True


needs_rows = pytest.mark.skipif(not rows_on_this_cpu(), reason="this PyTorch does not scale rows of FP8 on the CPU")


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows and columns of very different size, zeros, a subnormal and the largest number."""
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-30, 30, (rows, 1)).float())
    x[0, : columns // 2] = 0.0
    x[-1, -1], x[rows // 2, 0] = 3e38, 1e-40
    return x.to(dtype)


def assert_same(found: Quantised | None, wanted: Quantised) -> None:
    """Codes without their padding (which is zero), scales, shape."""
    assert found is not None and found.shape == wanted.shape and found.spec == wanted.spec
    rows, columns = wanted.shape
    assert torch.equal(found.codes[:rows, :columns], wanted.codes[:rows, :columns])
    assert not found.codes[rows:].any() and not found.codes[:, columns:].any()
    assert torch.equal(found.scales, wanted.scales)


@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_the_references(spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = numbers(*shape, dtype)
    assert together(spec, spec)
    for matrix in (x, x.t().contiguous().t()):  # as it lies, and transposed in memory
        found, found_t = quantise_both(matrix, spec, spec)
        assert_same(found, quantise(matrix, spec))
        assert_same(found_t, quantise(matrix.t(), spec))
        assert_same(quantise_both(matrix, spec, None)[0], quantise(matrix, spec))
        assert_same(quantise_both(matrix, None, spec)[1], quantise(matrix.t(), spec))
    assert found is not None and found.codes.shape[1] % 16 == 0


@each_format
def test_what_is_not_finite_stays_so(spec: QuantSpec) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(256, 256)
        x[3, 5] = bad
        found, found_t = quantise_both(x, spec, spec)
        assert found is not None and found_t is not None
        wanted, wanted_t = quantise(x, spec), quantise(x.t(), spec)
        assert torch.equal(found.dequantise().isnan(), wanted.dequantise().isnan())
        assert torch.equal(found_t.dequantise().isnan(), wanted_t.dequantise().isnan())
        assert found.dequantise().isnan()[3, 5] and found_t.dequantise().isnan()[5, 3]


def test_the_cast_is_mldtypes_with_saturation() -> None:
    y = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    held = np.clip(y.numpy(), -448.0, 448.0)
    wanted = held.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    finite = ~y.isnan()
    assert torch.equal(cast(y)[finite], torch.from_numpy(wanted)[finite])
    assert (cast(y)[~finite] & 0x7F == 0x7F).all()


def test_a_given_range_takes_the_place_of_the_largest_magnitude() -> None:
    x = torch.randn(32, 64)
    amax = torch.tensor(1.5)
    for spec in (S.FP8_TENSOR, S.FP8_ROW):
        found, _ = quantise_both(x, spec, None, amax)
        assert found is not None
        scale = np.float32(1.0) / (np.float32(448.0) / np.float32(1.5))
        assert (found.scales == float(scale)).all() and found.dequantise().float().abs().max() <= 1.5


def test_kinds() -> None:
    assert [kind_of(spec) for spec in FORMATS] == ["tensor", "row", "block", "square"]
    others = [spec for spec in S.SPECS.values() if spec not in FORMATS]
    assert {kind_of(spec) for spec in others} == {None} and kind_of(None) is None
    assert kind_of(replace(S.FP8_ROW, rounding=S.Rounding.STOCHASTIC)) is None
    assert not together(S.FP8_BLOCK, S.FP8_BLOCK_2D)


# Products -----------------------------------------------------------------------------------------------------


def exact(factor: Quantised) -> Tensor:
    """FP64 [rows, k]: code times scale."""
    values = factor.values()
    return (values.elements.double() * values.scale.double()).reshape(factor.codes.shape)[
        : factor.shape[0], : factor.shape[1]
    ]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


PAIRS = [
    (S.FP8_TENSOR, S.FP8_TENSOR),
    pytest.param(S.FP8_ROW, S.FP8_ROW, marks=needs_rows),
    pytest.param(S.FP8_TENSOR, S.FP8_ROW, marks=needs_rows),
    pytest.param(S.FP8_ROW, S.FP8_TENSOR, marks=needs_rows),
]
BLOCKS = [(S.FP8_BLOCK, S.FP8_BLOCK_2D), (S.FP8_BLOCK_2D, S.FP8_BLOCK), (S.FP8_BLOCK, S.FP8_BLOCK)]
SIZES = [(128, 128, 128), (17, 40, 72), (1, 8, 8), (150, 136, 520)]


def check_product(left: QuantSpec, right: QuantSpec, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = (torch.randn(rows, k) * torch.exp2(torch.randint(-6, 7, (rows, 1)).float()) for rows in (m, n))
    factors = BACKEND.factor(a, left), BACKEND.factor(b, right)
    assert all(isinstance(factor, Native) and factor.backend == "fp8" for factor in factors)
    wanted = exact(factors[0]) @ exact(factors[1]).t()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 3e-3)):
        found = BACKEND.multiply(*factors, dtype)
        assert found.dtype == dtype and found.shape == (m, n) and off(found, wanted) < bound
    for after in (torch.tensor([[0.3]]), torch.rand(m, 1), torch.rand(1, n)):
        assert off(BACKEND.multiply(*factors, torch.float32, after), wanted * after) < 1e-6
        assert off(BACKEND.multiply(*factors, torch.bfloat16, after), wanted * after) < 3e-3


@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(left: QuantSpec, right: QuantSpec, sizes: tuple[int, int, int]) -> None:
    check_product(left, right, sizes)


def scaled_mm_of_hopper(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: F.ScalingType,
    scale_b: Tensor,
    recipe_b: F.ScalingType,
    output_dtype: torch.dtype,
) -> Tensor:
    """What `F.scaled_mm` says of 128-wide blocks: shapes and strides that it checks, and the product in FP64.

    a [m, k] and b [k, n] have k fastest. 1x128: scales [m, k/128] or [n, k/128], rows fastest. 128x128: [k/128
    rounded up to 4, m/128 or n/128], k fastest.
    """
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.stride() == (k, 1) and b.stride() == (1, k)
    assert k % 128 == 0 and n % 16 == 0 and m % 16 == 0

    def spread(scale: Tensor, recipe: F.ScalingType, rows: int) -> Tensor:
        assert scale.dtype == torch.float32
        if recipe == F.ScalingType.BlockWise1x128:
            assert scale.shape == (rows, k // 128) and (scale.stride(0), scale.stride(1)) in ((1, rows), (1, 1))
            return scale.double().repeat_interleave(128, 1)
        assert recipe == F.ScalingType.BlockWise128x128 and rows % 128 == 0
        padded = -(-(k // 128) // 4) * 4
        assert scale.shape == (padded, rows // 128) and scale.stride() == (1, padded)
        return scale.t()[:, : k // 128].double().repeat_interleave(128, 0).repeat_interleave(128, 1)

    left, right = a.double() * spread(scale_a, recipe_a, m), b.t().double() * spread(scale_b, recipe_b, n)
    return (left @ right.t()).to(output_dtype)


@pytest.mark.parametrize(("left", "right"), BLOCKS, ids=lambda s: s.name)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layouts_of_128_wide_blocks(
    left: QuantSpec, right: QuantSpec, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_mm_of_hopper)
    check_product(left, right, sizes)


# Layers -------------------------------------------------------------------------------------------------------


def run(policy: LinearPolicy, x: Tensor, weights: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Y of each, dX, dW of each."""
    x, weights = x.detach().clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    outputs = linear_products(x, weights, KEYS[: len(weights)], CLOCK, policy)
    torch.autograd.backward(outputs, [dy] * len(weights))
    assert x.grad is not None
    return [*(y.detach() for y in outputs), x.grad, *(w.grad for w in weights if w.grad is not None)]


ALL = ("fp8", "fp8", "fp8")
LAYERS = {
    "tensor": (PRESETS["fp8_tensor"], ALL),
    "tensor_aligned": (replace(PRESETS["fp8_tensor"], alignment=Alignment.ALIGNED), ALL),
    "tensor_mean_split": (replace(PRESETS["fp8_tensor"], mean_split=True), ALL),
    "backward_only": (replace(PRESETS["fp8_tensor"], fprop=LinearPolicy().fprop), ALL),
    "dgrad_emulated": (PRESETS["fp8_tensor"], ("fp8", "emulated", "fp8")),
    "forward_only": (LinearPolicy(fprop=uniform(S.FP8_TENSOR).fprop), ALL),
    "row": (PRESETS["fp8_row"], ALL),
    "row_aligned": (replace(PRESETS["fp8_row"], alignment=Alignment.ALIGNED), ALL),
    "row_and_tensor": (replace(PRESETS["fp8_row"], wgrad=uniform(S.FP8_TENSOR).wgrad), ALL),
    "block": (PRESETS["fp8_block"], ALL),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sizes", [(128, 64, 96), (17, 72, 40), (1, 16, 8)], ids=str)
def test_layers_equal_the_emulation(name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, backends = LAYERS[name]
    if name.startswith("row") and not rows_on_this_cpu():
        pytest.skip("this PyTorch does not scale rows of FP8 on the CPU")
    if name == "block":
        monkeypatch.setattr(F, "scaled_mm", scaled_mm_of_hopper)
    tokens, width, out = sizes
    x, dy = torch.randn(tokens, width).bfloat16().float(), torch.randn(tokens, out).bfloat16().float()
    weights = [torch.randn(out, width) * 0.3 for _ in range(2)]
    wanted = run(policy, x, weights, dy)
    found = run(bind(policy, *backends), x, weights, dy)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32 and off(a, b.double()) < 1e-6
    found = run(bind(policy, *backends), x.bfloat16(), weights, dy.bfloat16())
    assert [t.dtype for t in found] == [torch.bfloat16] * 3 + [torch.float32] * 2
    for a, b in zip(found, wanted, strict=True):
        assert off(a, b.double()) < 6e-3


def test_what_is_kept_is_one_byte_a_number() -> None:
    saved: list[Tensor] = []
    x = torch.randn(64, 48).bfloat16().requires_grad_()
    weight = torch.randn(32, 48).requires_grad_()
    policy = bind(PRESETS["fp8_tensor"], *ALL)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        linear_products(x, [weight], KEYS[:1], CLOCK, policy)
    own = [t for t in saved if t.data_ptr() != weight.data_ptr()]
    assert sum(t.numel() * t.element_size() for t in own) < 64 * 48 + 100


def test_x_and_dy_are_read_once_for_both_their_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    plain = BACKEND.factor_pair
    monkeypatch.setattr(fp8.Fp8, "factor_pair", lambda self, *args: (asked.append(args[0].shape), plain(*args))[1])
    x, weights = torch.randn(32, 48), [torch.randn(16, 48)]
    run(bind(PRESETS["fp8_tensor"], *ALL), x, weights, torch.randn(32, 16))
    assert asked == [(32, 48), (32, 16)]


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones() -> None:
    policy = bind(PRESETS["fp8_tensor"], *ALL)
    x, dy, weights = torch.randn(48, 64), torch.randn(48, 32), [torch.randn(32, 64) for _ in range(2)]
    wanted = run(policy, x, weights, dy)
    compiled = torch.compile(linear_products, fullgraph=True, dynamic=False)
    x, leaves = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    outputs = compiled(x, leaves, KEYS, CLOCK, policy)
    torch.autograd.backward(outputs, [dy] * 2)
    found = [*outputs, x.grad, *(w.grad for w in leaves)]
    for a, b in zip(found, wanted, strict=True):
        assert a is not None and off(a.detach(), b.double()) < 1e-6
