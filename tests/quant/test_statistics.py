"""Statistics of quantised operands against numpy in FP64, and that listening to a model changes nothing in it."""

from typing import Any

import numpy as np
import pytest
import torch
from oracles import cast, tetrajet_nvfp4, to_bf16
from torch import Tensor, nn

import lowbit.quant.statistics
from lowbit.models.layers import Linear, project
from lowbit.quant import spec as S
from lowbit.quant.hadamard import rotate
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.linear_products import split_mean
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.policy import HIGH, LinearPolicy, Operand, ProductPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.quantise import fake_quantise
from lowbit.quant.spec import QuantSpec
from lowbit.quant.statistics import (
    NAMES,
    as_row,
    gradient_statistics,
    input_statistics,
    means,
    measure,
    measuring,
    weight_statistics,
)

EDEN = ProductPolicy(Operand(S.NVFP4_POW2_EDEN), Operand(S.NVFP4_POW2_EDEN), 128)
NVFP4 = LinearPolicy(ProductPolicy(Operand(S.NVFP4_POW2_46), Operand(S.NVFP4_POW2_46)), EDEN, EDEN)


def named(statistics: Tensor | None) -> dict[str, float]:
    assert statistics is not None
    return dict(zip(NAMES, statistics.tolist(), strict=True))


def heavy(rows: int, columns: int) -> np.ndarray:
    return to_bf16(np.random.default_rng(0).standard_t(3, (rows, columns)).astype(np.float32))


