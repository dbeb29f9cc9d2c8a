"""Signals in real processes."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lowbit.trainer.signals import SignalGuard

LOOP = """
import sys, time
from lowbit.trainer.signals import SignalGuard
with SignalGuard() as guard:
    print("ready", flush=True)
    for step in range(600):
        time.sleep(0.05)
        if guard.requested and "patient" not in sys.argv:
            print("stopped by", guard.requested, flush=True)
            break
"""


def _run(signals: list[signal.Signals], *arguments: str) -> tuple[int, str, str]:
    """Exit status and output of the loop above after these signals, in a process of its own."""
    command = [sys.executable, "-c", LOOP, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        out, error = process.communicate(timeout=280)
    return process.returncode, out, error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_the_loop_at_its_boundary(number: signal.Signals) -> None:
    status, out, error = _run([number])
    assert (status, out) == (0, f"stopped by {number.name}\n")
    assert number.name in error


def test_a_second_interrupt_ends_it_at_once() -> None:
    status, _, error = _run([signal.SIGINT, signal.SIGINT], "patient")
    assert status in (1, -signal.SIGINT) and "KeyboardInterrupt" in error


def test_a_repeated_sigterm_changes_nothing() -> None:
    status, _, error = _run([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGINT], "patient")
    assert status != -signal.SIGTERM and "KeyboardInterrupt" in error


def test_handlers_come_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError), SignalGuard() as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.requested == "SIGTERM"
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_the_main_thread_it_does_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with SignalGuard() as guard:
            seen.append((guard.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


# Non-finite -------------------------------------------------------------------------------------------------------
