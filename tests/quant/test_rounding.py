"""Rounding: bit for bit against ml_dtypes and gfloat; stochastic rounding by counting over all 65536 noise values."""

import gfloat
import numpy as np
import pytest
import torch
from oracles import FLOAT_FORMATS, all_bf16, cast, gfloat_round, same_bits, tensor, to_bf16

from lowbit.quant.bits import divide, exponent_up, power_of_two, round_to_bf16
from lowbit.quant.formats import E2M1, E4M3, ELEMENT_FORMATS, INT8, ElementFormat, decode
from lowbit.quant.rounding import round_nearest, round_stochastic, round_up

floats = pytest.mark.parametrize("fmt", FLOAT_FORMATS, ids=lambda f: f.name)
every = pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)


def grid(fmt: ElementFormat) -> np.ndarray:
    """All finite values >= 0, ascending, FP64."""
    if fmt.integer:
        return np.arange(128, dtype=np.float64)
    values = decode(torch.arange(1 << (fmt.bits - 1), dtype=torch.uint8), fmt)
    return values[values.isfinite()].double().numpy()


def hard_values(fmt: ElementFormat) -> np.ndarray:
    """Grid points, the ties between them and the FP32 neighbours of both, beyond the maximum too; both signs."""
    points = grid(fmt)
    middle = (points[1:] + points[:-1]) / 2
    all_points = np.concatenate([points, middle, [points[-1] * 1.01, points[-1] * 1e6, 3e38]]).astype(np.float32)
    near = [all_points, np.nextafter(all_points, np.float32(np.inf)), np.nextafter(all_points, np.float32(-np.inf))]
    values = np.concatenate(near)
    return np.concatenate([values, -values])


@floats
def test_nearest_on_hard_values_and_all_of_bf16(fmt: ElementFormat) -> None:
    values = np.concatenate([hard_values(fmt), all_bf16()])
    values = values[~np.isnan(values) & ~np.isinf(values)]
    ours = round_nearest(tensor(values), fmt)
    assert same_bits(ours, tensor(cast(values, fmt.name)))
    few = np.concatenate([hard_values(fmt), values[::16]])
    assert same_bits(round_nearest(tensor(few), fmt), tensor(gfloat_round(few, fmt.name)))


@floats
def test_nearest_on_two_million_random_values(fmt: ElementFormat) -> None:
    rng = np.random.default_rng(0)
    for chunk in range(4):
        if chunk % 2:
            values = (rng.standard_normal(1 << 19) * fmt.max / 3).astype(np.float32)
        else:  # every exponent around the format's range
            exponent = rng.uniform(np.log2(fmt.smallest_subnormal) - 4, np.log2(fmt.max) + 2, 1 << 19)
            values = (rng.choice([-1, 1], 1 << 19) * 2.0**exponent).astype(np.float32)
        assert same_bits(round_nearest(tensor(values), fmt), tensor(cast(values, fmt.name)))


def test_int8_against_numpy() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([hard_values(INT8), (rng.standard_normal(1 << 18) * 60).astype(np.float32)])
    want = np.clip(np.rint(values), -127, 127) + np.float32(0)  # no negative zero
    assert same_bits(round_nearest(tensor(values), INT8), tensor(want))
    assert same_bits(round_nearest(tensor(values), INT8), tensor(values).round().clamp(-127, 127) + 0.0)


@floats
def test_up_is_gfloat_away_from_zero(fmt: ElementFormat) -> None:
    values = np.abs(hard_values(fmt))
    want = np.minimum(gfloat_round(np.minimum(values, fmt.max), fmt.name, gfloat.RoundMode.TowardPositive), fmt.max)
    assert same_bits(round_up(tensor(values), fmt), tensor(want.astype(np.float32)))
    assert same_bits(round_up(tensor(-values), fmt), tensor(-want.astype(np.float32)))
    points = grid(fmt)
    second = points[np.minimum(np.searchsorted(points, values, side="left"), len(points) - 1)]
    np.testing.assert_array_equal(want, second)


