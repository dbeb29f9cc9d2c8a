"""Names and paths that do not exist, and those that were perhaps meant. A leaf: every room may import it."""

import difflib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name`, comparing whole dotted paths and their last parts; None if nothing is close."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        last = difflib.SequenceMatcher(None, name.lower().split(".")[-1], candidate.lower().split(".")[-1]).ratio()
        return max(whole, 0.5 * whole + 0.5 * last)

    best = max(candidates, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.5 else None


def suggest(name: str, candidates: Iterable[str]) -> str:
    """`"; nearest: X"`, or nothing."""
    best = nearest(name, candidates)
    return f"; nearest: {best}" if best else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint with the names nearest to `name`, or all of them when few; empty without names."""
    known = sorted(set(names))
    if not known:
        return ""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; there is " + ", ".join(repr(k) for k in known[:8]) + (", ..." if len(known) > 8 else "")


def nearest_path(given: str, words: Sequence[str] = ()) -> str:
    """`"; nearest: X"` for a path that does not exist, or nothing: what lies where its first wrong part should.

    words: what may stand in the path's place.
    """
    place = Path(given).expanduser()
    wrong = next((path for path in (*reversed(place.parents), place) if not path.exists()), None)
    if wrong is None:  # it is there, and something else than was wanted
        return ""
    names: list[str] = []
    with suppress(OSError):
        names = [path.name for path in wrong.parent.iterdir() if not path.name.startswith(".")]
    known = {name: str(wrong.with_name(name)) for name in names} | {word: word for word in words}
    matches = difflib.get_close_matches
    close = matches(wrong.name, known, n=1) or matches(wrong.name.lower(), words, n=1)
    return f"; nearest: {known[close[0]]}" if close else ""
