"""Bits: against a reader in plain Python integers; rounding against its definition; sizes against what was promised."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_estimators import CASES, DRAWS, TEACHERS, UNBIASED, VOCAB, dense, draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.blocks import Distributions
from lowbit.distill.codec import ZERO, Decoded, Layout, _levels, decode, encode, pack, round_entropy, round_weights
from lowbit.distill.estimators import Kept, sampler
from lowbit.distill.noise import Noise, Places

SKIPPED = 7
"""A position of every sample that has no targets."""


def keep(estimator: Estimator, logits: Tensor, k: int, samples: int, seed: int = 3) -> tuple[Kept, Tensor, Places]:
    """Targets and entropies of [samples * T] positions."""
    rows = len(logits)
    places = Places(torch.arange(samples).repeat_interleave(rows // samples), torch.arange(rows) % (rows // samples))
    p = Distributions(logits.clone(), logits.shape[1])
    return sampler(estimator)(p, k, Noise(seed, estimator.value), places), p.entropy, places


def store(layout: Layout, kept: Kept, entropy: Tensor, places: Places, samples: int) -> tuple[Tensor, Tensor]:
    """(words int32, first word of each sample)."""
    counted = places.position != SKIPPED
    values, widths = encode(layout, kept, entropy, Noise(9, "codes"), places, counted)
    words, sizes = pack(values, widths, samples)
    assert len(words) == int(sizes.sum())
    return words.to(torch.int32), sizes.cumsum(0) - sizes


class Bits:
    """A stream of bits as one Python integer."""

    def __init__(self, words: Tensor) -> None:
        self.value = int.from_bytes(words.numpy().astype("<i4").tobytes(), "little")

    def take(self, width: int) -> int:
        out = self.value & ((1 << width) - 1)
        self.value >>= width
        return out


def plain_reader(layout: Layout, words: Tensor, length: int) -> list[tuple[dict[int, float], float]]:
    """Each position's {id: weight} and entropy, by the description in codec.py, a bit at a time."""
    stream = Bits(words)
    ids = (layout.vocab_size - 1).bit_length()
    base = max(0, ids - 15)
    k = layout.targets

    def level(code: int) -> float:
        if layout.estimator is Estimator.multinomial:
            return code / k
        return 0.0 if code == 255 else math.exp((4 if layout.estimator is Estimator.gumbel else 0) - code / 16)

    headers = []
    for _ in range(length):
        headers.append(
            (
                stream.take((k + 1).bit_length()),
                stream.take(1),
                stream.take(4) + base,
                stream.take(4) + base,
                stream.take(12),
            )
        )
    out = []
    for count, implied, wc, wp, entropy in headers:
        weights: dict[int, float] = {}
        first, rest = -1, 0.0
        if count == k + 1:
            out.append((weights, entropy / 256))
            continue
        if implied:
            first, rest = stream.take(ids), level(stream.take(8))
        at = 0
        for _ in range(count):
            at += stream.take(wc)
            weights[at] = weights.get(at, 0.0) + level(stream.take(8))
        if layout.estimator in (Estimator.varopt, Estimator.topk):
            left = 1 - sum(weights.values())
            if implied:
                weights[first] = left - rest
            else:
                rest = left
        if layout.estimator is Estimator.varopt:
            plain, at = k - count - implied, 0
            for _ in range(plain):
                at += stream.take(wp)
                weights[at] = weights.get(at, 0.0) + rest / plain
        out.append((weights, entropy / 256))
    assert stream.value == 0, "nothing but zeros is left"
    return out


@pytest.mark.parametrize("estimator", Estimator)
def test_an_id_outside_of_the_vocabulary_is_not_read_at(estimator: Estimator) -> None:
    """Bits that were damaged: ids as wide as those of 500 tokens, where there are 257."""
    logits = torch.randn(4 * 16, 500)
    kept, entropy, places = keep(estimator, logits, 8, 4)
    words, starts = store(Layout(estimator, 8, 500), kept, entropy, places, 4)
    whole = decode(Layout(estimator, 8, 500), words, starts, 16)
    got = decode(Layout(estimator, 8, 257), words, starts, 16)
    wrong = whole.ids >= 257
    assert wrong.any() and not wrong.all()
    assert got.weights[wrong].isnan().all() and not got.ids[wrong].any()
    assert torch.equal(got.ids[~wrong], whole.ids[~wrong]) and torch.equal(got.weights[~wrong], whole.weights[~wrong])


