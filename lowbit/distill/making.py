"""Making a teacher's cache: the teacher reads the data once, and what `codec` keeps of it goes to the disk.

The cached samples are the first of the data's own order under `cache.seed`. Shards are made one at a time and appear
complete; any number of processes, started together or one after the other, share them: each takes the next shard whose
lock (`flock`) is free, and the last to finish writes the manifest. All randomness is keyed by the sample, and batches
never cross shards, so the bytes do not depend on how many processes there were or how often they were killed.

    hidden = teacher(batch)            words = rows(hidden)          file = the words of a shard's micro-batches
"""

import fcntl
import json
import logging
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import lowbit
from lowbit.configs.paths import with_absolute_paths
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.stored import plain
from lowbit.configs.strict import show
from lowbit.data.batch import Batch
from lowbit.data.dataset import Dataset
from lowbit.data.loader import Cursor, Loader
from lowbit.data.storage import folder_lock, remove_leftovers, write_error
from lowbit.data.verified import write_stamps
from lowbit.distill.codec import Layout
from lowbit.distill.estimators import check_targets
from lowbit.distill.expected import expected_bytes
from lowbit.distill.noise import Noise
from lowbit.distill.rows import Head, RowMaker, Rows, one_behind
from lowbit.distill.shards import (
    FORMAT,
    MANIFEST,
    TOTALS,
    Cache,
    Shard,
    differing,
    identity_sha256,
    is_there,
    layout_of,
    naming_the_cache,
    open_cache,
    read_manifest,
    record_name,
    require_hash,
    require_same,
    require_size,
    shard_count,
    shard_name,
    shard_of,
    shard_size,
    token_checksums,
    with_settings,
    write_json,
    write_shard,
)
from lowbit.distill.teacher import Teacher
from lowbit.errors import ConfigError, DataError
from lowbit.trainer.loaded import shown_path

logger = logging.getLogger("lowbit")


