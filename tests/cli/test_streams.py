"""Standard streams as shells really hand them over: a reader that leaves, a full disk, closed, of another encoding."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = f"{sys.executable} -m lowbit version"
UNKNOWN = f"{sys.executable} -m lowbit nothing"
FULL = f"lowbit: error: the output cannot be written ({os.strerror(errno.ENOSPC)}): free some space\n"
NO_COMMAND = "lowbit: error: No such command 'nothing'; see `lowbit --help`\n"


def shell(command: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """A command line of the shell, with output buffered as Python does by itself: exit code, output, errors."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | environment
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=cwd, env=env, capture_output=True, timeout=100
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        (f"{VERSION} | true", 1, ""),
        (f"{VERSION} > /dev/full", 1, FULL),
        (f"{VERSION} >&-", 0, ""),
        (f"{VERSION} 2>&- > /dev/null", 0, ""),
        (f"{VERSION} <&- >&- 2>&-", 0, ""),
        (UNKNOWN, 2, NO_COMMAND),
        (f"{UNKNOWN} >&-", 2, NO_COMMAND),
        (f"{UNKNOWN} 2>&-", 2, ""),
        (f"{UNKNOWN} 2> /dev/full", 2, ""),
        (f"{UNKNOWN} 2>&1 | true", 2, ""),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stream_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, command: str, code: int, err: str, unbuffered: str
) -> None:
    assert shell(command, tmp_path, PYTHONUNBUFFERED=unbuffered) == (code, "", err)


OPENS = """
import os, sys
from lowbit.trainer.reader import prepare_streams
prepare_streams()
with open("kept", "w") as file:
    os.write(2, b"from the system")
    print("from Python", file=sys.stderr)
    print("and its output")
    sys.exit(file.fileno() < 3)
"""


def test_nothing_is_written_into_a_file_that_took_a_closed_streams_number(tmp_path: Path) -> None:
    (tmp_path / "opens.py").write_text(OPENS)
    code, _, _ = shell(f"{sys.executable} opens.py <&- >&- 2>&-", tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert code == 0 and (tmp_path / "kept").read_text() == ""


PRINTS = """
import sys
from lowbit.trainer.reader import prepare_streams
prepare_streams()
print(*sys.argv[1:], chr(0xFFFD), chr(0x4E2D), chr(0xDCFF))
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1"},
    ],
)
def test_text_of_any_alphabet_can_be_printed_anywhere(tmp_path: Path, environment: dict[str, str]) -> None:
    """A model's sample is any text, and an argument may be no text at all."""
    (tmp_path / "prints.py").write_text(PRINTS)
    code, out, err = shell(
        rf"{sys.executable} prints.py é $'\xff' a", tmp_path, PYTHONPATH=os.pathsep.join(sys.path), **environment
    )
    assert (code, err) == (0, "") and out.count("\n") == 1 and " a " in out
