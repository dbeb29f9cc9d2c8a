"""When the reader of our output goes away, as in `lowbit ... | head`. This module is quick to import."""

import os
from contextlib import suppress
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Send what is still written to a stream, or lies in its buffer, nowhere; its reader is gone."""
    with suppress(OSError, ValueError):  # ValueError: not a file of the system's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
