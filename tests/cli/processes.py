"""Run the command line in real processes, a few at a time, since each costs more than half a second."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

STUB = Path(__file__).parent / "stub_main.py"


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def lowbit(
    arguments: Sequence[str], cwd: Path, *, stub: bool = False, environment: Mapping[str, str] | None = None
) -> Ended:
    """`lowbit ARGUMENTS` in `cwd`; with `stub`, behind a trainer that does nothing (stub_main.py)."""
    start = [str(STUB)] if stub else ["-m", "lowbit"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=cwd,
        env=env | {"COLUMNS": "100"} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def together(cases: Sequence[Sequence[str]], cwd: Path, *, stub: bool = False) -> list[Ended]:
    """All of `cases`, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda arguments: lowbit(arguments, cwd, stub=stub), cases))
