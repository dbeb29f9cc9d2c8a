"""Documents to shards: tokenize once, in several processes, so that training only ever reads flat files.

One process reads the source in order and cuts it into *parts* (1 MiB of text at first, growing to 32 MiB, so that
small sources occupy every core and large ones make few files). Workers tokenize parts; each leaves its shards and,
last, a record `part-00012.npz`. The cut depends on the documents alone, so the result is the same bytes for any number
of workers, and after a kill the parts with a record are kept and the rest done again. When all are there, the parent
joins the document offsets, writes `manifest.json` (whose presence means: complete) and removes the records.

The held-out split is decided by content: a document is held out when the first 64 bits of its BLAKE2b hash, as a
fraction, lie below `held_out`. Duplicates fall on the same side, and adding documents moves no other. If a small
source leaves a side empty, the fraction moves just enough to put one document there.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lowbit.configs.schema import DataConfig, SourceKind
from lowbit.data.shards import (
    FORMAT,
    MANIFEST,
    SPLITS,
    PackedSource,
    documents_file,
    expected_files,
    open_packed,
    token_dtype,
)
from lowbit.data.sources import Listing, list_source, read_documents
from lowbit.data.storage import atomic_write, folder_lock, remove_leftovers
from lowbit.data.tokenizer import Tokenizer
from lowbit.data.verified import write_stamps
from lowbit.data.worker import PackSettings, deaf_to_ctrl_c, pack_part, record_path, start_worker, work
from lowbit.errors import ConfigError, DataError

_PART_BYTES = 1 << 20
_PARTS_A_SIZE = 16
_PART_BYTES_MAX = 32 << 20
_WORKER_BYTES = 3 << 20
"""Text that is worth the start of one more process."""
_REPORT_SECONDS = 5.0


def packed_folder(listing: Listing, tokenizer: Tokenizer, config: DataConfig) -> Path:
    """Where a source is packed: its name and a hash of listing, tokenizer and the settings that shape the result."""
    settings = [FORMAT, listing.identity, tokenizer.digest, config.held_out, config.shard_tokens]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    return Path(config.cache_dir).expanduser() / "packed" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', listing.name)}-{key}"


def pack_source(
    listing: Listing, tokenizer: Tokenizer, config: DataConfig, report: Callable[[str], None]
) -> PackedSource:
    """Pack a source, or reuse what is there; finishes what another process began or waits for it.

    Raises: DataError for a bad source, a full disk, or fewer than two different documents.
    """
    if not 0.0 < config.held_out < 1.0:
        raise ConfigError(f"data.held_out={config.held_out} must lie between 0 and 1, both excluded")
    if config.shard_tokens < 1:
        raise ConfigError(f"data.shard_tokens={config.shard_tokens} must be at least 1")
    folder = packed_folder(listing, tokenizer, config)
    if not (folder / MANIFEST).is_file():
        with folder_lock(folder, report):
            remove_leftovers(folder)
            if not (folder / MANIFEST).is_file():
                _pack(folder, listing, tokenizer, config, report)
    packed = open_packed(folder, tokenizer, report=report)
    train, val = packed.train, packed.val
    report(
        f"data {listing.name}: {len(train):,} training and {len(val):,} held-out tokens in "
        f"{len(train.documents) - 1:,} and {len(val.documents) - 1:,} documents ({folder})"
    )
    return packed


def _pack(
    folder: Path, listing: Listing, tokenizer: Tokenizer, config: DataConfig, report: Callable[[str], None]
) -> None:
    settings = PackSettings(str(folder), split_threshold(config.held_out), config.shard_tokens)
    parts = _pack_parts(settings, listing, tokenizer, config, report)
    adjusted = _fill_empty_side(parts, settings, listing)
    if adjusted != settings:
        settings = adjusted
        parts = _pack_parts(settings, listing, tokenizer, config, report)
    if list_source(listing.name, listing.config).identity != listing.identity:
        raise DataError(f"data source {listing.name!r} changed while it was packed; run again to pack it anew")
    _finish(folder, parts, settings, listing, tokenizer, config)


def split_threshold(held_out: float) -> int:
    """Documents whose 64-bit hash is below this are held out."""
    return int(held_out * 2.0**64)


@dataclass(frozen=True)
class _Part:
    """The record that a worker left for its part."""

    note: dict[str, Any]
    lengths: dict[str, Any]


def _read_record(settings: PackSettings, index: int) -> _Part | None:
    """A finished part's record; None when it is not there, or belongs to another threshold."""
    path = record_path(settings, index)
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            note = json.loads(arrays["note"].tobytes())
            lengths = {split: arrays[split] for split in SPLITS}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return _Part(note, lengths) if note["threshold"] == settings.threshold else None


