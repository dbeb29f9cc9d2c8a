"""Stochastic rounding and MS-EDEN bit for bit, given the same random numbers: against gfloat, and numpy in FP64.

gfloat rounds |x| / step to the number of random bits by ties to even, lowbit by halves up: exact ties there are left
out. MS-EDEN has no installable oracle: here it is once more from the paper's description, casts by ml_dtypes and
gfloat, dot products in FP64; and its closed form <x, c v> = <x, x>, which no draw may break.
"""

from dataclasses import replace

import gfloat
import numpy as np
import pytest
import torch
from oracles import FLOAT_FORMATS, GFLOAT, Array, cast, gfloat_round, same_bits, tensor, tetrajet_nvfp4, to_bf16
from oracles import transformer_engine_nvfp4 as transformer_engine

from lowbit.quant import spec as S
from lowbit.quant.formats import E2M1, E4M3, INT8, ElementFormat
from lowbit.quant.philox import Product, Purpose, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import quantise_values
from lowbit.quant.rounding import round_stochastic
from lowbit.quant.spec import Outer, QuantSpec, Rounding, Scale

STREAM = Stream(make_key(5, "layer"), make_clock(7), Product.WGRAD, Side.LEFT)
ROWS, COLUMNS = 64, 512
F = np.float32


def gfloat_stochastic(x: Array, fmt: ElementFormat, noise: np.ndarray) -> Array:
    """Rounded by gfloat with 16 random bits an element."""
    clipped = np.clip(x.astype(np.float64), -fmt.max, fmt.max)
    mode = gfloat.RoundMode.Stochastic
    return np.asarray(gfloat.round_ndarray(GFLOAT[fmt.name], clipped, mode, True, noise.astype(np.int64), 16), F)


def off_ties(x: Array, fmt: ElementFormat) -> np.ndarray:
    """bool: not halfway between two multiples of 2**-16 of a step."""
    exponent = np.maximum(np.frexp(np.abs(x.astype(np.float64)))[1] - 1, 1 - fmt.bias) - fmt.mantissa_bits
    sixteenths = np.abs(x.astype(np.float64)) * np.exp2(-exponent) * 65536
    return np.asarray(sixteenths % 1 != 0.5)


def noise(purpose: Purpose, count: int) -> np.ndarray:
    return STREAM.halves(purpose, count).numpy()


@pytest.mark.parametrize("fmt", FLOAT_FORMATS, ids=lambda f: f.name)
def test_rounding_with_given_bits_is_gfloats(fmt: ElementFormat) -> None:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(np.log2(fmt.smallest_subnormal) - 18, np.log2(fmt.max) + 1, 200_000))
    x = np.concatenate([spread, -spread, rng.uniform(-fmt.max, fmt.max, 200_000)]).astype(F)
    x = x[off_ties(x, fmt)]
    bits = rng.integers(0, 1 << 16, x.size)
    got = round_stochastic(tensor(x), fmt, torch.from_numpy(bits).int())
    assert same_bits(got, tensor(gfloat_stochastic(x, fmt, bits)))


def test_int8_with_given_bits_is_the_floor_of_the_sum() -> None:
    rng = np.random.default_rng(0)
    x = np.rint(rng.uniform(-127, 127, 200_000) * 65536) / 65536  # multiples of what the noise has: no ties
    bits = rng.integers(0, 1 << 16, x.size)
    want = np.sign(x) * np.floor(np.abs(x) + bits / 65536)
    got = round_stochastic(tensor(x.astype(F)), INT8, torch.from_numpy(bits).int())
    np.testing.assert_array_equal(got.numpy(), want)


# Whole quantisers ------------------------------------------------------------------------------------------------


