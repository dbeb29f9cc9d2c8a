"""Expectation and variance of each estimator against closed forms in FP64; keys, chunks and corner cases."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.blocks import Distributions
from lowbit.distill.estimators import Kept, check_targets, gumbel, sampler, varopt
from lowbit.distill.noise import Lane, Noise, Places
from lowbit.errors import ConfigError

VOCAB, COLUMNS = 90, 100
DRAWS = 15_000
UNBIASED = (Estimator.varopt, Estimator.gumbel, Estimator.multinomial)
USUAL = [("flat", 4), ("zipf", 16), ("peaked", 4), ("twins", 16)]
"""Shapes of teachers and numbers of targets; `make exhaustive` crosses them."""


def zipf(exponent: float, size: int = VOCAB) -> NDArray[np.float64]:
    p = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return p / p.sum()


def teachers() -> dict[str, NDArray[np.float64]]:
    """Distributions over VOCAB tokens, in a shuffled order so that ids and ranks differ."""
    order = np.random.default_rng(1).permutation(VOCAB)
    peaked = 0.1 * zipf(0.7)
    peaked[0] += 0.9
    twins = 0.1 * np.full(VOCAB, 1 / VOCAB)
    twins[:2] += 0.45
    shapes = {"flat": np.full(VOCAB, 1 / VOCAB), "zipf": zipf(1.0), "peaked": peaked, "twins": twins}
    return {name: p[order] for name, p in shapes.items()}


TEACHERS = teachers()
CASES = [
    pytest.param(name, k, marks=() if (name, k) in USUAL else pytest.mark.exhaustive)
    for name in TEACHERS
    for k in (4, 16)
]


def logits_of(p: NDArray[np.float64], rows: int) -> Tensor:
    """[rows, COLUMNS] logits with some constant added; the columns beyond the vocabulary hold rubbish."""
    z = torch.full((rows, COLUMNS), 50.0)
    z[:, :VOCAB] = torch.from_numpy(np.log(p)).float() + 3.0
    return z


def draw(estimator: Estimator, p: NDArray[np.float64], k: int, draws: int = DRAWS, seed: int = 7) -> Kept:
    places = Places(torch.arange(draws) // 256, torch.arange(draws) % 256)
    return sampler(estimator)(Distributions(logits_of(p, draws), VOCAB), k, Noise(seed, estimator.value), places)


def dense(kept: Kept) -> NDArray[np.float64]:
    """The estimates as [C, VOCAB]."""
    out = torch.zeros(len(kept.ids), VOCAB, dtype=torch.float64)
    return out.scatter_add_(1, kept.ids, kept.weights).numpy()


# Closed forms -------------------------------------------------------------------------------------------------


def varopt_variance(p: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Per item: p (tau - p) in the tail, 0 in the head. tau by bisection on sum min(1, p / tau) = k."""
    low, high = 1e-15, 1.0
    for _ in range(200):
        tau = (low * high) ** 0.5
        low, high = (tau, high) if np.minimum(1, p / tau).sum() > k else (low, tau)
    return np.where(p < tau * (1 - 1e-9), p * (tau - p), 0.0)


