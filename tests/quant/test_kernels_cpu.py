"""The C++ quantisers give the reference's bits: every spec, rotation, layout and special value."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles import same_bits

from lowbit.quant import spec as S
from lowbit.quant.kernels import cpu, ops
from lowbit.quant.kernels.cpu import library
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import fake_quantise
from lowbit.quant.spec import SPECS, VARIANTS, QuantSpec, Rounding, Scale

KEY, CLOCK = make_key(7, "a"), make_clock(3, 4, 5)
STREAM = Stream(KEY, CLOCK, Product.WGRAD, Side.LEFT)
LANE = ops.lane_of(STREAM)
SQUARES = replace(S.NVFP4_2D, rounding=Rounding.FOUR_OVER_SIX_MSE, bound=256.0)
MORE = (
    *VARIANTS.values(),
    SQUARES,
    replace(S.NVFP4_EDEN, rounding=Rounding.MS_EDEN_PUBLISHED),
    replace(S.NVFP4_POW2_EDEN, rounding=Rounding.MS_EDEN_PUBLISHED),
    replace(S.NVFP4_TETRAJET, rounding=Rounding.MS_EDEN, bound=255.99),
)
ALL = [None, *SPECS.values(), *MORE]
each_spec = pytest.mark.parametrize("spec", ALL, ids=lambda s: f"{s.name}-{s.rounding.value}" if s else "BF16")

pytestmark = pytest.mark.skipif(not any(map(shutil.which, cpu.COMPILERS)), reason="no C++ compiler")


def _forget() -> None:
    """The next use builds and loads anew."""
    cpu._build.cache_clear()
    library.cache_clear()


def tensors() -> Iterator[torch.Tensor]:
    """Two ranges in a shape that no block divides, with zeros, subnormals, NaN and infinity, by rows and by columns."""
    for exponent, bad in ((0, 1.0), (-60, float("nan")), (60, float("inf")), (-130, 1.0), (120, 1.0)):
        x = torch.randn(40, 280) * 2.0**exponent
        x[3, 40:60] = 0
        x[5, 7] = 1e-38
        x[7] *= 2.0**-100
        x[:, 64:80] = 0
        x[20, 3] *= bad
        yield x if exponent >= 0 else x.t().contiguous().t().bfloat16()


def run(x: torch.Tensor, spec: QuantSpec | None, signs: torch.Tensor | None, **more: torch.Tensor) -> ops.FactorTensors:
    """The kernel, into memory full of rubbish."""
    out = ops.allocate(x, signs, spec, x.dtype, True, True)
    for tensor in out:
        tensor.view(torch.uint8).fill_(0x55)
    padded = ops.padded_columns(ops.operand_width(x.shape[1], signs), spec)
    cpu.run_factor(x, spec, signs, KEY, CLOCK, LANE, more.get("choice"), more.get("amax"), padded, out)
    return out


def reference(
    x: torch.Tensor, spec: QuantSpec | None, signs: torch.Tensor | None, **more: torch.Tensor
) -> ops.FactorTensors:
    out = ops.allocate(x, signs, spec, x.dtype, True, True)
    return ops.reference(x, signs, spec, STREAM, more.get("choice"), more.get("amax"), x.dtype, out)


@each_spec
@pytest.mark.parametrize("rotation", [0, 16, 128])
def test_operands_scales_and_codes_have_the_references_bits(spec: QuantSpec | None, rotation: int) -> None:
    signs = STREAM.signs(rotation) if rotation else None
    for x in tensors():
        got, want = run(x, spec, signs), reference(x, spec, signs)
        for g, w in zip(got, want, strict=True):
            assert same_bits(g, w)
        if spec is not None:
            back = torch.empty_like(want[0])
            outer = want[4] if want[4].numel() else None
            cpu.run_unpack(want[2], want[3], outer, spec, ops.padded_columns(back.shape[1], spec), back)
            assert same_bits(back, want[0])


def test_every_spec_has_a_kernel_and_odd_ones_the_reference() -> None:
    assert cpu.missing() is None
    assert all(cpu.handles(spec) for spec in ALL)
    odd = replace(S.NVFP4_POW2, block=(1, 32))
    assert not cpu.handles(odd)
    x = torch.randn(20, 72)
    out = ops.factor_op(x, None, KEY, CLOCK, None, None, ops.spec_text(odd), LANE, torch.float32, True, True, False)
    assert same_bits(out[0], fake_quantise(x, odd).float())


def test_several_threads_give_the_same_bits() -> None:
    x = torch.randn(300, 256)
    one = {spec: run(x, spec, None) for spec in ALL}
    torch.set_num_threads(2)
    try:
        for spec, want in one.items():
            assert all(same_bits(g, w) for g, w in zip(run(x, spec, None), want, strict=True))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("spec", [S.NVFP4_46, S.NVFP4_POW2_46, VARIANTS["NVFP4_46_MAE"], SQUARES], ids=lambda s: s.name)
def test_kept_choices_of_four_and_six(spec: QuantSpec) -> None:
    x = torch.randn(40, 280)
    rows = -(-40 // spec.block[0])
    choice = torch.tensor([0, 4, 6], dtype=torch.int8)[torch.randint(0, 3, (rows, ops.padded_columns(280, spec) // 16))]
    got, want = run(x, spec, None, choice=choice), reference(x, spec, None, choice=choice)
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))
    assert not same_bits(got[0], run(x, spec, None)[0])


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.scale is Scale.FP32], ids=lambda s: s.name)
def test_static_range(spec: QuantSpec) -> None:
    amax = torch.tensor(1.5)
    for x in tensors():
        got, want = run(x, spec, None, amax=amax), reference(x, spec, None, amax=amax)
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


def test_signs() -> None:
    for count in (16, 40, 128, 300):
        assert torch.equal(ops.signs_op(KEY, CLOCK, LANE, count), STREAM.signs(count))


@each_spec
def test_a_spec_survives_as_text(spec: QuantSpec | None) -> None:
    assert ops.spec_of(ops.spec_text(spec)) == spec


@pytest.mark.parametrize("spec", [None, S.NVFP4_POW2_EDEN, S.NVFP4_SR, S.FP8_BLOCK_2D, S.INT8_ROW], ids=str)
def test_the_operators_are_what_they_declare(spec: QuantSpec | None) -> None:
    x = torch.randn(20, 72)
    rest = (KEY, CLOCK, None, None, ops.spec_text(spec), LANE, torch.bfloat16, True, True, False)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.factor_op, (x, STREAM.signs(128), *rest), test_utils=tests)
    if spec is not None:
        _, _, data, scales, outer = ops.factor_op(x, None, *rest)
        packed = (data, scales, outer if outer.numel() else None, ops.spec_text(spec), 20, 72, torch.float32)
        torch.library.opcheck(ops.unpack_op, packed, test_utils=tests)
    torch.library.opcheck(ops.signs_op, (KEY, CLOCK, LANE, 128), test_utils=tests)


def test_without_a_compiler_the_reference_runs_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.randn(20, 72)
    rest = (KEY, CLOCK, None, None, ops.spec_text(S.NVFP4_POW2_46), LANE, torch.float32, True, True, False)
    want = ops.factor_op(x, None, *rest)
    monkeypatch.setenv("PATH", str(tmp_path))
    _forget()
    try:
        assert library() is None
        assert cpu.missing() == "no C++ compiler (c++, g++ or clang++)"
        assert all(same_bits(g, w) for g, w in zip(ops.factor_op(x, None, *rest), want, strict=True))
        broken = tmp_path / "c++"
        broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
        broken.chmod(0o755)
        _forget()
        assert "failed: no such thing" in str(cpu.missing())
    finally:
        _forget()


def test_without_a_home_the_library_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no entry among the users, and no HOME."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cpu.Path, "home", nowhere)
    _forget()
    try:
        assert library() is not None and cpu.missing() is None
    finally:
        _forget()