def data() -> list[Array]:
    rng = np.random.default_rng(1)
    plain = rng.standard_normal((ROWS, COLUMNS))
    uneven = plain * np.exp2(rng.integers(-6, 7, (ROWS, COLUMNS // 16))).repeat(16, 1)
    return [to_bf16(x.astype(F)) for x in (plain, uneven, rng.standard_t(3, (ROWS, COLUMNS)))]


def in_blocks(x: Array) -> Array:
    """[rows, blocks, 16]."""
    return x.reshape(ROWS, -1, 16)


def scaled(x: Array, spec: QuantSpec) -> tuple[Array, Array, Array, np.ndarray]:
    """What is rounded, block scales [rows, blocks], outer scales, x in units of the outer scale (FP64)."""
    blocks, amax, t = in_blocks(x), np.abs(in_blocks(x)).max(2), F(spec.target)
    nearest = cast if spec.scale is Scale.E4M3_NEAREST else _cast_up
    if spec.outer is Outer.BLOCK_POW2:
        largest = amax.reshape(ROWS, -1, 8).max(2).astype(np.float64)
        outer = np.exp2(np.ceil(np.log2(largest / float(F(spec.bound * spec.target)))))
        by_block = outer.repeat(8, 1)
        scales = nearest((amax / by_block).astype(F) / t, "E4M3")
        units = blocks / by_block[..., None]
        return units.astype(F) * (F(1) / scales)[..., None], scales, outer.astype(F), units
    if spec.outer is Outer.TENSOR:
        encode = F(spec.bound * spec.target) / np.abs(x).max()
        outer = F(1) / encode
        scales = nearest(amax * (encode * F(1 / spec.target)), "E4M3")
        inverse = F(1) / (scales * outer)
        return blocks * inverse[..., None], scales, outer.reshape(1, 1), blocks.astype(np.float64) * float(encode)
    outer = amax.reshape(ROWS, -1, 8).max(2) / F(spec.bound) / t
    by_block = outer.repeat(8, 1)
    scales = nearest(amax / by_block / t, "E4M3")
    return blocks * (F(1) / (by_block * scales))[..., None], scales, outer, blocks / by_block[..., None]


def _cast_up(x: Array, name: str) -> Array:
    return gfloat_round(x, name, gfloat.RoundMode.TowardPositive)


UP = {"scale": Scale.E4M3_UP}
SR = [S.NVFP4_SR, S.NVFP4_TETRAJET_SR, S.NVFP4_POW2_SR, *(replace(s, **UP) for s in (S.NVFP4_SR, S.NVFP4_TETRAJET_SR))]


@pytest.mark.parametrize("spec", SR, ids=lambda s: f"{s.name}-{s.scale.value}")
def test_a_stochastic_quantiser_is_its_scales_and_gfloats_rounding(spec: QuantSpec) -> None:
    for x in data():
        y, scales, outer, _ = scaled(x, spec)
        got = quantise_values(tensor(x), spec, STREAM)
        assert got.outer is not None
        assert same_bits(got.scale.reshape(scales.shape), tensor(scales))
        assert same_bits(got.outer.reshape(outer.shape), tensor(outer))
        bits = noise(Purpose.ELEMENTS, y.size).reshape(y.shape)
        sure = torch.from_numpy(off_ties(y, E2M1))
        want = tensor(gfloat_stochastic(y, E2M1, bits))
        assert sure.double().mean() > 0.9
        assert same_bits(got.elements.reshape(want.shape)[sure], want[sure])


@pytest.mark.parametrize("spec", [S.NVFP4, S.NVFP4_TETRAJET], ids=lambda s: s.name)
def test_the_scales_above_are_those_of_the_other_oracles(spec: QuantSpec) -> None:
    for x in data():
        other = transformer_engine(x) if spec is S.NVFP4 else tetrajet_nvfp4(x)
        _, scales, outer, _ = scaled(x, spec)
        np.testing.assert_array_equal(scales, other.scales.reshape(scales.shape))
        np.testing.assert_array_equal(outer, other.outer.reshape(outer.shape))


EDENS = [S.NVFP4_POW2_EDEN, S.NVFP4_EDEN, S.NVFP4_EDEN_PUBLISHED]
EDENS += [replace(S.NVFP4_POW2_EDEN, rounding=Rounding.MS_EDEN_PUBLISHED)]
each_eden = pytest.mark.parametrize("spec", EDENS, ids=lambda s: f"{s.name}-{s.rounding.value}")


def eden(x: Array, spec: QuantSpec) -> tuple[Array, Array, np.ndarray]:
    """Elements, block scales before their rounding, and the correction [rows, groups]."""
    y, scales, _, units = scaled(x, spec)
    scales = np.where(scales == 0, F(1), scales)
    elements = cast(y, "E2M1")
    if spec.rounding is Rounding.MS_EDEN:
        a, v = units, elements.astype(np.float64) * scales[..., None]
    else:
        a, v = y.astype(np.float64), elements.astype(np.float64)
    a, v = (z.reshape(ROWS, -1, 128) for z in (a, v))
    c = ((a * a).sum(2) / (a * v).sum(2)).astype(F)
    return elements, scales * c.repeat(8, 1), c


@each_eden
def test_ms_eden_is_the_papers_description(spec: QuantSpec) -> None:
    for x in data():
        elements, exact, _ = eden(x, spec)
        bits = noise(Purpose.SCALES, exact.size).reshape(exact.shape)
        sure = torch.from_numpy(off_ties(exact, E4M3))
        want = tensor(gfloat_stochastic(exact, E4M3, bits))
        got = quantise_values(tensor(x), spec, STREAM)
        assert same_bits(got.elements.reshape(elements.shape), tensor(elements))
        assert sure.double().mean() > 0.9
        assert same_bits(got.scale.reshape(exact.shape)[sure], want[sure])


@pytest.mark.parametrize("spec", [S.NVFP4_POW2_EDEN, S.NVFP4_EDEN], ids=lambda s: s.name)
def test_no_draw_of_ms_eden_changes_a_vectors_length_along_itself(spec: QuantSpec) -> None:
    """<x, q> / <x, x> of a group is 1 before the scales are rounded, and on average after."""
    for x in data():
        elements, exact, _ = eden(x, spec)
        outer = scaled(x, spec)[2].astype(np.float64)
        whole = exact.astype(np.float64) * (outer.repeat(8, 1) if spec.outer is Outer.BLOCK_POW2 else outer)
        v = (elements * whole[..., None]).reshape(ROWS, -1, 128)
        groups = x.astype(np.float64).reshape(v.shape)
        np.testing.assert_allclose((groups * v).sum(2), (groups**2).sum(2), rtol=3e-6)
        drawn = np.zeros_like(groups)
        steps = 64
        for step in range(steps):
            stream = replace(STREAM, clock=make_clock(step))
            values = quantise_values(tensor(x), spec, stream)
            after = values.after()
            q = values.operand().double() * (1.0 if after is None else after.double())
            drawn += q.numpy().reshape(v.shape) / steps
        error = ((drawn - v) ** 2).sum() / (v**2).sum()
        assert error < 2.0**-7 / steps  # a scale's step is at most an eighth of it: a variance of at most 1/256
