"""OsciReset against the published procedure written as plain loops in FP64, step by step."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import all_bf16, cast, tetrajet_nvfp4, to_bf16
from torch import nn

from lowbit.configs.schema import OsciDetector, OsciResetConfig
from lowbit.errors import ConfigError
from lowbit.quant import spec as S
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import LinearPolicy, Operand, ProductPolicy
from lowbit.quant.quantise import Memory, fake_quantise, quantise_values
from lowbit.quant.spec import QuantSpec
from lowbit.quant.stabilisers.grid import bin_width, edge_nearness, off_centre
from lowbit.quant.stabilisers.masters import Master, rows_of, whole_masters
from lowbit.quant.stabilisers.oscireset import OsciReset

CONFIG = OsciResetConfig(enabled=True, start_step=8, period=10, window=5, threshold=4.0, tracked=0.2)
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WIDTHS = dict(zip(GRID, (0.5, 0.5, 0.5, 0.5, 0.75, 1.0, 1.5, 2.0), strict=True))

Quantiser = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""FP32 weights [R, K] -> their quantised values, elements and scales a weight."""


def tetrajet(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q = tetrajet_nvfp4(to_bf16(w))
    scales = (np.repeat(q.outer, 8, 1) * q.scales).repeat(16, 1)
    return to_bf16(q.elements * scales).astype(np.float64), q.elements, scales


def four_over_six(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """NVFP4_POW2_46, a block at a time."""
    x = to_bf16(w).astype(np.float64)
    values, elements, scales = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for r in range(x.shape[0]):
        for c in range(0, x.shape[1], 16):
            group = np.abs(x[r, c // 128 * 128 : c // 128 * 128 + 128]).max()
            outer = 2.0 ** math.ceil(math.log2(group / 1536))
            block = x[r, c : c + 16] / outer
            best = None
            for target in (6.0, 4.0):
                scale = float(cast(np.float32(np.abs(block).max() / target).reshape(1), "E4M3")[0]) or 2.0**-9
                q = cast(block.astype(np.float32) * (np.float32(1) / np.float32(scale)), "E2M1").astype(np.float64)
                error = ((q * scale - block) ** 2).sum()
                if best is None or error < best[0]:
                    best = (error, q, scale)
            assert best is not None
            elements[r, c : c + 16], scales[r, c : c + 16] = best[1], best[2] * outer
    values = elements * scales
    return values, elements, scales


def mxfp8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = to_bf16(w).astype(np.float64).reshape(w.shape[0], -1, 32)
    scales = np.exp2(np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448)))
    elements = cast((blocks / scales).astype(np.float32), "E4M3").astype(np.float64)
    whole = np.broadcast_to(scales, blocks.shape).reshape(w.shape)
    return (elements * scales).reshape(w.shape), elements.reshape(w.shape), whole


QUANTISERS: dict[str, tuple[QuantSpec, Quantiser]] = {
    "tetrajet": (S.NVFP4_TETRAJET, tetrajet),
    "four_over_six": (S.NVFP4_POW2_46, four_over_six),
    "mxfp8": (S.MXFP8, mxfp8),
}


class Published:
    """Section b.4's procedure, one weight after the other."""

    def __init__(self, config: OsciResetConfig, quantise: Quantiser) -> None:
        self.config, self.quantise = config, quantise
        self.watched: list[tuple[int, int]] | None = None

    def after_step(self, w: np.ndarray, t: int) -> int | None:
        """Changes w in place; how many were reset, when a window closes."""
        assert self.config.start_step is not None
        p = t % self.config.period
        if t < self.config.start_step or p > self.config.window + 1:
            return None
        value, element, scale = self.quantise(w)
        if p == 0:
            self.watched = self.pick(w, element, scale)
            self.previous, self.previous_value = w.copy(), value
            self.d_q, self.d_w = np.zeros(w.shape), np.zeros(w.shape)
        elif self.watched is None:
            return None
        elif p <= self.config.window:
            for i, j in self.watched:
                self.d_q[i, j] += abs(float(value[i, j]) - float(self.previous_value[i, j]))
                self.d_w[i, j] += abs(float(w[i, j]) - float(self.previous[i, j]))
            self.previous, self.previous_value = w.copy(), value
        else:
            count = 0
            for i, j in self.watched:
                ratio = 0.0 if self.d_w[i, j] == 0 else self.d_q[i, j] / self.d_w[i, j]
                if ratio >= self.config.threshold:
                    w[i, j] = value[i, j]
                    count += 1
            self.watched = None
            return count
        return None

    def pick(self, w: np.ndarray, element: np.ndarray, scale: np.ndarray) -> list[tuple[int, int]]:
        everything = [(i, j) for i in range(w.shape[0]) for j in range(w.shape[1])]
        if self.config.detector is OsciDetector.full:
            return everything
        scores = {
            (i, j): abs(float(w[i, j]) / float(scale[i, j]) - float(element[i, j])) / WIDTHS[abs(float(element[i, j]))]
            for i, j in everything
        }
        count = math.ceil(len(everything) * self.config.tracked)
        return sorted(everything, key=lambda place: -scores[place])[:count]


def policy_of(spec: QuantSpec | None) -> LinearPolicy:
    return LinearPolicy(ProductPolicy(Operand(spec), Operand(spec)))


def layer_of(spec: QuantSpec | None, rows: int = 16, columns: int = 256) -> LowbitLinear:
    layer = LowbitLinear(columns, rows, policy_of(spec), make_key(1, "up"), make_clock())
    torch.manual_seed(3)
    with torch.no_grad():
        layer.weight.normal_(0.0, 0.02)
    return layer


def model_of(spec: QuantSpec | None) -> nn.ModuleDict:
    return nn.ModuleDict({"up": layer_of(spec), "down": layer_of(spec, 24, 128)})


def jiggle(tensors: Iterable[torch.Tensor], step: int) -> None:
    """What an optimizer late in training does: tiny steps without direction."""
    for k, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(1000 * k + step)
        tensor += 2e-4 * torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("detector", OsciDetector)
def test_every_step_is_the_published_one(name: str, detector: OsciDetector) -> None:
    if name == "mxfp8" and detector is OsciDetector.efficient:
        pytest.skip("the published widths are E2M1's")
    spec, quantiser = QUANTISERS[name]
    config = replace(CONFIG, detector=detector)
    model = model_of(spec)
    ours = OsciReset(config, lambda: whole_masters(model))
    weights = {master.layer_name: master.tensor for master in whole_masters(model)}
    copies = {key: w.numpy().copy() for key, w in weights.items()}
    oracles = {key: Published(config, quantiser) for key in weights}
    resets = 0
    for t in range(1, 33):
        jiggle(weights.values(), t)
        before = {key: w.clone() for key, w in weights.items()}
        row = ours.after_step(t, t / 32)
        counts = {}
        for k, (key, w) in enumerate(copies.items()):
            generator = torch.Generator().manual_seed(1000 * k + t)
            w += 2e-4 * torch.randn(w.shape, generator=generator).numpy()
            np.testing.assert_array_equal(w, before[key].numpy())
            if (count := oracles[key].after_step(w, t)) is not None:
                counts[key] = count
            np.testing.assert_array_equal(weights[key].numpy(), w, err_msg=f"{key} after step {t}")
        assert bool(row) == bool(counts) == (t in (16, 26))
        if row:
            total = sum(w.size for w in copies.values())
            assert row["quant/reset_share"] == pytest.approx(sum(counts.values()) / total)
            for key, count in counts.items():
                assert row[f"quant/{key}/weight/reset_share"] == pytest.approx(count / copies[key].size)
            resets += sum(counts.values())
    assert resets > 20


def test_nothing_moves_in_steps_that_reset_nothing() -> None:
    """Only in step 16 do weights change, and what changed lies on its grid."""
    layer = layer_of(S.NVFP4_POW2)
    ours = OsciReset(CONFIG, lambda: [Master("up.weight", layer.weight.detach(), layer)])
    for t in range(1, 17):
        jiggle([layer.weight.detach()], t)
        before = layer.weight.detach().clone()
        quantised = fake_quantise(before, S.NVFP4_POW2).float()
        ours.after_step(t, 0.0)
        changed = layer.weight != before
        assert bool(changed.any()) == (t == 16)
    assert torch.equal(layer.weight[changed], quantised[changed])
    assert ours.state_tensors().keys() == {"started"}


@pytest.mark.parametrize(("start", "start_step", "first"), [(0.5, None, 26), (0.0, None, 16), (0.0, 21, 36)])
def test_the_start_gate(start: float, start_step: int | None, first: int) -> None:
    """By a share of the run or by a step; a window opens at the first multiple of the period from then on."""
    layer = layer_of(S.NVFP4_POW2)
    config = replace(CONFIG, start=start, start_step=start_step, threshold=0.0)
    ours = OsciReset(config, lambda: [Master("up.weight", layer.weight.detach(), layer)])
    closed = []
    for t in range(1, 41):
        jiggle([layer.weight.detach()], t)
        progress = t / 40 if t < 25 else 0.0  # once open it stays open, whatever the clock says later
        if ours.after_step(t, progress):
            closed.append(t)
    assert closed == list(range(first - first % 10 + 6, 41, 10)) if start else closed[0] == first


def test_a_reset_weight_stops_flipping() -> None:
    """The point of it: straight-through descent towards a target between two grid values flips without end."""
    spec, rate = S.NVFP4_POW2, 1e-3
    layer = layer_of(spec, 8, 128)
    w = layer.weight.detach()
    target = w + 0.01 * torch.randn_like(w)
    ours = OsciReset(replace(CONFIG, start_step=200, threshold=8.0), lambda: [Master("up.weight", w, layer)])
    flips = []
    last = fake_quantise(w, spec)
    for t in range(1, 401):
        w -= rate * (fake_quantise(w, spec).float() - target)
        if t > 200:
            w += 0.02 * rate * torch.randn_like(w)
            rate *= 0.97
        ours.after_step(t, 0.0)
        now = fake_quantise(w, spec)
        flips.append(int((now != last).sum()))
        last = now
    assert sum(flips[150:200]) > 20 * max(1, sum(flips[350:]))


def test_bin_widths() -> None:
    got = {q: float(bin_width(torch.tensor([q, -q]), S.E2M1).unique()) for q in GRID}
    assert got == WIDTHS
    for fmt in (S.E2M3, S.E4M3, S.E5M2, S.E3M2):
        codes = np.unique(cast(all_bf16()[np.isfinite(all_bf16())], fmt.name))
        widths = bin_width(torch.from_numpy(codes.astype(np.float32)), fmt).numpy()
        np.testing.assert_array_equal(widths[1:-1], (codes[2:] - codes[:-2]) / 2)
    assert float(bin_width(torch.tensor([0.0, 1.0, 126.0, 127.0]), S.INT8).unique()) == 1.0


@pytest.mark.parametrize("spec", [S.NVFP4, S.NVFP4_2D, S.NVFP4_ROW, S.NVFP4_POW2_46, S.MXFP8, S.FP8_ROW, S.INT8_ROW])
def test_distances_on_the_grid(spec: QuantSpec) -> None:
    """From the definitions in FP64."""
    x = torch.randn(48, 208).bfloat16().float()
    values = quantise_values(x, spec)
    grid, scale = values.grid()
    exact = (grid.double() * scale.double()).bfloat16()
    assert (exact.float() - fake_quantise(x, spec).float()).abs().max() <= 2**-8 * exact.abs().max()
    s, q = scale.double(), grid.double()
    width = bin_width(grid, spec.element).double()
    off = (x.double() / s - q).abs()
    torch.testing.assert_close(off_centre(x, values).double(), off / width, rtol=1e-4, atol=1e-4)
    points = np.arange(-127.0, 128.0)
    if spec is not S.INT8_ROW:
        points = np.unique(cast(all_bf16()[np.isfinite(all_bf16())], spec.element.name)).astype(np.float64)
    edges = torch.from_numpy((points[1:] + points[:-1]) / 2)
    y = x.double() / s
    above = torch.searchsorted(edges, y).clamp(max=len(edges) - 1)
    below = torch.searchsorted(edges, y, right=True) - 1
    edge = torch.where(y >= q, edges[above], edges[below.clamp(min=0)])
    want = torch.where(y.abs() > spec.element.max, 0.0, (y - q).abs() / (edge - q).abs())
    near = edge_nearness(x, values).double()
    close = (near - want).abs() < 1e-3
    assert float(close.double().mean()) > 0.998  # FP32's multiplier may round an edge to the other side
    assert float(near.mean()) == pytest.approx(0.5, abs=0.05)
    zeros = torch.zeros(16, 128)
    for distance in (off_centre, edge_nearness):
        assert torch.equal(distance(zeros, quantise_values(zeros, spec)), zeros)


# Four over six -----------------------------------------------------------------------------------------------------


def both_errors(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors of six and of four, [rows, blocks], in units of the outer scale."""
    x = to_bf16(w).astype(np.float64)
    outer = np.exp2(np.ceil(np.log2(np.abs(x.reshape(len(x), -1, 128)).max(-1) / 1536)))
    blocks = (x.reshape(len(x), -1, 128) / outer[..., None]).reshape(len(x), -1, 16)
    errors = []
    for target in (6.0, 4.0):
        scale = cast((np.abs(blocks).max(-1) / target).astype(np.float32), "E4M3")[..., None]
        q = cast(blocks.astype(np.float32) * (np.float32(1) / scale), "E2M1").astype(np.float64)
        errors.append(((q * scale - blocks) ** 2).sum(-1))
    return errors[0], errors[1]


@pytest.mark.parametrize("margin", [0.0, 0.1, 0.9])
def test_hysteresis_keeps_a_choice_until_the_other_is_better_by_the_margin(margin: float) -> None:
    """Each block's choice after every step from the start on, flips counted in windows, and what the forward takes."""
    layer = layer_of(S.NVFP4_POW2_46)
    w = layer.weight.detach()
    config = replace(CONFIG, hysteresis=margin, threshold=1e9)
    ours = OsciReset(config, lambda: [Master("up.weight", w, layer)])
    assert (layer.choice is None) == (margin == 0)
    choice = np.zeros((16, 16), dtype=np.int64)
    flips = 0
    for t in range(1, 27):
        jiggle([w], t)
        row = ours.after_step(t, 0.0)
        if t < 8:
            assert layer.choice is None or not layer.choice.any()
            continue
        e6, e4 = both_errors(w.numpy())
        before = choice.copy()
        for r, c in np.ndindex(choice.shape):
            better = 4 if e4[r, c] < e6[r, c] else 6
            if before[r, c] == 0 or margin == 0:
                choice[r, c] = better
            elif better != before[r, c]:
                now, other = (e4, e6) if before[r, c] == 4 else (e6, e4)
                if other[r, c] < (1 - margin) * now[r, c]:
                    choice[r, c] = better
        if 1 <= t % 10 <= 5 and t > 10:
            flips += int((choice != before).sum())
        if layer.choice is not None:
            np.testing.assert_array_equal(layer.choice.numpy(), choice, err_msg=f"step {t}")
        if t == 16:
            assert row["quant/flip_share"] == pytest.approx(flips / (256 * 5))
            assert row["quant/up/weight/flip_share"] == row["quant/flip_share"]
    assert (flips > 30) == (margin == 0) or margin == 0.1
    free = np.where(e4 < e6, 4, 6)
    assert (choice != free).any() == (margin > 0)
    if margin:
        values = quantise_values(w, S.NVFP4_POW2_46, memory=Memory(torch.from_numpy(choice).to(torch.int8), 1.0))
        x = torch.randn(8, 256).bfloat16().float()
        inputs = fake_quantise(x, S.NVFP4_POW2_46).float()
        want = inputs @ values.dequantise().float().T
        with torch.no_grad():
            torch.testing.assert_close(layer(x), want)
            layer.freeze(torch.float32)
            torch.testing.assert_close(layer(x), want)
        assert float((want - inputs @ fake_quantise(w, S.NVFP4_POW2_46).float().T).abs().max()) > 1e-3


def test_the_backward_pass_sees_the_choice_too() -> None:
    """dX of an aligned layer multiplies by the weight that the forward pass used."""
    policy = LinearPolicy(ProductPolicy(Operand(S.NVFP4_POW2_46), Operand(S.NVFP4_POW2_46)))
    layer = LowbitLinear(128, 16, policy, make_key(1, "up"), make_clock())
    with torch.no_grad():
        layer.weight.normal_()
    layer.remember_choice(16, 8)
    assert layer.choice is not None
    for forced in (4, 6):
        layer.choice.fill_(forced)
        weight = quantise_values(layer.weight.detach(), S.NVFP4_POW2_46, memory=Memory(layer.choice, 1.0)).dequantise()
        x = torch.randn(4, 128, requires_grad=True)
        dy = torch.randn(4, 16).bfloat16().float()
        layer(x).backward(dy)
        torch.testing.assert_close(x.grad, dy @ weight.float())


def test_hysteresis_needs_whole_weights() -> None:
    layer = layer_of(S.NVFP4_POW2_46)
    with pytest.raises(ConfigError, match=r"hysteresis keeps a choice.*hysteresis=0 would work"):
        OsciReset(replace(CONFIG, hysteresis=0.1), lambda: shards_of(layer, [128]))


# Shards ------------------------------------------------------------------------------------------------------------


def shards_of(layer: LowbitLinear, cuts: list[int]) -> list[Master]:
    flat = layer.weight.detach().view(-1)
    ends = [*cuts, flat.numel()]
    return [Master("up.weight", flat[a:b], layer, a) for a, b in zip([0, *cuts], ends, strict=True)]


@pytest.mark.parametrize(
    ("spec", "cuts"),
    [
        (S.NVFP4_POW2_46, [128, 384, 384, 1280]),
        (S.NVFP4_POW2, [256, 1024]),
        (S.MXFP8, [32, 160, 2048]),
        (S.INT8_ROW, [256, 768]),
        (S.NVFP4_ROW, [512]),
        (S.FP8_BLOCK_2D, [0, 4096]),
    ],
)
@pytest.mark.parametrize("detector", OsciDetector)
def test_shards_give_the_bits_of_the_whole(spec: QuantSpec, cuts: list[int], detector: OsciDetector) -> None:
    """Each process owns a part of the flattened weight; an empty part is one, too."""
    config = replace(CONFIG, detector=detector, tracked=1.0)
    whole, sharded = layer_of(spec), layer_of(spec)
    ours = OsciReset(config, lambda: [Master("up.weight", whole.weight.detach(), whole)])
    parts = shards_of(sharded, cuts)
    ranks = [OsciReset(config, lambda part=part: [part]) for part in parts]
    for t in range(1, 18):
        for layer in (whole, sharded):
            jiggle([layer.weight.detach()], t)
        before = whole.weight.detach().clone()
        row = ours.after_step(t, 0.0)
        rows = [rank.after_step(t, 0.0) for rank in ranks]
        assert torch.equal(whole.weight, sharded.weight), t
        if row:
            changed = int((whole.weight != before).sum())
            shares = [r.get("quant/reset_share", 0.0) * p.tensor.numel() for r, p in zip(rows, parts, strict=True)]
            assert round(sum(shares)) == round(row["quant/reset_share"] * 4096) >= changed > 0


@pytest.mark.parametrize("spec", [S.NVFP4_POW2_46, S.NVFP4_46])
def test_windows_of_shards_travel_whole(spec: QuantSpec) -> None:
    """Saved by two processes inside a window and loaded by three, they go on as if never interrupted."""
    whole, sharded = layer_of(spec), layer_of(spec)
    ours = OsciReset(CONFIG, lambda: [Master("up.weight", whole.weight.detach(), whole)])
    first, then = ([2048], [512, 512, 1024]) if spec is S.NVFP4_POW2_46 else ([], [])
    parts = shards_of(sharded, first)
    ranks = [OsciReset(CONFIG, lambda part=part: [part]) for part in parts]
    for t in range(1, 18):
        for layer in (whole, sharded):
            jiggle([layer.weight.detach()], t)
        ours.after_step(t, 0.0)
        for rank in ranks:
            rank.after_step(t, 0.0)
        if t == 13:
            slots = [rank.shard_slots() for rank in ranks]
            state = ranks[0].state_tensors(windows=False)
            assert state.keys() == {"started", "up.weight.format"}
            gathered = {slot: torch.cat([s[slot]["up.weight"] for s in slots]) for slot in slots[0]}
            parts = shards_of(sharded, then)
            ranks = [OsciReset(CONFIG, lambda part=part: [part]) for part in parts]
            for rank, part in zip(ranks, parts, strict=True):
                rank.load_state_tensors(state)
                mine = slice(part.start, part.start + part.tensor.numel())
                rank.load_shard_slots({slot: {"up.weight": g[mine]} for slot, g in gathered.items()})
        assert torch.equal(whole.weight, sharded.weight), t


def test_the_efficient_detectors_windows_do_not_travel() -> None:
    layer = layer_of(S.NVFP4_POW2)
    ours = OsciReset(replace(CONFIG, detector=OsciDetector.efficient), lambda: shards_of(layer, []))
    assert set(ours.shard_slots()) == {"weight", "value", "moved", "jumped"}  # none open: empty parts
    ours.after_step(10, 0.0)
    assert ours.shard_slots() == {}


@pytest.mark.parametrize(
    ("spec", "cut", "why"),
    [
        (S.NVFP4, 1024, "one scale for the whole weight"),
        (S.FP8_TENSOR, 1024, "one scale for the whole weight"),
        (S.FP8_BLOCK_2D, 1024, "blocks of 128 rows, and the shard is rows 0 to 4"),
        (S.NVFP4_POW2, 64, "whole blocks of 128, and this one is 0 to 64"),
        (S.MXFP8, 16, "whole blocks of 32"),
        (S.INT8_ROW, 128, "needs whole rows"),
        (S.NVFP4_ROW, 384, "needs whole rows"),
    ],
)
def test_a_shard_that_blocks_reach_out_of_is_refused(spec: QuantSpec, cut: int, why: str) -> None:
    layer = layer_of(spec)
    with pytest.raises(
        ConfigError, match=rf"up\.weight: {spec.name} .*{why}.*cannot be quantised shard by shard.*zero_stage=0"
    ):
        OsciReset(CONFIG, lambda: shards_of(layer, [cut]))
    with pytest.raises(ConfigError):
        rows_of(shards_of(layer, [cut])[1], spec)


# Refusals and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (ProductPolicy(Operand(S.NVFP4_POW2), Operand(S.NVFP4_POW2), 128), "rotated"),
        (ProductPolicy(Operand(), Operand(S.NVFP4_POW2_SR)), "NVFP4_POW2_SR is stochastic"),
    ],
)
def test_a_weight_without_a_grid_of_its_own_is_refused(product: ProductPolicy, why: str) -> None:
    layer = LowbitLinear(128, 16, LinearPolicy(product), make_key(1, "up"), make_clock())
    with pytest.raises(ConfigError, match=rf"^up: .*{why}"):
        OsciReset(CONFIG, lambda: [Master("up.weight", layer.weight.detach(), layer)])


def test_a_window_that_never_closes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"window=9 .*period=10.*window=8 would work"):
        OsciReset(replace(CONFIG, window=9), lambda: [])