@pytest.mark.parametrize("k", [1, 7, 16, 64])
@pytest.mark.parametrize("estimator", Estimator)
@pytest.mark.parametrize("vocab", [257, 20_000])
def test_bits_against_a_plain_reader(estimator: Estimator, k: int, vocab: int) -> None:
    if estimator is Estimator.gumbel and k == 1:
        k = 4
    torch.manual_seed(6)
    samples, length = 3, 13
    logits = torch.randn(samples * length, vocab) * torch.linspace(0.1, 12, samples * length)[:, None]
    logits[5, 3:] = float("-inf")
    logits[6] = 0.0
    layout = Layout(estimator, k, vocab)
    kept, entropy, places = keep(estimator, logits, k, samples)
    words, starts = store(layout, kept, entropy, places, samples)
    got = decode(layout, words, starts, length)
    assert got.ids.shape == got.weights.shape == (samples, length, k) and got.weights.dtype == torch.float32
    ends = [*starts.tolist()[1:], len(words)]
    for s, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        for t, (weights, h) in enumerate(plain_reader(layout, words[start:end], length)):
            assert bool(weights) == (t != SKIPPED)
            row = got.ids[s, t], got.weights[s, t]
            ours: dict[int, float] = {}
            for i, w in zip(row[0].tolist(), row[1].tolist(), strict=True):
                if w != 0:
                    ours[i] = ours.get(i, 0.0) + w
            theirs = {i: w for i, w in weights.items() if abs(w) > 0}
            assert ours.keys() <= theirs.keys()
            for i, w in theirs.items():
                assert ours.get(i, 0.0) == pytest.approx(w, abs=1e-6, rel=1e-5)
            assert float(got.entropy[s, t]) == h
            assert abs(h - float(entropy[s * length + t])) < 1 / 256
    rows = kept.ids.view(samples, length, k)
    for s in range(samples):
        for t in range(length):
            assert set(got.ids[s, t][got.weights[s, t] != 0].tolist()) <= set(rows[s, t].tolist())


