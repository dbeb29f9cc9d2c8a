"""Problems of the package reasoning-gym: a hundred generators with checks of their own.

A generator makes the same problem twice, whatever its seed, where there are not many. A prompt therefore belongs to one
split by its hash, as elsewhere (`base.is_held_out`), and numbers are tried until one is of the split asked for.
"""

from collections.abc import Sequence
from functools import cached_property
from random import Random
from typing import Any

from lowbit.errors import ConfigError
from lowbit.rl.tasks.base import Example, Split, is_held_out

PASS = 1_000_000
"""Problems the generator is asked for; each is made when it is needed."""
TRIES = 2_000


class GymTask:
    """One generator."""

    def __init__(self, dataset: str, held_out: float) -> None:
        self._name = dataset
        self._held_out = held_out
        _ = self._dataset

    @cached_property
    def _dataset(self) -> Any:
        try:
            import reasoning_gym
        except ImportError:
            raise ConfigError("task.kind=reasoning_gym needs a package: pip install 'lowbit[reasoning_gym]'") from None
        try:
            return reasoning_gym.create_dataset(self._name, size=PASS, seed=0)
        except ValueError as error:
            raise ConfigError(f"task.dataset={self._name}: {str(error).splitlines()[0]}") from None

    def size(self, split: Split) -> int | None:
        """See `Task.size`."""
        return None

    def example(self, split: Split, seed: int, number: int) -> Example:
        """See `Task.example`; the package's own answer is the solution, where it has one."""
        random = Random(f"{split}:{seed}:{number}")
        for _ in range(TRIES):
            place = random.randrange(PASS)
            row = self._dataset[place]
            if is_held_out(str(row["question"]), self._held_out) == (split is Split.held_out):
                answer = row["answer"]
                return Example(str(row["question"]), {"number": place, "answer": answer}, (answer,) if answer else ())
        raise ConfigError(
            f"task.dataset={self._name} task.held_out={self._held_out}: {TRIES} problems and none for a {split} split; "
            "another task.held_out or task.dataset would work"
        )

    def check(self, turns: Sequence[str], example: Example) -> dict[str, float]:
        """See `Task.check`: the generator's own score, from 0 to 1."""
        row = self._dataset[example.answer["number"]]
        return {"score": float(self._dataset.score_answer(turns[-1].strip(), entry=row))}

    def reply(self, turns: Sequence[str], example: Example) -> str | None:
        """See `Task.reply`."""
        return None

    def describe(self) -> dict[str, Any]:
        """See `Task.describe`."""
        return {"task": "reasoning_gym", "dataset": self._name, "held_out": self._held_out}
