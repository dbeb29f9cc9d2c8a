"""Conversations with branches, from JSON lines to rows of training tokens in which a shared prompt stands once.

A line of a .jsonl file is a tree, written in either way:

    {"text": "Name a prime. ", "loss": false, "replies": [{"text": "2"}, {"text": "7", "replies": [...]}]}
    {"prompt": "Name a prime. ", "answers": ["2", "7"]}                            (no loss on the prompt)

Texts are tokenized one by one and laid out depth first (`models.trees`). Rows of `sequence_length` tokens hold as many
trees as fit (best fit, longest first), each whole, since a branch cut off from its prompt would mean something else. A
tree longer than a row is taken apart into its conversations, of which one that is still too long loses its end. What
then has no token with a loss is left out.

A packed folder has, for each split, an array a quantity, [rows, sequence_length], memory-mapped when read; all
rows are in memory while they are packed.
"""

import bisect
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowbit.configs.schema import DataConfig
from lowbit.data.storage import atomic_write, file_sha256, folder_lock, remove_leftovers
from lowbit.data.tokenizer import Tokenizer
from lowbit.data.worker import held_out_key
from lowbit.errors import DataError
from lowbit.models.trees import FlatTree, Node, flatten, paths
from lowbit.models.visibility import Visibility

MANIFEST = "trees.json"
FORMAT = 2
SPLITS = ("train", "val")
DEEPEST = 200
"""Pieces one below the other: everything here goes down a tree by recursion."""
ARRAYS = {"tokens": "<u4", "targets": "<u4", "weights": "<f4", "limit": "<i4", "position": "<i4"}
"""What is stored of each token, and how."""


@dataclass(frozen=True)
class Piece:
    """A node of a conversation as it is written."""

    text: str
    loss: bool = True
    replies: Sequence["Piece"] = field(default=())

    def texts(self) -> Iterator[str]:
        """All texts, depth first."""
        yield self.text
        for reply in self.replies:
            yield from reply.texts()


def parse(line: str, where: str) -> Piece:
    """A line of a file. Raises DataError naming what is wrong."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}; repair or remove the line") from None
    except RecursionError:
        raise _too_deep(where) from None
    if isinstance(row, dict) and "prompt" in row:
        answers = row.get("answers")
        if set(row) - {"prompt", "answers"} or not isinstance(answers, list) or not answers:
            raise DataError(f'{where}: "prompt" goes with "answers", a list of at least one text, and nothing else')
        row = {"text": row["prompt"], "loss": False, "replies": [{"text": answer} for answer in answers]}
    return _piece(row, where, 1)


def _piece(row: Any, where: str, depth: int) -> Piece:
    if depth > DEEPEST:
        raise _too_deep(where)
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise DataError(f'{where}: a piece of a conversation is an object with "text", or "prompt" and "answers"')
    unknown = sorted(set(row) - {"text", "loss", "replies"})
    if unknown or not isinstance(row.get("loss", True), bool) or not isinstance(row.get("replies", []), list):
        what = f"unknown {unknown[0]!r}" if unknown else '"loss" is true or false, "replies" a list'
        raise DataError(f"{where}: {what}; a piece has text, loss and replies")
    try:
        row["text"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start} of a text is half of a surrogate pair") from None
    replies = tuple(_piece(reply, where, depth + 1) for reply in row.get("replies", []))
    if not replies and not row["text"]:
        raise DataError(f"{where}: a conversation ends in an empty text; leave the reply out")
    return Piece(row["text"], row.get("loss", True), replies)


def _too_deep(where: str) -> DataError:
    return DataError(
        f"{where}: a conversation has more than {DEEPEST} replies one below the other; cut it into several"
    )


def read_lines(path: Path) -> Iterator[tuple[bytes, Piece]]:
    """The lines of a file and what they say. Raises DataError naming file and line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    where = f"{path} line {number}"
                    try:
                        text = line.decode("utf-8")
                    except UnicodeDecodeError as error:
                        raise DataError(f"{where} is not UTF-8: {error.reason}") from None
                    yield line.strip(), parse(text, where)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class TreeRows:
    """One split: rows of whole trees."""

    arrays: dict[str, NDArray[Any]]
    """Each [rows, sequence_length], as `ARRAYS` says."""
    used: NDArray[np.int64]
    """Tokens of each row that are no padding."""
    text_bytes: int

    def __len__(self) -> int:
        """Tokens of all rows, padding aside."""
        return int(self.used.sum())

    @property
    def rows(self) -> int:
        return len(self.used)

    @property
    def documents(self) -> range:
        """As `TokenStream.documents`: a row counts as a document."""
        return range(self.rows + 1)

    def document(self, index: int) -> NDArray[Any]:
        """Tokens of a row."""
        return self.arrays["tokens"][index, : self.used[index]]