def test_layers_in_bf16_are_left_alone_and_a_switch_ends_their_windows() -> None:
    model = nn.ModuleDict({"a": layer_of(None), "b": layer_of(S.NVFP4_POW2)})
    ours = OsciReset(replace(CONFIG, threshold=0.0), lambda: whole_masters(model))
    ours.after_step(10, 0.0)
    assert [k for k in ours.state_tensors() if k.endswith(".weight.weight")] == ["b.weight.weight"]
    layer = model["b"]
    assert isinstance(layer, LowbitLinear)
    layer.policy = policy_of(None)
    assert ours.after_step(11, 0.0) == {}
    assert ours.state_tensors().keys() == {"started"}


@pytest.mark.parametrize("detector", OsciDetector)
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations((S.NVFP4_POW2_46, S.NVFP4_POW2, S.MXFP8), 2)))
@pytest.mark.parametrize("resumed", [False, True])
def test_a_switch_of_formats_is_no_oscillation(
    before: QuantSpec, after: QuantSpec, detector: OsciDetector, resumed: bool
) -> None:
    """It moves every quantised value once, in a window that is open, while weights hardly move."""
    layer = layer_of(before)
    layer.phases = (policy_of(before), policy_of(after))
    masters = [Master("up.weight", layer.weight.detach(), layer)]
    config = replace(CONFIG, detector=detector)
    ours = OsciReset(config, lambda: masters)
    for t in range(10, 31):
        layer.weight.detach().mul_(1 + 1e-6)
        if t == 13:
            layer.policy = policy_of(after)
            if resumed:
                state = {name: tensor.clone() for name, tensor in ours.state_tensors().items()}
                ours = OsciReset(config, lambda: masters)
                ours.load_state_tensors(state)
        wanted = layer.weight.detach().clone()
        assert ours.after_step(t, 0.0).get("quant/reset_share", 0.0) == 0.0
        assert torch.equal(layer.weight, wanted)
        assert any(key.endswith(".moved") for key in ours.state_tensors()) == (t <= 12 or 20 <= t < 26 or t == 30), t


