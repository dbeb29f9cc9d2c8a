"""The schedule of a mixture: exact shares, even spacing, O(1) access, against counting one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.data.mixture import BLOCK, Mixture
from lowbit.errors import ConfigError

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=20)
@given(WEIGHTS)
def test_shares_are_exact_over_a_block(weights: list[float]) -> None:
    mixture = Mixture(weights)
    source, _ = mixture.locate(np.arange(5 * BLOCK, 6 * BLOCK))
    count = np.bincount(source, minlength=len(weights))
    assert np.all(np.abs(count - np.array(weights) / sum(weights) * BLOCK) <= len(weights))
    assert np.array_equal(count, mixture.counts)


@settings(deadline=None, max_examples=20)
@given(WEIGHTS)
def test_rank_counts_the_samples_of_its_source(weights: list[float]) -> None:
    mixture = Mixture(weights)
    samples = np.arange(BLOCK - 500, BLOCK + 500)
    source, rank = mixture.locate(samples)
    seen = mixture.drawn(int(samples[0]))
    for s, r in zip(source.tolist(), rank.tolist(), strict=True):
        assert r == seen[s]
        seen[s] += 1
    assert np.array_equal(seen, mixture.drawn(int(samples[-1]) + 1))


@settings(deadline=None, max_examples=20)
@given(WEIGHTS)
def test_every_prefix_holds_the_shares(weights: list[float]) -> None:
    mixture = Mixture(weights)
    source, _ = mixture.locate(np.arange(BLOCK))
    for k in range(len(weights)):
        counted = np.cumsum(source == k)
        ideal = np.arange(1, BLOCK + 1) * mixture.counts[k] / BLOCK
        assert np.abs(counted - ideal).max() <= len(weights)


def test_far_samples_are_as_quick() -> None:
    source, rank = Mixture([1.0, 3.0]).locate(np.array([10**15]))
    assert rank[0] == pytest.approx(10**15 * (0.25, 0.75)[source[0]], rel=1e-9)


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources"):
        Mixture(weights)
