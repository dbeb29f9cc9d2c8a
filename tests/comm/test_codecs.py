"""Every way of coding gives the reference's bytes; the plain codecs against NumPy."""

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from test_squinch import KINDS, values

from lowbit.comm.codec import Codec, IntCodec
from lowbit.comm.codecs import CODECS, Squinch, make_codec
from lowbit.comm.grid import SQ48, SQUINCH
from lowbit.comm.noise import Noise
from lowbit.comm.squinch import ReferenceSquinch
from lowbit.errors import ConfigError, LowbitError

FORMATS = {"squinch": (SQUINCH, True), "sq48": (SQ48, True), "sq48_fast": (SQ48, False)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, one NaN like another."""
    assert a.dtype == b.dtype == torch.float32
    return torch.equal(a.nan_to_num(77.0).view(torch.int32), b.nan_to_num(77.0).view(torch.int32))


def check_against_reference(
    codec: Codec, reference: Codec, device: str, sizes: list[tuple[int, int, int]], kinds: list[str] = KINDS
) -> None:
    """All methods, on all kinds of values: (rows, values a row, values there are)."""
    for kind, (rows, per_row, n), dtype in itertools.product(kinds, sizes, (torch.float32, torch.bfloat16)):
        where = f"{codec.name} {kind} {rows} x {per_row}, {n} values, {dtype}"
        if dtype is torch.bfloat16 and kind not in ("normal", "bad"):
            continue
        x = torch.from_numpy(values(kind, n, seed=n)).to(dtype) if n else torch.zeros(0, dtype=dtype)
        expected = reference.encode_rows(x, rows, per_row)
        messages = codec.encode_rows(x.to(device), rows, per_row)
        assert torch.equal(messages.cpu(), expected), where
        out, out_expected = torch.full((n,), 9.0), torch.full((n,), 9.0)
        reference.decode_rows(expected, per_row, out_expected)
        out = out.to(device)
        codec.decode_rows(messages, per_row, out)
        assert same(out.cpu(), out_expected), where
        for factor in (1.0, 1 / 3):
            total = codec.sum_decode(messages, per_row, factor)
            assert same(total.cpu(), reference.sum_decode(expected, per_row, factor)), where
            again = codec.sum_encode(messages, per_row, factor)
            assert torch.equal(again.cpu(), reference.sum_encode(expected, per_row, factor)), where
        if dtype is torch.bfloat16:
            rounded = torch.empty(n, dtype=dtype, device=device)
            codec.decode_rows(messages, per_row, rounded)
            assert same(rounded.cpu().float(), out_expected.bfloat16().float()), where


def check_noise(
    codec: Codec, reference: Codec, device: str, sizes: list[tuple[int, int, int]], kinds: list[str] = KINDS
) -> None:
    """The same for stochastic rounding: noise of each row, of a message alone, and of a sum."""
    noise = Noise((1 << 35, 7, 3))
    for kind, (rows, per_row, n) in itertools.product(kinds, sizes):
        where = f"{codec.name} {kind} {rows} x {per_row}, {n} values"
        x = torch.from_numpy(values(kind, n, seed=n)) if n else torch.zeros(0)
        expected = reference.encode_rows(x, rows, per_row, noise)
        messages = codec.encode_rows(x.to(device), rows, per_row, noise)
        assert torch.equal(messages.cpu(), expected), where
        assert torch.equal(codec.encode(x.to(device), noise).cpu(), reference.encode(x, noise)), where
        again = codec.sum_encode(messages, per_row, 1 / 3, noise)
        assert torch.equal(again.cpu(), reference.sum_encode(expected, per_row, 1 / 3, noise)), where
        if kind == "normal" and n > 1000:
            assert not torch.equal(expected, reference.encode_rows(x, rows, per_row)), where


@pytest.mark.parametrize("name", FORMATS)
def test_the_fast_path_is_the_reference(name: str) -> None:
    sizes = [(1, 0, 0), (1, 1, 1), (3, 256, 700), (2, 4224, 8400), (3, 100, 100), (1, 33000, 33000)]
    check_against_reference(make_codec(name), ReferenceSquinch(*FORMATS[name]), "cpu", sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_are_the_reference(name: str) -> None:
    sizes = [(1, 0, 0), (1, 1, 1), (3, 256, 700), (2, 4224, 8400), (3, 100, 100), (5, 40960, 200001)]
    check_against_reference(make_codec(name), ReferenceSquinch(*FORMATS[name]), "cuda", sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_round_by_chance_as_the_reference(name: str) -> None:
    sizes = [(1, 0, 0), (1, 1, 1), (3, 256, 700), (2, 4224, 8400), (5, 40960, 200001)]
    check_noise(make_codec(name), ReferenceSquinch(*FORMATS[name]), "cuda", sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_find_every_level(name: str) -> None:
    """All steps of the grid under many scales: where an approximate root could fall on the wrong side."""
    grid = FORMATS[name][0]
    step = torch.arange(grid.steps + 1) / grid.steps
    blocks = torch.nn.functional.pad(step, (0, -len(step) % (grid.block - 1))).view(-1, grid.block - 1)
    scales = 2.0 ** (torch.arange(64) / 64)
    largest = torch.ones(len(blocks), 1)
    x = (scales[:, None, None] * torch.cat([largest, blocks], 1)).flatten()
    expected = ReferenceSquinch(*FORMATS[name]).encode(x)
    assert torch.equal(make_codec(name).encode(x.cuda()).cpu(), expected)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_in_the_interpreter() -> None:
    """The kernels' arithmetic on a machine without a GPU, in a process of its own (the interpreter is chosen when
    Triton is imported).
    """
    code = """