@dataclass(frozen=True)
class PackedTrees:
    """An opened folder."""

    folder: Path
    digest: str
    """Hash of the content."""
    train: TreeRows
    val: TreeRows


def pack_conversations(
    name: str,
    files: Sequence[Path],
    identity: str,
    tokenizer: Tokenizer,
    config: DataConfig,
    report: Callable[[str], None],
    most: int | None = None,
) -> PackedTrees:
    """Pack conversations, or open what is packed already.

    Args:
        identity: of the files and the source's settings. Others: of the source and the run.
        most: conversations to read; None: all.

    Raises: DataError for a bad line, a damaged folder, a full disk, fewer than two conversations, or none with a loss.
    """
    settings = [FORMAT, identity, tokenizer.digest, config.held_out, config.sequence_length]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    folder = Path(config.cache_dir).expanduser() / "packed" / f"{name}-trees-{key}"
    if not (folder / MANIFEST).is_file():
        with folder_lock(folder, report):
            remove_leftovers(folder)
            if not (folder / MANIFEST).is_file():
                _pack(folder, name, files, tokenizer, config, report, most)
    return open_trees(folder)


def _pack(
    folder: Path,
    name: str,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    config: DataConfig,
    report: Callable[[str], None],
    most: int | None,
) -> None:
    lines = list(islice((line for file in files for line in read_lines(file)), most))
    keyed = [(held_out_key(raw), piece) for raw, piece in lines]
    if len({key for key, _ in keyed}) < 2:
        raise DataError(
            f"data source {name!r} has {len(keyed)} conversations: training and validation need one each, and copies "
            "count as one"
        )
    border = int(config.held_out * 2**64)
    border = min(max(border, min(key for key, _ in keyed) + 1), max(key for key, _ in keyed))  # neither side is empty
    manifest: dict[str, Any] = {"format": FORMAT, "tokenizer": tokenizer.digest, "length": config.sequence_length}
    digests = [tokenizer.digest]
    for split in SPLITS:
        pieces = [piece for key, piece in keyed if (key < border) == (split == "val")]
        fitting = [list(_fitting(_tokenized(piece, tokenizer), tokenizer, config)) for piece in pieces]
        trees = [tree for found in fitting for tree in found]
        if not trees:
            raise DataError(
                f"data source {name!r}: none of {len(pieces)} conversations for {split} has text with a loss in "
                f"data.sequence_length={config.sequence_length} tokens: raise it, or give the answers a loss"
            )
        rows = best_fit([len(tree) for tree in trees], config.sequence_length)
        hashes = _write_rows(folder, split, [[trees[i] for i in row] for row in rows], tokenizer.eot_id, config)
        digests += hashes.values()
        text_bytes = sum(len(text.encode()) for piece in pieces for text in piece.texts())
        manifest[split] = {"rows": len(rows), "bytes": text_bytes, "files": hashes}
        tokens = sum(map(len, trees))
        full = tokens / (len(rows) * config.sequence_length)
        report(
            f"data {name}: {len(pieces):,} conversations for {split} in {len(rows):,} rows, {tokens:,} tokens, "
            f"{full:.0%} of the rows full"
        )
        if without := sum(not found for found in fitting):
            report(f"data {name}: {without:,} of them are left out: no text with a loss in data.sequence_length tokens")
    manifest["content"] = hashlib.sha256("".join(digests).encode()).hexdigest()
    atomic_write(folder / MANIFEST, [json.dumps(manifest, indent=1).encode() + b"\n"])


