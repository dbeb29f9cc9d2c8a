"""Is this the same answer? Numbers exactly; formulas by math-verify where it is installed.

The answer of a text is what stands in its last `\\boxed{}`, else after its last `####`, else its last number. Numbers
are compared as fractions after `$`, `%`, thousands separators and spaces are gone, with their sign.
"""

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def final_answer(text: str) -> str | None:
    """The answer that a text ends with; None when there is none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` of a text holds, brackets matched; None without a whole one."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    depth, start = 1, begin + len("\\boxed{")
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None


def number(text: str) -> Fraction | None:
    """A text as a number: `-1,234.50`, `$3`, `50%` (as 50), `3/4`, `\\frac{3}{4}`; None for anything else."""
    cleaned = re.sub(r"\\d?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text)
    cleaned = re.sub(r"[\s$,]|\\,|\\!|\\?%|\\\$|\.$", "", cleaned).lstrip("+")
    if not re.fullmatch(r"-?\d+(\.\d+)?(/\d+)?", cleaned) or len(cleaned) > 100:
        return None
    above, _, below = cleaned.partition("/")
    if below and int(below) == 0:
        return None
    return Fraction(above) / (Fraction(below) if below else 1)


def same_answer(text: str, gold: str) -> bool:
    """Whether a completion gives the gold answer.

    Raises: ValueError when the gold answer itself cannot be read, which is no fault of the completion.
    """
    wanted, given = number(gold), final_answer(text)
    if given is None:
        return False
    if wanted is not None:
        return number(given) == wanted
    return given == gold.strip() or _verified(text, gold)


def _verified(text: str, gold: str) -> bool:
    """math-verify's word, in a process that its caller may kill: it sets no alarms of its own. False without it."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    wanted = parse(f"${gold}$", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"math-verify cannot read the gold answer {gold!r}")
    return bool(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None))
