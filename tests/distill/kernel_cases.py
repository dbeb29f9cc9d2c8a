"""The kernels of caching against FP64, against the PyTorch path, and on average.

`python kernel_cases.py NAME ...` runs groups of cases in Triton's interpreter (TRITON_INTERPRET=1), where there is no
GPU.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from kernel_oracle import check
from test_estimators import TEACHERS, UNBIASED, VARIANCE, VOCAB, dense, logits_of
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.blocks import Distributions
from lowbit.distill.codec import Layout, decode, encode, pack
from lowbit.distill.estimators import Chosen, sampler
from lowbit.distill.fast import difference, misread
from lowbit.distill.kernels.choose import Chooser
from lowbit.distill.kernels.decode import Decoder
from lowbit.distill.kernels.encode import Encoder
from lowbit.distill.noise import Noise, Places

PER_PROGRAM = 64
"""Rows of a program in the interpreter."""


def choose(
    logits: Tensor,
    estimator: Estimator,
    k: int,
    vocab: int,
    noise: Noise,
    places: Places,
    device: str,
    softcap: float | None = None,
    temperature: float = 1.0,
    per_program: int | None = None,
) -> Chosen:
    """By the kernels; the result on the CPU."""
    rows = 1 if device != "cpu" else per_program or PER_PROGRAM
    tile = {} if device != "cpu" else {"tile": 1024}
    chooser = Chooser(estimator, k, vocab, softcap, temperature, rows, **tile)
    out = Chosen.empty(len(logits), k, torch.device(device))
    there = places.to(device)
    chooser(logits.to(device), there, torch.tensor(noise.key, device=device), out)
    return out.to("cpu")


def by_pytorch(
    logits: Tensor,
    estimator: Estimator,
    k: int,
    vocab: int,
    noise: Noise,
    places: Places,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Chosen:
    p = Distributions(logits.clone(), vocab, softcap, temperature)
    return Chosen(sampler(estimator)(p, k, noise, places), p.entropy, p.lse)


def places_of(rows: int) -> Places:
    """Samples beyond 32 bits among them."""
    index = torch.arange(rows)
    return Places(index // 16 + torch.where(index % 3 == 0, 2**40, 0), index % 16)


def mixed(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows of seven kinds by turns; rubbish beyond the vocabulary."""
    g = torch.Generator().manual_seed(rows + vocab)
    z = torch.randn(rows, columns, generator=g)
    kind = torch.arange(rows) % 7
    z[kind == 1] *= 6
    z[kind == 2] = (z[kind == 2] * 2).round() / 2  # many ties
    z[kind == 3] = 1.5
    z[kind == 4] = -2.5 * torch.argsort(torch.rand(z[kind == 4].shape, generator=g), dim=1).add(1).float().log()
    z[kind == 5, 2:] -= 40.0  # two tokens have all but nothing of it
    z[kind == 6] = torch.where(torch.rand(z[kind == 6].shape, generator=g) < 4 / vocab, 1.0, float("-inf"))
    z[:, vocab // 2] = z[:, vocab // 2].clamp(min=-5.0)
    z[:, vocab:] = 60.0
    return z.to(dtype)


def one(
    estimator: Estimator,
    k: int,
    vocab: int,
    device: str,
    *,
    rows: int = 63,
    softcap: float | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    extra: int = 5,
    per_program: int | None = None,
) -> None:
    """Against FP64 row by row, and against PyTorch: ids of nearly all rows agree."""
    logits = mixed(rows, vocab + extra, vocab, dtype)
    noise, places = Noise(3, estimator.value), places_of(rows)
    got = choose(logits, estimator, k, vocab, noise, places, device, softcap, temperature, per_program)
    slack = 1e-6 if softcap is None else 1e-5  # tanh differs in its last bits
    check(estimator, got, logits, vocab, softcap, temperature, noise, places, slack)
    wanted = by_pytorch(logits, estimator, k, vocab, noise, places, softcap, temperature)
    torch.testing.assert_close(got.lse, wanted.lse, rtol=slack, atol=slack)
    torch.testing.assert_close(got.entropy, wanted.entropy, rtol=2 * slack, atol=2 * slack)
    have, want = (
        torch.where(c.kept.weights > 0, c.kept.ids, -1).sort(dim=1, descending=True).values for c in (got, wanted)
    )
    same = (have == want).all(dim=1) & (got.kept.named == wanted.kept.named)
    sure = torch.ones(rows, dtype=torch.bool) if softcap is None else torch.arange(rows) % 7 == 0
    if estimator is Estimator.topk:  # which of more equal ones than it keeps PyTorch takes is its own affair
        sure &= ~torch.isin(torch.arange(rows) % 7, torch.tensor([2, 3, 6]))
    if estimator is Estimator.varopt:  # where two tokens have all, the last bits of their sum decide the threshold
        sure &= wanted.kept.rest > 1e-4
    assert float(same[sure].float().mean()) > 0.96, (estimator, k, vocab, same.nonzero())
    for name in ("weights", "rest"):
        mine, theirs = (getattr(c.kept, name)[same & sure] for c in (got, wanted))
        rtol = 5e-6 if estimator is Estimator.gumbel else 2 * slack  # PyTorch's kappa is FP32
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-12)


