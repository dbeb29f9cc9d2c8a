"""Stabilisers on a GPU: the CPU's bits where arithmetic fixes them, and compiled layers with two kinds of channels."""

from dataclasses import replace

import pytest
import torch
from test_clamp import square
from test_oscireset import CONFIG, jiggle, layer_of
from test_outcontrol import POLICIES, outliers
from test_outcontrol import layer_of as policy_layer
from torch import Tensor

from lowbit.configs.schema import OsciDetector
from lowbit.quant import spec as S
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.spec import QuantSpec
from lowbit.quant.stabilisers.masters import Master
from lowbit.quant.stabilisers.oscireset import OsciReset
from lowbit.quant.stabilisers.outcontrol import RetainedChannels
from lowbit.quant.statistics import weight_statistics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("spec", [S.NVFP4_POW2_46, S.NVFP4_TETRAJET, S.NVFP4_46, S.MXFP8], ids=lambda s: s.name)
@pytest.mark.parametrize("detector", OsciDetector)
@pytest.mark.parametrize("hysteresis", [0.0, 0.2])
def test_oscireset_has_the_cpus_bits(spec: QuantSpec, detector: OsciDetector, hysteresis: float) -> None:

    config = replace(CONFIG, detector=detector, hysteresis=hysteresis)
    layers = [layer_of(spec), layer_of(spec).cuda()]
    both = [OsciReset(config, lambda x=x: [Master("up.weight", x.weight.detach(), x)]) for x in layers]
    step = layers[0].weight.detach().clone()
    for t in range(1, 28):
        step.zero_()
        jiggle([step], t)
        rows = []
        for layer, ours in zip(layers, both, strict=True):
            layer.weight.detach().add_(step.to(layer.weight.device))
            rows.append(ours.after_step(t, 0.0))
        assert rows[0] == rows[1], t
        assert torch.equal(layers[0].weight, layers[1].weight.cpu()), t
        if hysteresis and spec.name.endswith("_46"):
            assert layers[0].choice is not None and layers[1].choice is not None
            assert torch.equal(layers[0].choice, layers[1].choice.cpu()), t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_clamped_square_has_the_cpus_bits(dtype: torch.dtype) -> None:
    up = (torch.randn(512, 512) * 0.4).to(dtype)
    dy = torch.randn(512, 512).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaf = up.to(device, copy=True).requires_grad_()
        y = square(0.7).to(device)(leaf)
        y.backward(dy.to(device))
        assert leaf.grad is not None
        results.append((y.detach().cpu(), leaf.grad.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def run(layer: LowbitLinear, call: torch.nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = call(leaf)
    y.backward(dy)
    assert leaf.grad is not None and layer.weight.grad is not None
    return [y.detach(), leaf.grad, layer.weight.grad.clone()]


@pytest.mark.parametrize("name", POLICIES)
def test_retained_channels_compiled_and_on_the_cpu(name: str) -> None:
    """The compiled layer, the same one uncompiled, and the CPU's: equal up to the order of sums and BF16."""
    torch._dynamo.reset()
    here, there = policy_layer(POLICIES[name]), policy_layer(POLICIES[name]).cuda()
    order = torch.randperm(256)
    here.retained, there.retained = RetainedChannels(order, 26), RetainedChannels(order.cuda(), 26)
    x, dy = outliers(256, 256).bfloat16(), torch.randn(256, 128).bfloat16()
    compiled = torch.compile(there, fullgraph=True, dynamic=False)
    eager = run(there, there, x.cuda(), dy.cuda())
    for got in (run(there, compiled, x.cuda(), dy.cuda()), run(here, here, x, dy)):
        for a, b in zip(got, eager, strict=True):
            assert float((a.cpu().float() - b.cpu().float()).norm() / b.float().norm().cpu()) < 5e-3


def test_statistics_are_the_cpus() -> None:
    here = layer_of(S.NVFP4_POW2_46)
    there = layer_of(S.NVFP4_POW2_46).cuda()
    a, b = weight_statistics(here), weight_statistics(there)
    assert a is not None and b is not None
    torch.testing.assert_close(a, b.cpu(), rtol=1e-6, atol=1e-9)
