"""What a task is: problems with numbers, a check of answers, and for conversations the environment's side.

Problems are addressed, not streamed: `example(split, seed, number)` gives the same problem at any time in any process,
so that a resumed run needs nothing but the number it had reached. Nothing here imports PyTorch: checks run in processes
of their own that have to start fast.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from random import Random
from typing import Any, Protocol

from lowbit.errors import ConfigError


class Split(StrEnum):
    """Which problems."""

    train = "train"
    held_out = "held_out"


@dataclass(frozen=True)
class Example:
    """A problem; plain JSON."""

    prompt: str
    """What is asked, before the template."""
    answer: Any
    """What a check compares with."""
    solution: tuple[str, ...] = ()
    """The turns of a right conversation, for supervised learning; empty: not known."""

    def as_dict(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    @staticmethod
    def of(values: dict[str, Any]) -> "Example":
        """From `as_dict`."""
        return Example(str(values["prompt"]), values["answer"], tuple(values.get("solution", ())))


class Task(Protocol):
    """Problems and what decides about answers."""

    def size(self, split: Split) -> int | None:
        """Problems of a split; None: as many as one likes."""
        ...

    def example(self, split: Split, seed: int, number: int) -> Example:
        """Problem `number` of a split in the order of `seed`; beyond the last it goes on with the next pass."""
        ...

    def check(self, turns: Sequence[str], example: Example) -> dict[str, float]:
        """Reward of a conversation by parts; the reward is their sum. Runs in another process.

        Args:
            turns: texts of the model's turns.
        """
        ...

    def reply(self, turns: Sequence[str], example: Example) -> str | None:
        """What the environment says to the last turn; None: the conversation is over."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain values that tell these problems from others, for a checkpoint."""
        ...


class Generated:
    """Problems made by arithmetic on their number: endless, and each prompt belongs to one split for good.

    Whether a prompt is held out follows from its hash, so no held-out problem is ever trained on, whatever the seed.
    A subclass gives `make`, `check` and a name.
    """

    name = ""

    def __init__(self, size: int, held_out: float) -> None:
        if size < 1:
            raise ConfigError(f"task.size={size} must be at least 1")
        self.problem_size = size
        self.held_out = held_out

    def make(self, random: Random) -> Example:
        """One problem. Another one each time."""
        raise NotImplementedError

    def size(self, split: Split) -> int | None:
        """See `Task.size`."""
        return None

    def example(self, split: Split, seed: int, number: int) -> Example:
        """See `Task.example`."""
        random = Random(f"{self.name}:{self.problem_size}:{split}:{seed}:{number}")
        for _ in range(10_000):
            found = self.make(random)
            if is_held_out(found.prompt, self.held_out) == (split is Split.held_out):
                return found
        raise ConfigError(
            f"task.size={self.problem_size} task.held_out={self.held_out}: {self.name} has too few problems of this "
            f"size for a {split} split; a larger task.size would work"
        )

    def reply(self, turns: Sequence[str], example: Example) -> str | None:
        """See `Task.reply`: one turn."""
        return None

    def check(self, turns: Sequence[str], example: Example) -> dict[str, float]:
        """See `Task.check`: the answer, and nothing else."""
        return {"correct": float(turns[-1].strip() == example.answer)}

    def describe(self) -> dict[str, Any]:
        """See `Task.describe`."""
        return {"task": self.name, "size": self.problem_size, "held_out": self.held_out}


def is_held_out(prompt: str, share: float) -> bool:
    """Whether a prompt is one of the held-out share."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def fingerprint(task: Task) -> str:
    """Hash of `describe`."""
    return hashlib.sha256(json.dumps(task.describe(), sort_keys=True).encode()).hexdigest()
