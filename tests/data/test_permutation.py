"""The order of an epoch: a bijection for every size, and as uniform as a shuffle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.data.permutation import Permutation


@pytest.mark.parametrize("size", [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 1009, 4096, 65537, 100_003])
def test_every_element_comes_exactly_once(size: int) -> None:
    order = Permutation(size, "k", 7)(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 1 << 62), seed=st.integers(0, 1 << 63), data=st.data())
def test_large_sizes_stay_in_range_and_do_not_collide(size: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, max(0, size - 200)))
    index = np.arange(start, min(size, start + 200), dtype=np.int64)
    order = Permutation(size, seed)(index)
    assert order.min() >= 0 and order.max() < size
    assert len(set(order.tolist())) == len(index)


def test_one_position_at_a_time_gives_the_same_order() -> None:
    permutation = Permutation(1000, 3)
    whole = permutation(np.arange(1000))
    assert [int(permutation(np.array([i]))[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


@pytest.mark.parametrize("size", [2, 3, 13, 67, 130])
def test_each_element_is_equally_likely_in_each_place(size: int) -> None:
    """Chi-squared of the (place, element) table over many keys, against its expectation and spread."""
    trials = 1000
    table = np.zeros((size, size))
    places = np.arange(size)
    for key in range(trials):
        table[places, Permutation(size, "uniform", key)(places)] += 1
    chi2 = ((table - trials / size) ** 2 / (trials / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom) + 3


def test_neighbours_are_unrelated() -> None:
    order = Permutation(1 << 16, 5)(np.arange(1 << 16)).astype(float)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(1 << 16)
    other = Permutation(1 << 16, 6)(np.arange(1 << 16)).astype(float)
    assert abs(np.corrcoef(order, other)[0, 1]) < 5 / np.sqrt(1 << 16)


def test_positions_outside_are_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(5, 0)(np.array([5]))
    with pytest.raises(ValueError, match="size=0"):
        Permutation(0, 0)
