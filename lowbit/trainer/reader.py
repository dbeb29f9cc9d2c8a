"""When our output cannot be read: a reader that goes away (`lowbit ... | head`), a stream that came closed (`2>&-`), a
locale that lacks our characters (`LC_ALL=C`).

This module is quick to import.
"""

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Send what is still written to a stream, or lies in its buffer, nowhere; its reader is gone."""
    with suppress(OSError, ValueError):  # ValueError: not a file of the system's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def prepare_streams() -> None:
    """Let standard streams that came closed lead nowhere, and characters that the locale lacks be written as escapes.

    The next file that is opened would get a closed stream's number, and what the system's libraries, a signal's handler
    or a child say would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