def first(device: str) -> None:
    """Every estimator over a few blocks; ties and rows without enough tokens are in `mixed`."""
    for estimator in Estimator:
        one(estimator, 8, 300, device, rows=35)


def selections(device: str) -> None:
    """One block, part of one, several; a program of one row."""
    for estimator in Estimator:
        for k, vocab in ((4, 90), (16, 700), (7, 64)):
            one(estimator, k, vocab, device)
        one(estimator, 5, 300, device, rows=14, per_program=1)
    one(Estimator.varopt, 1, 90, device)


def logits_as_they_come(device: str) -> None:
    """Softcap, temperature, BF16, rows of odd lengths."""
    one(Estimator.varopt, 16, 500, device, softcap=4.0, temperature=0.5)
    one(Estimator.topk, 16, 500, device, softcap=30.0)
    one(Estimator.gumbel, 8, 500, device, temperature=2.0, dtype=torch.bfloat16, extra=12)
    one(Estimator.varopt, 8, 500, device, dtype=torch.bfloat16, extra=0)
    one(Estimator.multinomial, 16, 500, device, temperature=0.5, dtype=torch.float16)


def large(device: str) -> None:
    """Two thousand blocks, and hundreds of targets."""
    for estimator in (Estimator.varopt, Estimator.gumbel):
        one(estimator, 16, 128_256, device, rows=7, dtype=torch.bfloat16, extra=0, per_program=8)
    for estimator in Estimator:
        one(estimator, 255, 1000, device, rows=14, per_program=16)


def alone(device: str) -> None:
    """A row's bits depend on its place alone: not on the chunk it is in."""
    for estimator in Estimator:
        logits, places = mixed(21, 200, 200, torch.bfloat16), places_of(21)
        noise = Noise(3, estimator.value)
        parts = [
            choose(logits[rows], estimator, 4, 200, noise, places[rows], device)
            for rows in (slice(0, 21), slice(0, 5), slice(5, 6), slice(6, 21))
        ]
        whole, together = parts[0], Chosen.cat(parts[1:])
        for name, tensor in vars(whole.kept).items():
            assert torch.equal(tensor, getattr(together.kept, name)), (estimator, name)
        assert torch.equal(whole.lse, together.lse) and torch.equal(whole.entropy, together.entropy)


def broken(device: str) -> None:
    """Rows with a NaN, an infinity or no finite logit show in lse, and there only; ids stay in range."""
    for estimator in Estimator:
        logits = mixed(14, 150, 147, torch.float32)
        logits[3, 130], logits[5, 70], logits[8, :] = float("nan"), float("inf"), float("-inf")
        got = choose(logits, estimator, 6, 147, Noise(1, "x"), places_of(14), device)
        bad = (~torch.isfinite(got.lse)).nonzero()[:, 0]
        assert bad.tolist() == [3, 5, 8], (estimator, bad)
        assert int(got.kept.ids.min()) >= 0 and int(got.kept.ids.max()) < 147
        assert int(got.kept.named.min()) >= 0 and int(got.kept.named.max()) <= 6


