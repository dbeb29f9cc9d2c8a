"""Signals that ask a command to end, from its first moment to its last.

Ctrl-C is an exception in Python and SIGTERM kills without a word. Here both raise KeyboardInterrupt, so that files are
closed, temporary ones removed, and the exit code is 130. The training loop takes them over while it runs, to end after
a step and save (`trainer.signals.SignalGuard`). Libraries may turn the exception into one of their own or swallow it
while they clean up; `came` remembers what really happened.
"""

import math
import signal
import time
from types import FrameType

BURST_SECONDS = 0.5
"""Signals that follow each other so closely are one: schedulers repeat theirs, and a terminal tells a whole group."""


class EndingSignals:
    """Turns SIGTERM and SIGINT into KeyboardInterrupt, from `watch` to `finish`."""

    def __init__(self) -> None:
        self.came: str | None = None
        """Name of the signal that came last, or None."""
        self._watched: list[signal.Signals] = []
        self._last = -math.inf

    def watch(self) -> None:
        """Take the signals over, except one that the parent process had ignored (nohup, a script's background job)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
                self._watched.append(number)

    def finish(self) -> None:
        """The outcome is decided: further signals change nothing, also while the interpreter shuts down."""
        for number in self._watched:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number).name
        now = time.monotonic()
        burst, self._last = now - self._last < BURST_SECONDS, now
        if not burst:
            raise KeyboardInterrupt
