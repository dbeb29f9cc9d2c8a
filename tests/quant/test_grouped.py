"""Experts' products: each expert alone, bit for bit, whatever its number of rows; and plain experts in FP64."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from oracles import same_bits
from test_linear import POLICIES, each_policy
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lowbit.configs.schema import MatrixBackend, ModelConfig, MoeConfig, PrecisionConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import GroupedLinear, frozen_weights
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy, candidates, clocks, high_precision, set_stage
from lowbit.quant.backends.base import Device
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.grouped import LowbitGroupedLinear, keys_of
from lowbit.quant.grouped_products import grouped_backward, grouped_forward, policy_of, policy_text
from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.resolve import resolve

COUNTS = (0, 1, 31, 33, 0, 150, 128, 0)
CLOCK = make_clock(4, 1)
WIDTH, OUT = 72, 40


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def grouped(name: str, policy: LinearPolicy, experts: int = len(COUNTS), clock: Tensor = CLOCK) -> LowbitGroupedLinear:
    plain = GroupedLinear(experts, WIDTH, OUT)
    generator = torch.Generator().manual_seed(len(name))
    plain.weight.data.normal_(0, 0.3, generator=generator)
    keys = keys_of(1, name, experts)
    assert torch.equal(keys[0], make_key(1, f"{name}.0"))
    return LowbitGroupedLinear.of(plain, policy, keys, clock, name)


def each_alone(
    layers: list[LowbitGroupedLinear], x: Tensor, grads: list[Tensor], counts: tuple[int, ...]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Outputs, dX and every dW, from `linear_products` of one expert after the other."""
    ys: list[list[Tensor]] = [[] for _ in layers]
    dxs, dws = [], [torch.zeros_like(layer.weight) for layer in layers]
    for e, (rows, *grads_of_e) in enumerate(zip(x.split(counts), *(g.split(counts) for g in grads), strict=True)):
        rows = rows.clone().requires_grad_()
        weights = [layer.weight[e].detach().clone().requires_grad_() for layer in layers]
        keys = [layer.keys[e] for layer in layers]
        made = linear_products(rows, weights, keys, layers[0].clock, layers[0].policy)
        torch.autograd.backward(made, grads_of_e)
        for i, (y, weight) in enumerate(zip(made, weights, strict=True)):
            ys[i].append(y.detach())
            dws[i][e] = weight.grad
        dxs.append(rows.grad)
    return [torch.cat(y) for y in ys], torch.cat(dxs), dws


@each_policy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_expert_is_a_lowbit_linear(policy: LinearPolicy, dtype: torch.dtype) -> None:
    gate, up = grouped("gate", policy), grouped("up", policy)
    x = torch.randn(sum(COUNTS), WIDTH).to(dtype).requires_grad_()
    outputs = gate.project_together(x, offsets_of(COUNTS), [up])
    grads = [torch.randn(sum(COUNTS), OUT).to(dtype) for _ in outputs]
    torch.autograd.backward(outputs, grads)
    ys, dx, dws = each_alone([gate, up], x.detach(), grads, COUNTS)
    assert all(map(same_bits, outputs, ys))
    assert x.grad is not None and same_bits(x.grad, dx)
    for layer, dw in zip((gate, up), dws, strict=True):
        assert layer.weight.grad is not None and same_bits(layer.weight.grad, dw)
        assert not layer.weight.grad[0].any() and layer.weight.grad[1].any()


@pytest.mark.parametrize(
    ("name", "split"),
    [("weights_only", False), *product(("nvfp4", "nvfp4_nvidia", "fp8_tensor"), (False, True))],
)
def test_other_loads_and_the_mean_split(name: str, split: bool) -> None:
    policy = replace(POLICIES[name], mean_split=split)
    for counts in ((17,), (0, 0, 5), (300, 0), (1, 1, 1, 1)):
        layer = grouped("up", policy, len(counts))
        x = torch.randn(sum(counts), WIDTH).requires_grad_()
        y = layer(x, offsets_of(counts))
        grad = torch.randn_like(y)
        y.backward(grad)
        ys, dx, dws = each_alone([layer], x.detach(), [grad], counts)
        assert same_bits(y, ys[0]) and same_bits(x.grad, dx) and same_bits(layer.weight.grad, dws[0])