def _chunks(documents: Iterator[str]) -> Iterator[list[bytes]]:
    """Cut the stream of documents into parts, by their bytes alone."""
    index, size, part = 0, 0, list[bytes]()
    for document in documents:
        data = document.encode("utf-8")
        part.append(data)
        size += len(data)
        if size >= min(_PART_BYTES_MAX, _PART_BYTES << (index // _PARTS_A_SIZE)):
            yield part
            index, size, part = index + 1, 0, []
    if part:
        yield part


def _pack_parts(
    settings: PackSettings,
    listing: Listing,
    tokenizer: Tokenizer,
    config: DataConfig,
    report: Callable[[str], None],
) -> list[_Part]:
    """Have every part tokenized; return their records in order."""
    workers = config.pack_workers or len(os.sched_getaffinity(0))
    total = listing.total_bytes
    if total is not None:
        workers = min(workers, 1 + total // _WORKER_BYTES)
    pool = None
    if workers > 1:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads (torch) can deadlock
        pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(tokenizer,))
    progress = _Progress(listing, settings, report)
    parts: dict[int, _Part] = {}
    waiting: deque[tuple[int, Future[None]]] = deque()

    def collect(index: int) -> None:
        part = _read_record(settings, index)
        if part is None:
            raise DataError(f"{record_path(settings, index)} vanished while packing; run again")
        parts[index] = part
        progress.add(part)

    try:
        for index, chunk in enumerate(_chunks(read_documents(listing))):
            needed = progress.bytes_needed()
            if _read_record(settings, index) is not None:
                collect(index)
            elif pool is None:
                pack_part(tokenizer, settings, index, chunk, needed)
                collect(index)
            else:
                with deaf_to_ctrl_c():  # a submission may start a process
                    waiting.append((index, pool.submit(work, settings, index, chunk, needed)))
            while len(waiting) > workers + 1:
                done, future = waiting.popleft()
                future.result()
                collect(done)
        for done, future in waiting:
            future.result()
            collect(done)
    except BrokenProcessPool:
        raise DataError(
            f"a packing process for data source {listing.name!r} died, perhaps for lack of memory; run again (finished "
            "parts are kept), with a smaller data.pack_workers"
        ) from None
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
    return [parts[i] for i in range(len(parts))]


class _Progress:
    """Counts what was packed, says so now and then, and estimates the disk space still needed."""

    def __init__(self, listing: Listing, settings: PackSettings, report: Callable[[str], None]) -> None:
        self.listing, self.settings, self.report = listing, settings, report
        self.began = self.last = time.monotonic()
        self.text = self.tokens = self.stored = 0

    def add(self, part: _Part) -> None:
        self.text += sum(part.note[s]["bytes"] for s in SPLITS)
        self.tokens += sum(part.note[s]["tokens"] for s in SPLITS)
        self.stored += sum(part.note[s]["tokens"] * part.note["itemsize"] for s in SPLITS)
        now = time.monotonic()
        if now - self.last < _REPORT_SECONDS:
            return
        self.last = now
        total = self.listing.total_bytes
        share = f" of {total / 1e6:,.0f}" if total else ""
        rate = self.text / 1e6 / (now - self.began)
        self.report(
            f"packing {self.listing.name}: {self.text / 1e6:,.0f}{share} MB, {self.tokens:,} tokens, {rate:.1f} MB/s"
        )

    def bytes_needed(self) -> int | None:
        """Bytes of shards still to come; None where the size of the source is unknown."""
        total = self.listing.total_bytes
        if not total:
            return None
        return int(max(0, total - self.text) * (self.stored / self.text if self.text else 1.0))


def _fill_empty_side(parts: list[_Part], settings: PackSettings, listing: Listing) -> PackSettings:
    """Move the threshold by as little as puts one document (and its duplicates) on an empty side."""
    count = {split: sum(p.note[split]["documents"] for p in parts) for split in SPLITS}
    if all(count.values()):
        return settings
    lowest = min(p.note["lowest"] for p in parts)
    highest = max(p.note["highest"] for p in parts)
    if lowest == highest:
        name = listing.name
        files = listing.config.kind is SourceKind.files
        cut = f", or cut a long text file with data.sources.{name}.document_bytes" if files else ""
        raise DataError(
            f"data source {name!r} has only one document or copies of one, and training and evaluation need one each; "
            f"add documents{cut}"
        )
    threshold = lowest + 1 if count["val"] == 0 else highest
    return PackSettings(settings.folder, threshold, settings.shard_tokens)


def _finish(
    folder: Path,
    parts: list[_Part],
    settings: PackSettings,
    listing: Listing,
    tokenizer: Tokenizer,
    config: DataConfig,
) -> None:
    """Join the parts' document offsets, write the manifest, remove the records."""
    import tokenizers

    from lowbit import __version__

    manifest: dict[str, Any] = {
        "format": FORMAT,
        "versions": {"lowbit": __version__, "tokenizers": tokenizers.__version__, "python": platform.python_version()},
        "source": {
            "kind": str(listing.config.kind),
            "text_field": listing.config.text_field,
            "listing_sha256": listing.identity,
            "files": len(listing.files),
            "file_bytes": listing.total_bytes,
            "documents_sha256": _joined_sha256([p.note["documents_sha256"] for p in parts]),
        },
        "settings": {
            "held_out": config.held_out,
            "held_out_threshold": settings.threshold,
            "shard_tokens": config.shard_tokens,
        },
        "tokenizer_digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "dtype": token_dtype(tokenizer.vocab_size).str,
    }
    for split in SPLITS:
        lengths = np.concatenate([p.lengths[split] for p in parts])
        offsets = np.zeros(len(lengths) + 1, dtype="<i8")
        np.cumsum(lengths, out=offsets[1:])
        data = offsets.tobytes()
        atomic_write(folder / documents_file(split), [data])
        manifest[split] = {
            "tokens": int(offsets[-1]),
            "documents": len(lengths),
            "bytes": sum(p.note[split]["bytes"] for p in parts),
            "documents_sha256": hashlib.sha256(data).hexdigest(),
            "shards": [shard for p in parts for shard in p.note[split]["shards"]],
        }
    content = [tokenizer.digest] + [sha for _, sha in expected_files(manifest).values()]
    manifest["content_sha256"] = _joined_sha256(content)
    write_stamps(folder, list(expected_files(manifest)))
    atomic_write(folder / MANIFEST, [json.dumps(manifest, indent=1).encode() + b"\n"])
    for index in range(len(parts)):
        record_path(settings, index).unlink(missing_ok=True)


def _joined_sha256(digests: list[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()