def test_shards_and_grids_of_every_phase_are_looked_at_in_the_beginning() -> None:
    layer = layer_of(S.NVFP4_POW2)
    layer.phases = (policy_of(None), policy_of(S.NVFP4_POW2), policy_of(S.NVFP4))
    layer.policy = policy_of(None)
    with pytest.raises(ConfigError, match="NVFP4 has one scale for the whole weight"):
        OsciReset(CONFIG, lambda: shards_of(layer, [1024]))
    layer.phases = layer.phases[:2]
    OsciReset(CONFIG, lambda: shards_of(layer, [128]))
    with pytest.raises(ConfigError, match="OutControl needs shards of whole rows"):
        OsciReset(CONFIG, lambda: shards_of(layer, [128]), retaining=True)
    layer.phases = (policy_of(None), LinearPolicy(ProductPolicy(Operand(), Operand(S.NVFP4_POW2_SR))))
    with pytest.raises(ConfigError, match="is stochastic"):
        OsciReset(CONFIG, lambda: [Master("up.weight", layer.weight.detach(), layer)])


@pytest.mark.parametrize("spec", [S.NVFP4_POW2_46, S.NVFP4_46, S.MXFP8])
@pytest.mark.parametrize("detector", OsciDetector)
@pytest.mark.parametrize(("cut", "hysteresis"), [(12, 0.0), (15, 0.2), (19, 0.2)])
def test_a_resume_inside_a_window_changes_no_bit(
    spec: QuantSpec, detector: OsciDetector, cut: int, hysteresis: float
) -> None:
    config = replace(CONFIG, detector=detector, start=0.2, start_step=None, hysteresis=hysteresis)
    ends = []
    for stop in (None, cut):
        layer = layer_of(spec)
        masters = [Master("up.weight", layer.weight.detach(), layer)]
        ours = OsciReset(config, lambda masters=masters: masters)
        rows = []
        for t in range(1, 30):
            jiggle([layer.weight.detach()], t)
            rows.append(ours.after_step(t, 0.2 if t == 9 else 0.0))
            if t == stop:
                state = {name: tensor.clone() for name, tensor in ours.state_tensors().items()}
                layer.choice = None
                ours = OsciReset(config, lambda masters=masters: masters)
                ours.load_state_tensors(state)
        ends.append((layer.weight.detach().clone(), rows))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] and sum(map(bool, ends[0][1])) == 2
