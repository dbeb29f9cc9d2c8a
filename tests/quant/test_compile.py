"""torch.compile(fullgraph=True) gives eager's bits, without a graph break and without recompiling as the clock runs."""

from dataclasses import replace

import pytest
import torch
from oracles import same_bits

from lowbit.quant import spec as S
from lowbit.quant.hadamard import rotate
from lowbit.quant.philox import Product, Purpose, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import fake_quantise, quantise
from lowbit.quant.spec import EDEN, SPECS, QuantSpec, Rounding

STOCHASTIC_MX = replace(S.MXFP8, rounding=Rounding.STOCHASTIC)


def whole(x: torch.Tensor, key: torch.Tensor, clock: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, ...]:
    """Everything between a tensor and its bytes."""
    stream = Stream(key, clock, Product.WGRAD, Side.LEFT)
    if spec.rounding in EDEN:
        x = rotate(x, stream.signs(128), 128)
    quantised = quantise(x, spec, stream)
    packed = quantised.pack()
    layout = quantised.pack(swizzled=packed.scales.dtype == torch.uint8)
    bits = (packed.data, packed.scales, quantised.codes, layout.scales)
    return fake_quantise(x, spec, stream), packed.unpack().dequantise(), layout.unpack().operand(), *bits


def check(spec: QuantSpec, backend: str, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> None:
    torch.compiler.reset()
    compiled = torch.compile(whole, fullgraph=True, backend=backend)
    key, clock = make_key(1, "a"), make_clock(3, 1)
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        x = torch.randn(40, 280, generator=generator)  # a multiple of no block: exact padding
        x[3, 40:60] = 0
        x[5, 7] = 1e-38
        x[7] *= 2.0**-100
        for bad in (1.0, float("nan")):
            x[20, 3] = bad
            want = whole(x.to(dtype), key, clock, spec)
            got = compiled(x.to(dtype), key, clock, spec)
            for w, g in zip(want, got, strict=True):
                assert same_bits(g, w)


TRACED = [S.MXFP8, S.NVFP4_2D, S.NVFP4_POW2_46, S.NVFP4_POW2_SR, S.INT8_ROW]
MORE = [S.MXFP6_E2M3, S.NVFP4, S.FP8_ROW]


@pytest.mark.parametrize(
    "spec", [*TRACED, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in MORE)], ids=lambda s: s.name
)
def test_every_kind_of_spec_traces_without_a_break(spec: QuantSpec) -> None:
    check(spec, "eager", dtypes=(torch.float32,))


@pytest.mark.exhaustive
def test_inductor_gives_eagers_bits() -> None:
    """Fake quantisation from FP32, where Inductor likes to drop the rounding to BF16; a width no block divides."""
    torch.compiler.reset()
    x = torch.randn(24, 280)
    want = fake_quantise(x, S.NVFP4_POW2)
    got = torch.compile(fake_quantise, fullgraph=True)(x, S.NVFP4_POW2)
    assert same_bits(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", [*SPECS.values(), STOCHASTIC_MX], ids=lambda s: f"{s.name}-{s.rounding.value}")
def test_inductor_gives_eagers_bits_for_every_spec(spec: QuantSpec) -> None:
    check(spec, "inductor")


def test_a_running_clock_and_many_layers_compile_once() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(fullgraph=True, backend="eager")
    def draw(x: torch.Tensor, key: torch.Tensor, clock: torch.Tensor) -> torch.Tensor:
        return fake_quantise(x, S.NVFP4_POW2_SR, Stream(key, clock, Product.DGRAD, Side.LEFT))

    x, clock, seen = torch.randn(16, 128), make_clock(), []
    for layer in range(4):
        for step in range(3):
            clock.copy_(make_clock(step))
            key = make_key(1, f"blocks.{layer}")
            seen.append(draw(x, key, clock))
            want = fake_quantise(x, S.NVFP4_POW2_SR, Stream(key, clock, Product.DGRAD, Side.LEFT))
            assert same_bits(seen[-1], want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len({s.view(torch.int16).numpy().tobytes() for s in seen}) == 12


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [*SPECS.values(), STOCHASTIC_MX], ids=lambda s: f"{s.name}-{s.rounding.value}")
def test_a_gpu_gives_the_cpus_bits(spec: QuantSpec) -> None:
    key, clock = make_key(1, "a"), make_clock(3, 1)
    compiled = torch.compile(whole, fullgraph=True)
    torch.compiler.reset()
    for exponent in (0, -60, 60, -120):
        x = torch.randn(256, 1024) * 2.0**exponent
        x[3, 40:60] = 0
        want = whole(x, key, clock, spec)
        for run in (whole, compiled):
            for w, g in zip(want, run(x.cuda(), key.cuda(), clock.cuda(), spec), strict=True):
                assert same_bits(g.cpu(), w)


@pytest.mark.gpu
def test_a_gpu_draws_the_cpus_words() -> None:
    key, clock = make_key(1, "a"), make_clock(3, 1)
    on_cpu = Stream(key, clock, Product.WGRAD, Side.LEFT).words(Purpose.ELEMENTS, 100_001)
    on_gpu = Stream(key.cuda(), clock.cuda(), Product.WGRAD, Side.LEFT).words(Purpose.ELEMENTS, 100_001)
    assert torch.equal(on_gpu.cpu(), on_cpu)
