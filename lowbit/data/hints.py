"""Names that do not exist, and those that were perhaps meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint with the names nearest to `name`, or all of them when few; empty without names."""
    known = sorted(set(names))
    if not known:
        return ""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; there is " + ", ".join(repr(k) for k in known[:8]) + (", ..." if len(known) > 8 else "")
