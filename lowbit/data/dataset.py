"""From a configuration to a data set: tokenizer, packed sources, and batches cut from them.

Each split of a source is one stream of tokens: separator, document, separator, document, ... A sequence of length T is
the T tokens at q*T and, as targets, the T tokens one further on: consecutive sequences share no target and leave none
out. The target of a document's last token is the next separator, so end-of-text is learned. With `document_mask`
attention stays within a document's piece of the sequence, and positions restart there.

Validation reads the held-out streams in one fixed shuffled order, so that a part of them is a fair sample; the last
short sequence is padded with weight 0, so that every held-out token counts.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowbit.configs.schema import DataConfig, SourceKind, TokenizerKind
from lowbit.data.batch import Batch
from lowbit.data.conversations import PackedTrees, TreeRows, pack_conversations
from lowbit.data.mixture import Mixture
from lowbit.data.pack import pack_source, split_threshold
from lowbit.data.permutation import Permutation
from lowbit.data.shards import PackedSource, TokenStream
from lowbit.data.sources import Listing, list_source, read_documents
from lowbit.data.storage import folder_lock
from lowbit.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer, take_bytes, train_bpe, trained_here
from lowbit.data.trigram import TrigramModel
from lowbit.data.worker import held_out_key
from lowbit.errors import ConfigError, DataError
from lowbit.models.visibility import Visibility


@dataclass(frozen=True)
class MixedSource:
    """A packed source and its share of the training samples."""

    name: str
    share: float
    packed: PackedSource | PackedTrees
    sequences: int
    """Whole training sequences in an epoch."""


class Dataset:
    """Everything that training and evaluation read."""

    def __init__(
        self, tokenizer: Tokenizer, sources: dict[str, tuple[float, PackedSource | PackedTrees]], config: DataConfig
    ) -> None:
        """`sources`: name to weight and packed source. Raises: DataError for less than one sequence in a source."""
        self.tokenizer = tokenizer
        self.sequence_length = config.sequence_length
        self.document_mask = config.document_mask
        if self.sequence_length < 1:
            raise ConfigError(f"data.sequence_length={self.sequence_length} must be at least 1")
        self.mixture = Mixture([weight for weight, _ in sources.values()])
        self.sources: list[MixedSource] = []
        for (name, (_, packed)), share in zip(sources.items(), self.mixture.shares, strict=True):
            sequences = sequences_in(packed.train, self.sequence_length)
            if sequences < 1:
                raise DataError(
                    f"data source {name!r} has {len(packed.train)} training tokens, and one sequence needs "
                    f"{self.sequence_length + 1}: add text or lower data.sequence_length"
                )
            if len(packed.val) < 2:
                raise DataError(f"data source {name!r} has no held-out tokens: add documents or raise data.held_out")
            self.sources.append(MixedSource(name, share, packed, sequences))
        identity = [
            self.sequence_length,
            [
                [s.name, count, s.packed.digest]
                for s, count in zip(self.sources, self.mixture.counts.tolist(), strict=True)
            ],
        ]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        """Hash of all that decides the order and content of training samples, besides the seed."""

    @property
    def train_tokens(self) -> int:
        """Training tokens of all sources."""
        return sum(len(s.packed.train) for s in self.sources)

    @property
    def val_tokens(self) -> int:
        """Held-out tokens of all sources."""
        return sum(len(s.packed.val) for s in self.sources)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint remembers of its data, field by field so that a difference can be shown."""
        return {
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.digest,
            "vocab_size": self.tokenizer.vocab_size,
            "sequence_length": self.sequence_length,
            "document_mask": self.document_mask,
            "sources": {
                s.name: {
                    "share": round(s.share, 6),
                    "content": s.packed.digest,
                    "train_tokens": len(s.packed.train),
                    "val_tokens": len(s.packed.val),
                }
                for s in self.sources
            },
        }

    def training_batch(self, source: NDArray[np.int64], sequence: NDArray[np.int64]) -> Batch:
        """The batch of training sequences (source[b], sequence[b])."""
        rows = [(self.sources[s].packed.train, int(q)) for s, q in zip(source, sequence, strict=True)]
        return self._batch(rows, len(rows))

    def validation_batches(
        self, micro_batch: int, max_tokens: int | None = None, *, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Held-out sequences in a fixed order, `micro_batch` a batch (the last filled up with weight 0).

        `max_tokens` bounds the targets, shared between the sources by their weights, at least a sequence each.
        Of several ranks each gets every world-th batch, and equally many: what is missing is a batch of weight 0.
        """
        rows = []
        for source in self.sources:
            stream = source.packed.val
            count = sequences_in(stream, self.sequence_length, whole=False)
            wanted = count
            if max_tokens is not None:
                wanted = min(count, max(1, int(max_tokens * source.share) // self.sequence_length))
            order = Permutation(count, "validation")(np.arange(wanted)) if count else np.zeros(0, np.int64)
            rows += [(stream, int(q)) for q in order]
        for round_start in range(0, len(rows), micro_batch * world):
            first = round_start + rank * micro_batch
            yield self._batch(rows[first : first + micro_batch], micro_batch)

    def trigram_bpb(self, max_bytes: int = 50_000_000) -> float:
        """Bits per byte, over the held-out documents, of a byte-trigram model fitted on the training documents.

        Each side reads at most about `max_bytes` of text, shared between the sources by their weights.
        """
        model = TrigramModel()
        for source in self.sources:
            model.add(self._texts(source.packed.train, int(max_bytes * source.share)))
        bits = size = 0.0
        for source in self.sources:
            texts = self._texts(source.packed.val, int(max_bytes * source.share))
            bits += model.bits(texts)
            size += sum(len(t) for t in texts)
        return bits / size

    def _texts(self, stream: TokenStream | TreeRows, max_bytes: int) -> list[bytes]:
        """Documents of a stream as bytes, in a shuffled order, until `max_bytes` are there."""
        texts, size, count = [], 0, len(stream.documents) - 1
        order = Permutation(count, "trigram")
        for position in range(count):
            if size >= max(1, max_bytes):
                break
            index = int(order(np.array([position]))[0])
            texts.append(self.tokenizer.decode_bytes(stream.document(index).tolist()))
            size += len(texts[-1])
        return texts

    def _batch(self, rows: list[tuple[TokenStream | TreeRows, int]], size: int) -> Batch:
        """Sequences of streams as a batch of `size` rows; what is missing is padding that sees only itself.

        A batch in which every token sees all before it has no visibility: plain causal attention is faster.
        """
        length = self.sequence_length
        tokens = np.full((size, length), self.tokenizer.eot_id, dtype=np.int64)
        targets = tokens.copy()
        weights = np.zeros((size, length), dtype=np.float32)
        index = np.arange(length, dtype=np.int32)
        limit = np.tile(index + 1 if self.document_mask else np.full_like(index, length), (size, 1))
        position = np.tile(np.zeros_like(index) if self.document_mask else index, (size, 1))
        for row, (stream, sequence) in enumerate(rows):
            if isinstance(stream, TreeRows):
                tokens[row], targets[row] = stream.arrays["tokens"][sequence], stream.arrays["targets"][sequence]
                weights[row], position[row] = stream.arrays["weights"][sequence], stream.arrays["position"][sequence]
                limit[row] = stream.arrays["limit"][sequence]
                continue
            start = sequence * length
            stop = min(start + length + 1, len(stream))
            count = stop - start - 1
            read = stream.read(start, stop)
            tokens[row, :count], targets[row, :count] = read[:-1], read[1:]
            if count < length:  # the token behind the last one, which nothing is trained on
                tokens[row, count] = read[-1]
            weights[row, :count] = 1.0
            if self.document_mask:
                begins = stream.boundaries(start, start + count)
                ends = np.append(begins[1:], count)
                sizes = ends - begins
                limit[row, :count] = np.repeat(ends, sizes)
                position[row, :count] = np.arange(count) - np.repeat(begins, sizes)
        seen = None
        if not (limit == length).all():
            begin = torch.arange(length, dtype=torch.int32).expand(size, length).contiguous()
            seen = Visibility(begin, torch.from_numpy(limit), torch.from_numpy(position))
            seen.validate()  # here it can be read without waiting for a device
            seen = seen.with_ends()
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            torch.from_numpy(weights),
            seen,
            int(weights.sum()),
        )


def prepare_data(config: DataConfig, report: Callable[[str], None]) -> Dataset:
    """Train or load the tokenizer, pack or reuse every source, and open them.

    Raises: DataError or ConfigError, one line, for whatever is missing, damaged or does not fit.
    """
    if not config.sources:
        raise ConfigError("data.sources is empty: name at least one source")
    Mixture([source.weight for source in config.sources.values()])  # refuses bad weights before any work
    listings = [list_source(name, source) for name, source in config.sources.items()]
    tokenizer = prepare_tokenizer(config, listings, report)
    packed = {listing.name: (listing.config.weight, _pack(listing, tokenizer, config, report)) for listing in listings}
    return Dataset(tokenizer, packed, config)


def _pack(
    listing: Listing, tokenizer: Tokenizer, config: DataConfig, report: Callable[[str], None]
) -> PackedSource | PackedTrees:
    if listing.config.kind is not SourceKind.conversations:
        return pack_source(listing, tokenizer, config, report)
    files = [file.path for file in listing.files]
    most = listing.config.max_documents
    return pack_conversations(listing.name, files, listing.identity, tokenizer, config, report, most)


def sequences_in(stream: TokenStream | TreeRows, length: int, whole: bool = True) -> int:
    """Sequences of a stream: rows of trees, or stretches of tokens, of which the last may be short unless `whole`."""
    if isinstance(stream, TreeRows):
        return stream.rows
    return (len(stream) - 1) // length if whole else -(-(len(stream) - 1) // length)


def prepare_tokenizer(config: DataConfig, listings: list[Listing], report: Callable[[str], None]) -> Tokenizer:
    """The run's tokenizer: loaded where it is there, else trained on the training documents and kept.

    Raises: DataError when a file is missing or damaged, or holds another vocabulary than configured.
    """
    wanted = config.tokenizer
    if wanted.kind is TokenizerKind.bytes:
        return bytes_tokenizer()
    if wanted.kind is TokenizerKind.file:
        if not wanted.path:
            raise ConfigError("data.tokenizer.path is empty: set it to a tokenizer.json or a folder that holds one")
        return load_tokenizer(wanted.path, wanted.eot)
    folder = Path(wanted.path).expanduser() if wanted.path else _tokenizer_folder(config, listings)
    if folder.is_file() or ((folder / "tokenizer.json").is_file() and not trained_here(folder)):
        raise ConfigError(
            f"data.tokenizer.path={wanted.path or folder} holds a tokenizer that was not trained here: use it with "
            "data.tokenizer.kind=file, or train into another folder"
        )
    if not trained_here(folder):
        with folder_lock(folder, report):
            if not trained_here(folder):
                report(f"tokenizer: training a byte-level BPE of {wanted.vocab_size} tokens")
                train_bpe(_training_sample(config, listings), wanted.vocab_size).save(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != wanted.vocab_size:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, not data.tokenizer.vocab_size="
            f"{wanted.vocab_size}: change either, or set another data.tokenizer.path"
        )
    report(f"tokenizer: byte-level BPE of {tokenizer.vocab_size} tokens ({folder})")
    return tokenizer


def _tokenizer_folder(config: DataConfig, listings: list[Listing]) -> Path:
    parts = [[listing.name, listing.identity, listing.config.weight] for listing in listings]
    settings = [parts, config.tokenizer.vocab_size, config.tokenizer.train_bytes, config.held_out]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    return Path(config.cache_dir).expanduser() / "tokenizers" / f"bpe{config.tokenizer.vocab_size}-{key}"


def _training_sample(config: DataConfig, listings: list[Listing]) -> Iterator[str]:
    """Text to train a tokenizer on: the sources by weight, without the held-out documents."""
    threshold = split_threshold(config.held_out)
    shares = Mixture([listing.config.weight for listing in listings]).shares
    found = False
    for listing, share in zip(listings, shares, strict=True):
        for document in take_bytes(
            read_documents(listing, shuffled=True),
            int(config.tokenizer.train_bytes * share),
            lambda document: held_out_key(document.encode("utf-8")) >= threshold,
        ):
            found = True
            yield document
    if not found:
        names = ", ".join(listing.name for listing in listings)
        raise DataError(f"no text to train a tokenizer on: all of {names} is held out; add documents")
