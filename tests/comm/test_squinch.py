"""The 6-bit formats against an independent coder, closed forms and published figures."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from squinch_oracle import Oracle, snr_db

from lowbit.comm.grid import SHRINK, SQ48, SQUINCH, Grid, squinch_maximum, squinch_thresholds
from lowbit.comm.message import layout
from lowbit.comm.noise import Noise
from lowbit.comm.squinch import ReferenceSquinch
from lowbit.errors import LowbitError

GOLDEN = Path(__file__).with_name("golden_squinch.json")
CODECS = {
    "squinch": ReferenceSquinch(SQUINCH),
    "sq48": ReferenceSquinch(SQ48),
    "sq48_fast": ReferenceSquinch(SQ48, search=False),
}
ORACLES = {
    "squinch": Oracle("squinch"),
    "sq48": Oracle("sq48"),
    "sq48_fast": Oracle("sq48", search=False),
}
NAMES = list(CODECS)


def values(kind: str, n: int, seed: int = 0) -> np.ndarray:
    """Inputs that gradients, or bad luck, can look like. FP32 [n]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    if kind == "wide":  # 60 octaves between neighbours
        x = x * 2.0 ** rng.uniform(-30, 30, n)
    elif kind == "tiny":
        x = x * 2.0 ** rng.uniform(-149, -80, n)
    elif kind == "huge":
        x = np.sign(x) * 2.0 ** rng.uniform(100, 127.999, n)
    elif kind == "rows":  # each block with a scale of its own
        x = x * 2.0 ** rng.uniform(-40, 2, -(-n // 16)).repeat(16)[:n]
    elif kind == "sparse":
        x = x * (rng.random(n) < 0.05)
    elif kind == "bad":
        x[rng.integers(0, n, 5)] = np.nan
        x[rng.integers(0, n, 5)] = np.inf
        x[rng.integers(0, n, 5)] = -np.inf
    elif kind == "equal":
        x = np.full(n, -3.0)
    elif kind == "powers":
        x = 2.0 ** rng.integers(-40, 40, n)
    elif kind == "zeros":
        x = np.where(rng.random(n) < 0.5, 0.0, -0.0)
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


KINDS = ["normal", "wide", "tiny", "huge", "rows", "sparse", "bad", "equal", "powers", "zeros"]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_values_are_those_of_the_independent_coder(name: str) -> None:
    codec, oracle = CODECS[name], ORACLES[name]
    for kind, n in [*itertools.product(KINDS, [1000]), ("rows", 9001), ("bad", 5000)]:
        x = values(kind, n)
        data = oracle.encode(x)
        message = codec.encode(torch.from_numpy(x))
        assert bytes(message.tolist()) == data, kind
        expected = oracle.decode(data, n)
        decoded = codec.decode(message, n).numpy()
        assert np.array_equal(decoded.view(np.int32)[~np.isnan(expected)], expected.view(np.int32)[~np.isnan(expected)])
        assert np.array_equal(np.isnan(decoded), np.isnan(expected)), kind


@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors(name: str) -> None:
    """The bytes of version 1 do not change."""
    for case in json.loads(GOLDEN.read_text())[name]:
        x = torch.tensor(list(bytes.fromhex(case["values"])), dtype=torch.uint8).view(torch.float32)
        assert bytes(CODECS[name].encode(x).tolist()).hex() == case["message"]


@pytest.mark.parametrize("name", NAMES)
def test_every_length(name: str) -> None:
    codec, oracle = CODECS[name], ORACLES[name]
    for n in [0, 1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097]:
        x = values("rows", n, seed=n) if n else np.zeros(0, np.float32)
        message = codec.encode(torch.from_numpy(x))
        assert message.numel() == codec.nbytes(n) == layout(codec.grid, n).nbytes
        assert message.numel() % 16 == 0
        assert codec.decode(message, n).shape == (n,)
        if n < 300:
            assert bytes(message.tolist()) == oracle.encode(x)


def test_bits_a_value() -> None:
    """48 bits for 8 values; a header of 16 bytes and an exponent byte for 4096 values on top."""
    n = 1 << 20
    assert CODECS["squinch"].nbytes(n) == n * 6 // 8 + 16
    assert CODECS["sq48"].nbytes(n) == n * 6 // 8 + 16 + n // 4096


PUBLISHED = [
    ("squinch", "gauss", 26.4),
    ("squinch", "laplace", 26.3),
    ("sq48", "gauss", 28.7),
    ("sq48", "laplace", 28.45),
    ("sq48_fast", "gauss", 28.4),
    ("sq48_fast", "laplace", 28.2),
]


@pytest.mark.parametrize(("name", "law", "expected"), PUBLISHED)
def test_signal_to_noise(name: str, law: str, expected: float) -> None:
    """Simulations of ideal coders with these constants (FP64, nearest level) gave these figures."""
    rng = np.random.default_rng(1)
    n = 1 << 18
    x = {
        "gauss": rng.standard_normal,
        "laplace": lambda n: rng.laplace(size=n),
    }[law](n).astype(np.float32)
    codec = CODECS[name]
    y = codec.decode(codec.encode(torch.from_numpy(x)), n).numpy()
    assert abs(snr_db(x, y) - expected) < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_zero_decodes_to_zero(name: str) -> None:
    x = torch.from_numpy(values("sparse", 4096))
    y = CODECS[name].decode(CODECS[name].encode(x), 4096)
    assert (y[x == 0] == 0).all()
    assert (y[x != 0] != 0).float().mean() > 0.9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_decodes_to_nan_and_no_other(name: str, bad: float) -> None:
    codec = CODECS[name]
    x = torch.randn(1000)
    x[77] = bad
    y = codec.decode(codec.encode(x), 1000)
    block = codec.grid.block
    first = 77 // block * block
    assert y[first : first + block].isnan().all()
    assert y.isnan().sum() == block


@pytest.mark.parametrize("name", NAMES)
def test_largest_value_of_a_block_keeps_its_size(name: str) -> None:
    """The top of the range is not clipped: a block's largest value is off by at most half the widest gap."""
    x = torch.from_numpy(values("rows", 4096))
    y = CODECS[name].decode(CODECS[name].encode(x), 4096)
    block = CODECS[name].grid.block
    largest, at = x.view(-1, block).abs().max(1)
    decoded = y.view(-1, block).abs().gather(1, at[:, None])[:, 0]
    reached = largest > largest.max() * 2**-28
    assert ((decoded - largest).abs() / largest)[reached].max() < 0.09


def test_sq48_reaches_30_octaves_below_the_tile_and_fades_out_below() -> None:
    errors = []
    for octave in (0, 20, 30, 35, 40):
        x = torch.randn(4096) * 2.0**-octave
        x[:8] = 1.9
        y = CODECS["sq48"].decode(CODECS["sq48"].encode(x), 4096)
        errors.append(float(((y - x)[8:].square().sum() / x[8:].square().sum()).sqrt()))
    assert max(errors[:3]) < 0.04 < errors[3] < 0.3
    assert errors[4] > 0.9


def test_published_maximum() -> None:
    """code = floor(6 ln m + 129) clipped, on both sides of every threshold."""
    thresholds = squinch_thresholds()
    for code, threshold in enumerate(thresholds, start=1):
        below = float(np.nextafter(np.float32(threshold), np.float32(0)))
        assert math.floor(6 * math.log(threshold) + 129) == code
        assert math.floor(6 * math.log(below) + 129) == code - 1
        assert squinch_maximum(code) > threshold


@pytest.mark.parametrize("grid", [SQUINCH, SQ48], ids=lambda g: g.name)
def test_no_step_lies_near_a_boundary(grid: Grid) -> None:
    """What lets approximate roots of a device find exact levels: 8e-4 of a level at least."""
    for shrink in (1.0, SHRINK) if grid is not SQUINCH else (1.0,):
        positions = np.array([grid.boundary_position(i, shrink) for i in range(grid.steps + 1)])
        assert np.abs(positions - np.rint(positions)).min() > 8e-4


def test_search_takes_the_better_scale() -> None:
    """Squared error never above that of the larger scale alone, in every block (within the grid's resolution)."""
    x = torch.randn(1 << 16)
    errors = {}
    for name in ("sq48", "sq48_fast"):
        y = CODECS[name].decode(CODECS[name].encode(x), x.numel())
        errors[name] = (x - y).view(-1, 8).square().sum(1)
    assert (errors["sq48"] <= errors["sq48_fast"] * 1.02 + 1e-6).float().mean() > 0.99


@pytest.mark.parametrize("name", ["squinch", "sq48"])
def test_stochastic_rounding_keeps_the_mean(name: str) -> None:
    """The mean of many draws comes as near as its own spread allows; without noise it does not."""
    codec = CODECS[name]
    x = torch.from_numpy(values("normal", 512))
    draws = torch.stack([codec.decode(codec.encode(x, Noise((1, k))), 512) for k in range(400)])
    error = (draws.mean(0) - x).view(-1, codec.grid.block)
    spread = draws.std(0).view(-1, codec.grid.block) / 20
    spread = spread.clamp(min=0.2 * float(spread.square().mean().sqrt()))  # rare roundings: too few draws to tell
    assert ((error / spread).abs() < 5).all()
    assert 0.6 < (error / spread).square().mean() < 1.3
    nearest = (codec.decode(codec.encode(x), 512) - x).view_as(error)
    assert nearest.square().mean() > 10 * error.square().mean()


def test_noise_is_uniform_independent_and_repeatable() -> None:
    a = Noise((7, 1)).uniform(1 << 16, torch.device("cpu"))
    assert torch.equal(a, Noise((7, 1)).uniform(1 << 16, torch.device("cpu")))
    assert a.min() >= 0 and a.max() < 1
    counts = torch.histc(a, 64, 0, 1)
    assert ((counts - 1024).square() / 1024).sum() < 110  # chi-squared with 63 degrees of freedom
    for other in ((7, 2), (8, 1), (7,), (7, 1, 0)):
        b = Noise(other).uniform(1 << 16, torch.device("cpu"))
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1]) < 0.02


def test_rows_are_messages_of_their_own() -> None:
    codec = CODECS["sq48"]
    x = torch.randn(3 * 256 - 100)
    rows = codec.encode_rows(x, 4, 256)
    assert torch.equal(rows[1], codec.encode(x[256:512]))
    assert torch.equal(rows[3], codec.encode(torch.zeros(256)))
    out = torch.empty_like(x)
    codec.decode_rows(rows, 256, out)
    assert torch.equal(out, codec.decode(codec.encode(x), x.numel()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m[:-1], "bytes"),
        (lambda m: _with(m, 0, 0), "not a gradient message"),
        (lambda m: _with(m, 2, 9), "version 9"),
        (lambda m: _with(m, 3, 1), "in squinch"),
        (lambda m: _with(m, 4, 99), "expected 100"),
    ],
)
def test_a_wrong_message_is_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    message = CODECS["sq48"].encode(torch.randn(100))
    with pytest.raises(LowbitError, match=words):
        CODECS["sq48"].decode(change(message), 100)


def _with(message: torch.Tensor, at: int, value: int) -> torch.Tensor:
    message = message.clone()
    message[at] = value
    return message
