"""Solved problems as batches: the supervised steps before reinforcement learning.

The loss falls on what the model has to say, the end of each of its turns included, never on the problem or on what an
environment says.
"""

import torch

from lowbit.data.batch import Batch
from lowbit.data.loader import Cursor, Loader
from lowbit.errors import CheckpointError, DataError
from lowbit.rl.packing import empty_batch, pack, with_weights
from lowbit.rl.prompts import Prompts
from lowbit.rl.tasks import Example, Split, Task
from lowbit.trainer.distributed import Ranks

START = 10**9
"""Problems from this number on: those that rollouts begin with are none of them."""


def solved(task: Task, prompts: Prompts, example: Example) -> tuple[list[int], list[bool]]:
    """Token ids of a solved problem, and which of them the model has to say.

    Raises: DataError for a problem without a solution.
    """
    if not example.solution:
        raise DataError(
            f"warm_start.steps: the problem {example.prompt[:60]!r} comes without a solution to learn from; "
            "warm_start.steps=0 would start without"
        )
    ids = list(prompts.encode(example))
    learned = [False] * len(ids)
    turns: list[str] = []
    for turn in example.solution:
        said = [*prompts.tokenizer.encode(turn), prompts.tokenizer.eot_id]
        ids += said
        learned += [True] * len(said)
        turns.append(turn)
        reply = task.reply(turns, example)
        heard = [] if reply is None else prompts.tokenizer.encode(reply)
        ids += heard
        learned += [False] * len(heard)
    return ids, learned


class SupervisedLoader(Loader):
    """Steps of so many solved problems."""

    def __init__(
        self,
        task: Task,
        prompts: Prompts,
        *,
        seed: int,
        examples: int,
        length: int,
        rows: int,
        fingerprint: str,
        full: bool,
        ranks: Ranks,
    ) -> None:
        """`full`: see `packing.pack`."""
        self._task, self._prompts, self._examples, self._ranks = task, prompts, examples, ranks
        self._length, self._rows, self._full = length, rows, full
        self._position = Cursor(0, seed, fingerprint)

    @property
    def cursor(self) -> Cursor:
        """Problems used up by all ranks."""
        return self._position

    def seek(self, cursor: Cursor) -> None:
        """Go on from `cursor`."""
        if cursor.fingerprint != self._position.fingerprint:
            raise CheckpointError(
                "the checkpoint counts problems of another task: resume with the same task.* settings"
            )
        self._position = cursor

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches."""
        now, share = self._position, self._examples // self._ranks.world
        first = START + now.sample + self._ranks.rank * share
        examples = [self._task.example(Split.train, now.seed, first + i) for i in range(share)]
        found = [solved(self._task, self._prompts, example) for example in examples]
        self._position = Cursor(now.sample + self._examples, now.seed, now.fingerprint)
        filler = self._prompts.tokenizer.eot_id
        packed = pack([ids for ids, _ in found], self._length, self._rows, filler, full=self._full)
        batches = []
        for batch, places in packed:
            weights = torch.zeros_like(batch.weights)
            for place in places:
                learned = found[place.item][1][1:]
                weights[place.row, place.start : place.start + len(learned)] = torch.tensor(learned).float()
            batches.append(with_weights(batch, weights))
        most = max(self._ranks.gather(len(batches)))
        return batches + [empty_batch(self._length, self._rows, filler)] * (most - len(batches))

    def epochs(self) -> dict[str, float]:
        """Passes over the task's problems, where their number is known."""
        size = self._task.size(Split.train)
        return {} if size is None else {"task": self._position.sample / size}

    def close(self) -> None:
        """Nothing runs."""
