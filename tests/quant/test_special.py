"""Bad and extreme input: NaN, infinities, zeros, subnormal amax, empty tensors, wrong types."""

from dataclasses import replace

import pytest
import torch
from oracles import same_bits

from lowbit.errors import ConfigError
from lowbit.quant import spec as S
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import fake_quantise, quantise
from lowbit.quant.spec import SPECS, Outer, QuantSpec, Rounding, Scale

every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
NAN, INF = float("nan"), float("inf")


def stream() -> Stream:
    return Stream(make_key(0, "layer"), make_clock(), Product.WGRAD, Side.LEFT)


def reach(spec: QuantSpec) -> tuple[int, int]:
    """Rows and columns that one bad element may turn into NaN."""
    if spec.outer is Outer.TENSOR:
        return 256, 512
    rows, columns = spec.block
    if spec.outer is Outer.ROW:
        columns = 512
    if spec.outer in (Outer.BLOCK, Outer.BLOCK_POW2):
        columns = 128
    return rows or 256, columns or 512


@every
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_and_infinity_make_their_block_nan_and_nothing_else(spec: QuantSpec, bad: float) -> None:
    x = torch.randn(256, 512).bfloat16()
    x[17, 200] = bad
    rows, columns = reach(spec)
    y = fake_quantise(x, spec, stream())
    assert y[17, 200].isnan()
    outer = quantise(x, spec, stream()).outer
    assert outer is None or not outer.isinf().any()
    top, left = 17 // rows * rows, 200 // columns * columns
    outside = torch.ones(256, 512, dtype=torch.bool)
    outside[top : top + rows, left : left + columns] = False
    assert y[outside].isfinite().all()
    inside = y[~outside]
    assert (inside.isnan() | (inside.abs() <= x[~outside].abs().nan_to_num(posinf=0, neginf=0).max() * 1.2)).all()
    assert same_bits(y, quantise(x, spec, stream()).pack().unpack().dequantise())


@every
def test_zero_blocks_stay_zero_with_their_signs(spec: QuantSpec) -> None:
    x = torch.randn(256, 512)
    x[:128, :256] = 0.0
    x[:128:2, :256] = -0.0
    for z in (x, torch.zeros(256, 512), -torch.zeros(256, 512)):
        y = fake_quantise(z, spec, stream())
        assert y.isfinite().all()
        if spec.scale is Scale.FP32 and not z.any():
            assert (quantise(z, spec).scales == 1).all()
        assert (y[z == 0] == 0).all()
        if not spec.element.integer:
            assert torch.equal(y.signbit()[z == 0], z.signbit()[z == 0])


@every
def test_subnormal_and_huge_blocks_are_finite_and_no_farther_off_than_a_block_maximum(spec: QuantSpec) -> None:
    patterns = torch.arange(1, 1 << 15, 37, dtype=torch.int32)
    values = patterns[patterns < 0x7E80].to(torch.int16).view(torch.bfloat16)
    for value in (values[:4], values[-4:], values[::40]):
        for v in value.tolist():
            x = torch.full((16, 128), v).bfloat16() * torch.linspace(-1, 1, 128).bfloat16()
            y = fake_quantise(x, spec, stream())
            assert y.isfinite().all()
            assert ((y.double() - x.double()).abs() <= v * 0.51 + 1e-37).all()


def test_a_tensor_of_tiny_numbers_is_still_quantised() -> None:
    """Power-of-two scales reach down to FP32's smallest normal numbers; relative error as anywhere else."""
    x = torch.randn(64, 256)
    for scale in (1.0, 2.0**-60, 2.0**-100):
        tiny = (x * scale).bfloat16()
        for spec in (S.MXFP8, S.NVFP4_POW2, S.NVFP4_TETRAJET, S.NVFP4, S.FP8_TENSOR, S.FP8_BLOCK, S.INT8_ROW):
            y = fake_quantise(tiny, spec)
            assert torch.equal(y.double() / scale, fake_quantise(x, spec).double()) or spec.scale is Scale.FP32
            assert (y.double() - tiny.double()).norm() < 0.1 * tiny.double().norm()


@every
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (2, 0, 32)])
def test_empty_tensors(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    assert fake_quantise(x, spec, stream()).shape == shape
    assert quantise(x, spec, stream()).pack().unpack().dequantise().shape == shape


def test_wrong_use_is_refused() -> None:
    with pytest.raises(TypeError, match="not torch"):
        fake_quantise(torch.zeros(4, 32, dtype=torch.float64), S.MXFP8)
    with pytest.raises(ValueError, match="random stream"):
        fake_quantise(torch.zeros(4, 32), S.NVFP4_SR)
    with pytest.raises(ValueError, match="at least one dimension"):
        fake_quantise(torch.zeros(()), S.MXFP8)
    with pytest.raises(ValueError, match="32_4_4"):
        quantise(torch.zeros(4, 32), S.FP8_ROW).pack(swizzled=True)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (S.MXFP8, {"outer": Outer.TENSOR}, "go together"),
        (S.MXFP8, {"scale": Scale.E4M3_UP}, "go together"),
        (S.NVFP4, {"element": S.E4M3}, "go together"),
        (S.NVFP4_2D, {"outer": Outer.ROW}, "blocks of one row"),
        (S.NVFP4, {"rounding": Rounding.FOUR_OVER_SIX_MSE}, "bound=256"),
        (S.MXFP4, {"rounding": Rounding.FOUR_OVER_SIX_MAE}, "four over six"),
        (S.MXFP4, {"rounding": Rounding.MS_EDEN}, "MS-EDEN"),
        (S.FP8_BLOCK, {"scale": Scale.FP32}, "whole rows"),
    ],
)
def test_combinations_that_do_not_exist_are_refused(base: QuantSpec, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(base, **changes)


@pytest.mark.parametrize("spec", [S.NVFP4_EDEN, S.NVFP4_EDEN_PUBLISHED], ids=lambda s: s.name)
def test_eden_keeps_finite_what_underflows_under_the_tensors_scale(spec: S.QuantSpec) -> None:
    """Rows 2**-40 as large as others: their block scales underflow, and their elements must not grow without bound."""
    x = torch.randn(64, 256) * 2.0 ** torch.linspace(-40, 20, 64)[:, None]
    stream = Stream(make_key(1, "a"), make_clock(), Product.DGRAD, Side.LEFT)
    got = fake_quantise(x, spec, stream)
    assert got.isfinite().all()
    assert (got[0] == 0).all()
    assert (got[-1] != 0).any()
