"""OutControl: channels against a plain FP64 count, products against their composition from the quantisers' calls."""

import os
from dataclasses import replace
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowbit.configs.schema import OsciResetConfig, OutControlConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import project
from lowbit.quant import spec as S
from lowbit.quant.hadamard import rotate
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.policy import HIGH, Alignment, LinearPolicy, Operand, ProductPolicy
from lowbit.quant.quantise import fake_quantise, quantise
from lowbit.quant.spec import QuantSpec
from lowbit.quant.stabilisers.masters import Master, whole_masters
from lowbit.quant.stabilisers.oscireset import OsciReset
from lowbit.quant.stabilisers.outcontrol import OutControl, RetainedChannels
from lowbit.quant.statistics import input_statistics, measure, weight_statistics

CONFIG = OutControlConfig(enabled=True, first_step=3, steps=2)


def pair(spec: QuantSpec, rotation: int = 0) -> ProductPolicy:
    return ProductPolicy(Operand(spec), Operand(spec), rotation)


EDEN = pair(S.NVFP4_POW2_EDEN, 128)
POLICIES = {
    "nvfp4": LinearPolicy(pair(S.NVFP4_POW2_46), EDEN, EDEN),
    "nvfp4_tetrajet": LinearPolicy(
        pair(S.NVFP4_TETRAJET), pair(S.NVFP4_TETRAJET_SR, 16), pair(S.NVFP4_TETRAJET_SR, 16)
    ),
    "nvfp4_nvidia": LinearPolicy(pair(S.NVFP4), pair(S.NVFP4_SR), replace(pair(S.NVFP4_SR, 16)), Alignment.ORIGINAL),
    "forward_only": LinearPolicy(pair(S.NVFP4_POW2)),
}


def layer_of(policy: LinearPolicy, name: str = "up", width: int = 256, out: int = 128) -> LowbitLinear:
    layer = LowbitLinear(width, out, policy, make_key(1, name), make_clock(5, 2))
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        layer.weight.normal_(0, 0.05, generator=generator)
    return layer


def outliers(tokens: int, width: int, channels: int = 20) -> Tensor:
    """BF16-valued; every 13th channel is thirty times as large."""
    x = torch.randn(tokens, width)
    x[:, : 13 * channels : 13] *= 30
    return x.bfloat16().float()


def stream(layer: LowbitLinear, product: Product, side: Side) -> Stream:
    return Stream(layer.key, layer.clock, product, side)


def exact(x: Tensor, spec: QuantSpec | None, noise: Stream) -> Tensor:
    """The factor in FP64: the operand times what comes after."""
    if spec is None:
        return x.bfloat16().double()
    q = quantise(x.contiguous(), spec, noise)
    after = q.after()
    return q.operand().double() * (1.0 if after is None else after.double())


class Composition:
    """The issue's products, channel set by channel set."""

    def __init__(self, layer: LowbitLinear, order: Tensor, count: int, x: Tensor, dy: Tensor) -> None:
        policy, self.layer = layer.policy, layer
        x, w, dy = x.bfloat16(), layer.weight.detach().bfloat16(), dy.bfloat16()
        o, r = order[:count], order[count:]
        x_o, w_o = (fake_quantise(t[:, o], S.MXFP8) for t in (x, w))
        self.y = self.times(Product.FPROP, x[:, r], w[:, r]) + x_o.double() @ w_o.double().T
        aligned = policy.alignment is Alignment.ALIGNED
        if aligned:
            x_r = fake_quantise(x[:, r], policy.fprop.left.spec)  # type: ignore[arg-type]
            w_r = fake_quantise(w[:, r], policy.fprop.right.spec)  # type: ignore[arg-type]
            seen = torch.zeros_like(w)
            seen[:, o], seen[:, r] = w_o, w_r
        else:
            x_r, x_o, seen = x[:, r], x[:, o], w
        self.dx = self.times(Product.DGRAD, dy, seen.T)
        self.dw = torch.zeros(w.shape, dtype=torch.float64)
        self.dw[:, r] = self.times(Product.WGRAD, dy.T, x_r.T)
        eight = S.MXFP8 if policy.wgrad.quantised else None
        noise = stream(layer, Product.WGRAD, Side.LEFT)
        self.dw[:, o] = exact(dy.T, eight, noise) @ exact(x_o.T, eight, noise).T

    def times(self, which: Product, left: Tensor, right: Tensor) -> Tensor:
        policy: ProductPolicy = getattr(self.layer.policy, which.name.lower())
        if policy.rotation:
            signs = stream(self.layer, which, Side.SHARED).signs(policy.rotation)
            left, right = (rotate(t.contiguous(), signs, policy.rotation) for t in (left, right))
        a = exact(left, policy.left.spec, stream(self.layer, which, Side.LEFT))
        return a @ exact(right, policy.right.spec, stream(self.layer, which, Side.RIGHT)).T


