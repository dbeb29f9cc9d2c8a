"""Sources and tokenizers that cannot be read. Looks at the file system only to see whether named paths exist."""

import glob
from pathlib import Path

from lowbit.configs.checks import refuse, value_of
from lowbit.configs.nearest import nearest_path
from lowbit.configs.schema import RunConfig, SourceKind, TokenizerKind

BYTE_VOCABULARY = 257
"""256 byte values and the end-of-text id: the least a byte-level tokenizer can have."""


def check_data(config: RunConfig) -> None:
    """Raise ConfigError for the first setting of the data that cannot work."""
    _sources(config)
    _tokenizer(config)


def _sources(config: RunConfig) -> None:
    if not config.data.sources:
        works = "data=python_docs would work, or data=files data.sources.files.path=FOLDER"
        raise refuse(config, "data.sources", why="there is nothing to train on", works=works)
    for name in config.data.sources:
        _source(config, f"data.sources.{name}")


def _source(config: RunConfig, key: str) -> None:
    source = value_of(config, key)
    if source.weight <= 0:
        works = f"{key}.weight=1 would work; ~{key} removes the source"
        raise refuse(config, f"{key}.weight", why="must be greater than 0", works=works)
    if source.max_documents is not None and source.max_documents < 1:
        works = f"{key}.max_documents=1000 would work, or null for all"
        raise refuse(config, f"{key}.max_documents", why="must be at least 1", works=works)
    if source.document_bytes < 1:
        works = f"{key}.document_bytes=1048576 would work"
        raise refuse(config, f"{key}.document_bytes", why="must be at least 1", works=works)
    path, kind = f"{key}.path", f"{key}.kind"
    if source.kind is SourceKind.python_docs and source.path:
        raise refuse(config, path, kind, why="python_docs reads no path", works=f"{kind}=files would work")
    if source.kind is not SourceKind.python_docs and not source.path:
        example = {"files": "corpus/", "conversations": "chats.jsonl"}.get(source.kind, "roneneldan/TinyStories")
        raise refuse(config, path, kind, why="this kind needs a path", works=f"for example {path}={example}")
    if source.kind in (SourceKind.files, SourceKind.conversations) and not _exists(source.path):
        why = f"no such file, folder or glob below {Path.cwd()}{nearest_path(source.path)}"
        raise refuse(config, path, why=why, works=f"give a path that exists, for example {path}=corpus/")


def _exists(path: str) -> bool:
    expanded = str(Path(path).expanduser())
    return Path(expanded).exists() or any(glob.iglob(expanded, recursive=True))  # noqa: PTH207 (absolute globs too)


def _tokenizer(config: RunConfig) -> None:
    t, key = config.data.tokenizer, "data.tokenizer"
    path, kind = f"{key}.path", f"{key}.kind"
    if t.kind is TokenizerKind.bpe and t.vocab_size < BYTE_VOCABULARY:
        why = f"byte-level BPE needs the 256 bytes and an end-of-text id, at least {BYTE_VOCABULARY}"
        raise refuse(config, f"{key}.vocab_size", kind, why=why, works=f"{key}.vocab_size=4096 would work")
    if t.kind is TokenizerKind.file and not t.path:
        works = f"give {path}=tokenizer.json, or {kind}=bpe"
        raise refuse(config, kind, path, why="this kind needs a path", works=works)
    if t.kind is TokenizerKind.file and not Path(t.path).expanduser().exists():
        why = f"no such file or folder below {Path.cwd()}{nearest_path(t.path)}"
        raise refuse(config, path, kind, why=why, works=f"give a path that exists, or {kind}=bpe, which trains one")
    if t.kind is TokenizerKind.bytes and t.path:
        works = f"{kind}=file would work, or {path}=\"''\""
        raise refuse(config, path, kind, why="bytes need no file", works=works)
    if t.eot is not None and t.kind is not TokenizerKind.file:
        works = f"{key}.eot=null would work"
        raise refuse(config, f"{key}.eot", kind, why="this kind has an end-of-text token of its own", works=works)
