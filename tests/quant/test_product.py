"""One product of two factors: where scales go, what rounds, and how the factors are made."""

import pytest
import torch
from oracles import same_bits
from torch import Tensor

from lowbit.quant import spec as S
from lowbit.quant.hadamard import rotate
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.policy import BF16, Operand, Signs
from lowbit.quant.product import Dense, Fused, Wanted, bf16_valued, factor, multiply, pack, signs_of
from lowbit.quant.quantise import quantise
from lowbit.quant.spec import SPECS, QuantSpec

STREAM = Stream(make_key(3, "a"), make_clock(1), Product.DGRAD, Side.LEFT)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=lambda s: s.name)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@each_spec
def test_scales_of_rows_and_tensors_are_applied_after_the_product(spec: QuantSpec) -> None:
    """Against FP64, over a range of scales that BF16 factors with the scale inside would round."""
    x, w = torch.randn(24, 160) * 1e-5, torch.randn(40, 160) * 3e4
    x *= torch.logspace(-3, 3, 24)[:, None]
    signs = STREAM.signs(128)
    factors = [factor(t, Operand(spec), STREAM, signs, torch.float32) for t in (x, w)]
    exact = [quantise(rotate(t, signs, 128), spec, STREAM) for t in (x, w)]
    scaled = [q.operand().double() * (1 if (a := q.after()) is None else a.double()) for q in exact]
    want = scaled[0] @ scaled[1].t()
    assert error(multiply(*factors, torch.float32), want) < 1e-6
    after = torch.full((1, 1), 3.0)
    assert error(multiply(*factors, torch.float32, after=after), 3 * want) < 1e-6
    low = [factor(t, Operand(spec), STREAM, signs, torch.bfloat16) for t in (x, w)]
    assert multiply(*low, torch.bfloat16).dtype == torch.bfloat16
    assert error(multiply(*low, torch.bfloat16), want) < 4e-3
    wide = multiply(*low, torch.bfloat16, torch.float32)
    assert wide.dtype == torch.float32 and error(wide, want) < 1e-6


@each_spec
def test_fused_factors_are_those_of_the_reference(spec: QuantSpec) -> None:
    x = torch.randn(17, 72).bfloat16()
    signs = STREAM.signs(128)
    made = factor(x, Operand(spec), STREAM, signs, torch.bfloat16, wanted=Wanted.BOTH)
    want = quantise(rotate(x, signs, 128), spec, STREAM)
    assert isinstance(made, Fused)
    assert same_bits(made.operand(), want.operand())
    assert same_bits(made.dequantise(), want.dequantise())
    after = made.after()
    assert (after is None) == (want.after() is None) and (after is None or same_bits(after, want.after()))
    packed = pack(made)
    assert packed.shape == want.shape == (17, 128)
    assert same_bits(packed.unpack().dequantise(), want.dequantise())
    back = Fused.unpack(packed, torch.float32)
    assert same_bits(back.operand(), want.operand().float())
    assert (back.after() is None) == (after is None)
    assert same_bits(pack(want).data, packed.data)


def test_a_transposed_view_is_as_good_as_a_tensor() -> None:
    x = torch.randn(72, 40)
    for operand in (BF16, Operand(S.NVFP4_POW2_46), Operand(S.FP8_ROW)):
        view, copy = (factor(t, operand, STREAM, None, torch.float32) for t in (x.t(), x.t().contiguous()))
        assert same_bits(view.operand().contiguous(), copy.operand())
        same = torch.full((1, 1), 0.3).expand(40, 72)  # what sum().backward() hands out: strides of zero
        view, copy = (factor(t, operand, STREAM, None, torch.float32) for t in (same, same.contiguous()))
        assert same_bits(view.operand().contiguous(), copy.operand())


def test_only_what_is_wanted_is_made() -> None:
    x = torch.randn(32, 128)
    codes = factor(x, Operand(S.NVFP4_POW2), STREAM, None, torch.float32, wanted=Wanted.CODES)
    operand = factor(x, Operand(S.NVFP4_POW2), STREAM, None, torch.float32)
    assert isinstance(codes, Fused) and isinstance(operand, Fused)
    assert codes.matrix.numel() == 0 and codes.data.numel() == 32 * 64
    assert operand.matrix.numel() == 32 * 128 and operand.data.numel() == 0


def test_transformer_engines_signs() -> None:
    want = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    signs = signs_of(STREAM, 16, Signs.FIXED)
    assert signs is not None and signs.tolist() == want


def test_fresh_signs_are_the_streams() -> None:
    for size in (16, 128):
        signs = signs_of(STREAM, size, Signs.FRESH)
        assert signs is not None and torch.equal(signs, STREAM.signs(size))
    assert signs_of(STREAM, 0, Signs.FRESH) is None


def test_an_unquantised_factor_is_rounded_to_bf16() -> None:
    x = torch.randn(8, 24)
    made = factor(x, BF16, STREAM, None, torch.float32)
    assert isinstance(made, Dense) and same_bits(made.operand(), x.bfloat16().float())
    assert same_bits(bf16_valued(x, torch.bfloat16), x.bfloat16())
    signs = STREAM.signs(16)
    turned = factor(x, BF16, STREAM, signs, torch.float32)
    assert same_bits(turned.operand(), rotate(x, signs, 16).float())
