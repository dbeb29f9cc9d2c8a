"""Files that are either whole or not there, and folders that one process at a time may write.

A file is written under a temporary name, flushed to the disk (fsync) and then renamed, so a reader never sees
half of it, whether the writer was killed or the disk was full. Folders are locked with `flock`, which the kernel
releases when the owner dies: nobody has to judge whether a lock is stale.
"""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowbit.errors import DataError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = ".tmp"


def atomic_write(path: Path, pieces: Iterable[bytes | memoryview], needed: int | None = None) -> None:
    """Write `pieces` one after the other to `path`, which appears only when it is complete and on the disk.

    `needed` (bytes) is what the whole job still wants to write; it makes the message about a full disk useful.

    Raises: DataError when the disk is full or the place cannot be written; the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    written = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                written += len(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # where the folder is a file or cannot be written, there is none
            temporary.unlink()
        raise write_error(path, error, max(written, needed or 0)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_error(path: Path, error: OSError, needed: int = 0) -> DataError:
    """The message for a file that could not be written."""
    if error.errno == errno.EFBIG:
        return DataError(f"cannot write {path}: no file may be so large here; raise the limit (ulimit -f)")
    if error.errno not in DISK_FULL:
        return DataError(f"cannot write {path}: {error.strerror or error}; choose another place with data.cache_dir")
    try:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB free"
    except OSError:
        free = "free space unknown"
    # less is of small files, of which one does not know what else they stand for
    wanted = f"about {needed / 1e6:.1f} MB are needed there; " if needed >= 50_000 else ""
    return DataError(
        f"disk full while writing {path} ({error.strerror}; {free}): {wanted}free some, or set "
        "data.cache_dir to a larger disk and run again (what is finished is kept)"
    )


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that a killed writer left in `folder`. Call it with the folder's lock held."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


@contextmanager
def folder_lock(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock beside `folder` (`<folder>.lock`); wait, saying so, while another live process holds it.

    Raises: DataError in a packing process that is still importing the script which started it: the script would wait
    for that process, and the process for the script's lock, for good.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DataError("packing processes import this script: put what it does under `if __name__ == '__main__':`")
    path = folder.with_name(folder.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise write_error(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            report(f"waiting for {file.read().strip() or 'another process'}, which is writing {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(OSError):  # for people, and the disk may be full
            file.seek(0)
            file.truncate()
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
