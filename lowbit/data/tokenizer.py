"""Text to token ids and back: bytes, a byte-level BPE trained here, or any Hugging Face `tokenizer.json`.

One class serves all three. What makes it fit for training:

- Text is text. A document that contains `<|endoftext|>` gets the ids of those characters, never the separator's id.
- `digest` hashes the tokenizer's definition, so shards and checkpoints know which one they belong to.
- `token_bytes` says how many UTF-8 bytes each id stands for, which turns a loss in nats a token into bits a byte,
  the unit in which models with different tokenizers can be compared.

Byte-level BPE writes every byte as one printable character (GPT-2's table); a token's bytes are therefore exact even
where a token ends inside a character. SentencePiece-like tokenizers mark spaces with U+2581 and spell unknown bytes
`<0xAB>`; both are undone here.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.configs.nearest import did_you_mean
from lowbit.data.storage import atomic_write, write_error
from lowbit.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
_USUAL_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "<|im_end|>", "[SEP]")
# Words with the space, dot, underscore or bracket before them; numbers by twos; runs of signs; line ends; spaces.
_SPLIT = r"[ ._(]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PROBE = "def f(x):\n    return x * 2.5  # naïve café, 東京 🙂\n\nThe end\tof <tokens>.\n"


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable character of every byte: Latin-1's printable ones are themselves, the rest follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """A tokenizer with a document separator. Build it with `bytes_tokenizer`, `train_bpe` or `load_tokenizer`."""

    def __init__(self, definition: bytes | None, eot: str) -> None:
        """`definition` is a `tokenizer.json`; None means plain bytes. `eot` is the separator's token."""
        self.definition = definition
        self.eot = eot
        self.digest = hashlib.sha256((definition or b"bytes") + b"\0" + eot.encode()).hexdigest()
        self._tokenizer: Any = None
        if definition is None:
            self.vocab_size, self.eot_id = 257, 256
            return
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(definition.decode("utf-8"))
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # special tokens written in a text are text
        vocab = backend.get_vocab(with_added_tokens=True)
        if eot not in vocab:
            raise DataError(f"the tokenizer has no token {eot!r}{did_you_mean(eot, vocab)} (data.tokenizer.eot)")
        self._tokenizer = backend
        self.vocab_size = max(vocab.values()) + 1
        self.eot_id = int(vocab[eot])

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tokenizer, (self.definition, self.eot))

    @property
    def kind(self) -> str:
        """`bytes` or `file`, for display."""
        return "bytes" if self.definition is None else "file"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without separator or other special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text."""
        if self._tokenizer is None:
            return [list(text.encode("utf-8")) for text in texts]
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def begin(self) -> list[int]:
        """What stands before a text: what an imported tokenizer itself puts there, else the separator."""
        if self._tokenizer is None:
            return [self.eot_id]
        text = self._tokenizer.encode("a", add_special_tokens=True)
        before = [i for i, special in zip(text.ids, text.special_tokens_mask, strict=True) if special][:1]
        return before if text.ids[:1] == before else [self.eot_id]

    def hugging_face(self) -> bytes:
        """A `tokenizer.json` with these very ids; plain bytes become a byte-level BPE without merges."""
        if self.definition is not None:
            return self.definition
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        backend = Backend(models.BPE(vocab=_byte_characters(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([self.eot])
        return str(backend.to_str()).encode("utf-8")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for; special tokens stand for none."""
        if self._pieces is None:
            return self.decode(ids).encode("utf-8")
        pieces = self._pieces
        return b"".join([pieces[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text that ids stand for; a cut character becomes U+FFFD, special tokens nothing."""
        if self._pieces is None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> NDArray[np.int32]:
        """UTF-8 bytes each id stands for, int32 [vocab]; 0 for special tokens and unused ids.

        Exact for bytes and byte-level BPE. Others are checked on a sample text; a warning says when the sum is off.
        """
        if self._pieces is not None:
            return np.array([len(piece) for piece in self._pieces], dtype=np.int32)
        sizes = self._estimated_sizes()
        ids = self.encode(_PROBE)
        found, true = int(sizes[ids].sum()), len(_PROBE.encode("utf-8"))
        if found != true or self.decode(ids) != _PROBE:
            warnings.warn(
                f"the tokenizer does not give every text back byte for byte (sample: {found} bytes counted, {true} "
                "written): bits per byte will be approximate",
                stacklevel=2,
            )
        return sizes

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` (Hugging Face's format; none for bytes) and `lowbit.json` into a folder.

        A new folder appears whole. In one that exists `lowbit.json`, which holds the digest that `load_tokenizer`
        checks, is taken away first and written last; if it already holds this tokenizer it is left alone.
        """
        if folder.is_dir():
            if not self._is_in(folder):
                (folder / "lowbit.json").unlink(missing_ok=True)
                self._write(folder)
            return
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        self._write(temporary)
        try:
            temporary.rename(folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not (folder.is_dir() and self._is_in(folder)):  # else another process was quicker, with the same one
                raise write_error(folder, error) from error

    def _is_in(self, folder: Path) -> bool:
        note, file = folder / "lowbit.json", folder / "tokenizer.json"
        try:
            same_note = note.is_file() and _read_json(note).get("digest") == self.digest
        except DataError:  # damaged: written anew
            return False
        return same_note and (self.definition is None or (file.is_file() and file.read_bytes() == self.definition))

    def _write(self, folder: Path) -> None:
        if self.definition is not None:
            atomic_write(folder / "tokenizer.json", [self.definition])
        note = {"kind": self.kind, "eot": self.eot, "vocab_size": self.vocab_size, "digest": self.digest}
        atomic_write(folder / "lowbit.json", [json.dumps(note, indent=1).encode() + b"\n"])

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        return decoder.get("decoders", [decoder]) if decoder else []

    @cached_property
    def _special(self) -> dict[int, bool]:
        """Added tokens: id to whether it is special."""
        return {i: bool(t.special) for i, t in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _pieces(self) -> list[bytes] | None:
        """Bytes of every id, where ids map to bytes one by one (bytes, byte-level BPE); else None."""
        if self._tokenizer is None:
            return [bytes([b]) for b in range(256)] + [b""]
        if not any(d["type"] == "ByteLevel" for d in self._decoders):
            return None
        table = _byte_characters()
        pieces = [b""] * self.vocab_size
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in self._special:
                pieces[i] = b"" if self._special[i] or i == self.eot_id else token.encode("utf-8")
            elif all(c in table for c in token):
                pieces[i] = bytes(table[c] for c in token)
            else:
                pieces[i] = token.encode("utf-8")
        return pieces

    def _estimated_sizes(self) -> NDArray[np.int32]:
        """Bytes of every id where a token's text may depend on its neighbours: read from its spelling or decoded."""
        kinds = {d["type"] for d in self._decoders}
        spaced = "Metaspace" in kinds or "▁" in json.dumps(self._decoders, ensure_ascii=False)
        anchor = self.encode("a")[-1:]
        alone = len(self._decoded(anchor))
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i == self.eot_id or self._special.get(i, False):
                continue
            if "ByteFallback" in kinds and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                sizes[i] = 1
            elif spaced:
                sizes[i] = len(token.replace("▁", " ").encode("utf-8"))
            else:
                sizes[i] = max(0, len(self._decoded([*anchor, i])) - alone)
        return sizes

    def _decoded(self, ids: list[int]) -> bytes:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).encode("utf-8")


def bytes_tokenizer() -> Tokenizer:
    """256 byte values and one end-of-text id."""
    return Tokenizer(None, END_OF_TEXT)


def train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens (separator included), the same for the same documents.

    Raises: ConfigError when `vocab_size` has no room for the bytes; DataError when the text is too small for it.
    """
    if vocab_size < 257:
        raise ConfigError(f"data.tokenizer.vocab_size={vocab_size} has no room for 256 bytes and {END_OF_TEXT}")
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.encode_special_tokens = True
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(_byte_characters()),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    tokenizer = Tokenizer(backend.to_str().encode("utf-8"), END_OF_TEXT)
    if tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"the text is too small for a vocabulary of {vocab_size}: it yields {tokenizer.vocab_size} tokens; set "
            f"data.tokenizer.vocab_size={tokenizer.vocab_size} or less, or give more text"
        )
    return tokenizer


def trained_here(folder: Path | str) -> bool:
    """Whether a folder holds a tokenizer that `Tokenizer.save` wrote."""
    return (Path(folder).expanduser() / "lowbit.json").is_file()


def load_tokenizer(path: Path | str, eot: str | None = None) -> Tokenizer:
    """Load a `tokenizer.json`, or a folder that holds one (Hugging Face's, or one written by `Tokenizer.save`).

    `eot` names the separator; None takes the folder's own note, or one of the usual names.

    Raises: DataError when it is missing or damaged, or has no such separator.
    """
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent
    note = _read_json(folder / "lowbit.json") if place.is_dir() and (folder / "lowbit.json").is_file() else {}
    if note.get("kind") == "bytes":
        tokenizer = bytes_tokenizer()
        if eot not in (None, tokenizer.eot):
            raise DataError(f"{place}: bytes are separated by {tokenizer.eot!r}, not by {eot!r}")
        return tokenizer
    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.is_file():
        hint = did_you_mean(file.name, [p.name for p in file.parent.iterdir()]) if file.parent.is_dir() else ""
        raise DataError(f"no tokenizer at {file}{hint}")
    definition = file.read_bytes()
    try:
        vocab = _tokens(definition)
        separator = eot or note.get("eot") or next((t for t in _separators(folder) if t in vocab), None)
        if separator is None:
            raise DataError(f"{file}: no usual end-of-text token found; name it with data.tokenizer.eot")
        tokenizer = Tokenizer(definition, separator)
    except DataError:
        raise
    except Exception as error:  # the backend raises plain Exception for anything it cannot parse
        raise DataError(f"{file} is not a Hugging Face tokenizer: {str(error).splitlines()[0]}") from error
    if eot is None and note.get("digest", tokenizer.digest) != tokenizer.digest:
        raise DataError(f"{file} does not match the digest in lowbit.json beside it: it was edited or half copied")
    return tokenizer


def _tokens(definition: bytes) -> dict[str, int]:
    from tokenizers import Tokenizer as Backend

    vocab: dict[str, int] = Backend.from_str(definition.decode("utf-8")).get_vocab(with_added_tokens=True)
    return vocab


def _separators(folder: Path) -> list[str]:
    """Candidates for the separator: what Hugging Face's own note names, then the usual ones."""
    path = folder / "tokenizer_config.json"
    named = _read_json(path).get("eos_token") if path.is_file() else None
    if isinstance(named, dict):
        named = named.get("content")
    return [named, *_USUAL_SEPARATORS] if isinstance(named, str) else list(_USUAL_SEPARATORS)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return content if isinstance(content, dict) else {}


def limit_threads_to_one() -> None:
    """Keep `tokenizers` to one thread in a worker process; the library offers no other switch than this variable."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def take_bytes(documents: Iterator[str], limit: int, wanted: Callable[[str], bool]) -> Iterator[str]:
    """The documents that are `wanted`, until about `limit` UTF-8 bytes were taken."""
    taken = 0
    for document in documents:
        if taken >= limit:
            return
        if wanted(document):
            taken += len(document.encode("utf-8"))
            yield document
