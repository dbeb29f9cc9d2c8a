"""The line that a command ends with, on standard error; nothing is imported that takes time."""

import os
import sys

from lowbit.errors import EXIT_INTERRUPTED
from lowbit.trainer.reader import discard


def say(message: str, code: int) -> int:
    """Print `lowbit: error: MESSAGE` as one line, without `error` for an interruption, and return the exit code.

    Several processes say which one speaks.
    """
    rank = os.environ.get("RANK", "0")
    parts = ["lowbit", *(["error"] if code != EXIT_INTERRUPTED else [])]
    who = ": ".join(parts) + (f" (rank {rank})" if rank != "0" else "")
    try:
        print(f"{who}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:  # where it cannot be said, the code still tells
        discard(sys.stderr)
    return code