def error(got: Tensor | None, want: Tensor) -> float:
    assert got is not None
    return float((got.detach().double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("tokens", "width", "out"), [(64, 256, 128), (17, 200, 72)])
def test_products_are_those_of_both_channel_sets(name: str, tokens: int, width: int, out: int) -> None:
    layer = layer_of(POLICIES[name], "up", width, out)
    order = torch.randperm(width)
    count = round(0.1 * width)
    layer.retained = RetainedChannels(order, count)
    x, dy = outliers(tokens, width, width // 13), torch.randn(tokens, out).bfloat16().float()
    want = Composition(layer, order, count, x, dy)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 5e-3)):
        layer.zero_grad()
        leaf = x.to(dtype, copy=True).requires_grad_()
        y = layer(leaf)
        y.backward(dy.to(dtype))
        assert y.dtype == dtype and layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
        assert error(y, want.y) < bound
        # with an FP32 scale of the whole tensor dX's weights are rounded to BF16 once more
        assert error(leaf.grad, want.dx) < max(bound, 5e-3 if name == "nvfp4_nvidia" else 0)
        assert error(layer.weight.grad, want.dw) < 2e-6
        with torch.no_grad():
            assert torch.equal(layer(leaf), y)
            layer.freeze(dtype)
            assert torch.equal(layer(leaf), y)
            layer.frozen = None
    assert layer(x[:0]).shape == (0, out)


def test_what_it_is_for() -> None:
    """On an input with outlier channels: less error, in the forward and in both gradients' operands."""
    layer = layer_of(POLICIES["nvfp4"])
    x = outliers(512, 256)
    norms = x.double().norm(dim=0)
    reference = x.double() @ layer.weight.detach().double().T
    with torch.no_grad():
        before = error(layer(x), reference)
        layer.retained = RetainedChannels(norms.argsort(descending=True), 26)
        after = error(layer(x), reference)
        layer.retained = RetainedChannels(norms.argsort(), 26)
        wrong = error(layer(x), reference)
    assert after < 0.7 * before < 0.9 * wrong


