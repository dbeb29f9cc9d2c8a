"""Drawing ahead on two ranks, whose threads here stand for processes with a board between them."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from changes import changed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lowbit.configs.schema_rl import RlConfig
from lowbit.infer.requests import WeightsReport
from lowbit.rl.producer import AheadProducer, Drawing, aligned
from lowbit.rl.rollout import Conversation
from lowbit.rl.tasks import Example
from lowbit.trainer.distributed import Ranks

CPU = torch.device("cpu")


class Draws:
    """Stands in for a collector: rank 1 is slow, and every third prompt teaches nothing."""

    class sampler:
        version = 0

        @classmethod
        def update(cls, weights: Any, version: int) -> WeightsReport:
            cls.version = version
            return WeightsReport(version, 0, 0, 0.0, 0, 0.0)

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.drawn: list[list[int]] = []

    def draw(self, numbers: Sequence[int], split: Any, samples: int) -> list[list[Conversation]]:
        time.sleep(0.02 * self.rank)
        self.drawn.append(list(numbers))
        example = Example("1+1=", "2")
        groups = [[Conversation(n, s, example, 4, [1, 2, 3, 4, 5], [-1.0], [0]) for s in range(2)] for n in numbers]
        for group in groups:
            for c in group:
                c.parts = {"correct": float(c.sample == 0 and c.number % 3 > 0)}
        return groups

    def check(self, groups: Any) -> None: ...


def producers(config: RlConfig, ahead: int = 2) -> list[AheadProducer]:
    store = HashStore()
    config = changed(config, batch__sequences=16, rollout__samples=2, algorithm__refill=4)
    return [
        AheadProducer(Drawing(config, Draws(rank), Ranks(rank, 2, board=store)), list, ahead, 20.0, CPU)  # type: ignore[arg-type]
        for rank in range(2)
    ]


@pytest.mark.timeout(60)
def test_ranks_share_prompts_whatever_their_pace(config: RlConfig) -> None:
    """Each rollout has the prompts that follow the last one's, each drawn by one rank; both have as many groups."""
    both = producers(config)
    for producer in both:
        producer.publish(0)
    for index in range(4):
        rollouts = [producer.take() for producer in both]
        assert [rollout.index for rollout in rollouts] == [index, index]
        assert [len(rollout.groups) for rollout in rollouts] == [4, 4], "half of 8, those that teach nothing replaced"
    began = time.monotonic()
    for producer in both:
        producer.close()
    assert time.monotonic() - began < 10, "a thread that waits for another rank's ends with the run"
    every = [n for producer in both for numbers in producer.drawing.collector.drawn for n in numbers]  # type: ignore[attr-defined]
    assert len(every) == len(set(every)), "no prompt twice"
    assert set(range(8 * 4)) <= set(every), "and none left out"
    assert not any(thread.name == "lowbit-rollouts" and thread.is_alive() for thread in threading.enumerate())


def test_a_rank_that_was_ahead_goes_back() -> None:
    """What only one rank had finished at a checkpoint is drawn again, by both."""

    def state(index: int, prompts: int, waiting: list[int]) -> dict[str, Any]:
        return {"steps": 5, "index": index, "prompts": prompts, "waiting": [{"index": i} for i in waiting]}

    found = aligned([state(8, 90, [6, 7]), state(7, 80, [6])])
    assert found == [state(7, 80, [6]), state(7, 80, [6])]
    assert aligned([state(3, 24, [])]) == [state(3, 24, [])]


def test_sums_of_threads_are_those_of_ranks() -> None:
    store, found = HashStore(), {}

    def work(rank: int) -> None:
        ranks = Ranks(rank, 2, board=store).beside("mine", lambda: None)
        found[rank] = [ranks.sum([0.1 * (rank + 1), rank]), ranks.sum([]), ranks.gather(rank)]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found[0] == found[1] == [[pytest.approx(0.3), 1.0], [], [0, 1]]
    alone = Ranks()
    assert alone.beside("mine", lambda: None) is alone
