"""A packing process: tokenize one part of a source and leave its shards on the disk.

It imports neither torch nor anything else that is slow, because each process starts anew (`spawn`). It ignores
Ctrl-C, which its parent answers, and ends by itself when the parent is killed.
"""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.data.shards import SPLITS, token_dtype
from lowbit.data.storage import atomic_write
from lowbit.data.tokenizer import Tokenizer, limit_threads_to_one
from lowbit.errors import DataError

_ENCODE_BYTES = 1 << 20


@dataclass(frozen=True)
class PackSettings:
    """What shapes a part's output, besides its documents and the tokenizer."""

    folder: str
    threshold: int
    """Documents whose 64-bit hash is below this are held out."""
    shard_tokens: int


class _Worker:
    """What a process keeps between its parts."""

    tokenizer: Tokenizer


def start_worker(tokenizer: Tokenizer) -> None:
    """Prepare a packing process."""
    limit_threads_to_one()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.tokenizer = tokenizer


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, not even while they import; for this one it comes a moment later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def work(settings: PackSettings, index: int, documents: list[bytes], needed: int | None) -> None:
    """`pack_part` in a process prepared by `start_worker`."""
    pack_part(_Worker.tokenizer, settings, index, documents, needed)


def record_path(settings: PackSettings, index: int) -> Path:
    """The file whose presence says that a part is complete."""
    return Path(settings.folder) / f"part-{index:05d}.npz"


def document_hash(data: bytes) -> bytes:
    """16 bytes of BLAKE2b over a document's UTF-8 text."""
    return hashlib.blake2b(data, digest_size=16).digest()


def held_out_key(data: bytes) -> int:
    """The 64 bits that decide a document's split."""
    return int.from_bytes(document_hash(data)[:8], "big")


def pack_part(
    tokenizer: Tokenizer, settings: PackSettings, index: int, documents: list[bytes], needed: int | None = None
) -> None:
    """Tokenize UTF-8 documents and write their shards, then the part's record.

    Raises: DataError when a token id is beyond the vocabulary or the disk is full.
    """
    hashes = [document_hash(data) for data in documents]
    keys = [int.from_bytes(h[:8], "big") for h in hashes]
    tokens: dict[str, list[NDArray[Any]]] = {split: [] for split in SPLITS}
    size = dict.fromkeys(SPLITS, 0)
    for data, key, ids in zip(documents, keys, _encode(tokenizer, documents), strict=True):
        split = "val" if key < settings.threshold else "train"
        tokens[split].append(ids)
        size[split] += len(data)
    dtype = token_dtype(tokenizer.vocab_size)
    note: dict[str, Any] = {
        "threshold": settings.threshold,
        "itemsize": dtype.itemsize,
        "lowest": min(keys),
        "highest": max(keys),
        "documents_sha256": hashlib.sha256(b"".join(hashes)).hexdigest(),
    }
    for split in SPLITS:
        stream = np.concatenate(tokens[split]) if tokens[split] else np.zeros(0, np.int64)
        note[split] = {
            "documents": len(tokens[split]),
            "tokens": len(stream),
            "bytes": size[split],
            "shards": _write_shards(settings, f"{split}-{index:05d}", stream, dtype, tokenizer.vocab_size, needed),
        }
    record = io.BytesIO()
    train, val = (np.array([len(t) for t in tokens[split]], dtype=np.int64) for split in SPLITS)
    np.savez(record, note=np.frombuffer(json.dumps(note).encode(), np.uint8), train=train, val=val)
    atomic_write(record_path(settings, index), [record.getbuffer()], needed)


def _encode(tokenizer: Tokenizer, documents: list[bytes]) -> Iterator[NDArray[np.int64]]:
    """Each document's separator and tokens; a few documents at a time, as the tokenizer's results are large."""
    first = 0
    while first < len(documents):
        last, size = first, 0
        while last < len(documents) and size < _ENCODE_BYTES:
            size += len(documents[last])
            last += 1
        for ids in tokenizer.encode_batch([data.decode("utf-8") for data in documents[first:last]]):
            yield np.array([tokenizer.eot_id, *ids], dtype=np.int64)
        first = last


def _write_shards(
    settings: PackSettings,
    name: str,
    stream: NDArray[np.int64],
    dtype: np.dtype[Any],
    vocab_size: int,
    needed: int | None,
) -> list[dict[str, Any]]:
    """Write a part's tokens as shards of at most `shard_tokens`; return their manifest entries."""
    shards = []
    for number, start in enumerate(range(0, len(stream), settings.shard_tokens)):
        tokens = stream[start : start + settings.shard_tokens]
        highest, lowest = int(tokens.max()), int(tokens.min())
        file = f"{name}-{number}.bin"
        if highest >= vocab_size or lowest < 0:
            raise DataError(
                f"the tokenizer gave id {highest if highest >= vocab_size else lowest}, beyond its vocabulary of "
                f"{vocab_size}, while packing {Path(settings.folder) / file}; check the tokenizer"
            )
        data = tokens.astype(dtype).tobytes()
        atomic_write(Path(settings.folder) / file, [data], needed)
        sha256 = hashlib.sha256(data).hexdigest()
        shards.append({"file": file, "tokens": len(tokens), "sha256": sha256, "max_id": highest})
    return shards
