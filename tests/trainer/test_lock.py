"""One live run a folder, with real processes, also killed ones."""

import fcntl
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowbit.errors import LowbitError
from lowbit.trainer.lock import RunLock, held

HOLD = """
import os, sys, time
from pathlib import Path
from lowbit.trainer.lock import RunLock
with RunLock(Path(sys.argv[1])):
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        time.sleep(60)
        os._exit(0)
    os.write(1, b"held\\n")
    time.sleep(60)
"""


def _holder(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *arguments], stdout=subprocess.PIPE, text=True)


def test_a_second_live_run_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(LowbitError, match=f"process {process.pid} on {platform.node()}"), RunLock(tmp_path):
            pass
        assert held(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "lock").exists() and not held(tmp_path)
        with RunLock(tmp_path):  # taken over
            assert str(os.getpid()) in (tmp_path / "lock").read_text() and held(tmp_path)
    assert not held(tmp_path) and not (tmp_path / "lock").exists()


def test_who_looks_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """`held` shares the lock for an instant, in which a run may start."""
    (tmp_path / "lock").write_text("")
    handle = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    assert not held(tmp_path), "those who look do not see each other"
    threading.Timer(0.02, os.close, [handle]).start()
    with RunLock(tmp_path):
        assert held(tmp_path)


def test_a_worker_that_outlives_its_run_does_not_hold_the_folder(tmp_path: Path) -> None:
    with _holder(tmp_path, "fork") as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline().split() for _ in range(2))
        assert lines[0][0] == "child" and lines[1] == ["held"]
        try:
            process.send_signal(signal.SIGKILL)
            process.wait()
            with RunLock(tmp_path):
                pass
        finally:
            os.kill(int(lines[0][1]), signal.SIGKILL)


def test_twice_in_one_process_and_again_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with RunLock(folder):
        with pytest.raises(LowbitError, match=str(os.getpid())), RunLock(folder):
            pass
        with pytest.raises(LowbitError), RunLock(folder):  # the failed attempt must not have let go of it
            pass
    with pytest.raises(ZeroDivisionError), RunLock(folder):
        raise ZeroDivisionError
    with RunLock(folder):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LowbitError, match="cannot lock"), RunLock(tmp_path / "file" / "run"):
        pass
