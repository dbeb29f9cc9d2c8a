"""Which source a training sample comes from: weighted shares, spread evenly, computable at any sample in O(1).

Samples come in blocks of 65536. In a block source k has n_k samples, the nearest whole numbers to its share (largest
remainders, at least one each), so shares are exact over every block. Within it the j-th sample of source k is placed at
time (j + 1/2) / n_k, and the block is all of them sorted by time: each source is spaced evenly, and the count of any
source over any stretch differs from its share by less than about the number of sources. The block's order and each
sample's rank within its source are two small tables; sample i lies in block i // 65536.
"""

import math

import numpy as np
from numpy.typing import NDArray

from lowbit.errors import ConfigError

BLOCK = 65536


class Mixture:
    """The schedule for some weights."""

    def __init__(self, weights: list[float]) -> None:
        """Raises: ConfigError unless every weight is positive and finite and there are at most 65536 of them."""
        if not 1 <= len(weights) <= BLOCK:
            raise ConfigError(f"a mixture takes 1 to {BLOCK} sources, not {len(weights)} (data.sources)")
        if not all(math.isfinite(w) and w > 0 for w in weights):
            raise ConfigError(f"weights of data.sources must be positive, not {weights}; remove a source to skip it")
        self.shares = [w / math.fsum(weights) for w in weights]
        self.counts = _whole_counts(self.shares)
        """Samples of each source in a block: [sources]."""
        source = np.repeat(np.arange(len(weights)), self.counts)
        rank = np.concatenate([np.arange(n) for n in self.counts])
        time = (rank + 0.5) / self.counts[source]
        order = np.lexsort((source, time))
        self._source, self._rank = source[order], rank[order]

    def locate(self, sample: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of samples [...]: the source, and how many samples of that source came before."""
        block, place = np.divmod(sample, BLOCK)
        source = self._source[place]
        return source, block * self.counts[source] + self._rank[place]

    def drawn(self, samples: int) -> NDArray[np.int64]:
        """Samples of each source among the first `samples`: [sources]."""
        block, place = divmod(samples, BLOCK)
        drawn: NDArray[np.int64] = block * self.counts
        drawn += np.bincount(self._source[:place], minlength=len(self.counts))
        return drawn


def _whole_counts(shares: list[float]) -> NDArray[np.int64]:
    """Split BLOCK by `shares` into whole numbers, at least one each."""
    wanted = np.array(shares) * BLOCK
    counts: NDArray[np.int64] = np.maximum(1, np.floor(wanted)).astype(np.int64)
    while (short := BLOCK - int(counts.sum())) > 0:
        counts[np.argsort(counts - wanted, kind="stable")[:short]] += 1
    while counts.sum() > BLOCK:  # many tiny sources were raised to one sample: the largest gives way
        counts[counts.argmax()] -= 1
    return counts
