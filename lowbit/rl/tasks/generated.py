"""Tasks whose problems are made: small enough for a model of 100,000 parameters on a CPU, hard enough to be learned."""

from collections.abc import Sequence
from random import Random

from lowbit.rl.tasks.arithmetic import ArithmeticMistake, evaluate
from lowbit.rl.tasks.base import Example, Generated


class Add(Generated):
    """`07+45=` -> `052`: both numbers and the sum padded with zeros, so that places line up."""

    name = "add"

    def make(self, random: Random) -> Example:
        """See `Generated.make`."""
        n = self.problem_size
        a, b = random.randrange(10**n), random.randrange(10**n)
        answer = f"{a + b:0{n + 1}d}"
        return Example(f"{a:0{n}d}+{b:0{n}d}=", answer, (answer,))


class Sort(Generated):
    """`493827>` -> `234789`."""

    name = "sort"

    def make(self, random: Random) -> Example:
        """See `Generated.make`."""
        digits = random.choices("0123456789", k=self.problem_size)
        answer = "".join(sorted(digits))
        return Example("".join(digits) + ">", answer, (answer,))

    def check(self, turns: Sequence[str], example: Example) -> dict[str, float]:
        """See `Task.check`: half for the right digits in any order, the rest for the order."""
        given = turns[-1].strip()
        same = sorted(given) == sorted(example.answer)
        return {"digits": 0.5 * same, "order": 0.5 * (given == example.answer)}


class Reverse(Generated):
    """`abcdef<` -> `fedcba`."""

    name = "reverse"

    def make(self, random: Random) -> Example:
        """See `Generated.make`."""
        letters = random.choices("abcdefghijklmnopqrstuvwxyz", k=self.problem_size)
        answer = "".join(reversed(letters))
        return Example("".join(letters) + "<", answer, (answer,))


class Countdown(Generated):
    """`3 7 25: 172=` -> `(25-3)*7+18`-like: an expression that uses each number exactly once and has the value."""

    name = "countdown"

    def make(self, random: Random) -> Example:
        """See `Generated.make`."""
        while True:
            numbers = [random.randint(1, 25) for _ in range(max(2, self.problem_size))]
            text, value = str(numbers[0]), numbers[0]
            for number in numbers[1:]:
                sign = random.choice("+-*")
                text = f"({text}){sign}{number}" if sign == "*" and not text.isdigit() else f"{text}{sign}{number}"
                value = {"+": value + number, "-": value - number, "*": value * number}[sign]
            if 0 < value < 1000:
                shown = " ".join(map(str, sorted(numbers)))
                return Example(f"{shown}: {value}=", {"target": value, "numbers": sorted(numbers)}, (text,))

    def check(self, turns: Sequence[str], example: Example) -> dict[str, float]:
        """See `Task.check`: a tenth for an expression of the right numbers, the rest for its value."""
        try:
            value, numbers = evaluate(turns[-1].strip().split("=")[0])
        except ArithmeticMistake:
            return {"numbers": 0.0, "correct": 0.0}
        right = sorted(numbers) == list(example.answer["numbers"])
        return {"numbers": 0.1 * right, "correct": 0.9 * (right and value == example.answer["target"])}


class Calculator(Generated):
    """`37*48=` -> `?37*48`, to which the calculator says `1776;`, and then `1776`."""

    name = "calculator"

    def make(self, random: Random) -> Example:
        """See `Generated.make`."""
        n = self.problem_size
        a, b = random.randrange(10 ** (n - 1), 10**n), random.randrange(10 ** (n - 1), 10**n)
        return Example(f"{a}*{b}=", str(a * b), (f"?{a}*{b}", str(a * b)))

    def reply(self, turns: Sequence[str], example: Example) -> str | None:
        """See `Task.reply`: the value of an expression after `?`; an answer ends the conversation."""
        text = turns[-1].strip()
        if not text.startswith("?"):
            return None
        try:
            value, _ = evaluate(text[1:])
        except ArithmeticMistake as mistake:
            return f"{mistake};"
        return f"{value};"
