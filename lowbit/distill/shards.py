"""A teacher's cache on disk: a folder of shards with a manifest, in which any sample is found at once.

    manifest.json            what the cache is (`identity`), and, once complete, each shard's samples, bytes and SHA-256
    shard-00000.targets ...  targets of consecutive samples
    shard-00000.json ...     the record of a finished shard while others are missing; in the manifest afterwards
    stamps.json              size and modification time of each shard as last verified

A shard is, little-endian: the magic b"LBKD0001"; uint32 samples S; uint32 positions a sample T; uint64 [S + 1], the
word at which each sample begins (counted from the end of this header) and the end; uint32 [S], CRC-32 of each sample's
tokens and targets as int32; padding to 8 bytes; then the samples, words of 32 bits (`codec`).

Row t of a sample is the teacher's distribution of the token after t, the batch's target there. The checksum covers
both, so that rows joined to other text, or shifted by one, are an error and not a bad student.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.configs.stored import flatten
from lowbit.configs.strict import build, fields_of
from lowbit.data.batch import Batch
from lowbit.data.storage import atomic_write
from lowbit.data.verified import check_files, check_hash, check_size
from lowbit.distill.codec import Layout, decode
from lowbit.distill.estimators import check_targets
from lowbit.errors import ConfigError, DataError

FORMAT = "lowbit.kdcache/1"
MANIFEST = "manifest.json"
MAGIC = b"LBKD0001"
TOTALS = ("rows", "entropy", "named", "rest")
"""What a record sums over its positions that have targets: their number, entropy, named entries, rest."""
_AGAIN = "delete the folder and run `lowbit distill cache` again, or give another cache.path"
_ANEW = "delete the file and run the same `lowbit distill cache` again, which makes it anew, or give another cache.path"
"""Of a shard: `_AGAIN` is of the whole cache."""

_FIRST = ("tokenizer", "vocab_size", "sequence_length", "temperature")
"""Fields of an identity that are told first where they differ: others may differ because of them."""
_LOOKED_AT = 16
"""Samples that are decoded before a student learns from a cache."""


@dataclass(frozen=True)
class Shard:
    """What the manifest remembers of a shard."""

    file: str
    first: int
    """Its first sample."""
    samples: int
    bytes: int
    sha256: str
    totals: dict[str, float]
    """By `TOTALS`."""


def shard_name(number: int) -> str:
    """File of a shard."""
    return f"shard-{number:05d}.targets"


def record_name(number: int | None) -> str:
    """File of its record, until the cache is complete; None: a pattern of all."""
    return "shard-*.json" if number is None else f"shard-{number:05d}.json"


def shard_size(identity: dict[str, Any], number: int) -> tuple[int, int]:
    """(first sample, samples) of a shard."""
    size = int(identity["shard_samples"])
    first = number * size
    return first, min(size, int(identity["samples"]) - first)


def shard_count(identity: dict[str, Any]) -> int:
    """Shards of a complete cache."""
    return -(-int(identity["samples"]) // int(identity["shard_samples"]))


def token_checksums(batch: Batch) -> NDArray[np.uint32]:
    """CRC-32 of each sequence of a batch on the CPU: its tokens, then its targets, as int32. [B]"""
    rows = torch.cat([batch.tokens, batch.targets], dim=1).to(torch.int32).numpy()
    return np.array([zlib.crc32(row) for row in rows.astype("<i4", copy=False)], dtype="<u4")


def require_text(cache: "Cache", samples: NDArray[np.int64], stored: "Packed", batch: Batch) -> None:
    """Raises DataError when stored samples [B] were made from other text than a batch on the CPU holds there."""
    wrong = (stored.checksums != token_checksums(batch)).nonzero()[0]
    if len(wrong):
        raise DataError(
            f"{cache.folder}: sample {samples[wrong[0]]} was made from other text than the data have there: "
            "the rows do not belong to these tokens; make the cache again"
        )


# Writing ------------------------------------------------------------------------------------------------------


def write_shard(
    path: Path,
    words: Sequence[NDArray[np.uint32]],
    sizes: NDArray[np.int64],
    sums: NDArray[np.uint32],
    length: int,
    needed: int = 0,
) -> tuple[int, str]:
    """Write a shard atomically: samples' words in order, words of each sample [S], token checksums [S].

    needed: bytes that are still to be written, this shard's among them, which a full disk's message says.

    Returns its bytes and SHA-256. Raises DataError, one line, when it cannot be written.
    """
    header = MAGIC + np.array([len(sizes), length], "<u4").tobytes()
    header += np.concatenate([[0], np.cumsum(sizes)]).astype("<u8").tobytes() + sums.astype("<u4").tobytes()
    header += b"\0" * (-len(header) % 8)
    digest, size = hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal size
        for piece in (header, *(w.astype("<u4").tobytes() for w in words)):
            digest.update(piece)
            size += len(piece)
            yield piece

    write(path, pieces(), needed)
    return size, digest.hexdigest()


def write(path: Path, pieces: Iterable[bytes], needed: int) -> None:
    """`atomic_write` whose errors name this command's setting."""
    with naming_the_cache():
        atomic_write(path, pieces, needed)


