"""The order of training samples, and batches made ahead of time.

Position is one number, the count of samples consumed by the whole job, whatever its number of processes: the *cursor*.
Sample i of a run belongs to a source (`Mixture`), is the j-th sample of that source, hence lies in that source's epoch
j // n at place j % n, and is the sequence that the epoch's own random order (`Permutation`, keyed by seed, source and
epoch) has there. All of it is arithmetic on i: nothing is replayed when a run resumes, in any epoch, on any world size.

A step that starts at sample s takes G = sequences_at(s) samples. Rank r of w takes the contiguous block
[s + r*G/w, s + (r+1)*G/w), cut into micro-batches in order.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowbit.data.batch import Batch
from lowbit.data.dataset import Dataset
from lowbit.data.permutation import Permutation
from lowbit.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Cursor:
    """Where a run stands in its data."""

    sample: int
    """Samples consumed by all ranks together."""
    seed: int
    """Seed of the order."""
    fingerprint: str
    """`Dataset.fingerprint` of the data that it counts in."""

    def as_dict(self) -> dict[str, Any]:
        """For a checkpoint (JSON)."""
        return {"sample": self.sample, "seed": self.seed, "fingerprint": self.fingerprint}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Cursor":
        """From a checkpoint."""
        return Cursor(int(values["sample"]), int(values["seed"]), str(values["fingerprint"]))


class SampleOrder:
    """The sequence that each sample of a run is."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._mixture = dataset.mixture
        self._sizes = [(s.name, s.sequences) for s in dataset.sources]
        self._seed = seed
        self._permutation = lru_cache(maxsize=64)(self._make_permutation)

    def _make_permutation(self, source: int, epoch: int) -> Permutation:
        name, size = self._sizes[source]
        return Permutation(size, "train", self._seed, name, epoch)

    def locate(self, sample: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and sequence of samples [n]: two int64 [n]."""
        source, drawn = self._mixture.locate(sample)
        sizes = np.array([size for _, size in self._sizes])[source]
        epoch, place = np.divmod(drawn, sizes)
        sequence = np.empty_like(place)
        for s, e in sorted(set(zip(source.tolist(), epoch.tolist(), strict=True))):
            here = (source == s) & (epoch == e)
            sequence[here] = self._permutation(s, e)(place[here])
        return source, sequence

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over each source after so many samples."""
        drawn = self._mixture.drawn(samples)
        return {name: float(n) / size for (name, size), n in zip(self._sizes, drawn, strict=True)}


class Loader:
    """This rank's micro-batches, step after step, prepared in a background thread."""

    _worker: "_Prefetcher | None" = None
    _sent: Batch | None = None
    """The next micro-batch, if it has been sent to its device already."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        sequences_at: Callable[[int], int],
        micro_batch: int,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 4,
        pin: bool = False,
    ) -> None:
        """`sequences_at(s)`: sequences of the step that starts at sample s, over all ranks. `prefetch`: micro-batches
        made ahead; 0 makes them when asked. `pin`: in page-locked memory.

        Raises: ConfigError when rank, world or micro_batch make no sense.
        """
        if micro_batch < 1 or world < 1 or not 0 <= rank < world or prefetch < 0:
            raise ConfigError(
                f"loader: micro_batch={micro_batch} rank={rank} world={world} prefetch={prefetch} is wrong"
            )
        self._dataset, self._sequences_at = dataset, sequences_at
        self._micro_batch, self._rank, self._world = micro_batch, rank, world
        self._prefetch, self._pin = prefetch, pin
        self._cursor = Cursor(0, seed, dataset.fingerprint)
        self._order = SampleOrder(dataset, seed)

    @property
    def cursor(self) -> Cursor:
        """Position after the last step returned, whatever was prepared ahead."""
        return self._cursor

    def seek(self, cursor: Cursor) -> None:
        """Go on from `cursor`, with its seed. O(1).

        Raises: CheckpointError when it counts in other data.
        """
        if cursor.fingerprint != self._dataset.fingerprint:
            raise CheckpointError(
                f"the data cursor belongs to data {cursor.fingerprint[:12]}, this data set is "
                f"{self._dataset.fingerprint[:12]}: resume with the same sources, weights, tokenizer and length"
            )
        self.close()
        self._cursor = cursor
        self._order = SampleOrder(self._dataset, cursor.seed)

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step, and move the cursor behind it.

        Raises: ConfigError when the step cannot be shared out; whatever went wrong while preparing it.
        """
        sequences = self._step_size(self._cursor.sample)
        count = sequences // (self._world * self._micro_batch)
        if self._prefetch:
            if self._worker is None:
                self._worker = _Prefetcher(self._batches(self._cursor.sample), self._prefetch)
            step = [] if self._sent is None else [self._sent]
            self._sent = None
            step += [self._worker.get() for _ in range(count - len(step))]
        else:
            step = list(self._step_batches(self._cursor.sample, sequences))
        self._cursor = Cursor(self._cursor.sample + sequences, self._cursor.seed, self._cursor.fingerprint)
        return step

    def send_ahead(self, device: torch.device) -> None:
        """Send the next step's first micro-batch to a device, if it is prepared: for when the device has other work, so
        that it need not wait for the host when that step begins. The cursor stays."""
        if self._worker is not None and self._sent is None:
            self._sent = self._worker.get_if_ready()
            if self._sent is not None:
                self._sent = self._sent.to(device)  # if there is no room, it stays where it was

    def epochs(self) -> dict[str, float]:
        """Passes over each source so far."""
        return self._order.epochs(self._cursor.sample)

    def close(self) -> None:
        """Stop preparing batches. `next_step` may be called again and goes on at the cursor."""
        if self._worker is not None:
            self._worker.close()
            self._worker = self._sent = None

    def _step_size(self, sample: int) -> int:
        sequences, unit = self._sequences_at(sample), self._world * self._micro_batch
        if sequences < 1 or sequences % unit:
            below, above = sequences // unit * unit, -(-max(1, sequences) // unit) * unit
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"batch.sequences={sequences} cannot be shared by {self._world} ranks in micro-batches of "
                f"{self._micro_batch}: it must be a multiple of {unit}, for example {near}"
            )
        return sequences

    def _batches(self, sample: int) -> Iterator[Batch]:
        """Micro-batches from a step's first sample on, without end."""
        while True:
            sequences = self._step_size(sample)
            yield from self._step_batches(sample, sequences)
            sample += sequences

    def _step_batches(self, sample: int, sequences: int) -> Iterator[Batch]:
        share = sequences // self._world
        first = sample + self._rank * share
        for start in range(first, first + share, self._micro_batch):
            batch = self._make(np.arange(start, start + self._micro_batch, dtype=np.int64))
            yield batch.pin() if self._pin else batch

    def _make(self, samples: NDArray[np.int64]) -> Batch:
        """The batch of global samples [B]."""
        return self._dataset.training_batch(*self._order.locate(samples))


class _Prefetcher:
    """A thread that keeps a queue of batches full; an exception in it is raised where the batch is asked for."""

    def __init__(self, batches: Iterator[Batch], ahead: int) -> None:
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(batches,), name="lowbit-loader", daemon=True)
        self._thread.start()

    def _run(self, batches: Iterator[Batch]) -> None:
        try:
            for batch in batches:
                if not self._put(batch):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def get(self) -> Batch:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # asked again, it fails again
            raise item
        return item

    def get_if_ready(self) -> Batch | None:
        """The next batch, if it is made. What went wrong is left to `get`."""
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            self._queue.put(item)
            return None
        return item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
