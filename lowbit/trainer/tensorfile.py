"""Named tensors in one file, in the safetensors format, hashed and synced as they are written.

    8 bytes    length of the header, little-endian
    header     JSON: name -> {dtype, shape, data_offsets}, and text under __metadata__; padded with spaces
    data       raw little-endian values, one tensor after the other

Reading is the safetensors library's. Writing is done here for three reasons: the SHA-256 of the file comes out of the
same pass over the data, the file is on the disk (fsync) when the function returns, and a full disk is an OSError
from an ordinary write. The format: github.com/huggingface/safetensors, section "Format".
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK = 1 << 24


@dataclass(frozen=True)
class FileRecord:
    """What a manifest remembers of a file."""

    sha256: str
    bytes: int


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all values, without the header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write named tensors (any device) to a new file and sync it; returns its hash and size.

    Raises OSError (a full disk, say) and leaves what was written; KeyError for a dtype the format has not.
    """
    entries: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little")
        yield header
        for tensor in tensors.values():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            yield from (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))

    return write_synced(path, pieces())


def write_synced(path: Path, pieces: Iterator[bytes | memoryview]) -> FileRecord:
    """Write byte strings to a new file, sync it to the disk, and return its hash and size."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(digest.hexdigest(), size)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. Raises ValueError when it is none, OSError as usual."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None
    return tensors


def hash_file(path: Path) -> FileRecord:
    """Hash and size of a file as it is on the disk."""
    with path.open("rb") as file:
        return FileRecord(hashlib.file_digest(file, "sha256").hexdigest(), file.tell())