@contextmanager
def naming_the_cache() -> Iterator[None]:
    """What the files of packed data say of their setting is said of the cache's."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("data.cache_dir", "cache.path")) from error


def write_json(path: Path, value: Any, needed: int = 0) -> None:
    """The same value always becomes the same bytes. needed: see `write_shard`."""
    write(path, iter([(json.dumps(value, indent=1, sort_keys=True) + "\n").encode()]), needed)


# Manifest -----------------------------------------------------------------------------------------------------


def is_there(path: Path) -> bool:
    """Whether a file exists. Raises DataError where that cannot be seen."""
    try:
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises DataError, one line, when it is missing, damaged or of another version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} holds no teacher's cache: {MANIFEST} is missing; make one with `lowbit distill cache`"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}; {_AGAIN}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is not of format {FORMAT}; {_AGAIN}")
    try:
        identity, shards = manifest["identity"], manifest["shards"]
        _check_identity(identity)
        if manifest.get("identity_sha256", identity_sha256(identity)) != identity_sha256(identity):
            raise ValueError("identity is not the one that the cache was made with")
        if not isinstance(manifest.get("versions", {}), dict):
            raise ValueError("versions are no mapping")
        for number, record in enumerate([] if shards is None else shards):
            shard_of(record, identity, number)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__} "
        raise DataError(f"{path} was edited or damaged: {kind}{error}; {_AGAIN}") from error
    return manifest


def _unreadable(path: Path, error: OSError) -> DataError:
    """Of a file that may well be good."""
    return DataError(f"cannot read {path}: {error.strerror or error}; make it readable, or give another cache.path")


def shard_of(record: Any, identity: dict[str, Any], number: int) -> Shard:
    """A record as read from a file. Raises ConfigError, TypeError, ValueError when it is not that of this shard."""
    shard = build(Shard, record, f"shards.{number}")
    if (shard.file, (shard.first, shard.samples)) != (shard_name(number), shard_size(identity, number)):
        raise ValueError(f"shards.{number} is not of the samples that belong there")
    if shard.totals.keys() != set(TOTALS):
        raise ValueError(f"shards.{number}.totals are not {', '.join(TOTALS)}")
    return shard


@dataclass(frozen=True)
class _Named:
    """The fields of an identity that are read; the others are only compared."""

    samples: int
    sequence_length: int
    vocab_size: int
    targets: int
    micro_batch: int
    shard_samples: int
    seed: int
    estimator: Estimator
    temperature: float
    tokenizer: str


@dataclass(frozen=True)
class _NamedTeacher:
    """Those of its teacher."""

    digest: str
    step: int
    compute: str


def identity_sha256(identity: dict[str, Any]) -> str:
    """By which a manifest knows that its identity was not edited; caches of earlier versions have none."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _check_identity(identity: dict[str, Any]) -> None:
    """Raises ConfigError, KeyError, TypeError, ValueError, AttributeError for what can be no cache's identity."""
    named = build(_Named, {key: identity[key] for key in fields_of(_Named)}, "identity")
    counts = (named.samples, named.sequence_length, named.micro_batch, named.shard_samples)
    if not all(0 < count < 2**48 for count in counts) or not 0 <= named.seed < 2**32 or named.temperature <= 0:
        raise ValueError("identity has a number out of its range")
    if named.samples % named.micro_batch or named.shard_samples % named.micro_batch:
        raise ValueError("identity.samples and shard_samples are not whole micro-batches")
    check_targets(named.estimator, named.targets, named.vocab_size)
    teacher, model = identity["teacher"], identity["teacher"]["model"]
    build(_NamedTeacher, {key: teacher[key] for key in fields_of(_NamedTeacher)}, "identity.teacher")
    build(dict[str, int], {key: model[key] for key in ("layers", "width")}, "identity.teacher.model")
    flatten(teacher)
    flatten(identity["data"])
    texts = (identity["tokenizer"], identity["data"]["fingerprint"], teacher["digest"], teacher["compute"])
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a digest that is no text")