def _tokenized(piece: Piece, tokenizer: Tokenizer) -> Node:
    replies = [_tokenized(reply, tokenizer) for reply in piece.replies]
    return Node(tokenizer.encode(piece.text), 1.0 if piece.loss else 0.0, replies)


def _fitting(tree: Node, tokenizer: Tokenizer, config: DataConfig) -> Iterator[FlatTree]:
    """The tree if it fits a row, else its conversations one by one, cut where they are too long; without those that
    have no loss anywhere."""
    length = config.sequence_length
    whole = flatten(tree, tokenizer.eot_id)
    if len(whole) <= length:
        if any(whole.weights):
            yield whole
        return
    for path in paths(tree):
        flat = flatten(path, tokenizer.eot_id)
        if len(flat) > length:
            flat = FlatTree(
                flat.tokens[:length],
                flat.targets[:length],
                flat.weights[:length],
                [length] * length,
                flat.position[:length],
            )
        if any(flat.weights):
            yield flat


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Which items stand in which row: longest first, each into the fullest row that still has room."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room left and row, ascending
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = bisect.bisect_left(free, (sizes[item], -1))
        if place < len(free):
            room, row = free.pop(place)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        bisect.insort(free, (room - sizes[item], row))
    return rows


def _write_rows(
    folder: Path, split: str, rows: list[list[FlatTree]], eot_id: int, config: DataConfig
) -> dict[str, str]:
    """Write a split's arrays; their SHA-256 by file name. Raises DataError when a row's rule is none of trees."""
    shape = (len(rows), config.sequence_length)
    arrays = {name: np.zeros(shape, dtype=dtype) for name, dtype in ARRAYS.items()}
    arrays["tokens"][:] = arrays["targets"][:] = eot_id
    arrays["limit"][:] = np.arange(1, config.sequence_length + 1)
    used = np.zeros(len(rows), dtype="<i8")
    owner = np.full(shape, -1) - np.arange(shape[1])  # padding tokens are documents by themselves
    for row, trees in enumerate(rows):
        begin = 0
        for number, tree in enumerate(trees):
            here = slice(begin, begin + len(tree))
            for name in ("tokens", "targets", "weights", "position"):
                arrays[name][row, here] = getattr(tree, name)
            arrays["limit"][row, here] = np.array(tree.limit) + begin
            owner[row, here] = number
            begin += len(tree)
        used[row] = begin
    index = torch.arange(shape[1], dtype=torch.int32).expand(shape)
    rule = Visibility(index, torch.from_numpy(arrays["limit"]), torch.from_numpy(arrays["position"]))
    rule.validate(config.sequence_length, torch.from_numpy(owner), tree=True)
    hashes = {}
    for name, array in (arrays | {"used": used}).items():
        data = io.BytesIO()
        np.save(data, array)
        file = f"{split}-{name}.npy"
        atomic_write(folder / file, [data.getbuffer()])
        hashes[file] = hashlib.sha256(data.getbuffer()).hexdigest()
    return hashes


def open_trees(folder: Path) -> PackedTrees:
    """A packed folder, its files compared with their SHA-256. Raises DataError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        splits = {}
        for split in SPLITS:
            for file, sha256 in manifest[split]["files"].items():
                if file_sha256(folder / file) != sha256:
                    raise DataError(f"{folder / file} was edited or damaged; delete {folder} and run again")
            arrays = {name: np.load(folder / f"{split}-{name}.npy", mmap_mode="r") for name in [*ARRAYS, "used"]}
            used = np.asarray(arrays.pop("used"))
            splits[split] = TreeRows(arrays, used, int(manifest[split]["bytes"]))
        return PackedTrees(folder, str(manifest["content"]), splits["train"], splits["val"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is damaged ({type(error).__name__}): delete it and run again") from error