def test_no_rows_at_all() -> None:
    layer = grouped("up", POLICIES["nvfp4"], 3)
    x = torch.randn(0, WIDTH, requires_grad=True)
    y = layer(x, offsets_of((0, 0, 0)))
    y.sum().backward()
    assert y.shape == (0, OUT) and x.grad is not None and x.grad.shape == x.shape
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_a_policy_of_bf16_alone_is_the_plain_layer() -> None:
    layer, plain = grouped("up", LinearPolicy()), GroupedLinear(len(COUNTS), WIDTH, OUT)
    plain.weight = layer.weight
    x = torch.randn(sum(COUNTS), WIDTH)
    assert torch.equal(layer(x, offsets_of(COUNTS)), plain(x, offsets_of(COUNTS)))


@each_policy
def test_frozen_weights_are_the_quantised_ones(policy: LinearPolicy) -> None:
    layers = nn.ModuleList([grouped("up", policy)])
    x = torch.randn(sum(COUNTS), WIDTH)
    with torch.no_grad():
        want = layers[0](x, offsets_of(COUNTS))
        with frozen_weights(layers, torch.float32):
            layers[0].weight.mul_(2)
            assert same_bits(layers[0](x, offsets_of(COUNTS)), want)
        assert not torch.equal(layers[0](x, offsets_of(COUNTS)), want)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_nvidia", "nvfp4_tetrajet", "nvfp4_quartet2"])
def test_what_is_kept_is_a_third_and_a_block_an_expert(name: str) -> None:
    layer = grouped("up", PRESETS[name], 4)
    counts = (500, 1, 600, 947)
    x = torch.randn(sum(counts), WIDTH, requires_grad=True)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.int64 and tensor.data_ptr() != layer.weight.data_ptr():
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, offsets_of(counts))
    used = sum(t.numel() * t.element_size() for t in kept.values())
    policy = PRESETS[name]
    padding = 4 * 128 * WIDTH if policy.kept.value == "Q(X^T)" else 0
    # 72 channels make five blocks of 16 and one outer scale: 5.6 bits a channel, where 128 would make 4.75.
    assert used <= 5.7 / 8 * (x.numel() + padding) + 1000


class Two(nn.Module):
    def __init__(self, policy: LinearPolicy, clock: Tensor, name: str) -> None:
        super().__init__()
        self.gate, self.up = (grouped(f"{name}.{part}", policy, clock=clock) for part in ("gate", "upp"))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        gate, up = self.gate.project_together(x, offsets, [self.up])
        return gate * up


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_nvidia"])
def test_one_graph_for_all_layers_loads_and_times(name: str) -> None:
    torch.compiler.reset()
    counters.clear()
    clock = make_clock()
    modules = [Two(POLICIES[name], clock, f"blocks.{i}") for i in range(2)]
    x = torch.randn(sum(COUNTS), WIDTH)
    for step, counts in enumerate((COUNTS, COUNTS[::-1], (343, 0, 0, 0, 0, 0, 0, 0))):
        clock.copy_(make_clock(step))
        for module in modules:
            results = []
            for run in (module.forward, torch.compile(module.forward, backend="aot_eager", fullgraph=True)):
                module.zero_grad()
                y = run(x.requires_grad_(), offsets_of(counts))
                y.backward(torch.ones_like(y))
                assert x.grad is not None
                results.append([y.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())])
                x.grad = None
            assert all(map(same_bits, *results))
    assert counters["stats"]["unique_graphs"] == 1


