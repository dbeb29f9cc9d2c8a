"""The trigram baseline against a brute-force dictionary model."""

import math
from collections import Counter

import numpy as np
import pytest

from lowbit.data.trigram import TrigramModel

TRAIN = [b"the cat sat on the mat", b"", b"a", b"the \x00\xff bat sat \x00\x00 on the hat", b"xy" * 40]
TEST = [b"the rat sat on a mat", b"", b"q", b"\xff\xfe\x00never seen", b"xyxyxz"]


def brute_force(train: list[bytes]) -> dict[str, Counter[bytes]]:
    counts: dict[str, Counter[bytes]] = {"3": Counter(), "2": Counter(), "1": Counter()}
    for text in train:
        padded = b"\0\0" + text
        for i in range(2, len(padded)):
            counts["3"][padded[i - 2 : i + 1]] += 1
            counts["2"][padded[i - 1 : i + 1]] += 1
            counts["1"][padded[i : i + 1]] += 1
    return counts


def probability(counts: dict[str, Counter[bytes]], context: bytes, c: bytes) -> float:
    """Witten-Bell by its definition, recursive, over the shorter and shorter context."""
    table = counts[str(len(context) + 1)]
    following = {k: n for k, n in table.items() if k[:-1] == context}
    shorter = 1 / 256 if not context else probability(counts, context[1:], c)
    seen, kinds = sum(following.values()), len(following)
    return shorter if not seen else (following.get(context + c, 0) + kinds * shorter) / (seen + kinds)


def model_of(train: list[bytes]) -> TrigramModel:
    model = TrigramModel()
    model.add(train)
    return model


def test_bits_match_brute_force() -> None:
    counts = brute_force(TRAIN)
    expected = 0.0
    for text in TEST:
        padded = b"\0\0" + text
        expected -= sum(
            math.log2(probability(counts, padded[i - 2 : i], padded[i : i + 1])) for i in range(2, len(padded))
        )
    assert model_of(TRAIN).bits(TEST) == pytest.approx(expected, rel=1e-12)


def test_counting_in_pieces_is_counting_at_once() -> None:
    model = TrigramModel()
    for text in TRAIN:
        model.add([text])
    assert model.bits(TEST) == pytest.approx(model_of(TRAIN).bits(TEST), rel=1e-12)


@pytest.mark.parametrize("context", [b"th", b"\0\0", b"zq", b"\xff "])
def test_probabilities_sum_to_one(context: bytes) -> None:
    counts = brute_force(TRAIN)
    found = model_of(TRAIN).probabilities(*context)
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    expected = [probability(counts, context, bytes([c])) for c in range(256)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_without_training_every_byte_costs_eight_bits() -> None:
    assert TrigramModel().bits([b"abc", b"d"]) == pytest.approx(32.0)
