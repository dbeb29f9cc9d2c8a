"""A signal at any moment ends a command with 130 and one line, whatever libraries make of the interruption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowbit.cli import main
from lowbit.cli.signals import EndingSignals
from lowbit.errors import LowbitError

SLOW_PACKING = """
import sys, time
import lowbit.data.dataset
from lowbit.cli.main import main

def slow(config, report):
    print("packing", flush=True)
    time.sleep(60)

lowbit.data.dataset.prepare_data = slow
sys.argv = ["lowbit", "data", "pack"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_before_training_begins(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_PACKING], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "packing\n"
    for _ in range(3):  # schedulers repeat themselves
        process.send_signal(number)
        time.sleep(0.01)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 130
    assert err == "lowbit: interrupted\n"


SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "lowbit.cli.main":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from lowbit.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_the_command_is_imported(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (130, "lowbit: interrupted\n")


def test_ctrl_c_reaches_packing_processes_too(tmp_path: Path) -> None:
    """A terminal tells the whole group. The workers are hit while they start, and only the parent answers."""
    (tmp_path / "text.txt").write_text("a line of text\n" * 500_000)
    overrides = ["data=files", "data.sources.files.path=text.txt", "data.tokenizer.kind=bytes", "data.pack_workers=2"]
    command = [sys.executable, "-m", "lowbit", "data", "pack", *overrides]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(workers(process.pid)) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 130 and err == "lowbit: interrupted\n"


def workers(pid: int) -> list[str]:
    """The packing processes that a process has started and in which Python, importing, has its Ctrl-C handler."""
    found = []
    for child in (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split():
        try:
            command, status = ((Path("/proc") / child / name).read_text() for name in ("cmdline", "status"))
        except OSError:
            continue
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if "spawn_main" in command and caught >> (signal.SIGINT - 1) & 1:
            found.append(child)
    return found


@pytest.mark.parametrize("made_of_it", [AttributeError("half-way"), LowbitError("a packing process died")])
def test_what_a_library_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made_of_it: Exception
) -> None:
    def app(*arguments: object, **settings: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except KeyboardInterrupt:
            raise made_of_it from None

    monkeypatch.setattr(main, "build_app", lambda: app)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signals = EndingSignals()
    try:
        signals.watch()
        assert main.run([], signals) == 130
        os.kill(os.getpid(), signal.SIGTERM)  # the outcome is decided: nothing happens
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == "lowbit: interrupted by SIGTERM\n"


def test_a_bug_without_a_signal_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(*arguments: object, **settings: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(main, "build_app", lambda: app)
    with pytest.raises(AttributeError, match="a bug"):
        main.run([])
