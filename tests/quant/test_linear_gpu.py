"""Low-bit layers on a GPU: the CPU's factors, products right to the last sum; eager, compiled and by experts."""

import pytest
import torch
from test_grouped import COUNTS, OUT, WIDTH, grouped, offsets_of
from test_linear import CLOCK, KEY, Composition, each_policy, error, inputs
from test_linear_compile import Some
from torch import Tensor
from torch._dynamo.utils import counters

from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import make_clock
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS

pytestmark = pytest.mark.gpu


def run(policy: LinearPolicy, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.cuda().bfloat16().requires_grad_(), weight.cuda().requires_grad_()
    (y,) = linear_products(x, [weight], [KEY.cuda()], CLOCK.cuda(), policy)
    y.backward(dy.cuda().bfloat16())
    assert x.grad is not None and weight.grad is not None
    return y.detach().cpu(), x.grad.cpu(), weight.grad.cpu()


@each_policy
@pytest.mark.parametrize("shape", [(128, 128, 256), (17, 72, 136), (1, 8, 8), (1000, 640, 200)], ids=str)
def test_products_are_those_of_the_factors_that_a_cpu_makes(policy: LinearPolicy, shape: tuple[int, int, int]) -> None:
    """Y and dX are rounded to BF16, dW sums in FP32. A wrong factor would show as 1e-2 and more."""
    x, weight, dy = inputs(*shape)
    want = Composition(policy, x, weight, dy)
    y, dx, dw = run(policy, x, weight, dy)
    assert [t.dtype for t in (y, dx, dw)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for got, expected, bound in zip((y, dx, dw), (want.y, want.dx, want.dw), (4e-3, 4e-3, 1e-5), strict=True):
        assert error(got, expected) < bound


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_nvidia", "mxfp8", "fp8_row"])
def test_compiled_it_is_one_graph_and_eagers_result(name: str) -> None:
    torch.compiler.reset()
    counters.clear()
    clock = make_clock().cuda()
    modules = [Some(f"blocks.{i}", PRESETS[name], clock).cuda() for i in range(3)]
    for module in modules:
        for layer in (module.a, module.b, module.c):
            layer.register_buffer("clock", clock, persistent=False)
        module.compile(fullgraph=True, dynamic=False)
    x = torch.randn(2, 32, 72, device="cuda", dtype=torch.bfloat16)
    for step in range(2):
        clock.copy_(make_clock(step).cuda())
        for module in modules:
            results = []
            for call in (module.forward, module):
                module.zero_grad()
                given = x.clone().requires_grad_()
                y = call(given)
                y.backward(torch.ones_like(y))
                assert given.grad is not None
                results.append([y.detach(), given.grad, *(p.grad.clone() for p in module.parameters())])
            for eager, compiled in zip(*results, strict=True):
                assert error(compiled, eager.double()) < 4e-3
    assert counters["stats"]["unique_graphs"] == 1


@each_policy
def test_experts_are_those_of_a_cpu(policy: LinearPolicy) -> None:
    """The same BF16 factors on both: products differ by the order of their sums and a rounding to BF16."""
    layer = grouped("up", policy)
    x, dy = torch.randn(sum(COUNTS), WIDTH).bfloat16(), torch.randn(sum(COUNTS), OUT).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        layer.to(device).zero_grad()
        given = x.to(device, copy=True).requires_grad_()
        y = layer(given, offsets_of(COUNTS).to(device))
        y.backward(dy.to(device))
        assert given.grad is not None and layer.weight.grad is not None
        # Copies, since moving a layer moves its gradients too.
        results.append([t.to("cpu", copy=True) for t in (y.detach(), given.grad, layer.weight.grad)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert error(on_gpu, on_cpu.double()) < 4e-3
