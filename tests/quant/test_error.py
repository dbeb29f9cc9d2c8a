"""Error and bias, against published numbers: relative MSE on N(0, 1), slopes, and means at fixed points.

Relative MSE: the table of the Quartet II paper's notebook (arXiv 2601.22813) and measurements of the published rules.
The slope <x, q(x)> / <x, x> of an unbiased quantiser is 1; the published ones fall short of it.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lowbit.quant import spec as S
from lowbit.quant.hadamard import rotate, unrotate
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import fake_quantise, quantise_values
from lowbit.quant.quantised import Values
from lowbit.quant.spec import EDEN, QuantSpec, Rounding, Scale

UP = {"scale": Scale.E4M3_UP}
EDEN_PUBLISHED = replace(S.NVFP4_EDEN, rounding=Rounding.MS_EDEN_PUBLISHED)
TABLE = [
    (S.NVFP4, 9.05e-3),
    (S.NVFP4_ROW, 9.05e-3),
    (S.NVFP4_TETRAJET, 9.01e-3),
    (S.NVFP4_POW2, 9.05e-3),
    (S.NVFP4_46, 7.56e-3),
    (S.NVFP4_POW2_46, 7.56e-3),
    (S.VARIANTS["NVFP4_46_MAE"], 7.80e-3),
    (S.VARIANTS["NVFP4_POW2_46_MAE"], 7.80e-3),
    (S.NVFP4_2D, 12.41e-3),
    (replace(S.NVFP4_46, block=(16, 16)), 12.4e-3),
    (S.NVFP4_SR, 18.9e-3),
    (replace(S.NVFP4_SR, target=6 * 16 / 17), 23.52e-3),  # the other way not to clip
    (replace(S.NVFP4_SR, **UP), 22.1e-3),
    (replace(S.NVFP4_TETRAJET_SR, **UP), 21.3e-3),
    (S.NVFP4_POW2_SR, 22.0e-3),
    (S.NVFP4_EDEN, 9.73e-3),
    (S.NVFP4_POW2_EDEN, 9.8e-3),
    (EDEN_PUBLISHED, 9.73e-3),
    (S.MXFP8, 7.04e-4),
    (S.MXFP8_FLOOR, 8.60e-4),
]


def name(spec: QuantSpec) -> str:
    return f"{spec.name}-{spec.rounding.value}-{spec.scale.value}-{spec.block[0]}"


def stream(step: int) -> Stream:
    return Stream(make_key(3, "layer"), make_clock(step), Product.DGRAD, Side.LEFT)


def pass_through(x: torch.Tensor, spec: QuantSpec, step: int) -> tuple[torch.Tensor, Values]:
    """What the quantiser read and what it made of it: rotated, for MS-EDEN."""
    s = stream(step)
    if spec.rounding in EDEN:
        x = rotate(x, s.signs(128), 128)
    return x, quantise_values(x, spec, s)


@pytest.mark.parametrize(("spec", "want"), TABLE, ids=[name(s) for s, _ in TABLE])
def test_relative_mse_on_gaussian_data(spec: QuantSpec, want: float) -> None:
    x = torch.randn(1024, 1024).bfloat16()
    q = pass_through(x, spec, 0)[1].dequantise()
    if spec.rounding in EDEN:
        q = unrotate(q, stream(0).signs(128), 128)
    error = ((q.double() - x.double()) ** 2).sum() / (x.double() ** 2).sum()
    assert abs(error.item() / want - 1) < 0.02, f"{error.item():.4e} against {want:.4e}"


def slope(spec: QuantSpec, draw: str, chunks: int, rows: int = 1024) -> tuple[float, float]:
    """(slope - 1, its standard deviation) over chunks of rows x 512 fresh numbers.

    Every group of 128 counts alike (an unbiased quantiser is so for each), or a heavy tail's few largest would decide.
    The value is the operand times what is applied after the product: BF16 rounding of their product, the same for all
    elements of a code, is no part of a matrix product.
    """
    generator = torch.Generator().manual_seed(11)
    ratios = []
    for step in range(chunks):
        x = torch.randn(rows, 512, generator=generator)
        if draw == "laplace":
            u = torch.rand(rows, 512, generator=generator) - 0.5
            x = -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.4999999))
        elif draw == "student3":
            x = x / (torch.randn(3, rows, 512, generator=generator).square().sum(0) / 3).sqrt()
        read, values = pass_through(x.bfloat16(), spec, step)
        after = values.after()
        q = values.operand().double() * (1.0 if after is None else after.double())
        read, q = read.double().reshape(-1, 128), q.reshape(-1, 128)
        ratios.append((read * (q - read)).sum(1) / read.square().sum(1))
    ratio = torch.cat(ratios)
    return ratio.mean().item(), ratio.std().item() / len(ratio) ** 0.5


UNBIASED = [S.NVFP4_POW2_SR, replace(S.NVFP4_SR, **UP), replace(S.NVFP4_TETRAJET_SR, **UP), S.NVFP4_POW2_EDEN]
UNBIASED += [S.NVFP4_EDEN, S.VARIANTS["MXFP8_SR"], S.VARIANTS["MXFP4_SR"]]
PUBLISHED = [(S.NVFP4_SR, -3.4e-3), (S.NVFP4_TETRAJET_SR, -2.7e-3), (EDEN_PUBLISHED, -5.6e-4), (S.NVFP4, -4.5e-3)]


@pytest.mark.parametrize("spec", UNBIASED, ids=name)
def test_ours_are_unbiased(spec: QuantSpec) -> None:
    bias, deviation = slope(spec, "normal", 16)  # 8.4 million numbers
    assert abs(bias) < 4.5 * deviation, f"{bias:+.1e} +- {deviation:.1e}"
    assert deviation < 1e-4


OTHERS = [spec for spec in S.VARIANTS.values() if spec.stochastic and spec not in UNBIASED]


@pytest.mark.parametrize("spec", OTHERS, ids=lambda s: s.name)
def test_stochastic_rounding_is_unbiased_in_every_other_family(spec: QuantSpec) -> None:
    bias, deviation = slope(spec, "normal", 4)
    assert abs(bias) < 4.5 * deviation, f"{bias:+.1e} +- {deviation:.1e}"
    assert deviation < 1.2e-4


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("draw", ["normal", "laplace", "student3"])
@pytest.mark.parametrize("spec", UNBIASED, ids=name)
def test_ours_are_unbiased_over_many_millions(spec: QuantSpec, draw: str) -> None:
    bias, deviation = slope(spec, draw, 64)  # 33.5 million numbers
    assert abs(bias) < 2e-4 and abs(bias) < 4.5 * deviation, f"{bias:+.1e} +- {deviation:.1e}"


@pytest.mark.parametrize(("spec", "want"), PUBLISHED, ids=[name(s) for s, _ in PUBLISHED])
def test_the_published_rules_have_their_published_bias(spec: QuantSpec, want: float) -> None:
    bias, deviation = slope(spec, "normal", 4)
    assert abs(bias - want) < 4.5 * deviation + 0.15 * abs(want), f"{bias:+.1e} +- {deviation:.1e}"
    assert bias < -3 * deviation


AT_POINTS = [S.NVFP4_POW2_SR, *(replace(s, **UP) for s in (S.NVFP4_SR, S.NVFP4_TETRAJET_SR))]
AT_POINTS += [S.VARIANTS["MXFP4_SR"]]


@pytest.mark.parametrize("spec", AT_POINTS, ids=name)
def test_the_mean_at_64_points_of_every_interval_is_the_point(spec: QuantSpec) -> None:
    """Blocks with the largest element at 6 x scale and the others spread over every interval, 4096 draws each."""
    points = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    inside = (torch.arange(64) + 0.5) / 64
    x = torch.cat([low + (high - low) * inside for low, high in pairwise(points)])
    x = torch.cat([x, -x])  # 896 points
    blocks = torch.cat([x.reshape(-1, 14), torch.tensor([[6.0, 0.0]]).expand(64, 2)], 1).reshape(8, 128)
    blocks = blocks.bfloat16()
    n = 4096
    many = blocks.expand(n, 8, 128)
    q = fake_quantise(many, spec, stream(0)).double()
    mean, deviation = q.mean(0), q.std(0) / n**0.5
    assert ((mean - blocks.double()).abs() <= 5 * deviation + 1e-9).all()
    z = ((mean - blocks.double()) / deviation.clamp(min=1e-12))[deviation > 0]
    assert abs(z.square().mean().item() - 1) < 0.25


def test_an_average_of_independent_draws_converges_as_one_over_n() -> None:
    """Error energy of the mean of n draws of MS-EDEN and of stochastic rounding, times n, stays what it is for one."""
    x = torch.randn(64, 512).bfloat16()
    for spec in (S.NVFP4_POW2_EDEN, S.NVFP4_POW2_SR):
        total, energy = torch.zeros(64, 512, dtype=torch.float64), {}
        for step in range(256):
            s = stream(step)
            signs = s.signs(128)
            eden = spec.rounding in EDEN
            q = fake_quantise(rotate(x, signs, 128) if eden else x, spec, s)
            total += (unrotate(q, signs, 128) if eden else q).double()
            if step + 1 in (1, 16, 256):
                error = total / (step + 1) - x.double()
                energy[step + 1] = (error.square().sum() / x.double().square().sum()).item() * (step + 1)
        assert abs(energy[16] / energy[1] - 1) < 0.1
        assert abs(energy[256] / energy[1] - 1) < 0.12