def decoded(estimator: Estimator, kept: Kept, k: int, entropy: float = 1.0) -> Decoded:
    layout = Layout(estimator, k, VOCAB)
    rows = len(kept.ids)
    places = Places(torch.arange(rows) // 64, torch.arange(rows) % 64)
    values, widths = encode(layout, kept, torch.full((rows,), entropy, dtype=torch.float64), Noise(2, "q"), places)
    words, _ = pack(values, widths, 1)
    return decode(layout, words.to(torch.int32), torch.zeros(1, dtype=torch.int64), rows)


@pytest.mark.parametrize(("teacher", "k"), CASES)
@pytest.mark.parametrize("estimator", UNBIASED)
def test_stored_targets_are_unbiased(estimator: Estimator, teacher: str, k: int) -> None:
    """Sampling and rounding together: the mean of what a student sees is the teacher, within five standard errors."""
    p = TEACHERS[teacher]
    kept = draw(estimator, p, k)
    got = decoded(estimator, kept, k, entropy=1.001)
    w = dense(Kept(got.ids[0], got.weights[0].double(), kept.named, kept.rest))
    error = np.abs(w.mean(axis=0) - p)
    assert (error <= 5 * w.std(axis=0) / DRAWS**0.5 + 2e-6 * p).all()
    if estimator is not Estimator.gumbel:
        np.testing.assert_allclose(w.sum(axis=1), 1.0, atol=2e-6)
    h = got.entropy[0]
    assert abs(float(h.mean()) - 1.001) < 5 * float(h.std()) / DRAWS**0.5
    # Rounding adds less than a tenth to the variance of a step of cross-entropy, whose targets are one-hot.
    before, after = dense(kept).var(axis=0).sum(), w.var(axis=0).sum()
    assert after - before < 0.1 * (1 - (p**2).sum())
    assert (w > -1e-7).all()


def test_rounding_of_weights_is_unbiased_on_any_weight() -> None:
    torch.manual_seed(1)
    for estimator, values in (
        (Estimator.varopt, [1.0, 0.97, 0.5, 0.1, 1e-3, 2e-7, 1.3e-7, 1e-8, 0.0]),
        (Estimator.gumbel, [20.0, 1.3, 0.4, 1e-4, 7e-6, 1e-7, 0.0]),
    ):
        layout = Layout(estimator, 16, VOCAB)
        levels = layout.levels().double()
        assert levels[ZERO] == 0 and (levels.diff() < 0).all()
        w = torch.tensor(values, dtype=torch.float64).expand(200_000, -1)
        got = levels[round_weights(layout, w, torch.rand(w.shape, dtype=torch.float64))]
        spread = got.std(dim=0) / len(w) ** 0.5
        assert ((got.mean(dim=0) - w[0]).abs() <= 5 * spread + 1e-7 * w[0]).all()
        normal = w[0] > 1e-5
        assert (got[:, normal] / w[:, normal] - 1).abs().max() < math.exp(1 / 16) - 1 + 1e-6
    counts = Layout(Estimator.multinomial, 12, VOCAB)
    shares = torch.arange(1, 13).double() / 12
    assert torch.equal(round_weights(counts, shares, torch.rand(12).double()), torch.arange(1, 13))
    assert torch.equal(counts.levels()[torch.arange(1, 13)], shares.float())


def test_entropy_is_rounded_without_bias_and_stays_in_range() -> None:
    u = torch.rand(100_000, dtype=torch.float64)
    got = round_entropy(torch.full_like(u, 2.7183), u).double() / 256
    assert abs(float(got.mean()) - 2.7183) < 5 * float(got.std()) / 1e5**0.5
    assert round_entropy(torch.tensor([-1e-9, 0.0, 15.99]), torch.tensor([0.0, 0.0, 0.99])).tolist() == [0, 0, 4094]


def realistic(rows: int, vocab: int) -> Tensor:
    """Logits like a language model's: a power law over ranks whose steepness differs between positions.

    Entropies spread over 0 to 8 nats; the likely tokens are spread over the vocabulary, low ids more often.
    """
    g = torch.Generator().manual_seed(8)
    exponent = 1.0 + 2.5 * torch.rand(rows, 1, generator=g)
    rank = torch.arange(1, vocab + 1).float().log()
    z = -exponent * rank + torch.randn(rows, vocab, generator=g) * 0.5
    place = torch.argsort(rank + 2.0 * torch.randn(rows, vocab, generator=g), dim=1)
    return torch.zeros(rows, vocab).scatter_(1, place, z)


@pytest.mark.parametrize(("estimator", "limit"), [(Estimator.varopt, 40), (Estimator.gumbel, 54)])
def test_bytes_a_position_at_128k_tokens(estimator: Estimator, limit: int) -> None:
    samples, length, vocab = 2, 64, 128_256
    layout = Layout(estimator, 16, vocab)
    kept, entropy, places = keep(estimator, realistic(samples * length, vocab), 16, samples)
    assert 1.5 < float(entropy.mean()) < 5 and float(entropy.std()) > 1
    words, _ = store(layout, kept, entropy, places, samples)
    assert 4 * len(words) / (samples * length) <= limit
    assert layout.most_bits / 8 < 58


@pytest.mark.parametrize(
    ("scale", "nats", "varopt"),
    [(0.5, 11.6, 29.3), (3.0, 7.4, 32.0), (5.0, 3.2, 37.5), (7.0, 1.7, 41.2), (9.0, 1.1, 43.4), (40.0, 0.2, 47.6)],
)
def test_bytes_a_position_by_entropy(scale: float, nats: float, varopt: float) -> None:
    """Ids anywhere in 128,000 tokens: a peaked teacher's row names more entries, each with a weight of its own, and
    takes more bytes (docs/distill.md has these figures); gumbel's entries all have one."""
    samples, length, vocab = 2, 32, 128_000
    logits = torch.randn(samples * length, vocab, generator=torch.Generator().manual_seed(8)) * scale
    for estimator, each in ((Estimator.varopt, varopt), (Estimator.gumbel, 49.5)):
        layout = Layout(estimator, 16, vocab)
        kept, entropy, places = keep(estimator, logits, 16, samples)
        assert float(entropy.mean()) == pytest.approx(nats, abs=0.1)
        words, _ = store(layout, kept, entropy, places, samples)
        rows = samples * (length - 1)  # of a sample's positions one is SKIPPED
        found = (4 * len(words) - samples * layout.header_bits / 8) / rows
        assert found == pytest.approx(each, abs=0.4), f"{estimator.value} at {float(entropy.mean()):.2f} nats"


def test_reading_beyond_the_end_does_not_fail() -> None:
    """Damaged bits may point anywhere; decoding them gives rubbish of the right shape, not an error in a kernel."""
    torch.manual_seed(2)
    layout = Layout(Estimator.varopt, 16, 5000)
    words = torch.randint(-(2**31), 2**31 - 1, (40,), dtype=torch.int32)
    got = decode(layout, words, torch.tensor([0, 20]), 32)
    assert got.ids.shape == (2, 32, 16)


class Copies(TorchDispatchMode):
    """Notes what goes from one kind of device to another, for which a host may have to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        kinds = {x.device.type for x in (*args, out) if isinstance(x, Tensor) and x.ndim > 0}
        if len(kinds) > 1 or function is torch.ops.aten._local_scalar_dense.default:
            self.found.append(str(function))
        return out


@pytest.mark.parametrize("estimator", list(Estimator))
def test_reading_asks_nothing_of_the_host(estimator: Estimator) -> None:
    """Every step does it: whatever a device needs beside the bits is there from the first time on."""
    _levels.cache_clear()
    words, starts = (
        torch.empty(9000, dtype=torch.int32, device="meta"),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    )
    for first in (True, False):
        with Copies() as copies:
            decode(Layout(estimator, 8, 1003), words, starts, 64)
        assert bool(copies.found) == first, copies.found
