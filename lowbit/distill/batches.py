"""Batches that carry a teacher's stored targets, and the loader that joins them to the text.

A student's sample i is place i % S of the epoch i // S over the cache's S samples, in an order of its own (a keyed
permutation of each epoch); the cached sample there gives both the text, by the data's order under the cache's seed, and
the rows, read from the memory-mapped shards in the loader's thread. The checksum of each sample's tokens must be that
of the text: rows can never meet other words than those the teacher read.

The bits travel to the device as they are stored (40 bytes a position) and are unpacked there.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.data.batch import Batch
from lowbit.data.dataset import Dataset
from lowbit.data.loader import Loader, SampleOrder
from lowbit.data.permutation import Permutation
from lowbit.distill.codec import Layout
from lowbit.distill.fast import reader
from lowbit.distill.shards import Cache, require_text
from lowbit.models.sparse_head import SparseTargets


@dataclass(frozen=True)
class StoredRows:
    """One teacher's bits for a batch."""

    layout: Layout
    words: Tensor
    """int32 [W]."""
    starts: Tensor
    """int64 [B]: first word of each sample."""


@dataclass(frozen=True)
class DistilledBatch(Batch):
    """A batch with its targets: as bits of each teacher, and, once on its device, unpacked."""

    rows: tuple[StoredRows, ...] = ()
    teacher: SparseTargets | None = None
    """Of all B * T tokens, after `to`: the average of the teachers."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "DistilledBatch":
        """The same on another device, unpacked."""
        plain = super().to(device, non_blocking)
        if self.teacher is not None and plain.tokens is self.tokens:  # it is there
            return self
        rows = tuple(
            replace(
                r,
                words=r.words.to(device, non_blocking=non_blocking),
                starts=r.starts.to(device, non_blocking=non_blocking),
            )
            for r in self.rows
        )
        return DistilledBatch(**vars(plain), rows=rows, teacher=unpack(rows, self.tokens.shape[1]))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """See `Batch.tensors`: with the targets as the loss reads them, unpacked."""
        return (*super().tensors(), *(() if self.teacher is None else self.teacher))

    def clone(self) -> "DistilledBatch":
        """The same in memory of its own, without the bits, which a pass does not read."""
        teacher = None if self.teacher is None else SparseTargets(*(tensor.clone() for tensor in self.teacher))
        rows = tuple(replace(r, words=r.words.new_empty(0), starts=r.starts.new_empty(0)) for r in self.rows)
        return DistilledBatch(**vars(super().clone()), rows=rows, teacher=teacher)

    def head(self, count: int) -> "DistilledBatch":
        """The first `count` sequences, with their targets."""
        rows = tuple(replace(r, starts=r.starts[:count]) for r in self.rows)
        teacher = self.teacher
        if teacher is not None:
            tokens = self.tokens[:count].numel()
            teacher = SparseTargets(teacher.ids[:tokens], teacher.weights[:tokens], teacher.entropy[:tokens])
        return DistilledBatch(**vars(super().head(count)), rows=rows, teacher=teacher)

    def pin(self) -> "DistilledBatch":
        """The same in page-locked memory."""
        rows = tuple(replace(r, words=r.words.pin_memory(), starts=r.starts.pin_memory()) for r in self.rows)
        return DistilledBatch(**vars(super().pin()), rows=rows)


def unpack(rows: tuple[StoredRows, ...], length: int) -> SparseTargets:
    """Targets [B * T, K] of the average of M teachers: their lists one after the other, the weights over M.

    The average of their entropies makes the reported divergence the average of the divergences from each.
    """
    found = [reader(r.layout, r.words.device)(r.words, r.starts, length) for r in rows]
    if len(found) == 1:  # nothing to put together
        return SparseTargets(found[0].ids.flatten(0, 1), found[0].weights.flatten(0, 1), found[0].entropy.flatten())
    share = 1.0 / len(found)
    return SparseTargets(
        torch.cat([d.ids.flatten(0, 1) for d in found], dim=1),
        torch.cat([d.weights.flatten(0, 1) * share for d in found], dim=1),
        torch.stack([d.entropy.flatten() for d in found]).mean(dim=0),
    )


class CachedLoader(Loader):
    """A `Loader` over the samples of caches: epochs are passes over them."""

    def __init__(self, dataset: Dataset, caches: list[Cache], **settings: Any) -> None:
        """`caches`: of different teachers over the same samples. `settings`: those of `Loader`."""
        super().__init__(dataset, **settings)
        self._caches = caches
        self._samples = caches[0].samples
        self._cached = SampleOrder(dataset, int(caches[0].identity["seed"]))
        self._shuffle = lru_cache(maxsize=16)(self._make_shuffle)
        self._step = range(0)
        """Samples of the step returned last, on all ranks."""

    def next_step(self) -> list[Batch]:
        first = self.cursor.sample
        step = super().next_step()
        self._step = range(first, self.cursor.sample)
        return step

    def require_ids(self) -> None:
        """Look at the targets of the step returned last. Raises DataError for an id outside of the vocabulary, whose
        weight, not a number, let the step fail."""
        samples = self.cached_samples(np.array(self._step, dtype=np.int64))
        for cache in self._caches:
            cache.require_ids(samples)

    def epochs(self) -> dict[str, float]:
        """Passes over the cache so far."""
        return {"cache": self.cursor.sample / self._samples}

    def cached_samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which samples of the cache the student's global samples [B] are."""
        epochs, places = np.divmod(samples, self._samples)
        out = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = self._shuffle(self.cursor.seed, epoch)(places[here])
        return out

    def _make_shuffle(self, seed: int, epoch: int) -> Permutation:
        return Permutation(self._samples, "distill", seed, epoch)

    def _make(self, samples: NDArray[np.int64]) -> Batch:
        cached = self.cached_samples(samples)
        batch = self._dataset.training_batch(*self._cached.locate(cached))
        rows = []
        for cache in self._caches:
            packed = cache.read(cached)
            require_text(cache, cached, packed, batch)
            rows.append(StoredRows(cache.layout, packed.words, packed.starts))
        return DistilledBatch(**vars(batch), rows=tuple(rows))
