"""Tensors of a folder of safetensors files, read one at a time; and such a folder written in shards.

A folder has `model.safetensors`, or several files and `model.safetensors.index.json`, which says which tensor lies in
which. Reading maps the files: a tensor costs memory only while it is used. Pickled weights are refused.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class TensorFolder:
    """Tensors by name, from all safetensors files of a folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError: no such files, a damaged one, or an index that does not fit them."""
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        """All tensors, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> torch.Size:
        """Shape of a tensor, without reading it."""
        return torch.Size(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in the file's type."""
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        return self._files[self._where[name]]

    def _open(self) -> None:
        listed = self._index()
        for file in sorted(set(listed.values())) if listed is not None else [SINGLE]:
            self._files[file] = self._open_file(self.folder / file)
            for name in self._files[file].keys():  # noqa: SIM118 (it is no mapping)
                self._where[name] = file
        for name, file in (listed or {}).items():
            if self._where.get(name) != file:
                raise CheckpointError(f"{self.folder / INDEX} says that {name} lies in {file}: it does not")

    def _index(self) -> dict[str, str] | None:
        """The index's map from tensors to files; None without one."""
        path = self.folder / INDEX
        if not path.is_file():
            if not (self.folder / SINGLE).is_file():
                raise CheckpointError(self._nothing_to_read())
            return None
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            good = isinstance(listed, dict) and all(isinstance(file, str) for file in listed.values())
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            good = False
        if not good:
            raise CheckpointError(f"{path} is damaged: it must map tensors to files under weight_map")
        for file in listed.values():
            if not file or Path(file).name != file:
                raise CheckpointError(f"{path} names {file!r}, which is not a file of this folder")
        return {str(name): file for name, file in listed.items()}

    def _nothing_to_read(self) -> str:
        if not self.folder.is_dir():
            return f"there is no folder {self.folder}"
        pickled = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickled:
            return (
                f"{self.folder} holds pickled weights ({pickled[0]}), which can run any code when they are read: "
                "convert them to safetensors"
            )
        return f"{self.folder} holds no {SINGLE} and no {INDEX}"

    def _open_file(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return self._stack.enter_context(safe_open(str(path), framework="pt"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing, but {INDEX} names it") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())}; copy it again") from None


def write_folder(
    folder: Path,
    sizes: Mapping[str, int],
    make: Callable[[str], Tensor],
    json_files: Mapping[str, Any],
    shard_bytes: int,
) -> list[Path]:
    """Write tensors as safetensors with an index, and JSON files beside them. The folder appears whole or not at all.

    Args:
        sizes: bytes of each tensor to write. make: a tensor by its name, made when its shard is written.
        json_files: content by file name. shard_bytes: most bytes of a file; a larger tensor has one for itself.

    Returns:
        The files with tensors.

    Raises:
        CheckpointError: something is there already; the disk is full.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty: choose another folder, or delete it")
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        names = _write_shards(temporary, sizes, make, shard_bytes)
        for name, content in json_files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            (temporary / name).write_text(text, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error} ({sum(sizes.values()) / 2**20:.1f} MiB are needed)"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return [folder / name for name in names]


def _write_shards(folder: Path, sizes: Mapping[str, int], make: Callable[[str], Tensor], shard_bytes: int) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards = list(_shards(sizes, shard_bytes))
    listed: dict[str, str] = {}
    files = []
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        try:
            save_file({name: make(name) for name in names}, str(folder / file), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, " ".join(str(error).split())) from error
        listed |= dict.fromkeys(names, file)
        files.append(file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(listed.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> Iterator[Iterable[str]]:
    """Names in order, cut so that no shard exceeds `shard_bytes`."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > shard_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names
