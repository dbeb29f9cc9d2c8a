"""Properties of every spec over shapes, strides, types and exponents (hypothesis)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import same_bits

from lowbit.quant import spec as S
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import fake_quantise, quantise, quantise_values
from lowbit.quant.spec import SPECS, Outer, QuantSpec, Rounding, Scale

DETERMINISTIC = [s for s in SPECS.values() if not s.stochastic]
ROWWISE = [s for s in DETERMINISTIC if s.outer is not Outer.TENSOR and s.block[0] == 1]
POWERS = [s for s in DETERMINISTIC if s.scale in (Scale.E8M0_UP, Scale.E8M0_FLOOR, Scale.POWER_OF_TWO)]
deterministic = pytest.mark.parametrize("spec", DETERMINISTIC, ids=lambda s: s.name)
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def stream() -> Stream:
    return Stream(make_key(0, "layer"), make_clock(), Product.WGRAD, Side.RIGHT)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@every
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 99), rows=st.integers(1, 40), columns=st.integers(1, 200))
def test_strides_do_not_matter(spec: QuantSpec, seed: int, rows: int, columns: int) -> None:
    x = draw(seed, rows, columns).bfloat16()
    want = fake_quantise(x, spec, stream())
    assert same_bits(fake_quantise(x.T.contiguous().T, spec, stream()), want)
    wide = torch.zeros(2 * rows, 3 * columns + 1, dtype=torch.bfloat16)
    wide[::2, 1::3] = x
    assert same_bits(fake_quantise(wide[::2, 1::3], spec, stream()), want)
    assert same_bits(fake_quantise(x[:, None], spec, stream())[:, 0], want)
    assert same_bits(fake_quantise(x.float(), spec, stream()), want)


@deterministic
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 99), rows=st.integers(1, 40), columns=st.integers(1, 300))
def test_padding_with_zeros_changes_nothing(spec: QuantSpec, seed: int, rows: int, columns: int) -> None:
    x = draw(seed, rows, columns)
    padded = torch.nn.functional.pad(x, (0, 256 - columns % 256, 0, 128 - rows % 128))
    assert same_bits(fake_quantise(padded, spec)[:rows, :columns], fake_quantise(x, spec))


@deterministic
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), exponent=st.integers(-90, 90))
def test_a_power_of_two_passes_through_and_signs_mirror(spec: QuantSpec, seed: int, exponent: int) -> None:
    x = draw(seed, 16, 256).bfloat16()
    y = fake_quantise(x, spec)
    assert same_bits(fake_quantise(-x, spec) + 0.0, -y + 0.0)
    scaled = fake_quantise(x * 2.0**exponent, spec)
    assert torch.equal(scaled.double(), y.double() * 2.0**exponent)


@pytest.mark.parametrize("spec", ROWWISE, ids=lambda s: s.name)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 99))
def test_rows_do_not_depend_on_each_other_unless_they_share_a_scale(spec: QuantSpec, seed: int) -> None:
    x = draw(seed, 9, 256)
    assert same_bits(torch.cat([fake_quantise(row[None], spec) for row in x]), fake_quantise(x, spec))


@pytest.mark.parametrize("spec", POWERS, ids=lambda s: s.name)
def test_what_is_on_the_grid_stays(spec: QuantSpec) -> None:
    """Dequantised values come back unchanged where scales are powers of two: they fit a smaller scale too."""
    y = fake_quantise(draw(0, 64, 512), spec)
    assert same_bits(fake_quantise(y, spec), y)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.rounding is Rounding.STOCHASTIC], ids=lambda s: s.name)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(spec: QuantSpec) -> None:
    x = draw(0, 64, 512).bfloat16()
    v = quantise_values(x, spec, stream())
    assert v.outer is not None
    groups = v.scale.shape[2] // v.outer.shape[2]
    y = x.double().reshape(v.elements.shape) / (v.scale.double() * v.outer.repeat_interleave(groups, 2).double())
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    q = v.elements.double().abs()
    inside = y.abs() <= 6
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    assert torch.isin(q, grid).all()
    assert ((q - y.abs()).abs()[inside] < step[inside] * 1.00001).all()
    if spec.scale is Scale.E4M3_UP:
        assert (y.abs() <= 6.000001).all()
    else:
        assert (~inside).double().mean() > 0.005  # what the published rules clip


@every
def test_the_same_stream_gives_the_same_bits_and_another_step_does_not(spec: QuantSpec) -> None:
    x = draw(0, 16, 256)
    later = Stream(make_key(0, "layer"), make_clock(1), Product.WGRAD, Side.RIGHT)
    first, again, other = (quantise(x, spec, s).dequantise() for s in (stream(), stream(), later))
    assert same_bits(first, again)
    assert same_bits(first, other) != spec.stochastic


def test_specs_are_found_by_name_and_state_their_bits() -> None:
    assert all(SPECS[name].name == name for name in SPECS)
    assert (S.NVFP4.bits, S.NVFP4_POW2.bits, S.MXFP8.bits, S.MXFP6_E2M3.bits, S.MXFP4.bits) == (
        4.5,
        4.75,
        8.25,
        6.25,
        4.25,
    )