def test_the_operators_are_what_they_declare() -> None:
    for name in ("nvfp4", "nvfp4_nvidia", "fp8_tensor", "wgrad_of_x"):
        layer = grouped("up", replace(POLICIES[name], mean_split=name == "nvfp4"))
        offsets, text = offsets_of(COUNTS), policy_text(layer.policy)
        x, dy = torch.randn(sum(COUNTS), WIDTH), torch.randn(sum(COUNTS), OUT)
        rest = [layer.weight.detach()], [layer.keys], layer.clock, text
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(grouped_forward, (x, offsets, *rest, True), test_utils=tests)
        _, *kept = grouped_forward(x, offsets, *rest, True)
        if name == "wgrad_of_x":
            kept = [x, *kept[1:]]
        given = ([dy], kept, offsets, *rest, torch.float32, True, True)
        torch.library.opcheck(grouped_backward, given, test_utils=tests)


@each_policy
def test_a_policy_survives_as_text(policy: LinearPolicy) -> None:
    assert replace(policy_of(policy_text(policy)), allow_bias=policy.allow_bias) == policy


def test_impossible_layers_are_errors_that_name_them() -> None:
    keys = torch.stack([make_key(1, "a")] * 2)
    with pytest.raises(ConfigError, match=r"experts\.up: fprop sums over in_features=20"):
        LowbitGroupedLinear.of(GroupedLinear(2, 20, 64), POLICIES["nvfp4"], keys, CLOCK, "experts.up")
    with pytest.raises(ConfigError, match=r"up: keys \[2, 2\] must be \[3, 2\], one an expert"):
        LowbitGroupedLinear.of(GroupedLinear(3, 24, 64), POLICIES["nvfp4"], keys, CLOCK, "up")


def experts_model() -> Transformer:
    moe = MoeConfig(experts=4, top_k=2, expert_width=48, shared=1)
    model = Transformer(ModelConfig(layers=2, width=32, heads=2, kv_heads=1, moe=moe), 60)
    model.init_weights(1)
    return model


def test_a_policy_reaches_the_experts_of_a_model() -> None:
    model = experts_model()
    before = dict(model.named_parameters())
    report = apply_policy(model, resolve(PrecisionConfig(forward="nvfp4", backward="nvfp4")), seed=1, dtype="fp32")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    experts = {name: m for name, m in candidates(model).items() if isinstance(m, LowbitGroupedLinear)}
    assert list(experts) == [f"blocks.{i}.mlp.experts.{part}" for i in (0, 1) for part in ("gate", "up", "down")]
    assert all(layer.policy == PRESETS["nvfp4"] for layer in experts.values())
    assert torch.equal(experts["blocks.1.mlp.experts.up"].keys, keys_of(1, "blocks.1.mlp.experts.up", 4))
    assert len(clocks(model)) == 1 and "experts" in report.table()
    tokens = torch.randint(0, 60, (2, 24))
    plain = experts_model()
    losses = {}
    for name, m in (("low", model), ("plain", plain)):
        hidden = m(tokens)
        hidden.square().mean().backward()
        losses[name] = hidden.detach()
        assert all(p.grad is not None and p.grad.isfinite().all() for n, p in m.named_parameters() if "experts" in n)
    assert 0.01 < (losses["low"] - losses["plain"]).norm() / losses["plain"].norm() < 0.5
    with high_precision(model), torch.no_grad():
        assert torch.equal(model(tokens), losses["plain"])
    set_stage(model, resolve(PrecisionConfig()).training(()))
    assert all(layer.policy == LinearPolicy() for layer in experts.values())


def test_no_backend_takes_all_products_of_experts() -> None:
    policy = resolve(PrecisionConfig(forward="fp8_row"))
    chooser = Chooser(Device("cuda", (9, 0), (13, 0), "H200"), torch.bfloat16, MatrixBackend.fp8)
    with pytest.raises(
        ConfigError,
        match=r"precision.backend=fp8: .*mlp.experts.*: no backend multiplies all three products of experts",
    ):
        apply_policy(experts_model(), policy, seed=1, chooser=chooser)
