"""A byte-trigram model: the baseline that a trained network must beat.

The probability of byte c after bytes a, b interpolates trigram, bigram and unigram counts by Witten and Bell's rule:
a context seen N times with T different successors gives T / (N + T) of its mass to the shorter context,

    p(c | a b) = (N(a b c) + T(a b) p(c | b)) / (N(a b) + T(a b)),

likewise for p(c | b) and p(c), which falls back on 1/256. Nothing is tuned and nothing but the training text is used.
A document starts as if after two zero bytes. Source: I. Witten and T. Bell, "The Zero-Frequency Problem" (1991).
"""

import numpy as np
from numpy.typing import NDArray

_CHUNK = 4 << 20


class TrigramModel:
    """Counts of byte trigrams, and what they predict."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(1 << 24, dtype=np.int64)
        """How often bytes a, b, c came in a row, at a << 16 | b << 8 | c."""

    def add(self, documents: list[bytes]) -> None:
        """Count the trigrams of documents."""
        for codes in _codes(documents):
            self._counts += np.bincount(codes, minlength=1 << 24)

    def bits(self, documents: list[bytes]) -> float:
        """Bits that the model needs for the documents, ends of documents not counted."""
        total = 0.0
        bigram = self._bigram()
        trigram = self._counts.reshape(-1, 256)
        seen = trigram.sum(axis=1)
        kinds = np.count_nonzero(trigram, axis=1)
        for codes in _codes(documents):
            context = codes >> 8
            shorter = bigram[codes & 0xFFFF]
            mass = seen[context] + kinds[context]
            known = self._counts[codes] + kinds[context] * shorter
            total -= float(np.log2(np.where(mass > 0, known / np.maximum(mass, 1), shorter)).sum())
        return total

    def probabilities(self, first: int, second: int) -> NDArray[np.float64]:
        """p(c | first, second) for every byte c: [256]."""
        counts = self._counts.reshape(256, 256, 256)[first, second]
        shorter = self._bigram().reshape(256, 256)[second]
        row: NDArray[np.float64] = _interpolate(counts[None], shorter)[0]
        return row

    def _bigram(self) -> NDArray[np.float64]:
        """p(c | b) at b << 8 | c: [65536]."""
        pairs = self._counts.reshape(256, 256, 256).sum(axis=0)
        unigram = _interpolate(pairs.sum(axis=0)[None], np.full(256, 1 / 256))[0]
        return _interpolate(pairs, unigram).reshape(-1)


def _interpolate(counts: NDArray[np.int64], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Witten and Bell's rule for rows of counts [contexts, 256] over the distribution of the shorter context [256]."""
    kinds = np.count_nonzero(counts, axis=1)[:, None]
    mass = counts.sum(axis=1)[:, None] + kinds
    known = (counts + kinds * shorter) / np.maximum(mass, 1)
    return np.where(mass > 0, known, shorter)


def _codes(documents: list[bytes]) -> list[NDArray[np.int32]]:
    """Trigrams of every document, as a << 16 | b << 8 | c, in arrays of a few million."""
    arrays = []
    group: list[bytes] = []
    size = 0
    for i, document in enumerate(documents):
        group.append(document)
        size += len(document)
        if size >= _CHUNK or i == len(documents) - 1:
            arrays.append(_group_codes(group))
            group, size = [], 0
    return arrays


def _group_codes(documents: list[bytes]) -> NDArray[np.int32]:
    """Trigrams of documents, each preceded by two zero bytes that are context and no targets."""
    text = np.frombuffer(b"".join(b"\0\0" + d for d in documents), dtype=np.uint8).astype(np.int32)
    codes = (text[:-2] << 16) | (text[1:-1] << 8) | text[2:]
    target = np.ones(len(codes), dtype=bool)
    starts = np.cumsum([len(d) + 2 for d in documents[:-1]], dtype=np.int64)
    for ahead in (0, 1):  # the codes that would predict the next document's zero bytes
        places = starts - 2 + ahead
        target[places[places >= 0]] = False
    return codes[target]
