"""Signals that ask a run to end: it does at its next step boundary, and saves."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

WATCHED = (signal.SIGTERM, signal.SIGINT)


class SignalGuard:
    """Turns SIGTERM and the first SIGINT (Ctrl-C) into a request that the loop obeys at its next step boundary.

    `requested` is the name of the signal that came first, or None. A second SIGINT raises KeyboardInterrupt at once;
    a second SIGTERM changes nothing, since schedulers repeat theirs. The previous handlers come back on exit. Signals
    can be handled in the main thread only: elsewhere the guard does nothing.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = signal.Signals(number).name
        hint = "; Ctrl-C again ends it at once, unsaved" if number == signal.SIGINT else ""
        message = f"\n{self.requested}: the run ends after this step and saves{hint}\n"
        os.write(2, message.encode())  # a raw write: printing and logging may be interrupted half-way by a signal