def settings_of(identity: dict[str, Any]) -> dict[str, Any]:
    """Those of `CacheConfig` that say what a cache holds."""
    length = int(identity["sequence_length"])
    return {
        "estimator": Estimator(identity["estimator"]),
        "targets": int(identity["targets"]),
        "temperature": float(identity["temperature"]),
        "tokens": int(identity["samples"]) * length,
        "seed": int(identity["seed"]),
        "micro_batch": int(identity["micro_batch"]),
        "shard_tokens": int(identity["shard_samples"]) * length,
    }


def with_settings(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity with `cache`, the settings that it comes from, in place of them."""
    own = ("estimator", "targets", "temperature", "samples", "seed", "micro_batch", "shard_samples")
    return {key: value for key, value in identity.items() if key not in own} | {"cache": settings_of(identity)}


def differing(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """`field: value there, value here` for each field that differs, `_FIRST` first; nested ones are dotted."""
    was, now = (flatten(json.loads(json.dumps(side))) for side in (saved, wanted))
    return [
        f"{key}: {_show(was, key)} there, {_show(now, key)} here"
        for key in sorted(was.keys() | now.keys(), key=lambda key: (key.removeprefix("cache.") not in _FIRST, key))
        if was.get(key, _show) != now.get(key, _show)
    ]


def _show(values: dict[str, Any], key: str) -> str:
    text = json.dumps(values[key]) if key in values else "absent"
    return text if len(text) <= 40 else f"{text[:37]}..."


def require_same(folder: Path, saved: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Raises DataError that names the differing fields of a cache; `what` begins the sentence about them."""
    found = differing(saved, wanted)
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        raise DataError(f"{folder} {what}: {'; '.join(found[:4])}{more}")


# Reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Stored bits of some samples."""

    words: Tensor
    """int32 [W]."""
    starts: Tensor
    """int64 [B]: first word of each sample."""
    checksums: NDArray[np.uint32]
    """[B]"""


@dataclass(frozen=True)
class _Opened:
    index: NDArray[np.uint64]
    checksums: NDArray[np.uint32]
    words: NDArray[np.uint32]


class Cache:
    """A complete cache, memory-mapped: reading a sample touches its bytes alone."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.identity: dict[str, Any] = manifest["identity"]
        self.shards = [shard_of(record, self.identity, i) for i, record in enumerate(manifest["shards"])]
        self.samples = int(self.identity["samples"])
        self.length = int(self.identity["sequence_length"])
        self.layout = layout_of(self.identity)
        # A map keeps a file descriptor, and a process may have about a thousand: the least recently used ones go.
        self._open = lru_cache(maxsize=128)(self._open_shard)

    @property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def read(self, samples: NDArray[np.int64]) -> Packed:
        """The bits of samples [B], each in 0..samples-1, in any order."""
        size = int(self.identity["shard_samples"])
        pieces, sums, starts, at = [], [], [], 0
        for sample in samples.tolist():
            opened = self._open(sample // size)
            place = sample % size
            begin, end = int(opened.index[place]), int(opened.index[place + 1])
            pieces.append(opened.words[begin:end])
            sums.append(opened.checksums[place])
            starts.append(at)
            at += end - begin
        words = torch.from_numpy(np.concatenate(pieces).view(np.int32))
        return Packed(words, torch.tensor(starts), np.array(sums, dtype=np.uint32))

    def check_ids(self) -> None:
        """`require_ids` of samples all over the cache."""
        self.require_ids(np.unique(np.linspace(0, self.samples - 1, _LOOKED_AT).astype(np.int64)))

    def require_ids(self, samples: NDArray[np.int64]) -> None:
        """Decode samples on the CPU. Raises DataError for an id outside of the vocabulary."""
        for sample in samples:
            stored = self.read(sample[None])
            found = decode(self.layout, stored.words, stored.starts, self.length)
            wrong = found.weights[0].isnan().any(dim=1).nonzero()  # [positions, 1]
            if len(wrong):
                path = self.folder / self.shards[int(sample) // int(self.identity["shard_samples"])].file
                raise DataError(
                    f"{path} is damaged: sample {sample}, position {int(wrong[0])}: an id outside of the vocabulary of "
                    f"{self.layout.vocab_size}; {_ANEW}"
                )

    def _open_shard(self, number: int) -> _Opened:
        shard = self.shards[number]
        path = self.folder / shard.file
        head = 16 + 8 * (shard.samples + 1) + 4 * shard.samples
        head += -head % 8
        try:
            data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise _unreadable(path, error) from error
        except ValueError:  # an empty file
            data = np.zeros(0, dtype=np.uint8)
        wanted = MAGIC + np.array([shard.samples, self.length], "<u4").tobytes()
        if len(data) < head or (len(data) - head) % 4 or data[:16].tobytes() != wanted:
            raise _damaged(path)
        index = np.frombuffer(data, "<u8", shard.samples + 1, 16)
        end = (len(data) - head) // 4
        if index[0] != 0 or index[-1] != end or (index[1:] < index[:-1]).any():
            raise _damaged(path)
        sums = np.frombuffer(data, "<u4", shard.samples, 16 + 8 * (shard.samples + 1))
        words = np.frombuffer(data, "<u4", end, head)  # unlike a slice of a memmap cheap to slice
        return _Opened(index, sums, words)


def _damaged(path: Path) -> DataError:
    return DataError(f"{path} is damaged: its index does not fit; {_ANEW}")


def layout_of(identity: dict[str, Any]) -> Layout:
    """The bits' meaning in a cache of this identity."""
    return Layout(Estimator(identity["estimator"]), int(identity["targets"]), int(identity["vocab_size"]))


def open_cache(folder: Path, *, verify: bool = False, report: Callable[[str], None] = lambda _: None) -> Cache:
    """Open a complete cache. Files whose time changed since they were written or verified, or all with `verify`, are
    read once and must match their SHA-256: this accepts a copied shard and finds an edited one.

    Raises: DataError, one line, when the cache is unfinished, or a shard is missing, truncated or edited.
    """
    manifest = read_manifest(folder)
    if manifest["shards"] is None:
        done = len(list(folder.glob(record_name(None))))
        wanted = shard_count(manifest["identity"])
        raise DataError(
            f"{folder} is not finished: {done} of {wanted} shards are there; run the same `lowbit distill cache` "
            "again, which goes on from them"
        )
    cache = Cache(folder, manifest)
    if len(cache.shards) != shard_count(cache.identity):
        raise DataError(f"{folder / MANIFEST} was edited: its shards do not hold {cache.samples} samples; {_AGAIN}")
    files = {shard.file: (shard.bytes, shard.sha256) for shard in cache.shards}
    check_files(folder, files, _ANEW, verify=verify, report=report)
    return cache


def require_size(folder: Path, shard: Shard) -> None:
    """Raises DataError when a shard is missing or of another size."""
    check_size(folder / shard.file, shard.bytes, _ANEW)


def require_hash(folder: Path, shard: Shard, again: str) -> None:
    """Read a shard. Raises DataError, which ends with `again` (what to do), when it is not the one that was written."""
    check_hash(folder / shard.file, shard.bytes, shard.sha256, again)
