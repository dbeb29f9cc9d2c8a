"""The Triton quantisers: the reference's bits, on a GPU and in Triton's interpreter; what a NaN does; no waiting."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit.quant import spec as S
from lowbit.quant.kernels import ops
from lowbit.quant.linear_products import linear_products
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.presets import PRESETS

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    import kernel_cases

NAMES = ["BF16", *kernel_cases.TAKEN] if HAS_TRITON else ["BF16"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_references_bits(name: str) -> None:
    spec = kernel_cases.TAKEN.get(name)
    for rotation in kernel_cases.rotations(spec):
        for x in kernel_cases.inputs():
            kernel_cases.compare(spec, rotation, x, "cuda")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("name", ["MXFP8", "NVFP4_POW2_46", "NVFP4_POW2_SR", "NVFP4_POW2_EDEN", "NVFP4_2D", "INT8_ROW"])
def test_the_interpreter_gives_the_references_bits(name: str) -> None:
    script = Path(__file__).with_name("kernel_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script, name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["BF16", name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRESETS)
def test_where_kernels_do_not_compile_the_reference_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs before Ampere."""
    results = []
    for missing in (None, "too old"):
        monkeypatch.setattr(ops, "missing", lambda device, missing=missing: missing)
        torch.manual_seed(0)
        key, clock = make_key(1, "a").cuda(), make_clock().cuda()
        weight, x = torch.randn(72, 200).cuda().requires_grad_(), torch.randn(33, 200).cuda().requires_grad_()
        (y,) = linear_products(x, [weight], [key], clock, PRESETS[name])
        y.sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [S.NVFP4_POW2_46, S.NVFP4_46, S.MXFP8, S.FP8_TENSOR, S.INT8_ROW], ids=lambda s: s.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_operand_as_nan(spec: S.QuantSpec, bad: float) -> None:
    x = torch.randn(8, 256, device="cuda")
    x[2, 130] = bad
    key, clock = make_key(1, "a").cuda(), make_clock().cuda()
    settings = ops.spec_text(spec), 0, torch.bfloat16, True, False, False
    operand, after, *_ = ops.factor_op(x, None, key, clock, None, None, *settings)
    value = operand.float() if after.numel() == 0 else operand.float() * after
    assert value[2, 130].isnan()
    assert not value.isinf().any()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [16, 128])
def test_signs_are_the_cpus(count: int) -> None:
    key, clock = make_key(1, "a"), make_clock(3, 1, 2)
    stream = Stream(key, clock, Product.WGRAD, Side.LEFT)
    drawn = ops.signs_op(key.cuda(), clock.cuda(), ops.lane_of(stream), count)
    assert torch.equal(drawn.cpu(), stream.signs(count))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [S.NVFP4_POW2_46, S.MXFP8, S.FP8_TENSOR, S.INT8_ROW], ids=lambda s: s.name)
def test_beyond_two_to_the_31_numbers(spec: S.QuantSpec) -> None:
    """The last rows, and of the transpose the last columns, are what they are alone; the last number is the largest."""
    rows, columns, tail = (1 << 31) // 4096 + 128, 4096, 128
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-tail:] = torch.randn(tail, columns, device="cuda")
    x[-1, -1] = 90.0
    key, clock = make_key(1, "a").cuda(), make_clock().cuda()

    def made(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.factor_op(
            matrix, None, key, clock, None, None, ops.spec_text(spec), 0, torch.bfloat16, True, True, False
        )

    whole, alone = made(x), made(x[-tail:])
    assert torch.equal(whole[0][-tail:], alone[0]) and torch.equal(whole[2][-tail:], alone[2])
    outer = whole[4] if whole[4].numel() else None
    back = ops.unpack_op(whole[2], whole[3], outer, ops.spec_text(spec), rows, columns, torch.bfloat16)
    assert torch.equal(back[-tail:], alone[0])
    del whole, back
    whole, alone = made(x.t()), made(x[-tail:].t())
    assert torch.equal(whole[0][:, -tail:], alone[0])