def gumbel_variance(p: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Per item: p^2 (E[1 / pi(T)] - 1), T the k-th arrival among the others in an exponential race.

    P(at least k of the others by t) is a Poisson-binomial tail, by the usual recursion; E is a sum over a fine grid.
    """
    grid = np.geomspace(1e-3, 1e8, 6000)
    arrived = -np.expm1(-p[:, None] * grid)  # [V, G]
    out = np.empty_like(p)
    for i in range(len(p)):
        count = np.zeros((k, len(grid)))  # P(exactly j arrived), j < k
        count[0] = 1.0
        for a in np.delete(arrived, i, axis=0):
            count[1:] = count[1:] * (1 - a) + count[:-1] * a
            count[0] *= 1 - a
        cdf = 1 - count.sum(axis=0)
        middle = np.sqrt(grid[1:] * grid[:-1])
        inverse = 1 / -np.expm1(-p[i] * middle)
        out[i] = p[i] ** 2 * ((inverse * np.diff(cdf)).sum() - cdf[-1])
    return np.maximum(out, 0.0)


def multinomial_variance(p: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    return p * (1 - p) / k


VARIANCE: dict[Estimator, Callable[[NDArray[np.float64], int], NDArray[np.float64]]] = {
    Estimator.varopt: varopt_variance,
    Estimator.gumbel: gumbel_variance,
    Estimator.multinomial: multinomial_variance,
}


@pytest.mark.parametrize(("teacher", "k"), CASES)
@pytest.mark.parametrize("estimator", UNBIASED)
def test_expectation_and_variance(estimator: Estimator, teacher: str, k: int) -> None:
    p = TEACHERS[teacher]
    w = dense(draw(estimator, p, k))
    variance = VARIANCE[estimator](p, k)
    error = np.abs(w.mean(axis=0) - p)
    assert (error <= 5 * np.sqrt(variance / DRAWS) + 1e-6 * p).all()
    squared = ((w - p) ** 2).sum(axis=1)
    spread = squared.std() / DRAWS**0.5
    assert abs(squared.mean() - variance.sum()) <= 5 * spread + 2e-6 * variance.sum()
    if estimator is not Estimator.gumbel:
        np.testing.assert_allclose(w.sum(axis=1), 1.0, atol=2e-6)


def test_varopt_has_the_least_variance() -> None:
    for p in TEACHERS.values():
        best = varopt_variance(p, 16).sum()
        assert best <= gumbel_variance(p, 16).sum() + 1e-12 and best <= multinomial_variance(p, 16).sum() + 1e-12


def test_renormalised_gumbel_weights_would_be_found_biased() -> None:
    """The same test refuses the estimators that look alike: it can fail."""
    p = TEACHERS["zipf"]
    kept = draw(Estimator.gumbel, p, 4)
    naive = torch.from_numpy(p)[kept.ids]
    naive = naive / naive.sum(dim=1, keepdim=True)
    w = torch.zeros(DRAWS, VOCAB, dtype=torch.float64).scatter_add_(1, kept.ids, naive).numpy()
    assert (np.abs(w.mean(axis=0) - p) > 10 * w.std(axis=0) / DRAWS**0.5).any()


@pytest.mark.parametrize("teacher", TEACHERS)
def test_topk_is_the_likeliest_tokens_and_is_biased(teacher: str) -> None:
    p = TEACHERS[teacher]
    kept = draw(Estimator.topk, p, 16, draws=3)
    w = dense(kept)
    expected = np.sort(p)[::-1][:16]
    np.testing.assert_allclose(kept.weights.numpy(), np.tile(expected, (3, 1)), rtol=2e-6)
    np.testing.assert_allclose(kept.rest.numpy(), 1 - expected.sum(), atol=1e-6)
    np.testing.assert_allclose(w[0][w[0] > 0], p[w[0] > 0], rtol=2e-6)
    assert (kept.ids == kept.ids[0]).all() and kept.rest[0] > 0.01


@pytest.mark.parametrize("estimator", Estimator)
def test_a_rows_targets_depend_on_its_place_alone(estimator: Estimator) -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, COLUMNS) * 3
    places = Places(torch.full((40,), 2**40 + 5), torch.arange(40))
    noise = Noise(3, estimator.value)
    whole = sampler(estimator)(Distributions(logits.clone(), VOCAB), 8, noise, places)
    parts = [
        sampler(estimator)(Distributions(logits[r].clone(), VOCAB), 8, noise, places[r])
        for r in (slice(0, 7), slice(7, 8), slice(8, 40))
    ]
    assert torch.equal(whole.ids, torch.cat([part.ids for part in parts]))
    assert torch.equal(whole.weights, torch.cat([part.weights for part in parts]))
    assert int(whole.ids.max()) < VOCAB
    if estimator is Estimator.topk:
        return
    for other in (
        (noise, Places(places.sample + 1, places.position)),
        (noise, Places(places.sample - 2**40, places.position)),
        (noise, Places(places.sample, places.position + 64)),
        (Noise(4, estimator.value), places),
        (Noise(3, "another"), places),
    ):
        assert not torch.equal(sampler(estimator)(Distributions(logits.clone(), VOCAB), 8, *other).ids, whole.ids)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_a_chunk(softcap: float | None, temperature: float, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    logits = (torch.randn(30, COLUMNS) * 6).to(dtype)
    logits[0, 1:VOCAB] = -200.0  # nearly one-hot
    logits[1] = logits[1].sign() * 3  # many ties
    z = logits[:, :VOCAB].double()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, dim=1)
    p = Distributions(logits, VOCAB, softcap, temperature)
    torch.testing.assert_close(p.lse, torch.logsumexp(z / temperature, dim=1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(p.entropy, -(log_p.exp() * log_p).sum(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.mass.sum(dim=1), torch.ones(30, dtype=torch.float64), rtol=1e-6, atol=0)
    found, ids = p.largest(12)
    value, order = log_p.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(found, value[:, :12], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(log_p.gather(1, ids), value[:, :12], rtol=0, atol=0)
    assert all(len(set(row)) == 12 for row in ids.tolist())
    if dtype == torch.float32:
        assert torch.equal(ids[2:], order[2:, :12])
    assert torch.equal(ids[1], ids[1].sort().values), "equal logits by rising id"
    torch.testing.assert_close(p.log_probability(ids), found)


@pytest.mark.parametrize("estimator", Estimator)
@pytest.mark.parametrize("support", [1, 3, 8])
def test_fewer_likely_tokens_than_targets(estimator: Estimator, support: int) -> None:
    """Equal logits on a few tokens, none on the others: whatever is kept is exact or sums to one."""
    logits = torch.full((64, COLUMNS), float("-inf"))
    logits[:, 5 : 5 + support] = 2.0
    places = Places(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    kept = sampler(estimator)(Distributions(logits, VOCAB), 8, Noise(1, "x"), places)
    w = dense(kept)
    assert int(kept.ids.max()) < VOCAB and np.isfinite(w).all()
    np.testing.assert_allclose(w.sum(axis=1), 1.0, rtol=1e-6)
    if estimator is not Estimator.multinomial:
        np.testing.assert_allclose(w[:, 5 : 5 + support], 1 / support, rtol=1e-6)


def test_large_vocabulary_in_bf16() -> None:
    """2000 blocks: the tail's systematic sample has the right expectation, by halves of the vocabulary."""
    size, rows = 128_256, 256
    torch.manual_seed(5)
    logits = (torch.randn(1, size) * 2).bfloat16()
    p = torch.softmax(logits[0].double(), dim=0)
    places = Places(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    kept = varopt(Distributions(logits.expand(rows, -1).clone(), size), 16, Noise(1, "varopt"), places)
    half = torch.where(kept.ids < size // 3, kept.weights, 0.0).sum(dim=1)
    assert abs(half.mean() - p[: size // 3].sum()) < 5 * half.std() / rows**0.5 + 1e-6
    torch.testing.assert_close(kept.weights.sum(dim=1), torch.ones(rows, dtype=torch.float64))
    assert len(kept.ids.unique()) > 2000


def test_noise_is_uniform_and_named_by_its_place() -> None:
    places = Places(torch.arange(4000), torch.arange(4000) % 7)
    u = Noise(1, "x").uniform(places, Lane.TARGETS, 6)
    assert u.shape == (4000, 6) and u.dtype == torch.float64 and float(u.min()) > 0 and float(u.max()) < 1
    counts = torch.histc(u.float(), 20, 0, 1)
    expected = u.numel() / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 46  # chi-square, 19 degrees of freedom, p = 5e-4
    other = Noise(1, "x").uniform(places, Lane.WEIGHTS, 6)
    assert abs(float(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1])) < 5 / u.numel() ** 0.5
    assert torch.equal(Noise(1, "x").uniform(places[slice(10, 20)], Lane.TARGETS, 3), u[10:20, :3])


def test_gumbel_keys_reach_rare_tokens() -> None:
    """Tokens of probability 1e-7 enter as often as they must: the exponential's small values are not cut off."""
    rows = 20_000
    p = np.full(VOCAB, 1e-7)
    p[0] = 1 - p[1:].sum()
    places = Places(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    kept = gumbel(Distributions(logits_of(p, rows), VOCAB), 4, Noise(1, "g"), places)
    w = dense(kept)[:, 1:].sum(axis=1)
    assert abs(w.mean() - 89e-7) < 5 * w.std() / rows**0.5 and (kept.ids[:, 1:] > 0).all()


def test_numbers_of_targets_are_checked() -> None:
    check_targets(Estimator.varopt, 16, 4096)
    for estimator, targets, vocab in (
        (Estimator.varopt, 90, 90),
        (Estimator.varopt, 0, 90),
        (Estimator.gumbel, 3, 90),
        (Estimator.multinomial, 256, 4096),
    ):
        with pytest.raises(ConfigError, match=f"cache.targets={targets}: cache.estimator={estimator.value} keeps"):
            check_targets(estimator, targets, vocab)
