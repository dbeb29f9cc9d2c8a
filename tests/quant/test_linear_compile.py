"""Low-bit layers under torch.compile and activation checkpointing: one graph for all layers and times, eager's bits."""

from collections.abc import Callable

import pytest
import torch
from oracles import same_bits
from test_linear import POLICIES, layer
from test_linear_memory import block_of
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lowbit.configs.schema import ModelConfig, Recompute
from lowbit.models.attention import prepare_mask
from lowbit.models.layers import project
from lowbit.quant.philox import make_clock
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS

CONFIG = ModelConfig(layers=1, width=128, heads=2, kv_heads=1, mlp_width=256)


class Some(nn.Module):
    """Siblings and a layer on top."""

    def __init__(self, name: str, policy: LinearPolicy, clock: Tensor) -> None:
        super().__init__()
        self.a = layer(f"{name}.a", policy, 72, 64, clock)
        self.b = layer(f"{name}.b", policy, 72, 40, clock)
        self.c = layer(f"{name}.c", policy, 64, 40, clock)

    def forward(self, x: Tensor) -> Tensor:
        a, b = project(x, self.a, self.b)
        return self.c(a) + b


def results(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, dx and all dW."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def check(policy: LinearPolicy, backend: str) -> None:
    torch.compiler.reset()
    counters.clear()
    clock = make_clock()
    modules = [Some(f"blocks.{i}", policy, clock) for i in range(3)]
    for module in modules:
        module.compile(backend=backend, fullgraph=True, dynamic=False)
    x = torch.randn(2, 17, 72)
    for step in range(2):
        clock.copy_(make_clock(step))
        for module in modules:
            want = results(module.forward, module, x)
            assert all(same_bits(g, w) for g, w in zip(results(module, module, x), want, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


USUAL = ("nvfp4", "fp8_row")


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, id=name, marks=() if name in USUAL else pytest.mark.exhaustive)
        for name, policy in POLICIES.items()
    ],
)
def test_every_policy_traces_into_one_graph_with_eagers_bits(policy: LinearPolicy) -> None:
    check(policy, "aot_eager")


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, id=name, marks=() if name == "nvfp4" else pytest.mark.exhaustive)
        for name, policy in POLICIES.items()
    ],
)
def test_compiled_for_any_number_of_tokens_it_is_a_few_graphs(policy: LinearPolicy) -> None:
    """`dynamic=True`, to which every number is a variable: one graph for many tokens, and PyTorch's own for 0 and 1."""
    torch.compiler.reset()
    counters.clear()
    low = layer("a", policy, 72, 64)
    run = torch.compile(low, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (17, 33, 5, 64, 0, 1, 100):
        x = torch.randn(tokens, 72)
        want = results(low, low, x)
        assert all(same_bits(g, w) for g, w in zip(results(run, low, x), want, strict=True))
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.slow
def test_inductor_gives_eagers_bits() -> None:
    check(POLICIES["nvfp4"], "inductor")


def block_results(policy: LinearPolicy, recompute: Recompute, compiled: bool) -> list[Tensor]:
    torch.compiler.reset()
    block = block_of(policy, CONFIG).float()
    block.recompute = recompute
    if compiled:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 48, CONFIG.width, generator=generator).requires_grad_()
    table = torch.ones(1, 48, 1, 64)
    block(x, prepare_mask(None, 2, 48, torch.device("cpu")), (table, table)).x.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_nvidia", "nvfp4_quartet2", "mxfp8", "fp8_row"])
def test_checkpointing_changes_no_bit(name: str) -> None:
    want = block_results(PRESETS[name], Recompute.none, False)
    assert len(want) > 9
    for recompute in (Recompute.full, Recompute.selective):
        assert all(map(same_bits, block_results(PRESETS[name], recompute, False), want))


@pytest.mark.exhaustive
def test_checkpointing_changes_no_bit_of_a_compiled_block() -> None:
    """The norms' gradients may differ from eager's in the last place, and then quantised gradients in more."""
    want = block_results(PRESETS["nvfp4"], Recompute.none, True)
    for recompute in (Recompute.full, Recompute.selective):
        assert all(map(same_bits, block_results(PRESETS["nvfp4"], recompute, True), want))
