"""Files that were hashed once and are known by their size and time from then on.

A folder's manifest says how large each file is and what its SHA-256; `stamps.json` remembers the size and modification
time of each as last verified. Opening a folder then reads no data: a file of another size is an error, and one whose
time differs is read once and must match its SHA-256, which finds an edited file and accepts a copied one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lowbit.data.storage import atomic_write, file_sha256
from lowbit.errors import DataError

STAMPS = "stamps.json"


def check_files(
    folder: Path,
    files: Mapping[str, tuple[int, str]],
    again: str,
    *,
    verify: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Check files by name -> (bytes, SHA-256): those whose stamp is not known, or all with `verify`, are read.

    Raises: DataError, which ends with `again` (what to do), for a file that is missing, truncated or edited.
    """
    stamps = _read(folder)
    fresh = []
    for name, (size, sha256) in files.items():
        if check_size(folder / name, size, again) == stamps.get(name) and not verify:
            continue
        report(f"verifying {folder / name}")
        check_hash(folder / name, size, sha256, again)
        fresh.append(name)
    if fresh:
        try:
            write_stamps(folder, fresh)
        except DataError:  # a read-only folder: verified again next time
            report(f"cannot write {folder / STAMPS}: files will be verified again next time")


def check_size(path: Path, size: int, again: str) -> list[int]:
    """The stamp of a file of this size. Raises: DataError when it is missing or of another size."""
    try:
        stat = path.stat()
    except OSError:
        raise DataError(f"{path} is missing; {again}") from None
    if stat.st_size != size:
        raise DataError(f"{path} is truncated or was changed: {stat.st_size} bytes, not {size}; {again}")
    return [stat.st_size, stat.st_mtime_ns]


def check_hash(path: Path, size: int, sha256: str, again: str) -> None:
    """Read a file. Raises: DataError when it is not the one that was written."""
    check_size(path, size, again)
    if file_sha256(path) != sha256:
        raise DataError(f"{path} was edited or damaged: its SHA-256 is not the manifest's; {again}")


def write_stamps(folder: Path, names: Sequence[str]) -> None:
    """Remember files as they are: they were just written or verified. Raises: DataError when that cannot be written."""
    stamps = _read(folder)
    for name in names:
        stat = (folder / name).stat()
        stamps[name] = [stat.st_size, stat.st_mtime_ns]
    atomic_write(folder / STAMPS, [json.dumps(stamps, sort_keys=True).encode()])


def _read(folder: Path) -> dict[str, list[int]]:
    try:
        stamps = json.loads((folder / STAMPS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}