def encoded(estimator: Estimator, k: int, vocab: int, device: str, samples: int = 3, length: int = 21) -> None:
    """The words are those of `codec`, bit for bit."""
    rows = samples * length
    logits = mixed(rows, vocab, vocab, torch.float32)
    layout, noise = Layout(estimator, k, vocab), Noise(5, estimator.value)
    index = torch.arange(rows)
    places = Places(2**33 + index // length, index % length)
    chosen = by_pytorch(logits, estimator, k, vocab, noise, places)
    counted = index % 5 != 3
    words, sizes = pack(*encode(layout, chosen.kept, chosen.entropy, noise, places, counted), samples)
    there = places.to(device)
    encoder = Encoder(layout, layout.levels().double().to(device), 4096 if device == "cpu" else 128)
    key = torch.tensor(noise.key, device=device)
    got, got_sizes = encoder(chosen.to(device), there, key, counted.to(device), samples)
    assert torch.equal(got_sizes.cpu(), sizes), (estimator, k, vocab)
    assert torch.equal(got.cpu()[: len(words)], words.to(torch.int32)), (estimator, k, vocab)
    assert not bool(got.cpu()[len(words) :].any()), "nothing beyond the end"
    decoded(layout, words.to(torch.int32), sizes.cumsum(0) - sizes, length, device)


def decoded(layout: Layout, words: Tensor, starts: Tensor, length: int, device: str) -> None:
    """Reading gives what `codec.decode` gives; weights up to the order of their sums."""
    entries = 4096 if device == "cpu" else 128
    got = Decoder(layout, entries)(words.to(device), starts.to(device), length)
    expected = decode(layout, words, starts, length)
    assert torch.equal(got.ids.cpu(), expected.ids), layout
    assert torch.equal(got.entropy.cpu(), expected.entropy), layout
    torch.testing.assert_close(got.weights.cpu(), expected.weights, rtol=1e-6, atol=2e-7, equal_nan=True)


def damaged(device: str) -> None:
    """Ids outside of the vocabulary: the bits of 500 tokens, read as those of 257."""
    for estimator in Estimator:
        rows, length = 64, 16
        places = Places(torch.arange(rows) // length, torch.arange(rows) % length)
        noise, logits = Noise(5, estimator.value), mixed(rows, 500, 500, torch.float32)
        chosen = by_pytorch(logits, estimator, 16, 500, noise, places)
        words, sizes = pack(*encode(Layout(estimator, 16, 500), chosen.kept, chosen.entropy, noise, places), 4)
        narrow, starts = Layout(estimator, 16, 257), sizes.cumsum(0) - sizes
        assert decode(narrow, words, starts, length).weights.isnan().any()
        decoded(narrow, words.to(torch.int32), starts, length, device)


def bits(device: str) -> None:
    for estimator in Estimator:
        encoded(estimator, 16, 257, device)
    encoded(Estimator.varopt, 64, 20_000, device)


def more_bits(device: str) -> None:
    for estimator in Estimator:
        for k, vocab in ((5, 20_000), (64, 300), (255, 1000)):
            encoded(estimator, k, vocab, device, samples=2)
    encoded(Estimator.varopt, 1, 90, device)


def average(device: str, draws: int = 1200, cases: tuple[tuple[str, int], ...] = (("zipf", 16),)) -> None:
    """Mean and variance of what the kernels choose, as `test_expectation_and_variance` has them."""
    for estimator in UNBIASED:
        for teacher, k in cases:
            p = TEACHERS[teacher]
            index = torch.arange(draws)
            places = Places(index // 256, index % 256)
            noise = Noise(7, estimator.value)
            logits = logits_of(p, draws)
            got = choose(logits, estimator, k, VOCAB, noise, places, device, per_program=512)
            w = dense(got.kept)
            variance = VARIANCE[estimator](p, k)
            assert (np.abs(w.mean(axis=0) - p) <= 5 * np.sqrt(variance / draws) + 1e-6 * p).all(), (estimator, teacher)
            squared = ((w - p) ** 2).sum(axis=1)
            spread = squared.std() / draws**0.5
            assert abs(squared.mean() - variance.sum()) <= 5 * spread + 2e-6 * variance.sum(), (estimator, teacher)


def averages(device: str) -> None:
    average(device, 2000, tuple((teacher, k) for teacher in TEACHERS for k in (4, 16)))


def checked(device: str) -> None:
    """The check before a cache is made passes, with the settings of a program on a GPU."""
    for estimator in Estimator if device != "cpu" else (Estimator.varopt,):
        layout = Layout(estimator, 8, 150)
        assert difference(layout, 30.0, 0.7, torch.float32, torch.device(device)) is None
        assert misread(layout, torch.device(device)) is None


FEW = (first, broken, damaged, bits, average)
ALL = (*FEW, alone, selections, logits_as_they_come, large, more_bits, averages, checked)
GROUPS = {group.__name__: group for group in ALL}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "infer"))
    from attention_cases import mend_interpreter

    mend_interpreter()
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # unsigned words wrap
    for name in sys.argv[1:] or GROUPS:
        GROUPS[name]("cpu")
        print(name)
