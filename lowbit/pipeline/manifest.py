"""What a pipeline has done: `pipeline.json` in its folder, one record a stage, replaced as a whole at every change.

    {"format": ..., "stages": {"pretrain": {"folder": "pretrain", "state": "done", "settings": {...},
     "inputs": {"tokenizer": ..., "data": ...}, "outputs": {"weights": SHA-256, ...}, "seconds": ..., "reached": {...}},
     ...}, "earlier": [records that a change has put aside]}

`settings` are those that decide what a stage makes, so that a difference can be named.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from lowbit.configs.schema_pipeline import Stage
from lowbit.data.storage import DISK_FULL
from lowbit.errors import LowbitError

FILE = "pipeline.json"
FORMAT = "lowbit pipeline 1"


class State(StrEnum):
    """How far a stage has come."""

    running = "running"
    """Begun, and not ended in any way that was seen: it runs, or was killed."""
    interrupted = "interrupted"
    failed = "failed"
    done = "done"


@dataclass(frozen=True)
class Record:
    """One stage."""

    folder: str
    """Name in the pipeline's folder."""
    state: State
    settings: dict[str, Any]
    """Dotted key to value, of what decides the result."""
    inputs: dict[str, str]
    """What it was made from: digests by name."""
    precision: str
    """In a few words."""
    outputs: dict[str, str] = field(default_factory=dict)
    """What it left: digests by name; empty until it is done."""
    reached: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Of the wall clock, over all times that it ran (one that was killed counts for nothing)."""
    error: str = ""


@dataclass(frozen=True)
class Manifest:
    """All stages of a pipeline's folder."""

    stages: dict[Stage, Record] = field(default_factory=dict)
    earlier: list[Record] = field(default_factory=list)

    def with_record(self, stage: Stage, record: Record) -> "Manifest":
        """The same with this record; one of another folder goes to `earlier`."""
        before = self.stages.get(stage)
        put_aside = [before] if before is not None and before.folder != record.folder else []
        return replace(self, stages=self.stages | {stage: record}, earlier=[*self.earlier, *put_aside])

    def folders(self) -> set[str]:
        """Names in use."""
        return {record.folder for record in (*self.stages.values(), *self.earlier)}


def read(folder: Path) -> Manifest:
    """The manifest of a pipeline's folder; an empty one where there is none. LowbitError for a damaged one."""
    path = folder / FILE
    if not path.exists():
        return Manifest()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise LowbitError(f"{path} was written by another version of lowbit ({content['format']}): give a run_name")
        stages = {Stage(name): _record(value) for name, value in content["stages"].items()}
        return Manifest(stages, [_record(value) for value in content["earlier"]])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LowbitError(
            f"{path} cannot be read ({error}): restore it, or choose another run_name; the stages' folders are intact"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where a file is written before it takes the place of the one at `path`.

    Raises LowbitError when the disk is full; the file before it is then still there.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        yield temporary
    except OSError as error:
        temporary.unlink(missing_ok=True)
        cause = "the disk is full" if error.errno in DISK_FULL else str(error.strerror or error)
        raise LowbitError(
            f"{path} cannot be written ({cause}): what the stages have finished is kept; free some space, and the same "
            "command goes on"
        ) from error


def write(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest. Raises LowbitError when the disk is full; the one before it is then still there."""
    path = folder / FILE
    content = {"format": FORMAT} | asdict(manifest)
    with replacing(path) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _record(value: dict[str, Any]) -> Record:
    """Without a key that earlier versions of lowbit wrote and nobody reads."""
    return Record(**{key: value[key] for key in value if key != "config"} | {"state": State(value["state"])})
