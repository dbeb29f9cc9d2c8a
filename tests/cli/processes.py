"""Run the command line in processes of its own, two at a time."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import forked

STUB = Path(__file__).parent / "stub_main.py"


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def lowbit(
    arguments: Sequence[str],
    cwd: Path,
    *,
    stub: bool = False,
    fresh: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """`lowbit ARGUMENTS` in `cwd`; with `stub`, behind a trainer that does nothing (stub_main.py).

    fresh: with all the imports of its own, as a user's is.
    """
    start = [str(STUB)] if stub else ["-m", "lowbit"]
    done = forked.run([*start, *arguments], cwd, {"COLUMNS": "100"} | dict(environment or {}), fresh=fresh)
    return Ended(done.returncode, done.stdout, done.stderr)


def together(cases: Sequence[Sequence[str]], cwd: Path, *, stub: bool = False, fresh: bool = False) -> list[Ended]:
    """All of `cases`, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda arguments: lowbit(arguments, cwd, stub=stub, fresh=fresh), cases))