def test_against_numpy() -> None:
    """TetraJet's double block, each statistic from its definition."""
    x = heavy(64, 512)
    q = tetrajet_nvfp4(x)
    scale = (np.repeat(q.outer, 8, 1) * q.scales).repeat(16, 1).astype(np.float64)
    value = to_bf16((q.elements * scale).astype(np.float32)).astype(np.float64)
    y = x.astype(np.float64)
    grid, edges = [0, 0.5, 1, 1.5, 2, 3, 4, 6], [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    at_edge = 0
    for u, e in zip(np.abs(y / scale).ravel(), np.abs(q.elements).ravel(), strict=True):
        k = grid.index(e)
        if u >= e:
            at_edge += k < 7 and (u - e) / (edges[k] - e) >= 0.9
        else:
            at_edge += (e - u) / (e - edges[k - 1]) >= 0.9
    got = named(measure(torch.from_numpy(x), S.NVFP4_TETRAJET, risk=True))
    assert got["relative_mse"] == pytest.approx(((value - y) ** 2).sum() / (y**2).sum(), rel=1e-6)
    assert got["clipped_share"] == pytest.approx((np.abs(y) > 6 * scale * (1 + 2**-20)).mean(), abs=1e-12)
    assert got["clipped_share"] > 0.01
    assert got["underflow_share"] == pytest.approx(((value == 0) & (y != 0)).mean(), abs=1e-12)
    assert got["underflow_share"] > 0.05
    assert got["amax"] == np.abs(y).max()
    assert got["oscillation_risk"] == pytest.approx(at_edge / y.size, abs=5e-4)
    assert np.isnan(named(measure(torch.from_numpy(x), S.NVFP4_TETRAJET))["oscillation_risk"])


def test_a_fixed_range_is_what_clips() -> None:
    x = torch.randn(64, 512)
    x[0] = 0.1
    free, fixed = (named(measure(x, S.INT8_ROW, amax=amax)) for amax in (None, torch.tensor(1.0)))
    assert free["clipped_share"] == 0 and fixed["clipped_share"] == pytest.approx(0.317 * 63 / 64, abs=0.01)
    layer = LowbitLinear.of(Linear(512, 8), PRESETS["int8"], make_key(1, "a"), make_clock())
    layer.fix_input_amax(torch.tensor(1.0))
    found, spec = input_statistics(layer, x), PRESETS["int8"].fprop.left.spec
    assert found is not None and spec is not None
    assert torch.equal(found[:4], measure(x, spec, amax=torch.tensor(1.0))[:4])


@pytest.mark.parametrize(
    ("spec", "mse"), [(S.NVFP4, 9.05e-3), (S.NVFP4_46, 7.6e-3), (S.NVFP4_2D, 12.4e-3), (S.MXFP8, 7.04e-4)]
)
def test_errors_on_gaussian_data_are_the_known_ones(spec: QuantSpec, mse: float) -> None:
    x = torch.randn(1024, 1024)
    got = named(measure(x, spec, risk=True))
    assert got["relative_mse"] == pytest.approx(mse, rel=0.03)
    assert got["amax"] == float(x.bfloat16().abs().max())


@pytest.mark.parametrize("spec", [S.FP8_TENSOR, S.FP8_ROW, S.INT8_ROW, S.MXFP8, S.FP8_BLOCK, S.NVFP4_POW2_SR])
def test_formats_whose_scale_leaves_room_clip_nothing(spec: QuantSpec) -> None:
    x = torch.randn(256, 512) * torch.logspace(-3, 3, 256)[:, None]
    stream = Stream(make_key(0, "x"), make_clock(), Product.FPROP, Side.LEFT)
    assert named(measure(x, spec, stream))["clipped_share"] == 0


def test_underflow_and_clipping_seen_where_they_are() -> None:
    x = torch.zeros(4, 128)
    x[:, ::16] = 6.0
    x[0, 1:5] = 0.1  # below a quarter of the smallest step
    got = named(measure(x, S.NVFP4_POW2))
    assert got["underflow_share"] == 4 / 512 and got["clipped_share"] == 0
    assert named(measure(torch.zeros(4, 128), S.NVFP4_POW2, risk=True)) == dict.fromkeys(NAMES, 0.0)


def test_risk_rises_where_weights_gather_at_edges() -> None:
    w = torch.randn(256, 512) * 0.02
    even = named(measure(w, S.NVFP4_POW2, risk=True))["oscillation_risk"]
    value = fake_quantise(w, S.NVFP4_POW2).float()
    at_centre = named(measure(value, S.NVFP4_POW2, risk=True))["oscillation_risk"]
    assert even == pytest.approx(0.1, abs=0.02) and at_centre < 0.04
    assert cast(np.float32([2.48, 2.52]), "E2M1").tolist() == [2, 3]
    edges = torch.full((4, 128), 2.484375)
    edges[:, ::16] = 6.0
    assert named(measure(edges, S.NVFP4_POW2, risk=True))["oscillation_risk"] == 15 / 16


# Operands of a layer -----------------------------------------------------------------------------------------------


def layer_of(policy: LinearPolicy, name: str = "up", width: int = 128, out: int = 256) -> LowbitLinear:
    layer = LowbitLinear(width, out, policy, make_key(1, name), make_clock(3))
    with torch.no_grad():
        layer.weight.normal_(0, 0.05)
    return layer


def test_each_operand_is_measured_as_its_product_reads_it() -> None:
    layer = layer_of(NVFP4)
    x, dy = torch.randn(64, 128), torch.randn(64, 256)
    assert torch.equal(*[t.nan_to_num(-1) for t in (input_statistics(layer, x), measure(x, S.NVFP4_POW2_46))])
    assert torch.equal(weight_statistics(layer), measure(layer.weight.detach(), S.NVFP4_POW2_46, risk=True))
    stream = Stream(layer.key, layer.clock, Product.DGRAD, Side.LEFT)
    turned = measure(rotate(dy, stream.signs(128), 128), S.NVFP4_POW2_EDEN, stream)
    got = gradient_statistics(layer, dy.reshape(8, 8, 256))
    assert got is not None and torch.equal(got[:4], turned[:4])

    split = layer_of(LinearPolicy(NVFP4.fprop, mean_split=True))
    got = input_statistics(split, x + 5)
    assert got is not None and torch.equal(got[:4], measure(split_mean(x + 5)[1], S.NVFP4_POW2_46)[:4])
    wgrad_only = layer_of(LinearPolicy(wgrad=ProductPolicy(Operand(S.MXFP8), Operand(S.MXFP8))))
    got = gradient_statistics(wgrad_only, dy)
    assert got is not None and torch.equal(got[:4], measure(dy.T.contiguous(), S.MXFP8)[:4])
    assert input_statistics(wgrad_only, x) is None and weight_statistics(wgrad_only) is None
    assert gradient_statistics(layer_of(LinearPolicy(NVFP4.fprop)), dy) is None


class Toy(nn.Module):
    """Siblings of one policy and of two, a chain, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        other = LinearPolicy(ProductPolicy(Operand(S.MXFP8), Operand(S.MXFP8)), HIGH, HIGH)
        self.a, self.b, self.c = (layer_of(NVFP4, n) for n in "abc")
        self.d = layer_of(other, "d")
        self.plain = Linear(256, 128)
        self.end = layer_of(NVFP4, "end")
        with torch.no_grad():
            self.plain.weight.normal_(0, 0.05)

    def forward(self, x: Tensor) -> Tensor:
        a, b = project(x, self.a, self.b)
        c, d = project(x, self.c, self.d)
        y: Tensor = self.end(self.plain(a * b + c * d))
        return y

    def lowbit(self) -> dict[str, LowbitLinear]:
        return {n: m for n, m in self.named_modules() if isinstance(m, LowbitLinear)}


def test_every_operand_is_measured_once_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, x = Toy(), torch.randn(2, 32, 128)
    want = toy(x)
    want.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in toy.named_parameters() if p.grad is not None}
    toy.zero_grad()
    calls: list[object] = []
    for kind in (input_statistics, gradient_statistics):

        def counted(layer: LowbitLinear, t: Tensor, kind: Any = kind) -> Tensor | None:
            calls.append((layer, kind))
            return kind(layer, t)  # type: ignore[no-any-return]

        monkeypatch.setattr(lowbit.quant.statistics, kind.__name__, counted)
    with measuring(toy.lowbit()) as found:
        y = toy(x)
        y.square().sum().backward()
    assert torch.equal(y, want)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in toy.named_parameters() if p.grad is not None)
    assert len(calls) == len(set(calls)) == 4 + 5
    inputs = {"a/input", "c/input", "d/input", "end/input"}
    assert found.keys() == inputs | {f"{name}/gradient" for name in ("a", "b", "c", "end")}
    assert all("project_together" not in vars(layer) for layer in toy.lowbit().values())
    assert torch.equal(found["a/input"][:4], input_statistics(toy.a, x)[:4])  # type: ignore[index]

    row = as_row(found | {"a/weight": weight_statistics(toy.a)})  # type: ignore[dict-item]
    assert len(row) == 8 * 4 + 5
    assert row["quant/a/weight/oscillation_risk"] == pytest.approx(0.09, abs=0.02)
    mean = means(row | {"quant/reset_share": 0.5, "loss": 3.0})
    assert mean.keys() == {"input", "gradient", "weight"}
    errors = [row[f"quant/{n}/input/relative_mse"] for n in ("a", "c", "d", "end")]
    assert mean["input"]["relative_mse"] == pytest.approx(sum(errors) / 4)
    assert mean["gradient"]["amax"] == max(row[f"quant/{n}/gradient/amax"] for n in ("a", "b", "c", "end"))
    assert as_row({}) == {}


def test_without_gradients_only_inputs_are_measured() -> None:
    toy = Toy()
    with measuring(toy.lowbit()) as found, torch.no_grad():
        toy(torch.randn(4, 128))
    assert {name.split("/")[1] for name in found} == {"input"}


def test_an_error_in_the_pass_leaves_nothing_behind() -> None:
    toy = Toy()
    with pytest.raises(ValueError), measuring(toy.lowbit()):
        toy(torch.randn(4, 100))
    assert all("project_together" not in vars(layer) for layer in toy.lowbit().values())
