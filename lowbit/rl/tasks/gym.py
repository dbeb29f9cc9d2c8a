"""Problems of the package reasoning-gym: a hundred generators with checks of their own."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lowbit.errors import ConfigError
from lowbit.rl.tasks.base import Example, Split

PASS = 1_000_000
"""Problems a seed of the generator is asked for; each is made when it is needed."""


class GymTask:
    """One generator; training and evaluation have different seeds."""

    def __init__(self, dataset: str) -> None:
        self._name = dataset
        self._made: dict[int, Any] = {}
        _ = self._package

    @cached_property
    def _package(self) -> Any:
        try:
            import reasoning_gym
        except ImportError:
            raise ConfigError("task.kind=reasoning_gym needs a package: pip install 'lowbit[reasoning_gym]'") from None
        return reasoning_gym

    def _dataset(self, seed: int) -> Any:
        if seed not in self._made:
            try:
                self._made[seed] = self._package.create_dataset(self._name, size=PASS, seed=seed)
            except ValueError as error:
                raise ConfigError(f"task.dataset={self._name}: {str(error).splitlines()[0]}") from None
        return self._made[seed]

    def size(self, split: Split) -> int | None:
        """See `Task.size`."""
        return None

    def example(self, split: Split, seed: int, number: int) -> Example:
        """See `Task.example`."""
        where = 2 * (seed % 2**30) + (split is Split.held_out)
        row = self._dataset(where)[number % PASS]
        return Example(str(row["question"]), {"seed": where, "number": number % PASS, "answer": row["answer"]})

    def check(self, turns: Sequence[str], example: Example) -> dict[str, float]:
        """See `Task.check`: the generator's own score, from 0 to 1."""
        dataset = self._dataset(example.answer["seed"])
        row = dataset[example.answer["number"]]
        return {"score": float(dataset.score_answer(turns[-1].strip(), entry=row))}

    def reply(self, turns: Sequence[str], example: Example) -> str | None:
        """See `Task.reply`."""
        return None

    def describe(self) -> dict[str, Any]:
        """See `Task.describe`."""
        return {"task": "reasoning_gym", "dataset": self._name}
