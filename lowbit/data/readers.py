"""One reader a file format: each turns a file into documents (str), holding no more than a piece of it in memory.

    .txt .md .rst .py   a document a file, cut at line ends where longer than `document_bytes`
    .jsonl .jsonl.zst   a document a line, in one field of the object
    .parquet            a document a row, in one column

Text must be UTF-8. Nothing is repaired silently: a byte that is not UTF-8, a broken line or a missing field is a
DataError that names the file and the place. Empty documents are skipped.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lowbit.configs.nearest import did_you_mean
from lowbit.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.zst", ".parquet")
_BOM = b"\xef\xbb\xbf"


def is_readable(name: str) -> bool:
    """Whether a file of this name has a reader."""
    return name.endswith(SUFFIXES)


def read_file(path: Path, text_field: str, document_bytes: int) -> Iterator[str]:
    """The documents of one file, in order.

    Raises: DataError when the file cannot be read, is not UTF-8, is damaged or lacks `text_field`.
    """
    try:
        if path.name.endswith(TEXT_SUFFIXES):
            yield from _read_text(path, document_bytes)
        elif path.name.endswith(".jsonl"):
            with path.open("rb") as file:
                yield from _read_lines(path, file, text_field)
        elif path.name.endswith(".jsonl.zst"):
            yield from _read_zstd(path, text_field)
        else:
            yield from _read_parquet(path, text_field)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def decode_utf8(data: bytes, path: Path, offset: int) -> str:
    """`data`, which starts at byte `offset` of `path`, as text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = offset + error.start
        raise DataError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {where}; convert it (for example with "
            "iconv) or leave the file out"
        ) from None


def _read_text(path: Path, document_bytes: int) -> Iterator[str]:
    with path.open("rb") as file:
        rest, offset = b"", 0
        while True:
            # Read to one byte past the limit: that byte tells a file that just fits from one that must be cut.
            block = rest + file.read(document_bytes + 1 - len(rest))
            if not block:
                return
            if len(block) <= document_bytes:
                piece, rest = block, b""
            else:
                piece, rest = _cut(block, document_bytes)
            start = len(_BOM) if offset == 0 and piece.startswith(_BOM) else 0
            text = decode_utf8(piece[start:], path, offset + start)
            offset += len(piece)
            if text:
                yield text


def _cut(block: bytes, limit: int) -> tuple[bytes, bytes]:
    """Split `block` after its last line end within `limit` bytes, or else before a character."""
    at = block.rfind(b"\n", 0, limit) + 1
    if at == 0:
        at = limit
        while at > max(0, limit - 4) and block[at] & 0xC0 == 0x80:  # inside a character: step back to its first byte
            at -= 1
        at = at or limit
    return block[:at], block[at:]


def _read_zstd(path: Path, text_field: str) -> Iterator[str]:
    import io

    import pyarrow as pa

    with path.open("rb") as raw, pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd") as stream:
        yield from _read_lines(path, io.BufferedReader(stream, 1 << 20), text_field)


def _read_lines(path: Path, file: BinaryIO | Any, text_field: str) -> Iterator[str]:
    """Documents of a stream of JSON lines."""
    offset = 0
    for number, line in enumerate(file, start=1):
        text = decode_utf8(line.removeprefix(_BOM) if number == 1 else line, path, offset)
        offset += len(line)
        if text.isspace():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path} line {number} is not JSON: {error}; repair or remove the line") from None
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number} is a JSON {type(row).__name__}, not an object with {text_field!r}")
        yield from _field(row, text_field, f"{path} line {number}")


def _field(row: dict[str, Any], text_field: str, where: str) -> Iterator[str]:
    """The document of a row: none when null or empty."""
    if text_field not in row:
        raise missing_field(text_field, row, where)
    text = row[text_field]
    if text is None or text == "":
        return
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} holds {type(text).__name__}, not text; set text_field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start} of {text_field!r} is half of a surrogate pair") from None
    yield text


def missing_field(text_field: str, fields: Any, where: str) -> DataError:
    """The message for a row or table without the wanted field."""
    hint = did_you_mean(text_field, [str(f) for f in fields])
    return DataError(f"{where} has no field {text_field!r}{hint} (text_field)")


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise missing_field(text_field, names, str(path))
            done = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for i, text in enumerate(batch.column(0).to_pylist()):
                    yield from _field({text_field: text}, text_field, f"{path} row {done + i}")
                done += batch.num_rows
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: column {text_field!r} is not UTF-8 near row {done}: {error.reason}") from None
