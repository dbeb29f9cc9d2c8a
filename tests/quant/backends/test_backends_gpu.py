"""Backends on a real GPU: codes bit for bit, products against FP64, layers against the emulation, no waiting."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema import MatrixBackend, ModelConfig, PrecisionConfig
from lowbit.models.layers import Linear
from lowbit.models.transformer import Transformer
from lowbit.quant import spec as S
from lowbit.quant.apply import apply_policy, lowbit_layers
from lowbit.quant.backends import NATIVE, te
from lowbit.quant.backends.base import Sizes, bind, describe_device
from lowbit.quant.backends.choose import PRODUCTS, Chooser
from lowbit.quant.backends.fp8_codes import quantise_both
from lowbit.quant.backends.selftest import TOLERANCE, Trial, difference
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import EMULATED, LinearPolicy
from lowbit.quant.presets import PRESETS, product
from lowbit.quant.quantise import quantise
from lowbit.quant.quantised import Quantised
from lowbit.quant.resolve import resolve
from lowbit.quant.spec import QuantSpec

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
FORMATS = [S.FP8_TENSOR, S.FP8_ROW, S.FP8_BLOCK, S.FP8_BLOCK_2D]
PAIRS = [
    (S.FP8_TENSOR, S.FP8_TENSOR),
    (S.FP8_ROW, S.FP8_ROW),
    (S.FP8_TENSOR, S.FP8_ROW),
    (S.FP8_BLOCK, S.FP8_BLOCK_2D),
    (S.FP8_BLOCK_2D, S.FP8_BLOCK),
    (S.FP8_BLOCK, S.FP8_BLOCK),
]
FP8 = ["fp8_tensor", "fp8_row", "fp8_block"]


def need(policy: LinearPolicy) -> LinearPolicy:
    """The policy bound to this device's FP8; skips where it cannot."""
    backend, device = NATIVE["fp8"], describe_device(GPU)
    for name in PRODUCTS:
        why = backend.refuses(getattr(policy, name), name, Sizes(4096, 4096), device)
        if why is not None:
            pytest.skip(why)
    return bind(policy, "fp8", "fp8", "fp8")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def numbers(rows: int, columns: int) -> Tensor:
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-30, 30, (rows, 1)).float())
    x[0, : columns // 2] = 0.0
    x[-1, -1], x[rows // 2, 0] = 3e38, 1e-40
    return x


def assert_same(found: Quantised | None, wanted: Quantised) -> None:
    assert found is not None and found.shape == wanted.shape
    rows, columns = wanted.shape
    assert torch.equal(found.codes[:rows, :columns].cpu(), wanted.codes[:rows, :columns])
    assert not found.codes[rows:].any() and not found.codes[:, columns:].any()
    assert torch.equal(found.scales.cpu(), wanted.scales)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# FP8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FORMATS, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(128, 256), (17, 40), (1, 8), (130, 129), (1000, 2064)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_the_references(spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = numbers(*shape).to(dtype)
    wanted, wanted_t = quantise(x, spec), quantise(x.t(), spec)
    there = x.to(GPU)
    for matrix in (there, there.t().contiguous().t(), torch.cat((there, there), 1)[:, : shape[1]]):
        found, found_t = quantise_both(matrix, spec, spec)
        assert_same(found, wanted)
        assert_same(found_t, wanted_t)
        assert_same(quantise_both(matrix, spec, None)[0], wanted)
        assert_same(quantise_both(matrix, None, spec)[1], wanted_t)


@pytest.mark.parametrize("spec", FORMATS, ids=lambda s: s.name)
def test_what_is_not_finite_stays_so(spec: QuantSpec) -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.randn(256, 384)
        x[3, 5] = bad
        for found, matrix in zip(quantise_both(x.to(GPU), spec, spec), (x, x.t()), strict=True):
            assert found is not None
            assert torch.equal(found.dequantise().isnan().cpu(), quantise(matrix, spec).dequantise().isnan())


def test_all_casts() -> None:
    """Every BF16 number under a scale of one."""
    y = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    y = torch.where(y.float().abs() <= 448, y, 0.0).reshape(256, 256)
    y[0, 0] = 448
    found, _ = quantise_both(y.to(GPU), S.FP8_TENSOR, None)
    assert_same(found, quantise(y, S.FP8_TENSOR))


def test_more_than_2_to_the_31_numbers() -> None:
    rows, columns = 33024, 65536
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=GPU)
    x[-200:, -300:] = torch.randn(200, 300, device=GPU)
    found, found_t = quantise_both(x, S.FP8_BLOCK, S.FP8_BLOCK)
    assert found is not None and found_t is not None
    corner = x[-256:, -384:].cpu()
    assert torch.equal(found.codes[-256:, -384:].cpu(), quantise(corner, S.FP8_BLOCK).codes)
    assert torch.equal(found_t.codes[-384:, -256:].cpu(), quantise(corner.t(), S.FP8_BLOCK).codes)


def recipe_or_skip(left: QuantSpec, right: QuantSpec, dtype: torch.dtype) -> None:
    which = "wgrad" if dtype == torch.float32 else "fprop"
    why = NATIVE["fp8"].refuses(product(left, right), which, Sizes(4096, 4096), describe_device(GPU))
    if why is not None:
        pytest.skip(why)


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(left: QuantSpec, right: QuantSpec, dtype: torch.dtype) -> None:
    recipe_or_skip(left, right, dtype)
    backend = NATIVE["fp8"]
    for fast in (False, True):
        assert difference(backend, Trial(left, right, dtype, fast), GPU) is None
    for m, n, k in ((128, 128, 128), (17, 40, 72), (1, 8, 8), (150, 136, 520), (4096, 512, 2048)):
        a, b = torch.randn(m, k).to(GPU), torch.randn(n, k).to(GPU)
        factors = backend.factor(a, left), backend.factor(b, right)
        wanted = factors[0].values(), factors[1].values()
        exact = [
            (v.elements.double() * v.scale.double()).reshape(q.codes.shape)[: q.shape[0], : q.shape[1]]
            for v, q in zip(wanted, factors, strict=True)
        ]
        wanted_product = exact[0] @ exact[1].t()
        for after in (None, torch.full((1, 1), 0.3, device=GPU), torch.rand(m, 1, device=GPU)):
            found = backend.multiply(*factors, dtype, after)
            assert found.dtype == dtype and found.shape == (m, n)
            assert off(found, wanted_product * (1.0 if after is None else after)) < TOLERANCE[dtype]


def run(policy: LinearPolicy, x: Tensor, weights: list[Tensor], dy: Tensor, compiled: bool = False) -> list[Tensor]:
    keys = [make_key(1, f"layer {i}").to(GPU) for i in range(len(weights))]
    clock = make_clock().to(GPU)
    x, weights = x.detach().clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    products = torch.compile(linear_products, fullgraph=True, dynamic=False) if compiled else linear_products

    def both() -> list[Tensor]:
        outputs = products(x, weights, keys, clock, policy)
        return [*outputs, *torch.autograd.grad(outputs, [x, *weights], [dy] * len(weights))]

    found = both()  # compiles, and loads kernels
    if policy.fprop.backend != EMULATED:
        with no_waiting():
            found = both()
    return [t.detach() for t in found]


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("sizes", [(512, 256, 384), (17, 72, 40), (1, 16, 8), (4096, 1024, 512)], ids=str)
def test_layers_equal_the_emulation(name: str, sizes: tuple[int, int, int]) -> None:
    bound = need(PRESETS[name])
    tokens, width, out = sizes
    x, dy = (torch.randn(tokens, size).bfloat16().to(GPU) for size in (width, out))
    weights = [torch.randn(out, width).to(GPU) * 0.3 for _ in range(2)]
    wanted = run(PRESETS[name], x, weights, dy)
    found = run(bound, x, weights, dy)
    assert [t.dtype for t in found] == [torch.bfloat16] * 3 + [torch.float32] * 2
    for a, b in zip(found, wanted, strict=True):
        assert off(a, b) < (6e-3 if a.dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("name", FP8)
def test_compiled_layers_equal_eager_ones_without_waiting(name: str) -> None:
    bound = need(PRESETS[name])
    x, dy = (torch.randn(2048, size).bfloat16().to(GPU) for size in (512, 768))
    weights = [torch.randn(768, 512).to(GPU) * 0.3 for _ in range(2)]
    for a, b in zip(run(bound, x, weights, dy, compiled=True), run(bound, x, weights, dy), strict=True):
        assert off(a, b) < 1e-3


def test_a_model_gets_what_the_device_has_and_says_so() -> None:
    need(PRESETS["fp8_tensor"])
    with GPU:
        model = Transformer(ModelConfig(layers=1, width=128, heads=2, kv_heads=1, mlp_width=256), 60, torch.bfloat16)
    model.init_weights(1)
    policy = resolve(PrecisionConfig(forward="fp8_tensor", backward="fp8_tensor"))
    chooser = Chooser.on(GPU, torch.bfloat16, MatrixBackend.auto, check=True)
    chooser = Chooser(chooser.device, chooser.dtype, chooser.wanted, GPU, table=())
    made = apply_policy(model, policy, seed=1, chooser=chooser)
    assert made.runs == "native" and made.table().count("native (fp8)") == 6, made.table()
    assert all(layer.policy.fprop.backend == "fp8" for layer in lowbit_layers(model).values())
    hidden = model(torch.randint(0, 60, (2, 64), device=GPU))
    hidden.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks.parameters())


# Others -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_nvidia", "nvfp4_quartet2"])
def test_blocks_of_blackwell(name: str) -> None:
    policy, backend = PRESETS[name], NATIVE["torch_blocks"]
    for part in PRODUCTS:
        why = backend.refuses(getattr(policy, part), part, Sizes(4096, 4096), describe_device(GPU))
        if why is not None:
            pytest.skip(why)
    for which in PRODUCTS:
        part = getattr(policy, which)
        dtype = torch.float32 if which == "wgrad" else torch.bfloat16
        assert difference(backend, Trial(part.left.spec, part.right.spec, dtype, False), GPU) is None


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_block", "mxfp8", "nvfp4_nvidia"])
def test_transformer_engine_computes_what_the_emulation_does(name: str) -> None:
    why = te.missing() or te.refuses(PRESETS[name], Sizes(4096, 4096), describe_device(GPU))
    if why is not None:
        pytest.skip(why)
    assert te.check(PRESETS[name], GPU) is None


@pytest.mark.parametrize("tokens", [1, 17, 256])
def test_a_layer_through_transformer_engine_takes_any_number_of_tokens(tokens: int) -> None:
    policy = PRESETS["fp8_tensor"]
    why = te.missing() or te.refuses(policy, Sizes(256, 384), describe_device(GPU))
    if why is not None:
        pytest.skip(why)
    linear = Linear(256, 384).to(GPU)
    torch.nn.init.normal_(linear.weight)
    key, clock = make_key(0, "layer").to(GPU), make_clock().to(GPU)
    layer = te.TeLinear.of(linear, bind(policy, "te", "te", "te"), key, clock)
    plain = LowbitLinear.of(Linear(256, 384).to(GPU), policy, key, clock)
    plain.weight.data.copy_(linear.weight)
    x = torch.randn(2, tokens, 256, device=GPU, dtype=torch.bfloat16)
    results = []
    for module in (layer, plain):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.float().square().sum().backward()
        results.append((y.detach(), leaf.grad, module.weight.grad))
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and a.shape == b.shape and off(a, b) < 1e-2
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
