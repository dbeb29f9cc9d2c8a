"""A run's checkpoints: written whole or not at all, beside the training, kept by a rule, read back checked.

What a crash can do, and why nothing is lost: a write happens in a folder whose name starts with a dot, and only a
rename makes it `step_00000250` (see `snapshot.py`, also for the file format and the reasons for it). `kill -9`, a full
disk or a power cut leave such a dotted folder, which the next save removes, and the earlier checkpoints as they were.

Writing in the background: `save` copies all tensors to host memory (through page-locked buffers, kept from one save
to the next, when they lie on a GPU) and returns; a thread hashes and writes. The loop may go on at once. If the write
fails, the next `save` or `wait` raises the error.

*Newest* is what was written last, not what has the highest step: a run that went back to an earlier checkpoint
(`resume=PATH`) leaves later steps behind, and they must not win over its own. Each manifest therefore carries a number
that grows with every save; the abandoned ones go when newer ones have taken their place in `keep_last`.
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.configs.schema import CheckpointConfig
from lowbit.data.storage import sync_folder
from lowbit.errors import CheckpointError
from lowbit.trainer.snapshot import (
    MANIFEST,
    Manifest,
    Snapshot,
    read_manifest,
    read_meta,
    read_snapshot,
    write_snapshot,
)

__all__ = ["CheckpointStore", "Snapshot"]

REPLACED = ".replaced"
TEMPORARY = (".writing-", ".deleting-")
_NAMED = 3
"""Checkpoints, the newest, that a message names."""


class CheckpointStore:
    """The checkpoints in one folder. Any process may read; only the one that holds the run's lock may save."""

    def __init__(self, folder: Path, config: CheckpointConfig, report: Callable[[str], None] = lambda _: None) -> None:
        self.folder = folder
        self._config = config
        self._report = report
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: dict[str, Tensor] = {}

    # Writing ----------------------------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint; with `checkpoint.background` it returns once everything is copied to host memory.

        Waits for the previous write first. Raises CheckpointError when this write, or the previous one in the
        background, failed; checkpoints written before stay readable.
        """
        self.wait()
        if not self._config.background:
            self._write(snapshot)
            return
        snapshot = self._to_host(snapshot)
        self._thread = threading.Thread(target=self._write_and_keep_error, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write in the background; raises CheckpointError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_and_keep_error(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except BaseException as error:  # handed to the thread that saves or waits next
            self._error = error

    def _write(self, snapshot: Snapshot) -> None:
        final = self.folder / f"step_{snapshot.step:08d}"
        temporary = self.folder / f".writing-{final.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            self._require_space(snapshot.bytes)
            sequence = self._next_sequence()
            write_snapshot(temporary, snapshot, sequence)
            if final.exists():  # damaged or abandoned, of the same step: still listed under this name until it is gone
                final.rename(final.with_name(f"{final.name}{REPLACED}-{sequence}"))
            temporary.rename(final)
            sync_folder(self.folder)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} could not be written to {self.folder}: "
                f"{error.strerror or error} (it takes {snapshot.bytes / 2**20:.1f} MiB); earlier checkpoints are "
                "intact: free some space, or keep fewer with checkpoint.keep_last"
            ) from error
        self._retire(final)

    def _require_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(None, f"only {free / 2**20:.1f} MiB are free")

    def _next_sequence(self) -> int:
        return 1 + max((manifest.sequence for path in self.list() if (manifest := _intact(path))), default=0)

    def _to_host(self, snapshot: Snapshot) -> Snapshot:
        """Copies that later training steps do not change."""
        on_cuda = any(tensor.is_cuda for tensors in snapshot.parts.values() for tensor in tensors.values())
        parts = {part: self._copies(part, tensors) for part, tensors in snapshot.parts.items()}
        if on_cuda:
            torch.cuda.synchronize()
        meta = json.loads(json.dumps(snapshot.meta))
        return replace(
            snapshot,
            model=parts["model"],
            optimizer=parts["optimizer"],
            ema=parts.get("ema"),
            meta=meta,
            stabilisers=parts.get("stabilisers"),
            exchange=parts.get("exchange"),
        )

    def _copies(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copied: dict[tuple[object, ...], Tensor] = {}  # so that a tensor with two names stays one
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if place not in copied or not tensor.numel():
                copied[place] = self._copy(f"{part}/{name}", tensor.detach())
            copies[name] = copied[place]
        return copies

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        buffer = self._staging.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._staging[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return buffer.copy_(tensor, non_blocking=True)

    # Keeping ----------------------------------------------------------------------------------------------------

    def _clean(self) -> None:
        """Remove what killed writes and removals left."""
        for path in self.folder.iterdir():
            if path.name.startswith(TEMPORARY):
                shutil.rmtree(path)

    def _retire(self, written: Path) -> None:
        """Remove what the retention rule does not keep; the checkpoint just written always stays."""
        intact = [(path, manifest) for path in self.list() if (manifest := _intact(path))]
        intact = [(path, manifest) for path, manifest in intact if REPLACED not in path.name]
        keep = {path for path, _ in intact[-max(1, self._config.keep_last) :]}
        if (every := self._config.keep_every_steps) > 0:
            keep |= {path for path, manifest in intact if manifest.step % every == 0}
        for path in self.list():
            if path not in keep and path != written:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        hidden = self.folder / f".deleting-{path.name}"  # so that a kill half-way leaves no half checkpoint
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            self._report(f"the old checkpoint {path} could not be removed: {error}")

    # Reading ----------------------------------------------------------------------------------------------------

    def list(self) -> Sequence[Path]:
        """All checkpoints, oldest first in the order of writing; those with an unreadable manifest come last."""
        found = []
        for path in self.folder.glob("step_*") if self.folder.is_dir() else ():
            manifest = _intact(path)
            found.append((manifest is None, manifest.sequence if manifest else 0, path.name, path))
        return [entry[-1] for entry in sorted(found)]

    def load(self, which: str | Path = "latest", *, weights_only: bool = False) -> Snapshot:
        """Read a checkpoint, verified against its hashes; tensors are on the CPU.

        `which` is "latest", a step's folder (the bare name `step_00000250` is looked for in this store too), or a
        folder of checkpoints or of a run, whose newest is meant. A damaged newest one falls back to the one before it,
        and says so; a checkpoint asked for by its own name does not.
        `weights_only` leaves the optimizer's state out.

        Raises:
            CheckpointError: there is nothing to read, or nothing good.
        """
        if which == "latest":
            return self._load_newest(weights_only)
        path = self.find(which)
        if _is_checkpoint(path):
            return read_snapshot(path, weights_only)
        return CheckpointStore(path, self._config, self._report).load("latest", weights_only=weights_only)

    def find(self, which: str | Path) -> Path:
        """The folder of the checkpoint, or of the checkpoints, that a name or path means (see `load`).

        Raises CheckpointError: it means none.
        """
        path = Path(which).expanduser()
        if not path.exists() and path.name == str(which) and (self.folder / which).is_dir():
            path = self.folder / which
        if _is_checkpoint(path):
            return path
        for folder in (path / "checkpoints", path):
            if any(folder.glob("step_*")):
                return folder
        names = [found.name for found in self.list()]
        there = f"{self.folder} holds {', '.join(names[-_NAMED:])}" if names else f"{self.folder} holds none"
        raise CheckpointError(f"{path} is neither a checkpoint nor a folder with checkpoints; {there}")

    def peek(self, place: Path) -> dict[str, Any] | None:
        """The meta of a checkpoint, or of the newest that can be read in a folder of them, without its tensors.

        None where none can be read, which is for `load` to say.
        """
        paths = [place] if _is_checkpoint(place) else CheckpointStore(place, self._config).list()
        for path in reversed(paths):
            with suppress(CheckpointError):
                return read_meta(path)
        return None

    def _load_newest(self, weights_only: bool) -> Snapshot:
        paths = self.list()
        for path in reversed(paths):
            try:
                snapshot = read_snapshot(path, weights_only)
            except CheckpointError as error:
                self._report(f"skipping the checkpoint {path.name}: {error}")
                continue
            if path != paths[-1]:
                self._report(f"falling back to the checkpoint {path.name}")
            return snapshot
        if paths:
            raise CheckpointError(_all_damaged(self.folder, paths))
        raise CheckpointError(f"{self.folder} holds no checkpoint")


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or would be by its name."""
    return (path / MANIFEST).exists() or path.name.startswith("step_")


def _intact(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _all_damaged(folder: Path, paths: Sequence[Path]) -> str:
    return f"none of the {len(paths)} checkpoints in {folder} is readable: restore one, or move the folder away"