@every
def test_nan_infinity_and_zeros(fmt: ElementFormat) -> None:
    x = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    noise = torch.zeros(6, dtype=torch.int32)
    for got in (round_nearest(x, fmt), round_up(x, fmt), round_stochastic(x, fmt, noise)):
        assert bool(got[:2].isnan().all()) == fmt.has_nan
        assert got[2:4].tolist() == [fmt.max, -fmt.max]
        assert got[4:].tolist() == [0.0, 0.0]
        assert got[5].signbit().item() != fmt.integer


@every
def test_stochastic_counts_are_the_fraction(fmt: ElementFormat) -> None:
    """64 points of every interval (of a sample of intervals): the mean over every noise value is the point itself."""
    points = grid(fmt)
    intervals = range(len(points) - 1)
    if len(points) > 16:  # subnormals, the border to normal numbers, and the top
        intervals = [0, 1, 2, 2**fmt.mantissa_bits - 1 if not fmt.integer else 60, len(points) // 2, len(points) - 2]
    noise = torch.arange(1 << 16, dtype=torch.int32)
    for i in intervals:
        low, high = points[i], points[i + 1]
        x = torch.tensor(low + (high - low) * (np.arange(64) + 1 / 3) / 64, dtype=torch.float32)
        for sign in (1, -1):
            for point in x[:: 1 if fmt is E2M1 else 8]:
                q = round_stochastic((sign * point).expand(1 << 16), fmt, noise).double()
                assert set(q.unique().tolist()) <= {sign * low, sign * high}
                assert abs(q.mean().item() - sign * point.item()) <= (high - low) * 2.0**-17


@every
def test_stochastic_leaves_grid_points_alone_and_tiny_values_unbiased(fmt: ElementFormat) -> None:
    noise = torch.arange(1 << 16, dtype=torch.int32)
    for point in (grid(fmt)[0], grid(fmt)[1], grid(fmt)[-2], grid(fmt)[-1]):
        assert round_stochastic(torch.full((1 << 16,), point, dtype=torch.float32), fmt, noise).unique().tolist() == [
            point
        ]
    for shift in range(1, 17):
        tiny = fmt.smallest_subnormal * 2.0**-shift
        mean = round_stochastic(torch.full((1 << 16,), tiny), fmt, noise).double().mean().item()
        assert mean == tiny
    assert round_stochastic(torch.full((1 << 16,), 1e-30), fmt, noise).abs().max() == 0


def test_near_the_maximum_nothing_is_clipped() -> None:
    noise = torch.arange(1 << 16, dtype=torch.int32)
    for x in (5.0, 5.875, 5.99609375):
        assert round_stochastic(torch.full((1 << 16,), x), E2M1, noise).double().mean().item() == x
    assert round_stochastic(torch.full((1 << 16,), 440.0), E4M3, noise).double().mean().item() == 440.0


def test_bf16_rounding_is_ml_dtypes_and_torchs() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32).view(np.float32)
    edges = np.array([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x00000001, 0x00008000, 0x00018000, 0x80008001], np.uint32)
    values = np.concatenate([values, edges.view(np.float32), all_bf16()])
    ours = round_to_bf16(tensor(values))
    with np.errstate(invalid="ignore", over="ignore"):
        assert same_bits(ours, tensor(to_bf16(values)))
    assert same_bits(ours, tensor(values).bfloat16().float())


def test_division_is_correctly_rounded() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(1, 0x7F000000, 1 << 19).astype(np.uint32).view(np.float32) for _ in range(2))
    with np.errstate(over="ignore", under="ignore"):
        assert same_bits(divide(tensor(a), tensor(b)), tensor(a / b))


def test_powers_of_two_and_the_smallest_exponent() -> None:
    exponents = torch.arange(-127, 128)
    assert torch.equal(power_of_two(exponents).double(), 2.0 ** exponents.double())
    amax = all_bf16()
    amax = amax[(amax > 2.0**-120) & (amax < np.inf)]
    for largest in (6.0, 448.0, 2688.0, 1536.0, 57344.0):
        e = exponent_up(tensor(amax), largest).double().numpy()
        assert (amax.astype(np.float64) <= largest * 2.0**e).all()
        assert (amax.astype(np.float64) > largest * 2.0 ** (e - 1)).all()
