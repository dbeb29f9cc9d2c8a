"""The spike score against numpy."""

import json
import math

import numpy as np
import pytest

from lowbit.trainer.spikes import SpikeScore


def test_spike_score_against_numpy() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.1, 400)
    losses[300] += 1.0
    score = SpikeScore()
    for index, loss in enumerate(losses):
        got = score.update(float(loss))
        before = losses[max(0, index - 128) : index]
        if index < 16:
            assert got is None
        else:
            assert got == pytest.approx((loss - before.mean()) / before.std())
            assert (got > 6) == (index == 300)


def test_spike_score_edge_cases_and_state() -> None:
    score = SpikeScore()
    for _ in range(20):
        last = score.update(2.0)
    assert last == 0.0
    assert score.update(math.nan) is None
    restored = SpikeScore.from_dict(json.loads(json.dumps(score.as_dict())))
    assert restored.as_dict() == score.as_dict() and len(score.as_dict()["losses"]) == 20
    assert restored.update(2.1) == score.update(2.1) > 1e6
