"""Packed weights: what is held stands for the emulation's numbers; the kernel against the emulation's product."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packed_order import by_block, by_column, held_numbers
from torch import Tensor

from lowbit.configs.schema import PrecisionConfig
from lowbit.infer import packed
from lowbit.infer.arrangement import arranged
from lowbit.infer.packed import FEW_ROWS, PackedLinear, weight_only
from lowbit.infer.unfinished import Unfinished
from lowbit.models.layers import Linear, project
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.presets import PRESETS
from lowbit.quant.quantised import Packed, Quantised
from lowbit.quant.spec import FP8_ROW, MXFP8, NVFP4_46, QuantSpec

HAS_TRITON = importlib.util.find_spec("triton") is not None
WEIGHT_ONLY = ["nvfp4_w4a16", "mxfp8_w8a16", "fp8_w8a16"]


def _layer(name: str, out: int = 48, seed: int = 1) -> tuple[PackedLinear, LowbitLinear]:
    """The layer, and the one it was made of."""
    linear = Linear(256, out)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(seed))
    plain = LowbitLinear.of(linear, PRESETS[name], make_key(1, "a"), make_clock())
    layer = PackedLinear.of(plain, plain.policy, plain.key, plain.clock)
    for either in (plain, layer):
        either.freeze(torch.bfloat16)
    return layer, plain


def _unpacked(layer: PackedLinear) -> Quantised:
    """What is held."""
    assert layer.frozen_data is not None
    return held_numbers(layer.in_features, layer.frozen_data, layer.frozen_scales, layer.frozen_scale)


@pytest.mark.parametrize("name", PRESETS)
def test_which_presets_are_weight_only(name: str) -> None:
    assert weight_only(PRESETS[name]) == (name in WEIGHT_ONLY)


@pytest.mark.parametrize("spec", [NVFP4_46, MXFP8, FP8_ROW], ids=lambda s: s.name)
def test_arranged_codes_and_scales_are_the_same(spec: QuantSpec) -> None:
    """Any codes with any scale, all that are no NaN; codes whose scale is zero become zeros, and stand for the same."""
    bits, block = spec.element.bits, spec.block[1] or 256
    data = torch.randint(0, 256, (48, 32 * bits), dtype=torch.uint8)
    scales = torch.arange(48 * 256 // block).view(48, -1) % (127 if bits == 4 else 255)
    held = scales.to(torch.uint8) if spec.block[1] else torch.ones(48, 1)
    found, found_scales = arranged(Packed(data, held, None, (48, 256), spec, (48, 256 // block), False), 48)
    assert found.shape == (3, 2 if bits == 4 else 4, 1024)
    if found_scales is not None:
        assert found_scales.shape == (3, 2 if bits == 4 else 4, 128 if bits == 4 else 32)
        assert torch.equal(by_block(found_scales), held)
    if bits == 4:
        data = torch.where(scales.repeat_interleave(8, dim=1) == 0, 0, data)
    assert torch.equal(by_column(found, bits), data)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_both_forms_are_the_same_numbers(name: str) -> None:
    layer, plain = _layer(name)
    assert layer.frozen is not None and plain.frozen is not None
    assert torch.equal(layer.frozen, plain.frozen)
    assert torch.equal(_unpacked(layer).operand(), plain.frozen)
    held = [t for t in (layer.frozen_data, layer.frozen_scales, layer.frozen_scale) if t is not None]
    bits = 8 * sum(t.nbytes for t in held) / layer.weight.numel()
    assert bits < {"nvfp4_w4a16": 4.5 + 32 / 256 + 0.01, "mxfp8_w8a16": 8.26, "fp8_w8a16": 8.13}[name]


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS, FEW_ROWS + 1])
def test_few_rows_go_to_the_kernel_and_many_to_the_copy(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, plain = zip(_layer(name), _layer(name, 32, 2), strict=True)
    calls = []

    def product(x: Tensor, data: Tensor, scales: Tensor | None, after: Tensor | None) -> Unfinished:
        calls.append(x.shape[0])
        [layer] = [layer for layer in layers if layer.frozen_data is data]
        halves = zip(x.float().chunk(2, dim=1), _unpacked(layer).operand().float().chunk(2, dim=1), strict=True)
        return Unfinished(torch.stack([a @ b.t() for a, b in halves]), after, x.dtype)

    monkeypatch.setattr(packed, "begin_product", product)
    x = torch.randn(rows, 1, 256).bfloat16()
    with torch.no_grad():
        ours, theirs = project(x, *layers), project(x, *plain)
    assert calls == ([rows] * 2 if rows <= FEW_ROWS else [])
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("spec", [NVFP4_46, MXFP8, FP8_ROW], ids=lambda s: s.name)
def test_a_kernel_that_is_wrong_or_fails_is_named_and_not_used(
    spec: QuantSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")

    def right(x: Tensor, data: Tensor, scales: Tensor | None, after: Tensor | None) -> Unfinished:
        values = held_numbers(x.shape[1], data, scales, after).values()
        y, scale = x.float() @ values.operand().float().t(), values.after()
        return Unfinished(y[None], scale, x.dtype)

    def off(*arguments: Tensor) -> Unfinished:
        made = right(*arguments)  # type: ignore[arg-type]
        return made._replace(parts=1.05 * made.parts)

    def failing(*arguments: Tensor) -> Unfinished:
        raise RuntimeError("no such instruction")

    for product, text in (
        (right, None),
        (off, "computes something else"),
        (failing, "RuntimeError: no such instruction"),
    ):
        monkeypatch.setattr(packed, "begin_product", product)
        packed.wrong.cache_clear()
        caplog.clear()
        why = packed.wrong(spec, cpu)
        assert why is None if text is None else why is not None and text in why and spec.name in caplog.text
    packed.wrong.cache_clear()


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_the_check_cuts_products_in_every_way() -> None:
    """What a layer of any size is cut into for few rows, the check before it is used has tried."""
    from lowbit.infer.kernels.packed import Shape, shape_of

    def cut(rows: int, tiles: int, steps: int) -> Shape:
        """How many programs share the steps is no kind of its own."""
        shape = shape_of(rows, tiles, steps)
        return shape._replace(splits=min(2, shape.splits))

    tried = {cut(n, height // 16, width // 128) for height, width in packed.CHECKED for n in packed.CHECKED_ROWS}
    tiles, steps = (1, 2, 63, 64, 256, 257, 1023, 1024, 1025, 4096), (1, 2, 15, 63, 64, 65, 112, 1024)
    assert tried == {cut(n, t, k) for n in range(1, FEW_ROWS + 1) for t in tiles for k in steps}


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_every_cut_has_room_and_shares_all_steps() -> None:
    from lowbit.infer.kernels import PACKED_ROWS
    from lowbit.infer.kernels.packed import shape_of

    for rows in range(1, PACKED_ROWS + 1):
        for tiles in (1, 3, 256, 1023, 1024, 8192):
            for steps in (1, 2, 7, 16, 112, 4096):
                shape = shape_of(rows, tiles, steps)
                assert shape.stages >= 2 and shape.stages * shape.turn_bytes <= 46 * 1024
                assert rows <= shape.x_rows <= PACKED_ROWS and 1 <= shape.splits <= max(1, steps // 4)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("name", ["NVFP4_46", "NVFP4", "NVFP4_ROW", "MXFP8", "FP8_ROW"])
def test_the_kernel_in_the_interpreter(name: str) -> None:
    script = Path(__file__).with_name("packed_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script, name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["compared", name]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_threads_are_where_the_tensor_core_wants_them() -> None:
    """What the interpreter cannot show: the layout that the compiler gives each product, for every kind of shape."""
    script = Path(__file__).with_name("packed_compile.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) > 10 and all(right == "True" for *_, right, _, _ in lines), done.stdout
    assert all(spilled == "0" for *_, spilled in lines), done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["NVFP4_46", "NVFP4", "NVFP4_ROW", "MXFP8", "FP8_ROW"])
def test_the_kernel_on_a_gpu(name: str) -> None:
    """Every code and scale through the identity, in assembly and without; then rows and shapes of every kind."""
    from packed_cases import CUTS, SPECS, compare, weights

    for asm in (True, False):
        for x in torch.eye(256).bfloat16().split(16):
            compare(SPECS[name], x, weights(208, 256), "cuda", asm)
    for rows, columns, width in (
        *((rows, 1008, 640) for rows in (1, 2, 7, 8, 9, 16, 17, 33, 64)),
        (1, 48, 128),
        (5, 2048, 2048),
        (16, 4096, 3584),
        (3, 16400, 1024),  # groups of warps, and a tile over
        (16, 16400, 256),
        (16, 64, 8192),
        (12, 16384, 256),
        (13, 512, 4096),
    ):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
        compare(SPECS[name], x, weights(columns, width), "cuda", True)
    for cut in CUTS:
        for columns, width in ((144, 640), (2064, 256), (48, 4096)):
            x = torch.randn(max(1, cut.x_rows - 1), width, generator=torch.Generator().manual_seed(2)).bfloat16()
            compare(SPECS[name], x, weights(columns, width), "cuda", True, cut)
    strided = torch.randn(4, 260, generator=torch.Generator().manual_seed(1)).bfloat16()[:, 3:259]
    compare(SPECS[name], strided, weights(64, 256), "cuda", True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "fp8_row", "fp8_block"])
def test_an_engine_that_packs_is_one_that_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of the same tokens, up to BF16's order of sums; also in formats that do not pay."""
    from sampler_oracle import logprobs_of, model_of

    from lowbit.infer.embedded import EmbeddedSampler
    from lowbit.infer.requests import Request
    from lowbit.infer.sampling import SamplingConfig
    from lowbit.quant.resolve import resolve

    monkeypatch.setattr(packed, "PAYING", (4, 8))
    model = model_of(torch.bfloat16, width=256, heads=4, kv_heads=2, mlp_width=512, init_std=0.05).cuda()
    policy = resolve(PrecisionConfig(sampler=name))
    engine = EmbeddedSampler(model, None, policy, slots=8)
    assert engine.packed == 3 * 7
    plain = EmbeddedSampler(model, None, policy, slots=8, packed=False)
    assert plain.packed == 0
    requests = [Request((1, 2, 3), i, 30, 4) for i in range(4)]
    apart = []
    for request, group in zip(requests, engine.sample(requests, SamplingConfig(), seed=1), strict=True):
        for sample in group:
            theirs = logprobs_of(plain.model, request, sample, SamplingConfig())
            apart.append(torch.tensor(sample.logprobs) - theirs)
    d = torch.cat(apart)
    # Where activations are rounded too, a last bit of a sum falls on another step of 8 bits now and then.
    assert (d.exp() - 1 - d).mean() < (5e-4 if name in WEIGHT_ONLY else 5e-3)
