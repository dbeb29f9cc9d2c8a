"""One checkpoint on disk: a folder of plain tensors by fully qualified name, complete or absent.

    step_00000250/
        model.safetensors      FP32 master weights
        optimizer.safetensors  "<weight's name>.<slot>", e.g. blocks.0.mlp.up.weight.exp_avg
        ema.safetensors        averaged weights, where kept
        stabilisers.safetensors  what the precision's stabilisers know, where there are any (trainer/stabilise.py)
        exchange.safetensors   what coded gradients have lost so far (comm.error_feedback), and the noise's clock
        meta.json              step, position in the data, identity of tokenizer, data and model, versions
        manifest.json          SHA-256 and size of each file above, and when in the run's history it was written

Why safetensors and not `torch.distributed.checkpoint`: DCP keeps its metadata in a pickle, and unpickling a file
from elsewhere can run any code; it needs torch to be read, and its files are named after the ranks that wrote them.
Ours open in anything that reads safetensors, are mapped instead of copied, and are the same for every engine and world
size, because master weights and states are full tensors by name. A tensor that has two names (a tied head) is stored
once; `meta.json` says which name stands for which.

A folder is written under a temporary name, each file synced, the manifest last, then renamed: a name without a dot in
front is complete. The hashes are for what happens later: edits, bad disks, interrupted copies.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.data.storage import sync_folder
from lowbit.errors import CheckpointError
from lowbit.trainer.tensorfile import (
    FileRecord,
    hash_file,
    read_tensors,
    tensor_bytes,
    write_synced,
    write_tensors,
)

FORMAT = "lowbit checkpoint 1"
MANIFEST = "manifest.json"
META = "meta.json"


@dataclass(frozen=True)
class Snapshot:
    """All of a run's state after `step` optimizer steps."""

    step: int
    model: dict[str, Tensor]
    """Master weights by fully qualified name."""
    optimizer: dict[str, Tensor]
    """States by `<fully qualified name>.<slot>`; empty when loaded with `weights_only`."""
    ema: dict[str, Tensor] | None = None
    """Averaged weights by fully qualified name."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Plain JSON: tokens, seconds, cursor, identity, metric state, versions."""
    stabilisers: dict[str, Tensor] | None = None
    """Their state by `<stabiliser>.<name>`; tensors of any type."""
    exchange: dict[str, Tensor] | None = None
    """What the exchange of gradients remembers (comm/residuals.py)."""

    @property
    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by file name without ending."""
        optional = {"ema": self.ema, "stabilisers": self.stabilisers, "exchange": self.exchange}
        parts = {name: tensors for name, tensors in optional.items() if tensors is not None}
        return {"model": self.model, "optimizer": self.optimizer, **parts}

    @property
    def bytes(self) -> int:
        """Bytes it takes on the disk, headers aside."""
        return sum(tensor_bytes(_split_shared(tensors)[0]) for tensors in self.parts.values())


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says."""

    step: int
    sequence: int
    """Number of the write in this folder's history: the highest is the newest, whatever its step."""
    files: dict[str, FileRecord]


def write_snapshot(folder: Path, snapshot: Snapshot, sequence: int) -> None:
    """Write a checkpoint's files into a new folder and sync them. Raises OSError, leaving what was written."""
    folder.mkdir(parents=True)
    files: dict[str, FileRecord] = {}
    shared: dict[str, dict[str, str]] = {}
    for part, tensors in snapshot.parts.items():
        unique, shared[part] = _split_shared(tensors)
        files[f"{part}.safetensors"] = write_tensors(folder / f"{part}.safetensors", unique)
    files[META] = _write_json(folder / META, {"step": snapshot.step, "shared": shared, "meta": snapshot.meta})
    records = {name: asdict(record) for name, record in files.items()}
    _write_json(folder / MANIFEST, {"format": FORMAT, "step": snapshot.step, "sequence": sequence, "files": records})
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, after a quick look: every file is there and as long as it should be.

    Raises CheckpointError with the first thing that is wrong.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{folder}: written in the format {content['format']!r}, this version reads {FORMAT!r}"
            )
        files = {str(name): FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(int(content["step"]), int(content["sequence"]), files)
        for name, record in files.items():
            if (size := (folder / name).stat().st_size) != record.bytes:
                raise CheckpointError(f"{folder / name} has {size} bytes, not {record.bytes}: cut short or edited")
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {_why(error)}") from None
    return manifest


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's meta alone, checked against its hash. Raises CheckpointError."""
    record = read_manifest(folder).files.get(META)
    try:
        if record is None or hash_file(folder / META) != record:
            raise CheckpointError(f"{folder / META} is not what was written: its SHA-256 differs from the manifest")
        meta: dict[str, Any] = json.loads((folder / META).read_bytes())["meta"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / META} cannot be read: {_why(error)}") from None
    return meta


def read_snapshot(folder: Path, weights_only: bool = False) -> Snapshot:
    """Read a checkpoint, each file checked against its hash first; CheckpointError names the damaged file.

    With `weights_only` the state of optimizer and exchange is neither read nor checked, and `optimizer` is empty.
    """
    files = read_manifest(folder).files
    training = ("optimizer.safetensors", "exchange.safetensors")
    wanted = [name for name in files if not (weights_only and name in training)]
    for needed in ("model.safetensors", "optimizer.safetensors", META):
        if needed not in files:
            raise CheckpointError(f"{folder / MANIFEST} lists no {needed}")
    try:
        with ThreadPoolExecutor(len(wanted)) as pool:  # hashing releases the interpreter's lock
            hashes = list(pool.map(lambda name: hash_file(folder / name), wanted))
        for name, record in zip(wanted, hashes, strict=True):
            if record != files[name]:
                raise CheckpointError(f"{folder / name} is not what was written: its SHA-256 differs from the manifest")
        content = json.loads((folder / META).read_bytes())
        parts = {
            name.removesuffix(".safetensors"): read_tensors(folder / name)
            for name in wanted
            if name.endswith(".safetensors")
        }
        for part in parts:
            for alias, name in content["shared"].get(part, {}).items():
                parts[part][alias] = parts[part][name]
        return Snapshot(
            content["step"],
            parts["model"],
            parts.get("optimizer", {}),
            parts.get("ema"),
            content["meta"],
            parts.get("stabilisers"),
            parts.get("exchange"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {_why(error)}") from None


def _why(error: Exception) -> str:
    """In words what Python has a class for."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _write_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    return write_synced(path, iter([json.dumps(content, indent=1).encode()]))


def _split_shared(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without those that are another one under a second name, and those names: (unique, alias -> name)."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            unique[name] = tensor
    return unique, aliases
