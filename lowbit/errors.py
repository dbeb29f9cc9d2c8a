"""What lowbit raises on purpose, and the exit code each one ends the process with.

Messages are one line: what is wrong, where (key, file, layer), and what to do. The command line prints them
without a traceback; anything else that escapes is a bug and keeps its traceback.
"""

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130


class LowbitError(Exception):
    """A failure we understand. Exit code 1."""

    exit_code = EXIT_FAILED


class ConfigError(LowbitError):
    """The configuration is wrong or asks for something impossible. Exit code 2."""

    exit_code = EXIT_BAD_CONFIG


class DataError(LowbitError):
    """Documents, tokenizers or shards are missing, damaged or do not fit the run."""


class CheckpointError(LowbitError):
    """A checkpoint is missing, damaged or belongs to another run."""


class WeightsError(LowbitError):
    """New weights for a sampler are incomplete, do not fit its model, or arrived other than they were sent."""


class NonFiniteError(LowbitError):
    """A loss or a gradient became NaN or infinite; nothing was written from that step."""


class OutOfMemoryError(LowbitError):
    """The device ran out of memory; the message says what to change."""


class RankError(LowbitError):
    """Another process of the job died, failed or hangs, which the message names; this one is all right."""


class Interrupted(LowbitError):
    """A signal asked the run to end; its state was saved. Exit code 130."""

    exit_code = EXIT_INTERRUPTED


def in_a_line(error: BaseException) -> str:
    """Class and first line of somebody else's error, for a sentence that says why something cannot be used."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