import numpy, torch
from test_codecs import FORMATS, INTERPRETED, check_against_reference, check_noise, interpreted
numpy.seterr(all="ignore")
for name in FORMATS:
    check_against_reference(*interpreted(name), "cpu", *INTERPRETED)
    check_noise(*interpreted(name), "cpu", *INTERPRETED)
print("equal")
"""
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


INTERPRETED = ([(1, 0, 0), (2, 4224, 4300)], ["rows", "bad", "huge"])


def interpreted(name: str) -> tuple[Codec, Codec]:
    """A codec whose CPU tensors go through the kernels, and the reference."""
    codec = Squinch(*FORMATS[name])
    gpu = codec.on_gpu()

    class Interpreted(ReferenceSquinch):
        def encode(self, x: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
            out = torch.full((1, self.nbytes(len(x))), 77, dtype=torch.uint8)
            gpu.encode(x, 1, len(x), out, [noise] if noise else None)
            return out[0]

        def encode_rows(self, x: torch.Tensor, rows: int, per_row: int, noise: Noise | None = None) -> torch.Tensor:
            out = torch.full((rows, self.nbytes(per_row)), 77, dtype=torch.uint8)
            gpu.encode(x, rows, per_row, out, [noise.fork(r) for r in range(rows)] if noise else None)
            return out

        def decode_rows(self, messages: torch.Tensor, per_row: int, out: torch.Tensor) -> None:
            target = out.float()  # the interpreter truncates to BF16
            gpu.decode(messages, per_row, target)
            out.copy_(target)

        def sum_decode(
            self, messages: torch.Tensor, n: int, factor: float, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            out = torch.empty(n)
            gpu.sum(messages, n, factor, out, encode=False)
            return out

        def sum_encode(self, messages: torch.Tensor, n: int, factor: float, noise: Noise | None = None) -> torch.Tensor:
            out = torch.full((self.nbytes(n),), 77, dtype=torch.uint8)
            gpu.sum(messages, n, factor, out, encode=True, noise=noise)
            return out

    return Interpreted(*FORMATS[name]), ReferenceSquinch(*FORMATS[name])


def test_bf16_rounds_to_nearest_even() -> None:
    x = values("wide", 10_000)
    codec = make_codec("bf16")
    y = codec.decode(codec.encode(torch.from_numpy(x)), len(x)).numpy()
    assert np.array_equal(y, x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_fp32_is_exact() -> None:
    x = torch.from_numpy(values("wide", 1001))
    codec = make_codec("fp32")
    rows = codec.encode_rows(x, 3, 400)
    out = torch.empty_like(x)
    codec.decode_rows(rows, 400, out)
    assert torch.equal(out, x) and rows.shape == (3, 1600)


@pytest.mark.parametrize(("bits", "block"), [(8, 2048), (4, 2048), (4, 128)])
@pytest.mark.parametrize("n", [0, 1, 2048, 5000])
def test_integers(bits: int, block: int, n: int) -> None:
    """round(x / (largest / 127)) in FP64, one scale a block."""
    x = values("normal", n)
    codec = IntCodec(bits, block)
    message = codec.encode(torch.from_numpy(x))
    assert message.numel() == codec.nbytes(n)
    y = codec.decode(message, n).numpy()
    top = 2 ** (bits - 1) - 1
    for begin in range(0, n, block):
        part = x[begin : begin + block].astype(np.float64)
        scale = np.abs(part).max() / top
        assert np.abs(y[begin : begin + block] / scale - np.rint(part / scale)).max() < 1e-3


def test_integers_say_when_a_block_is_not_finite() -> None:
    codec = IntCodec(8, 128)
    x = torch.randn(1000)
    x[200] = torch.inf
    y = codec.decode(codec.encode(x), 1000)
    assert y[128:256].isnan().all() and y.isnan().sum() == 128
    assert not codec.decode(codec.encode(torch.zeros(100)), 100).any()


@pytest.mark.parametrize("name", CODECS)
def test_the_sum_is_ordered_fp32(name: str) -> None:
    """Message 0 first, FP32 at each step, one product at the end: a different order gives other bits."""
    codec = make_codec(name)
    x = torch.randn(5, 3000) * torch.tensor([1e3, 1.0, 1e-3, 1e3, 1.0])[:, None]
    rows = torch.stack([codec.encode(r) for r in x])
    decoded = torch.stack([codec.decode(r, 3000) for r in rows]).numpy()
    total = decoded[0]
    for r in range(1, 5):
        total = (total + decoded[r]).astype(np.float32)
    expected = torch.from_numpy(total * np.float32(0.2))
    assert same(codec.sum_decode(rows, 3000, 0.2), expected)
    assert torch.equal(codec.sum_encode(rows, 3000, 0.2), codec.encode(expected))


def test_a_wrong_message_is_refused_where_it_costs_nothing() -> None:
    message = make_codec("squinch").encode(torch.randn(256))
    for use in ("decode", "sum_decode", "sum_encode"):
        with pytest.raises(LowbitError, match=r"bytes|in squinch"):
            args = (message, 256) if use == "decode" else (message[None], 256, 1.0)
            getattr(make_codec("sq48"), use)(*args)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="squinch"):
        make_codec("sq49")
