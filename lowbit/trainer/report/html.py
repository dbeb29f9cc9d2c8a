"""HTML that cannot be injected into: what is not marked as HTML is text, and text is escaped.

`tag("td", name, cls="n")` makes an element; its children are `Html`, taken as they are, or anything else, which is
shown as text. Only this file makes `Html` of strings that come from outside, and only escaped. Characters that no
XML document may hold (control characters, lone surrogates) are shown as U+FFFD.
"""

import re
from collections.abc import Iterable
from html import escape

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = frozenset({"meta", "br", "line", "path", "rect", "circle"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Anything as escaped text; `Html` as it is."""
    return value if isinstance(value, Html) else Html(escape(_ILLEGAL.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `cls` is its class, `_` in attribute names stands for `-`; None leaves an attribute out."""
    given = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = join(children)
    return Html(f"<{name}{given}/>" if name in _VOID and not inner else f"<{name}{given}>{inner}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Parts one after the other; a list is joined too, None is nothing."""
    return Html(
        between.join(join(part) if isinstance(part, list) else text(part) for part in parts if part is not None)
    )


def table(header: Iterable[object], rows: Iterable[Iterable[object]], cls: str | None = None) -> Html:
    """A table that scrolls sideways where it is too wide; cells may be elements (td) already."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", *(cell if _is_cell(cell) else tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), cls=cls), cls="scroll")


def number(value: object) -> Html:
    """A cell with a number in it."""
    return tag("td", value, cls="n")


def _is_cell(cell: object) -> bool:
    return isinstance(cell, Html) and cell.startswith(("<td", "<th"))
