"""Settings of the data: sources, tokenizer, packing, and how much of it a step takes."""

from dataclasses import dataclass, field
from enum import StrEnum


class SourceKind(StrEnum):
    """Where documents come from."""

    python_docs = "python_docs"
    """Standard-library sources and documentation of the running Python: on every machine."""
    files = "files"
    """Local .txt .md .py .rst .jsonl .jsonl.zst .parquet files, folders or globs."""
    huggingface = "huggingface"
    """A data set read by the `datasets` library, by hub name or local path."""
    conversations = "conversations"
    """Local .jsonl files, a tree of texts a line: {"prompt": ..., "answers": [...]}, or {"text", "loss", "replies"}.
    Answers that share a prompt share its computation; loss falls on answers, and on texts without "loss": false."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of documents; a mixture has several, by name."""

    kind: SourceKind = SourceKind.python_docs
    path: str = ""
    """files: a file, a folder (searched recursively) or a glob. huggingface: a data set's name or path."""
    text_field: str = "text"
    """Field that holds the document in .jsonl, .parquet and data sets."""
    weight: float = 1.0
    """Share of training tokens, relative to the other sources."""
    subset: str | None = None
    """huggingface: configuration name."""
    split: str = "train"
    """huggingface: split."""
    streaming: bool = False
    """huggingface: stream instead of downloading first (the packer reads it once; training never does)."""
    max_documents: int | None = None
    """Stop after this many documents."""
    document_bytes: int = 1_048_576
    """files: a text file longer than this is cut at line ends into documents of at most so many bytes."""


class TokenizerKind(StrEnum):
    """How text becomes token ids."""

    bytes = "bytes"
    """256 byte values and one end-of-text id."""
    bpe = "bpe"
    """Byte-level BPE, trained on the run's own sources when no file is there yet."""
    file = "file"
    """A Hugging Face `tokenizer.json`, or a folder that holds one."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer of a run."""

    kind: TokenizerKind = TokenizerKind.bpe
    path: str = ""
    """file: the tokenizer. bpe: where the trained one is kept; empty means inside `data.cache_dir`."""
    vocab_size: int = 4096
    """bpe: vocabulary to train, the end-of-text id included."""
    train_bytes: int = 50_000_000
    """bpe: most text read for training it."""
    eot: str | None = None
    """file: the token that separates documents; None means look for the usual names."""


@dataclass(frozen=True)
class DataConfig:
    """Documents, tokenizer, packing and the order of training samples."""

    sources: dict[str, SourceConfig] = field(default_factory=lambda: {"python_docs": SourceConfig()})
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    sequence_length: int = 256
    """Tokens a training sequence."""
    document_mask: bool = True
    """Attention stays inside a document; false: plain causal attention across packed documents."""
    held_out: float = 0.02
    """Share of documents (by content hash) kept for evaluation."""
    cache_dir: str = "data"
    """Folder of packed shards and trained tokenizers."""
    pack_workers: int = 0
    """Processes that tokenize and pack; 0 means one a core."""
    shard_tokens: int = 16_777_216
    """Most tokens in one shard."""
    prefetch: int = 4
    """Micro-batches prepared ahead in the background; 0 means none."""


@dataclass(frozen=True)
class BatchWarmupConfig:
    """One stage of a batch-size warm-up."""

    until_tokens: int = 0
    """This stage lasts until so many tokens were trained on."""
    sequences: int = 0
    """Sequences an optimizer step in this stage."""


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences an optimizer step takes."""

    sequences: int = 16
    """Sequences an optimizer step, over all ranks and micro-batches."""
    micro_batch: int = 16
    """Sequences a rank processes at once; must divide each step's share."""
    warmup: list[BatchWarmupConfig] = field(default_factory=list)
    """Stages before the full batch, in order of `until_tokens`."""
