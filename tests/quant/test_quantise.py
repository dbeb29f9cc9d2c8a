"""Block quantisers: codes and scales bit for bit against torchao, numpy with ml_dtypes' casts, and torch's own casts.

torchao clamps an NVFP4 block scale to at least 2**-6 and replaces the multiplier of an all-but-zero MX block by 1; as
it is the oracle here, the data stay clear of both, and test_special.py covers those blocks.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from oracles import all_bf16, cast, same_bits, tensor, tetrajet_nvfp4, to_bf16, transformer_engine_nvfp4
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from lowbit.quant import spec as S
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import fake_quantise, quantise, quantise_values
from lowbit.quant.quantised import Packed
from lowbit.quant.spec import QuantSpec, Scale

MX = [
    (S.MXFP8, S.MXFP8_FLOOR, torch.float8_e4m3fn),
    (S.MXFP8_E5M2, S.MXFP8_E5M2_FLOOR, torch.float8_e5m2),
    (S.MXFP6_E2M3, S.MXFP6_E2M3_FLOOR, DTYPE_FP6_E2M3),
    (S.MXFP6_E3M2, S.MXFP6_E3M2_FLOOR, DTYPE_FP6_E3M2),
    (S.MXFP4, S.MXFP4_FLOOR, torch.float4_e2m1fn_x2),
]
MX_CASES = [(up, ScaleCalculationMode.RCEIL, d) for up, _, d in MX]
MX_CASES += [(floor, ScaleCalculationMode.FLOOR, d) for _, floor, d in MX]


def normal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return to_bf16(rng.standard_normal((rows, columns)).astype(np.float32))


def spread_out(rng: np.random.Generator, rows: int, columns: int, low: int = -90, high: int = 120) -> np.ndarray:
    """BF16 numbers whose blocks of 32 have exponents all over the range, and elements within 2**8 of each other."""
    block = np.exp2(rng.integers(low, high, (rows, columns // 32, 1)).astype(np.float32))
    element = np.exp2(-rng.integers(0, 9, (rows, columns // 32, 32)).astype(np.float32))
    mantissa = 1 + rng.integers(0, 128, (rows, columns // 32, 32)).astype(np.float32) / 128
    sign = rng.choice(np.array([-1, 1], np.float32), mantissa.shape)
    return to_bf16((block * element * mantissa * sign).reshape(rows, columns))


@pytest.mark.parametrize(("spec", "mode", "dtype"), MX_CASES, ids=lambda v: getattr(v, "name", None))
def test_mx_codes_and_scales_are_torchaos(
    spec: QuantSpec, mode: ScaleCalculationMode, dtype: torch.dtype | str
) -> None:
    rng = np.random.default_rng(0)
    for x in (normal(rng, 512, 512), spread_out(rng, 512, 512)):
        scales, codes = to_mx(tensor(x, torch.bfloat16), dtype, 32, mode)
        packed = quantise(tensor(x, torch.bfloat16), spec).pack()
        assert torch.equal(packed.scales, scales.view(torch.uint8).reshape(packed.scales.shape))
        if spec.element.bits == 6:
            assert torch.equal(packed.unpack().codes, codes)
        else:
            assert torch.equal(packed.data, codes.view(torch.uint8))


@pytest.mark.parametrize("spec", [case[0] for case in MX_CASES], ids=lambda s: f"{s.name}-{s.element.name}")
def test_mx_against_numpy(spec: QuantSpec) -> None:
    """The scale from exact rational comparison in FP64, the elements by ml_dtypes; every BF16 amax."""
    fmt = spec.element
    rng = np.random.default_rng(1)
    amax = all_bf16()[:0x7E80:3]  # every third value from 0 to 2**126, subnormals too (above, BF16 overflows)
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 0] = amax
    x[:, 1:] = to_bf16((amax[:, None] * rng.uniform(-1, 1, (len(amax), 31))).astype(np.float32))
    wide = amax.astype(np.float64)
    with np.errstate(divide="ignore"):
        if spec.scale is Scale.E8M0_FLOOR:
            exponent = np.floor(np.log2(wide)) - np.floor(np.log2(fmt.max))
        else:
            exponent = np.floor(np.log2(wide)) - np.floor(np.log2(fmt.max)) - 1
            exponent += (wide > fmt.max * np.exp2(exponent)) * 1.0
            exponent += (wide > fmt.max * np.exp2(exponent)) * 1.0
    exponent = np.clip(np.nan_to_num(exponent, neginf=-127), -127, 127)
    scale = np.exp2(exponent)[:, None]
    elements = cast((x.astype(np.float64) / scale).astype(np.float32), fmt.name)
    got = quantise_values(tensor(x, torch.bfloat16), spec)
    assert torch.equal(got.scale.reshape(-1).double(), torch.from_numpy(scale[:, 0]))
    assert same_bits(got.elements.reshape(x.shape), tensor(elements))
    exact = elements.astype(np.float64) * scale
    assert torch.equal(got.dequantise().double(), torch.from_numpy(exact)), "not exact in BF16"


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_nvfp4_is_torchaos_given_the_same_outer_scale(by: str) -> None:
    """torchao rounds (amax/6)/outer and multiplies by (1/outer)/scale: the same as ours exactly for powers of two."""
    rng = np.random.default_rng(0)
    x = normal(rng, 512, 512)
    if by == "block":
        got = quantise(tensor(x, torch.bfloat16), S.NVFP4_POW2)
        assert got.outer is not None
        scales, codes = nvfp4_quantize(tensor(x).reshape(-1, 128), 16, got.outer.reshape(-1, 1, 1))
        assert torch.equal(got.pack().data, codes.reshape(512, 256))
        assert torch.equal(got.scales, scales.view(torch.uint8).reshape(got.scales.shape))
        return
    got = quantise(tensor(x, torch.bfloat16), S.NVFP4 if by == "tensor" else S.NVFP4_ROW)
    assert got.outer is not None
    outer = got.outer.reshape(()) if by == "tensor" else got.outer.reshape(-1, 1, 1)
    scales, codes = nvfp4_quantize(tensor(x), 16, outer)
    # FP32 outer scales: the two orders round differently, which shows where BF16 numbers make exact ties, by one code
    theirs = scales.view(torch.uint8).reshape(got.scales.shape)
    assert (got.scales != theirs).float().mean() < 3e-3
    assert (got.scales.int() - theirs.int()).abs().max() <= 1
    same = (got.scales == theirs).repeat_interleave(16, 1)
    other = Packed(codes, theirs, None, (512, 512), got.spec, (512, 32), False).unpack().codes
    assert (got.codes[same] != other[same]).float().mean() < 3e-3
    assert (got.codes[same].int() - other[same].int()).abs().max() <= 1


@pytest.mark.parametrize(("spec", "rows"), [(S.NVFP4, 1), (S.NVFP4_2D, 16), (S.NVFP4_ROW, 1)], ids=lambda v: str(v))
def test_nvfp4_is_transformer_engines_arithmetic(spec: QuantSpec, rows: int) -> None:
    rng = np.random.default_rng(0)
    for x in (normal(rng, 1024, 512), spread_out(rng, 512, 512, -20, 4), spread_out(rng, 256, 256, -100, -90)):
        want = transformer_engine_nvfp4(x, rows, by_row=spec is S.NVFP4_ROW)
        got = quantise_values(tensor(x, torch.bfloat16), spec)
        assert got.outer is not None
        assert same_bits(got.elements.reshape(x.shape), tensor(want.elements))
        assert same_bits(got.scale.reshape(want.scales.shape), tensor(want.scales))
        assert same_bits(got.outer.reshape(want.outer.shape), tensor(want.outer))


def test_nvfp4_tetrajet_is_its_published_arithmetic() -> None:
    rng = np.random.default_rng(0)
    for x in (normal(rng, 1024, 512), spread_out(rng, 512, 512), spread_out(rng, 256, 256, -126, -120)):
        want = tetrajet_nvfp4(x)
        got = quantise_values(tensor(x, torch.bfloat16), S.NVFP4_TETRAJET)
        assert got.outer is not None
        assert same_bits(got.elements.reshape(x.shape), tensor(want.elements))
        assert same_bits(got.scale.reshape(want.scales.shape), tensor(want.scales))
        assert same_bits(got.outer.reshape(want.outer.shape), tensor(want.outer))
        whole = want.outer[..., None] * want.scales.reshape(*want.outer.shape, 8)
        exact = want.elements.reshape(*whole.shape, 16) * whole[..., None]
        assert same_bits(got.dequantise().float(), tensor(to_bf16(exact.reshape(x.shape))))


def test_scales_rounded_up_hold_every_element() -> None:
    """|x| <= 6 * scale * outer exactly (FP64), and the next smaller scale would not do."""
    rng = np.random.default_rng(0)
    x = tensor(np.concatenate([normal(rng, 256, 512), spread_out(rng, 256, 512, -3, 3)]), torch.bfloat16)
    got = quantise_values(x, replace(S.NVFP4_POW2, scale=Scale.E4M3_UP))
    assert got.outer is not None
    outer = got.outer.repeat_interleave(8, 2).double()
    amax = x.double().reshape(512, 1, -1, 16).abs().amax(3, keepdim=True)
    assert (amax <= 6 * got.scale.double() * outer).all()
    nearest = quantise_values(x, S.NVFP4_POW2)
    assert (got.scale >= nearest.scale).all()
    assert 0.3 < (got.scale > nearest.scale).double().mean() < 0.7
    assert (got.scale <= 448).all()


@pytest.mark.parametrize("spec", [S.NVFP4_POW2, S.NVFP4_POW2_46, S.NVFP4], ids=lambda s: s.name)
def test_operands_of_nvfp4_lose_nothing_in_bf16(spec: QuantSpec) -> None:
    """What BF16 holds equals element x scale (x outer) in FP64."""
    rng = np.random.default_rng(0)
    x = tensor(np.concatenate([normal(rng, 128, 512), spread_out(rng, 128, 512, -40, 40)]), torch.bfloat16)
    v = quantise_values(x, spec)
    exact = v.elements.double() * v.scale.double()
    if spec.outer is S.Outer.BLOCK_POW2:
        assert v.outer is not None
        exact = exact * v.outer.repeat_interleave(8, 2).double()
    assert torch.equal(v.operand().double(), exact.reshape(x.shape))


@pytest.mark.parametrize("by", ["tensor", "row"])
def test_fp8_tensor_and_row_are_torchs_casts(by: str) -> None:
    rng = np.random.default_rng(0)
    x = tensor(normal(rng, 512, 512) * 4)
    amax = x.abs().amax() if by == "tensor" else x.abs().amax(1, keepdim=True)
    multiplier = torch.tensor(448.0) / amax  # `448.0 / amax` would be a rounded reciprocal times 448
    want = (x * multiplier).clamp(-448, 448).to(torch.float8_e4m3fn)
    got = quantise(x, S.FP8_TENSOR if by == "tensor" else S.FP8_ROW)
    assert torch.equal(got.codes, want.view(torch.uint8))
    assert same_bits(got.scales, (1 / multiplier).reshape(got.scales.shape))
    assert torch.equal(got.operand().float(), want.float())
    same = cast((x * multiplier).numpy(), "E4M3")
    assert torch.equal(got.operand().float(), tensor(same))


@pytest.mark.parametrize(("spec", "rows"), [(S.FP8_BLOCK, 1), (S.FP8_BLOCK_2D, 128)], ids=["1x128", "128x128"])
def test_fp8_blocks_have_the_smallest_power_of_two_that_fits(spec: QuantSpec, rows: int) -> None:
    rng = np.random.default_rng(0)
    x = spread_out(rng, 256, 512)
    blocks = x.reshape(256 // rows, rows, 4, 128).astype(np.float64)
    amax = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    scale = np.exp2(np.ceil(np.log2(amax / 448)))
    want = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    got = quantise(tensor(x, torch.bfloat16), spec)
    assert torch.equal(got.scales.double(), torch.from_numpy(scale.reshape(got.scales.shape)))
    assert torch.equal(got.dequantise().double(), torch.from_numpy(want.reshape(x.shape)))
    cast_by_torch = (torch.from_numpy(blocks / scale).float()).to(torch.float8_e4m3fn).double() * torch.from_numpy(
        scale
    )
    assert torch.equal(got.dequantise().double(), cast_by_torch.reshape(x.shape))


def test_int8_rows_are_numpys() -> None:
    rng = np.random.default_rng(0)
    x = normal(rng, 512, 512)
    multiplier = np.float32(127) / np.abs(x).max(axis=1, keepdims=True)
    want = np.clip(np.rint(x * multiplier), -127, 127).astype(np.int8)
    got = quantise(tensor(x), S.INT8_ROW)
    np.testing.assert_array_equal(got.codes.numpy(), want)
    zero = torch.zeros(512, dtype=torch.int32)
    by_torch = torch.fake_quantize_per_channel_affine(tensor(x), 1 / tensor(multiplier)[:, 0], zero, 0, -127, 127)
    codes = (by_torch * tensor(multiplier)).round()
    assert (got.codes != codes).float().mean() < 2e-3  # torch multiplies by the reciprocal of the rounded scale: ties
    assert (got.codes - codes).abs().max() <= 1
    after = got.after()
    assert after is not None and after.shape == (512, 1)
    assert same_bits(got.dequantise().float(), tensor(to_bf16(want * after.numpy())))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n for n, s in S.SPECS.items() if not s.stochastic])
def test_two_million_values_of_every_spec(name: str) -> None:
    """fake == pack -> unpack -> dequantise on two million values, and an FP32 input counts as its BF16 rounding."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        x = tensor(rng.standard_t(3, (1024, 512)).astype(np.float32))
        fake = fake_quantise(x, S.SPECS[name])
        assert same_bits(fake, quantise(x.bfloat16(), S.SPECS[name]).pack().unpack().dequantise())


@pytest.mark.parametrize("name", S.SPECS)
def test_the_scale_that_follows_the_product_is_the_one_that_the_format_names(name: str) -> None:
    spec = S.SPECS[name]
    stream = Stream(make_key(1, name), make_clock(), Product.DGRAD, Side.LEFT)
    after = quantise_values(torch.randn(3, 256), spec, stream).after()
    shape = {S.Outer.NONE: None, S.Outer.TENSOR: (1, 1), S.Outer.ROW: (3, 1)}[spec.after]
    assert shape == (None if after is None else tuple(after.shape))
    by_name = {"_ROW": S.Outer.ROW, "FP8_TENSOR": S.Outer.TENSOR}
    assert all(spec.after is wanted for part, wanted in by_name.items() if part in name)
