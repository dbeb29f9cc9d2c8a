"""Arithmetic that strangers may write: a parser of numbers, + - * / and brackets, exact, bounded, and nothing more.

    expression = term (('+' | '-') term)*      term = factor (('*' | '/') factor)*
    factor     = '-' factor | number | '(' expression ')'

Values are fractions. Length, depth and the size of numbers are bounded, so that no text takes long.
"""

from fractions import Fraction

LONGEST = 256
DEEPEST = 32
LARGEST = 10**30


class ArithmeticMistake(ValueError):
    """The text is no expression, or its value is not a number."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Value of an expression and the whole numbers in it, in their order. Raises ArithmeticMistake."""
    if len(text) > LONGEST:
        raise ArithmeticMistake(f"longer than {LONGEST} characters")
    parser = _Parser(text.replace("×", "*").replace("÷", "/"))
    value = parser.expression(0)
    parser.end()
    return value, parser.numbers


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.numbers: list[int] = []

    def _peek(self) -> str:
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        return self._text[self._at] if self._at < len(self._text) else ""

    def end(self) -> None:
        if self._peek():
            raise ArithmeticMistake(f"unexpected {self._peek()!r}")

    def expression(self, depth: int) -> Fraction:
        value = self._term(depth)
        while (sign := self._peek()) in ("+", "-") and sign:
            self._at += 1
            other = self._term(depth)
            value = self._bounded(value + other if sign == "+" else value - other)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while (sign := self._peek()) in ("*", "/") and sign:
            self._at += 1
            other = self._factor(depth)
            if sign == "/" and other == 0:
                raise ArithmeticMistake("division by zero")
            value = self._bounded(value * other if sign == "*" else value / other)
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > DEEPEST:
            raise ArithmeticMistake("too deep")
        sign = self._peek()
        if sign == "-":
            self._at += 1
            return -self._factor(depth + 1)
        if sign == "(":
            self._at += 1
            value = self.expression(depth + 1)
            if self._peek() != ")":
                raise ArithmeticMistake("a bracket is not closed")
            self._at += 1
            return value
        return self._number()

    def _number(self) -> Fraction:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        digits = self._text[begin : self._at]
        if not digits:
            raise ArithmeticMistake(f"a number is missing before {self._peek()!r}")
        self.numbers.append(int(digits))
        return self._bounded(Fraction(int(digits)))

    def _bounded(self, value: Fraction) -> Fraction:
        if max(abs(value.numerator), value.denominator) > LARGEST:
            raise ArithmeticMistake("numbers become too large")
        return value