# Which channels ----------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """q, k, v of one input, a second layer of another width, and one that stays BF16."""

    def __init__(self) -> None:
        super().__init__()
        p = POLICIES["nvfp4"]
        self.q, self.k, self.v = (layer_of(p, n, 256, 128) for n in ("q", "kk", "vvv"))
        self.out = layer_of(p, "out", 128, 64)
        self.high = layer_of(LinearPolicy(HIGH), "high", 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = project(x, self.q, self.k, self.v)
        y: Tensor = self.high(self.out(q * k + v))
        return y

    def lowbit(self) -> dict[str, LowbitLinear]:
        return {n: m for n, m in self.named_modules() if isinstance(m, LowbitLinear)}


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = torch.rand(256, generator=torch.Generator().manual_seed(0)) ** 4 * 10
    return [torch.randn(2, 24, 256, generator=generator) * scale for _ in range(2)]


def steps_of(toy: Toy, ours: OutControl, first: int, last: int) -> list[str]:
    lines = []
    for step in range(first, last + 1):
        lines += ours.begin_step(step)
        if ours.measures(step):
            with ours.measuring(), torch.no_grad():
                for x in batches(step):
                    toy(x)
    return lines


def test_channels_are_those_of_the_largest_norms_in_the_window() -> None:
    """Steps 3 and 4 are measured, step 5 is the first with channels, and nothing moves afterwards."""
    toy = Toy()
    ours = OutControl(CONFIG, toy.lowbit())
    n, inner = np.zeros(256), np.zeros(128)
    for step in (3, 4):
        for x in batches(step):
            n += np.sqrt((x.double().numpy().reshape(-1, 256) ** 2).sum(0))
            with torch.no_grad():
                q, k, v = project(x, toy.q, toy.k, toy.v)
            inner += np.sqrt(((q * k + v).double().numpy().reshape(-1, 128) ** 2).sum(0))
    assert steps_of(toy, ours, 1, 4) == [] and toy.q.retained is None
    [line] = ours.begin_step(5)
    assert line == "OutControl: from step 5 on input channels in MXFP8: 13 of 128 (10.16%), 26 of 256 (10.16%)"
    for layer, norms, count in ((toy.q, n, 26), (toy.out, inner, 13)):
        channels = layer.retained
        assert isinstance(channels, RetainedChannels) and channels.count == count
        np.testing.assert_array_equal(channels.order.numpy(), np.argsort(-norms, kind="stable"))
    assert toy.q.retained is toy.k.retained is toy.v.retained and toy.high.retained is None
    before = toy.q.retained
    assert not ours.measures(5) and steps_of(toy, ours, 5, 9) == [] and toy.q.retained is before


@pytest.mark.parametrize(
    ("share", "width", "count"), [(0.1, 512, 51), (0.1, 768, 77), (0.25, 512, 128), (0.001, 256, 1)]
)
def test_the_share_is_exact(share: float, width: int, count: int) -> None:
    ours = OutControl(replace(CONFIG, share=share), {"up": layer_of(POLICIES["nvfp4"], width=width)})
    assert ours.count(width) == count


def test_siblings_still_quantise_their_input_once() -> None:
    """One input kept for q, k and v, split in two."""
    toy, x = Toy(), torch.randn(64, 256, requires_grad=True)
    channels = RetainedChannels(torch.randperm(256), 26)
    toy.q.retained = toy.k.retained = toy.v.retained = channels

    def kept(*layers: LowbitLinear) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            if t.dtype == torch.uint8 or (t.dtype == torch.float32 and t.shape[0] == 64):
                sizes[t.data_ptr()] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            project(x, *layers)
        return sum(sizes.values())

    assert kept(toy.q, toy.k, toy.v) == kept(toy.q)


@pytest.mark.parametrize("width", [512, 704, 768, 1024, 2048, 4096])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_tetrajet"])
def test_memory_kept_is_at_most_036_of_bf16(width: int, name: str) -> None:
    layer = layer_of(POLICIES[name], width=width)
    layer.retained = RetainedChannels(torch.randperm(width), round(0.1 * width))
    own = {t.data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in own:
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    x = torch.randn(256, width).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    assert 0.30 < sum(kept.values()) / (256 * width * 2) <= 0.36


# Beside others -----------------------------------------------------------------------------------------------------


def test_a_resume_at_any_point_changes_nothing() -> None:
    whole = Toy()
    steps_of(whole, OutControl(CONFIG, whole.lowbit()), 1, 6)
    for cut in (2, 3, 4, 5):
        toy = Toy()
        ours = OutControl(CONFIG, toy.lowbit())
        steps_of(toy, ours, 1, cut)
        state = {name: t.clone() for name, t in ours.state_tensors().items()}
        toy = Toy()
        ours = OutControl(CONFIG, toy.lowbit())
        ours.load_state_tensors(state)
        steps_of(toy, ours, cut + 1, 6)
        x = torch.randn(16, 256)
        assert torch.equal(toy(x), whole(x)), cut
        assert toy.q.retained is toy.v.retained is not None, cut


def test_switched_on_late_it_measures_from_then_on() -> None:
    toy = Toy()
    ours = OutControl(CONFIG, toy.lowbit())
    assert len(steps_of(toy, ours, 40, 43)) == 1 and toy.q.retained is not None


def test_oscireset_leaves_retained_channels_alone() -> None:
    """And watches the others as the layer quantises them, in their order."""
    layer = layer_of(LinearPolicy(pair(S.NVFP4_POW2_46)))
    order = torch.randperm(256)
    w = layer.weight.detach()
    config = OsciResetConfig(enabled=True, start_step=1, period=4, window=1, threshold=1e-9, hysteresis=0.3)
    ours = OsciReset(config, lambda: whole_masters(nn.ModuleDict({"up": layer})))
    assert layer.choice is not None
    ours.after_step(1, 0.0)
    assert (layer.choice != 0).all()
    control = OutControl(replace(CONFIG, share=0.25), {"up": layer})
    control._retain({"up": order})
    assert not layer.choice.any()
    o, r = order[:64], order[64:]
    for t in (4, 5):
        w += 1e-4
        ours.after_step(t, 0.0)
    w += 1e-4
    before = w.clone()
    ours.after_step(6, 0.0)
    assert torch.equal(w[:, o], before[:, o])
    changed = w != before
    assert changed.any()
    memory = layer.choice[:, : 256 // 16]
    values = fake_quantise(before[:, r], S.NVFP4_POW2)
    assert (memory == 4).any() and not torch.equal(values.float(), w[:, r])
    x = torch.randn(4, 256)
    assert layer(x).isfinite().all()


def test_oscireset_of_shards_needs_whole_rows_with_it() -> None:
    layer = layer_of(LinearPolicy(pair(S.NVFP4_POW2)))
    flat = layer.weight.detach().view(-1)
    config = OsciResetConfig(enabled=True)
    OsciReset(config, lambda: [Master("up.weight", flat[:512], layer)], retaining=True)
    OsciReset(config, lambda: [Master("up.weight", flat[:128], layer)])
    with pytest.raises(ConfigError, match=r"OutControl needs shards of whole rows.*engine\.zero_stage=0"):
        OsciReset(config, lambda: [Master("up.weight", flat[:128], layer)], retaining=True)


def test_statistics_are_those_of_the_ordinary_channels() -> None:
    layer = layer_of(POLICIES["nvfp4"])
    order = torch.randperm(256)
    layer.retained = RetainedChannels(order, 26)
    x = torch.randn(32, 256)
    got, want = input_statistics(layer, x), measure(x[:, order[26:]], S.NVFP4_POW2_46)
    assert got is not None and torch.equal(got[:4], want[:4])
    weight = measure(layer.weight.detach()[:, order[26:]], S.NVFP4_POW2_46, risk=True)
    assert torch.equal(weight_statistics(layer), weight)  # type: ignore[arg-type]


def test_a_switch_to_bf16_turns_it_off_and_back_on() -> None:
    layer = layer_of(POLICIES["nvfp4"])
    layer.retained = RetainedChannels(torch.randperm(256), 26)
    x = torch.randn(8, 256)
    controlled = layer(x)
    policy, layer.policy = layer.policy, LinearPolicy(HIGH, EDEN, EDEN)
    torch.testing.assert_close(layer(x), x.bfloat16().float() @ layer.weight.bfloat16().float().T)
    layer.policy = policy
    assert torch.equal(layer(x), controlled)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no layer's forward product has an input of fewer than 8 bits"):
        OutControl(CONFIG, {s.name: layer_of(LinearPolicy(pair(s))) for s in (S.MXFP8, S.INT8_ROW, S.FP8_ROW)})
    with pytest.raises(ConfigError, match=r"up: .*rotated forward"):
        OutControl(CONFIG, {"up": layer_of(LinearPolicy(pair(S.NVFP4_POW2, 128)))})


TWO_RANKS = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[4])
from test_outcontrol import CONFIG, OutControl, Toy, batches
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)

def total(t):
    t = t.clone()
    dist.all_reduce(t)
    return t

toy = Toy()
ours = OutControl(CONFIG, toy.lowbit(), total)
for step in (3, 4):
    with ours.measuring(), torch.no_grad():
        toy(batches(step)[rank])
ours.begin_step(5)
torch.save(toy.q.retained.order, sys.argv[3] + str(rank))
"""


@pytest.mark.dist
def test_ranks_agree_on_the_sum_of_their_norms(tmp_path: Path) -> None:
    """Each of two processes sees one of the micro-batches; both choose what one process would that saw both."""
    toy = Toy()
    ours = OutControl(CONFIG, toy.lowbit())
    steps_of(toy, ours, 3, 5)
    assert isinstance(toy.q.retained, RetainedChannels)
    rendezvous, here = f"file://{tmp_path}/rendezvous", str(Path(__file__).parent)
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    given = [rendezvous, f"{tmp_path}/order", here]
    jobs = [
        forked.start([str(script), str(rank), *given], tmp_path, os.environ, tmp_path / "out", tmp_path / "err")
        for rank in range(2)
    ]
    assert [job.wait(timeout=280) for job in jobs] == [0, 0], (tmp_path / "err").read_text()
    for rank in range(2):
        order = torch.load(f"{tmp_path}/order{rank}", weights_only=True)
        assert order[:26].sort().values.tolist() == toy.q.retained.order[:26].sort().values.tolist()


@pytest.mark.slow
def test_compiled_without_graph_breaks_and_other_channels_compile_nothing() -> None:
    torch._dynamo.reset()
    layer = layer_of(LinearPolicy(pair(S.NVFP4_POW2), pair(S.MXFP8), pair(S.MXFP8)))  # few operations: traced quickly
    layer.retained = RetainedChannels(torch.randperm(256), 26)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    x, dy = torch.randn(32, 256), torch.randn(32, 128)

    def run(call: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y = call(leaf)
        y.backward(dy)
        assert leaf.grad is not None and layer.weight.grad is not None
        return [y.detach(), leaf.grad, layer.weight.grad.clone()]

    for _ in range(2):
        for got, want in zip(run(compiled), run(layer), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with torch.compiler.set_stance("fail_on_recompile"):
            layer.retained.order.copy_(torch.randperm(256))
            layer.retained.place.copy_(layer.retained.order.argsort())
            run(compiled)
