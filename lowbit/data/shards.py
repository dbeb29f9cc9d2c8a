"""Packed documents on disk: what a folder holds, and reading any stretch of it without loading the rest.

A packed source is a folder of flat token files with a manifest:

    manifest.json          what was packed, with which tokenizer and settings, and each shard's tokens and SHA-256
    train-00000-0.bin ...  tokens of the training split, uint16 (uint32 when the vocabulary needs it), little-endian
    val-00000-0.bin ...    tokens of the held-out split
    train.documents, val.documents   int64 [documents + 1]: where each document begins in its split's token stream
    stamps.json            size and modification time of each file as last verified (`verified`)

A split is one stream of tokens, shard after shard; each document is stored as its separator followed by its tokens.
Opening reads the manifest and the files' sizes and times, never their tokens, unless a time has changed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.data.tokenizer import Tokenizer
from lowbit.data.verified import check_files
from lowbit.errors import DataError

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "val")
_REPACK = "delete the folder {folder} and run again to pack it anew"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type of tokens on disk."""
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenStream:
    """One split: tokens at any position, and where documents begin."""

    folder: Path
    shards: tuple[str, ...]
    starts: NDArray[np.int64]
    """Position of each shard's first token, and the end: [shards + 1]."""
    documents: NDArray[np.int64]
    """Position of each document's separator, and the end: [documents + 1], memory-mapped."""
    dtype: np.dtype[Any]
    text_bytes: int
    """UTF-8 bytes of the documents."""

    def __post_init__(self) -> None:
        # A map keeps a file descriptor, and a process may have about a thousand: the least recently used ones go.
        object.__setattr__(self, "_map", lru_cache(maxsize=256)(self._open))

    def __len__(self) -> int:
        """Tokens in the stream."""
        return int(self.starts[-1])

    def _open(self, shard: int) -> NDArray[Any]:
        return np.memmap(self.folder / self.shards[shard], dtype=self.dtype, mode="r")

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), as stored."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            begin, end = int(self.starts[first]), min(stop, int(self.starts[first + 1]))
            pieces.append(self._map(first)[start - begin : end - begin])  # type: ignore[attr-defined]
            start, first = end, first + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def boundaries(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the pieces of documents in [start, stop) begin, relative to `start`: 0 and every separator after it."""
        low = int(np.searchsorted(self.documents, start, side="right"))
        high = int(np.searchsorted(self.documents, stop, side="left"))
        return np.concatenate([np.zeros(1, np.int64), self.documents[low:high] - start])

    def document(self, index: int) -> NDArray[Any]:
        """Tokens of a document, without its separator."""
        return self.read(int(self.documents[index]) + 1, int(self.documents[index + 1]))


@dataclass(frozen=True)
class PackedSource:
    """An opened folder."""

    folder: Path
    manifest: dict[str, Any]
    train: TokenStream
    val: TokenStream

    @property
    def digest(self) -> str:
        """Hash of the content: tokens, documents and tokenizer, wherever and whenever they were packed."""
        return str(self.manifest["content_sha256"])


def open_packed(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    verify: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> PackedSource:
    """Open a packed folder; with `verify` every file is read and its SHA-256 compared.

    Raises: DataError when the folder is unfinished, a file is missing, truncated or edited, or the tokens do not
    belong to `tokenizer`.
    """
    manifest = read_manifest(folder)
    if tokenizer is not None and manifest["tokenizer_digest"] != tokenizer.digest:
        raise DataError(
            f"{folder} was packed with another tokenizer ({manifest['tokenizer_digest'][:12]}, not "
            f"{tokenizer.digest[:12]}); " + _REPACK.format(folder=folder)
        )
    vocab_size = tokenizer.vocab_size if tokenizer is not None else manifest["vocab_size"]
    for split in SPLITS:
        for shard in manifest[split]["shards"]:
            if shard["max_id"] >= vocab_size:
                what = (
                    f"{folder / shard['file']} holds token id {shard['max_id']}, beyond the vocabulary of {vocab_size}"
                )
                raise DataError(f"{what}; {_REPACK.format(folder=folder)}")
    check_files(folder, expected_files(manifest), _REPACK.format(folder=folder), verify=verify, report=report)
    dtype = np.dtype(manifest["dtype"])
    return PackedSource(folder, manifest, *(_open_split(folder, manifest[split], split, dtype) for split in SPLITS))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a packed folder. Raises: DataError when it is missing, damaged or of another version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} holds no packed data: {MANIFEST} is missing (not packed, or not finished)") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}; " + _REPACK.format(folder=folder)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is not of format {FORMAT}; " + _REPACK.format(folder=folder))
    try:
        _require_fields(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{path} was edited or damaged: {type(error).__name__} {error}"
        raise DataError(f"{what}; {_REPACK.format(folder=folder)}") from error
    return manifest


def _require_fields(manifest: dict[str, Any]) -> None:
    """Look at every field that readers use, so that a missing or odd one shows here and nowhere later."""
    for field in ("tokenizer_digest", "content_sha256"):
        manifest[field]
    int(manifest["vocab_size"])
    expected_files(manifest)
    for split in SPLITS:
        int(manifest[split]["bytes"]) + sum(int(shard["max_id"]) for shard in manifest[split]["shards"])


def documents_file(split: str) -> str:
    """Name of the file with a split's document offsets."""
    return f"{split}.documents"


def expected_files(manifest: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Every data file of a manifest: name to size in bytes and SHA-256."""
    item = np.dtype(manifest["dtype"]).itemsize
    files = {}
    for split in SPLITS:
        part = manifest[split]
        files.update({s["file"]: (s["tokens"] * item, s["sha256"]) for s in part["shards"]})
        files[documents_file(split)] = ((part["documents"] + 1) * 8, part["documents_sha256"])
    return files


def _open_split(folder: Path, part: dict[str, Any], split: str, dtype: np.dtype[Any]) -> TokenStream:
    starts = np.cumsum([0, *(s["tokens"] for s in part["shards"])], dtype=np.int64)
    documents = np.memmap(folder / documents_file(split), dtype="<i8", mode="r")
    if documents[-1] != starts[-1]:
        raise DataError(f"{folder}: {split} documents end at {documents[-1]}, tokens at {starts[-1]}; pack it anew")
    names = tuple(s["file"] for s in part["shards"])
    return TokenStream(folder, names, starts, documents, dtype, part["bytes"])
