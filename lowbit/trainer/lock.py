"""One live run a folder.

The file `lock` in the run's folder is held with `flock` for the life of the run. The kernel lets go of it when the
process ends in whatever way, `kill -9` included, so there is no stale lock to judge: what is written in the file
(process, host, start) is for people and for the error message. Network file systems pass `flock` on to the server
(NFS since Linux 2.6.12).
"""

import fcntl
import json
import os
import platform
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from lowbit.errors import LowbitError
from lowbit.trainer.files import LOCK

PAUSES = (0.01, 0.05)
"""Seconds between attempts: whoever looks (`held`) has the lock for an instant."""


def held(folder: Path) -> bool:
    """Whether a live run has the folder, on whatever machine. Leaves no file behind, and needs only to read."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, on which no run starts
        return False
    finally:
        os.close(handle)
    return False


def _lock(handle: int) -> None:
    """Take the lock alone. Raises BlockingIOError if another run has it."""
    for pause in PAUSES:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(pause)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunLock:
    """Context manager that holds a run's folder (made if missing); LowbitError names the process that has it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK
        self._handle: int | None = None

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while self._handle is None:
                self._handle = self._try_open()
            note = {
                "pid": os.getpid(),
                "host": platform.node(),
                "started": datetime.now().isoformat(timespec="seconds"),
            }
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(note).encode(), 0)
        except OSError as error:
            raise LowbitError(f"cannot lock the run's folder {self.path.parent}: {error.strerror}") from error
        os.register_at_fork(after_in_child=self._forget)
        return self

    def _try_open(self) -> int | None:
        """The locked file, or None when its holder removed it in between."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(handle)
            if os.path.samestat(os.fstat(handle), self.path.stat()):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError:
            note = os.pread(handle, 4096, 0)
            os.close(handle)
            holder = f"{self.path.parent} is in use by {_describe(note)}"
            raise LowbitError(f"{holder}: wait for it, stop it, or choose another run_name") from None
        os.close(handle)
        return None

    def _forget(self) -> None:
        """A forked worker does not hold the lock: it may outlive its parent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self.path.unlink(missing_ok=True)  # while held: whoever waits sees that the file is not the one it locked
            os.close(self._handle)
            self._handle = None


def _describe(note: bytes) -> str:
    try:
        found = json.loads(note)
        return f"process {found['pid']} on {found['host']} (since {found['started']})"
    except (ValueError, KeyError, TypeError):
        return "another process that is just starting"