class CacheMaker:
    """One process's part in making a cache."""

    def __init__(self, folder: Path, settings: DistillConfig, tokens: int, teacher: Teacher, dataset: Dataset) -> None:
        """`tokens`: positions wanted, rounded up to whole micro-batches. Where `cache.tokens` is null, those of a cache
        that is there are as good.

        Raises: ConfigError, DataError when teacher, data and settings do not fit each other.
        """
        config = settings.cache
        self.folder, self.config, self.teacher, self.dataset = folder, config, teacher, dataset
        source = replace(settings.teacher, path=str(Path(settings.teacher.path).expanduser().absolute()))
        self._made_with = {"data": plain(with_absolute_paths(settings).data), "teacher": plain(source)}
        vocab_size, length = dataset.tokenizer.vocab_size, dataset.sequence_length
        teacher.require_length(length)
        teacher.require_tokenizer(dataset.tokenizer.digest, vocab_size)
        check_targets(config.estimator, config.targets, vocab_size)
        batch = config.micro_batch
        self.identity: dict[str, Any] = {
            "teacher": teacher.description,
            "tokenizer": dataset.tokenizer.digest,
            "data": dataset.describe(),
            "seed": config.seed,
            "samples": -(-tokens // (length * batch)) * batch,
            "sequence_length": length,
            "vocab_size": vocab_size,
            "estimator": config.estimator.value,
            "targets": config.targets,
            "temperature": config.temperature,
            "micro_batch": batch,
            "shard_samples": max(1, round(config.shard_tokens / (length * batch))) * batch,
        }
        self.layout: Layout = layout_of(self.identity)
        head = Head(teacher.head_matrix(), teacher.softcap, config.temperature)
        self._row_maker = RowMaker(self.layout, Noise(config.seed, config.estimator.value), head)
        self._device = head.matrix.device
        self._loader = Loader(
            dataset,
            seed=config.seed,
            sequences_at=lambda _: batch,
            micro_batch=batch,
            prefetch=2,
            pin=self._device.type == "cuda",
        )

    @property
    def shards(self) -> int:
        return shard_count(self.identity)

    def make(self) -> Cache:
        """Make what is missing, with whoever else does, and return the complete cache.

        Raises: DataError when the folder holds another cache, or the disk is full; what is finished stays good.
        """
        complete = self._begin()
        ours: set[int] = set()
        try:
            if complete:
                self._make_lost()
            while not complete:
                self._make_missing(ours)
                complete = self._finish(ours)
        finally:
            self._loader.close()
        return open_cache(self.folder, report=logger.info)

    # Shards -----------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Write what the cache will be, or join the one that is there; True when that is complete."""
        there = is_there(self.folder / MANIFEST)
        if there and (manifest := read_manifest(self.folder))["shards"] is not None:
            self._join(manifest)  # without a lock: a complete cache may lie where nothing can be written
            logger.info("%s is complete already", shown_path(self.folder))
            return True
        with naming_the_cache(), folder_lock(self.folder, logger.info):
            if is_there(self.folder / MANIFEST):
                manifest = read_manifest(self.folder)
                self._join(manifest)
                return manifest["shards"] is not None
            if any(self.folder.glob("[!.]*")):
                raise DataError(f"{self.folder} holds something that is no teacher's cache: give another cache.path")
            versions = {"lowbit": lowbit.__version__, "torch": torch.__version__, "python": platform.python_version()}
            manifest = {"format": FORMAT, "identity": self.identity, "shards": None}
            self._write_manifest(manifest | {"versions": versions, "made_with": self._made_with})
            return False

    def _join(self, manifest: dict[str, Any]) -> None:
        """Check that the cache that is there is the one wanted. One that is not finished is extended to more samples
        than it was begun with, which changes no other shard than its last.

        Raises: DataError, naming the settings in which it is another.
        """
        there, complete = manifest["identity"], manifest["shards"] is not None
        if self.config.tokens is None:  # a longer training goes over it again
            self.identity["samples"] = int(there["samples"])
        elif not complete and there["samples"] < self.identity["samples"]:
            there = there | {"samples": self.identity["samples"]}
        was, now = with_settings(there), with_settings(self.identity)
        takes = "takes it" if complete else "goes on with it"
        wishes = [f"cache.{key}={show(value)}" for key, value in was["cache"].items() if value != now["cache"][key]]
        only = not differing(was | {"cache": None}, now | {"cache": None})
        other = f"{' '.join(wishes)} {takes}; else give" if only else "give"
        what = f"holds another cache than configured ({other} another cache.path, or delete it)"
        require_same(self.folder, was, now, what)
        if there is not manifest["identity"]:
            self._write_manifest(manifest | {"identity": there})

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        manifest["identity_sha256"] = identity_sha256(manifest["identity"])
        write_json(self.folder / MANIFEST, manifest, self._needed())

    def _manifest(self) -> dict[str, Any]:
        """As it is now; its length, which another process may have extended, becomes this one's."""
        manifest = read_manifest(self.folder)
        self.identity["samples"] = int(manifest["identity"]["samples"])
        return manifest

    def _needed(self) -> int:
        """Bytes that all processes have still to write, about."""
        done = len(list(self.folder.glob(record_name(None))))
        samples = max(0, int(self.identity["samples"]) - done * int(self.identity["shard_samples"]))
        return expected_bytes(self.layout, samples, self.dataset.sequence_length, max(0, self.shards - done))

    def _make_missing(self, ours: set[int]) -> None:
        """First every shard that is free, then, waiting for it, every one that another process has and may lose."""
        for wait in (False, True):
            for number in range(self.shards):
                if self._record(number) is not None:
                    continue
                if self._manifest()["shards"] is not None:  # another process has finished it all
                    return
                lock = self.folder / f".{shard_name(number)}.lock"
                with _claimed(lock, wait, self._needed()) as mine:
                    if self._manifest()["shards"] is not None:
                        lock.unlink(missing_ok=True)  # made anew after the last of the others had removed all
                        return
                    if mine and self._record(number) is None:
                        self._make_shard(number)
                        ours.add(number)

    def _make_lost(self) -> None:
        """Make shards anew that were deleted from a complete cache, because they were damaged.

        Raises: DataError when the bytes are not those that students learned from, which another device may make.
        """
        lost = [n for n in range(self.shards) if not is_there(self.folder / shard_name(n))]
        for number in lost:
            with naming_the_cache(), folder_lock(self.folder, logger.info):
                path = self.folder / shard_name(number)
                if is_there(path):  # another process was faster
                    continue
                wanted = shard_of(self._manifest()["shards"][number], self.identity, number)
                self._make_shard(number)
                (self.folder / record_name(number)).unlink()
                try:
                    require_hash(self.folder, wanted, "")
                except DataError:
                    path.unlink()
                    raise DataError(
                        f"{path} is not what it was when made anew here, on another device or by another version: "
                        "make it where the cache was made, or delete the folder and run the same command again"
                    ) from None

    def _record(self, number: int) -> Shard | None:
        """The record of a shard that is there, in its size."""
        try:
            record = json.loads((self.folder / record_name(number)).read_text(encoding="utf-8"))
            shard = shard_of(record, self.identity, number)
            require_size(self.folder, shard)
            return shard
        except (OSError, ValueError, TypeError, RecursionError, ConfigError, DataError):
            return None

    def _make_shard(self, number: int) -> None:
        first, samples = shard_size(self.identity, number)
        started = time.perf_counter()
        self._loader.seek(Cursor(first, self.config.seed, self.dataset.fingerprint))
        words: list[NDArray[np.uint32]] = []
        sizes: list[Tensor] = []
        sums: list[NDArray[np.uint32]] = []
        totals = torch.zeros(len(TOTALS), dtype=torch.float64)
        for batch, rows in one_behind(self._begun(first, samples)):
            found, size, total = rows.wait()
            words.append(found.numpy().view(np.uint32))
            sizes.append(size)
            sums.append(token_checksums(batch))
            totals += total
        self._loader.close()
        length = self.dataset.sequence_length
        name = shard_name(number)
        size_bytes, sha256 = write_shard(
            self.folder / name, words, torch.cat(sizes).numpy(), np.concatenate(sums), length, self._needed()
        )
        named = {key: round(value, 6) for key, value in zip(TOTALS, totals.tolist(), strict=True)}
        shard = Shard(name, first, samples, size_bytes, sha256, named)
        write_json(self.folder / record_name(number), asdict(shard), self._needed())
        positions = samples * length
        logger.info(
            "shard %d of %d: %s positions, %.1f bytes each, %.0f positions a second",
            number + 1,
            self.shards,
            f"{positions:,}",
            size_bytes / positions,
            positions / (time.perf_counter() - started),
        )

    def _begun(self, first: int, samples: int) -> Iterator[tuple[Batch, Rows]]:
        """A shard's micro-batches and their rows, perhaps still being made."""
        for sample in range(first, first + samples, self.config.micro_batch):
            [batch] = self._loader.next_step()
            yield batch, self.begin(batch, sample)

    def _finish(self, ours: set[int]) -> bool:
        """Write the manifest once all shards are there and good; False when some have to be made again."""
        with naming_the_cache(), folder_lock(self.folder, logger.info):
            manifest = self._manifest()
            if manifest["shards"] is not None:
                return True
            shards = []
            for number in range(self.shards):
                shard = self._record(number)
                try:
                    if shard is not None and number not in ours:
                        require_hash(self.folder, shard, "it is made again")
                except DataError as error:
                    logger.warning("%s", error)
                    shard = None
                if shard is None:
                    (self.folder / record_name(number)).unlink(missing_ok=True)
                    return False
                shards.append(asdict(shard))
            write_json(self.folder / MANIFEST, manifest | {"shards": shards})
            with suppress(DataError):  # on a full disk, what is written is good: it is verified when it is opened
                write_stamps(self.folder, [shard["file"] for shard in shards])
            for pattern in (record_name(None), ".shard-*.lock"):
                for path in self.folder.glob(pattern):
                    path.unlink(missing_ok=True)
            remove_leftovers(self.folder)
            return True

    # Rows -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, batch: Batch, sample: int) -> Rows:
        """Targets of a micro-batch (on the CPU) whose first global sample is `sample`, perhaps still being made."""
        here = batch.to(self._device)
        return self._row_maker(self.teacher.hidden(here), here.weights, sample)

    def rows(self, batch: Batch, sample: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same, made: words int32 [W], words of each sample int64 [B], the sums that records keep, FP64 [4].

        A position whose next token is not learned (weight 0: none there, or not of the answer) keeps an empty row.

        Raises: NonFiniteError where the teacher's logits are not finite.
        """
        return self.begin(batch, sample).wait()


@contextmanager
def _claimed(path: Path, wait: bool, needed: int) -> Iterator[bool]:
    """Hold a lock file, which the kernel frees when its owner dies; False when another process has it.

    Raises: DataError when there can be none, for example on a full disk, where `needed` bytes are to be written.
    """
    try:
        file = path.open("a")
    except OSError as error:
        with naming_the_cache():
            raise write_error(path, error, needed) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
