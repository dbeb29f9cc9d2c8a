"""Where documents come from: listing a source is cheap and gives it an identity, reading it yields its documents.

The listing (relative names, sizes and modification times of the files; for `datasets`, the resolved data files) is
hashed into `identity`, which names the folder of packed shards: an unchanged source is recognised without being read,
a changed one is packed anew. The order of documents is fixed: files by name, documents as they stand in the file.
"""

import ast
import glob
import hashlib
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from lowbit.configs.nearest import did_you_mean
from lowbit.configs.schema import SourceConfig, SourceKind
from lowbit.data.conversations import read_lines
from lowbit.data.readers import SUFFIXES, decode_utf8, is_readable, read_file
from lowbit.errors import DataError

_STDLIB_SKIP = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "Icons"})
_TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True)
class SourceFile:
    """A file of a source; `name` is relative to the source's root, with forward slashes."""

    path: Path
    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    """A source as found: what will be read, and the hash that recognises it."""

    name: str
    config: SourceConfig
    files: tuple[SourceFile, ...]
    identity: str
    """SHA-256 over the listing and over the settings that change which documents are read."""

    @property
    def total_bytes(self) -> int | None:
        """Size of the files; None where it is unknown (a data set read by `datasets`)."""
        return sum(f.size for f in self.files) if self.files else None


def list_source(name: str, config: SourceConfig) -> Listing:
    """Find the files of a source without reading them.

    Raises: DataError when the path is missing, unreadable or holds nothing that can be read.
    """
    details: list[object]
    if config.kind is SourceKind.huggingface:
        from lowbit.data.huggingface import dataset_identity

        files: tuple[SourceFile, ...] = ()
        details = [dataset_identity(config)]
    else:
        found = _stdlib_files() if config.kind is SourceKind.python_docs else _local_files(name, config.path)
        files = tuple(sorted((_stat(path, root) for path, root in found), key=lambda f: f.name))
        if not files:
            where = config.path or sysconfig.get_path("stdlib")
            raise DataError(f"data source {name!r} is empty: no {' '.join(SUFFIXES)} file in {where}")
        details = [[f.name, f.size, f.mtime_ns] for f in files]
    settings = asdict(config)
    for irrelevant in ("path", "weight", "streaming"):
        del settings[irrelevant]
    identity = hashlib.sha256(json.dumps([settings, details], sort_keys=True, default=str).encode()).hexdigest()
    return Listing(name, config, files, identity)


def read_documents(listing: Listing, shuffled: bool = False) -> Iterator[str]:
    """Every document of a source, in order; with `shuffled` (to take a sample) the files come in a hashed order.

    Raises: DataError for a file that is unreadable, not UTF-8 or lacks the field; for a source without any text.
    """
    documents = islice(_documents(listing, shuffled), listing.config.max_documents)
    blank = 0
    for document in documents:
        yield document
        if not document.isspace():
            yield from documents
            return
        blank += 1
    raise _no_text(listing, blank)


def _no_text(listing: Listing, blank: int) -> DataError:
    """The error for a source whose documents, `blank` of them, are all white space."""
    where = listing.config.path or sysconfig.get_path("stdlib")
    what = (
        f"has nothing but white space: {where}, in {blank} documents" if blank else f"is empty: {where} holds no text"
    )
    return DataError(f"data source {listing.name!r} {what}; add text, or set data.sources.{listing.name}.path")


def _documents(listing: Listing, shuffled: bool) -> Iterator[str]:
    config = listing.config
    if config.kind is SourceKind.huggingface:
        from lowbit.data.huggingface import read_dataset

        yield from read_dataset(config)
        return
    files = listing.files
    if shuffled:
        files = tuple(sorted(files, key=lambda f: hashlib.sha256(f.name.encode()).digest()))
    for file in files:
        if config.kind is SourceKind.conversations:
            yield from ("".join(piece.texts()) for _, piece in read_lines(file.path))
        elif config.kind is SourceKind.python_docs:
            yield from _read_stdlib(file)
        else:
            yield from read_file(file.path, config.text_field, config.document_bytes)


def _stat(path: Path, root: Path) -> SourceFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return SourceFile(path, path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns)


def _walk(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `folder`, without hidden files and folders."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(d for d in folders if not d.startswith(".") and d not in skip)
        yield from (Path(parent, f) for f in sorted(files) if not f.startswith("."))


def _stdlib_files() -> list[tuple[Path, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    return [(path, root) for path in _walk(root, _STDLIB_SKIP) if path.suffix == ".py"]


def _read_stdlib(file: SourceFile) -> Iterator[str]:
    """A module's source; the help topics are prose inside a dictionary, and become a document each."""
    try:
        data = file.path.read_bytes()
        if file.name == _TOPICS:
            yield from _help_topics(decode_utf8(data, file.path, 0))
            return
        with file.path.open("rb") as lines:
            encoding, _ = tokenize.detect_encoding(lines.readline)
        text = data.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file.path}: {error}") from error
    if text:
        yield text


def _help_topics(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            yield from (topics[name] for name in sorted(topics) if topics[name])


def _local_files(name: str, path: str) -> list[tuple[Path, Path]]:
    """Files of a `files` source with the folder that their names are relative to."""
    if not path:
        raise DataError(f"data source {name!r} has no path: set data.sources.{name}.path to a file, folder or glob")
    place = Path(path).expanduser()
    if place.is_dir():
        return [(p, place) for p in _walk(place) if is_readable(p.name)]
    if place.is_file():
        if not is_readable(place.name):
            raise DataError(f"cannot read {place}: its suffix is none of {' '.join(SUFFIXES)}")
        return [(place, place.parent)]
    if glob.has_magic(path):
        matches = [Path(p) for p in glob.glob(str(place), recursive=True)]  # noqa: PTH207 - absolute patterns too
        files = [p for p in matches if p.is_file() and is_readable(p.name)]
        if not files:
            raise DataError(f"data source {name!r} is empty: no {' '.join(SUFFIXES)} file matches {path}")
        root = Path(os.path.commonpath([p.parent for p in files]))
        return [(p, root) for p in files]
    if place.exists():
        raise DataError(f"data source {name!r}: {place} is neither a file nor a folder")
    siblings = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
    raise DataError(f"data source {name!r}: {place} does not exist{did_you_mean(place.name, siblings)}")
