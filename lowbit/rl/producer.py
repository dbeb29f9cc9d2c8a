"""Rollouts one after the other: drawn when they are asked for, or ahead by a thread of its own.

With `rollout.staleness=0` a rollout is drawn with the weights as they are, then trained on: nothing runs beside
anything, and every number can be reproduced. With staleness k a thread draws ahead with the newest weights it was
given. At most k // updates rollouts are begun and not yet taken, so that none is more than k optimizer steps old when
training on it begins. New weights take effect between rollouts. Ranks draw a rollout together, each its share, and
agree on its prompts over a channel of their threads; their weights may differ in version, each within the bound.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.configs.schema_rl import Advantage, RlConfig
from lowbit.errors import LowbitError
from lowbit.infer.requests import WeightsReport
from lowbit.rl.losses import group_outcome, scale_batch
from lowbit.rl.rollout import Collector, Conversation, Rollout, counts_of
from lowbit.rl.tasks import Split
from lowbit.trainer.distributed import Ranks

logger = logging.getLogger("lowbit")

Weights = Sequence[tuple[str, Tensor]]


@dataclass
class Position:
    """Where drawing is: all of it a checkpoint needs."""

    index: int = 0
    """Rollouts finished."""
    prompts: int = 0
    """Prompts used up by them, over all ranks."""


class Drawing:
    """Draws one rollout: groups with rewards and advantages, those that teach nothing replaced or left out."""

    def __init__(self, config: RlConfig, collector: Collector, ranks: Ranks) -> None:
        self.config, self.collector, self.ranks = config, collector, ranks
        self.prompts = config.batch.sequences * config.rollout.updates // config.rollout.samples
        """Prompts of a rollout, over all ranks."""
        self.doing = "nothing"
        """For whoever waits too long."""

    def draw(self, position: Position, version: int) -> Rollout:
        """The rollout at `position`, which is moved behind it; this rank's share."""
        rollout = Rollout(position.index, version, [])
        parts: list[list[Conversation]] = []
        missing = self.prompts // self.ranks.world
        for round_ in range(1 + self.config.algorithm.refill):
            numbers = self._numbers(position, missing)
            drawn = self._draw(rollout, numbers)
            kept = [group for group in drawn if self._teaches(group)]
            rollout.counts["zero_variance"] = rollout.counts.get("zero_variance", 0.0) + len(drawn) - len(kept)
            rollout.counts["refilled"] = rollout.counts.get("refilled", 0.0) + (len(kept) if round_ else 0)
            parts += kept
            missing = max(0, self.prompts // self.ranks.world - len(parts))
            if not self._anyone(missing):
                break
        self._scale(parts)
        rollout.groups = parts
        position.index += 1
        self.doing = "nothing"
        return rollout

    def _numbers(self, position: Position, missing: int) -> range:
        """This rank's next prompts; all ranks' are counted."""
        wanted = self.ranks.gather(missing)
        first = position.prompts + sum(wanted[: self.ranks.rank])
        position.prompts += sum(wanted)
        return range(first, first + missing)

    def _anyone(self, missing: int) -> bool:
        return self.config.algorithm.refill > 0 and self.ranks.sum([missing])[0] > 0

    def _draw(self, rollout: Rollout, numbers: range) -> list[list[Conversation]]:
        what = f"{len(numbers)} prompts from {numbers.start} on, {self.config.rollout.samples} conversations each"
        began = time.perf_counter()
        self.doing = f"drawing {what}"
        groups = self.collector.draw(numbers, Split.train, self.config.rollout.samples)
        middle = time.perf_counter()
        self.doing = f"waiting for the rewards of {what}"
        self.collector.check(groups)
        ended = time.perf_counter()
        counts = counts_of(groups) | {"seconds/rollout": middle - began, "seconds/reward": ended - middle}
        counts["left_out"] = float(len(numbers) - len(groups))
        for name, value in counts.items():
            rollout.counts[name] = rollout.counts.get(name, 0.0) + value
        return groups

    def _teaches(self, group: list[Conversation]) -> bool:
        """Give a group its advantages; whether it has any, or a teacher who needs none."""
        outcome = group_outcome([c.reward for c in group], self.config.algorithm.advantage)
        for conversation, advantage in zip(group, outcome.advantages, strict=True):
            conversation.advantage = advantage
        return not outcome.zero_variance or bool(self.config.teacher.path)

    def _scale(self, groups: list[list[Conversation]]) -> None:
        if self.config.algorithm.advantage is Advantage.batch:
            scaled = scale_batch([[c.advantage for c in group] for group in groups], self.ranks.sum)
            for group, advantages in zip(groups, scaled, strict=True):
                for conversation, advantage in zip(group, advantages, strict=True):
                    conversation.advantage = advantage


class Producer:
    """Draws when asked, with the trainer's very parameters."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing, self.sampler = drawing, drawing.collector.sampler
        self.position = Position()
        self.last_update: WeightsReport | None = None

    def publish(self, version: int) -> None:
        """The trainer's weights are now of this version."""
        self.last_update = self.sampler.update((), version)

    def take(self) -> Rollout:
        """The next rollout."""
        return self.drawing.draw(self.position, self.sampler.version)

    def state(self) -> tuple[Position, list[Rollout]]:
        """Where drawing is, and rollouts that wait to be trained on."""
        return Position(self.position.index, self.position.prompts), []

    def resume(self, position: Position, waiting: list[Rollout]) -> None:
        """Go on from `state`."""
        self.position = Position(position.index, position.prompts)

    def close(self) -> None:
        """Nothing runs."""


class CopyingProducer(Producer):
    """Draws when asked, with a sampler that has copies of the weights, on whatever device."""

    def __init__(self, drawing: Drawing, weights: Callable[[], Weights]) -> None:
        super().__init__(drawing)
        self._weights = weights

    def publish(self, version: int) -> None:
        """Send the weights to the sampler."""
        self.last_update = self.sampler.update(self._weights(), version)


class AheadProducer(Producer):
    """Draws in a thread, at most `ahead` rollouts before they are taken; weights wait for it on `device`.

    Whoever trains has the lock of recording steps (`infer/graphs.py`) but while it waits in `take`, since it may have
    to wait for the whole GPU. Not the other way round: an evaluation that records while the thread compiles may fail.
    """

    def __init__(
        self,
        drawing: Drawing,
        weights: Callable[[], Weights],
        ahead: int,
        seconds: float,
        device: torch.device,
        recording: "threading.RLock | None" = None,
    ) -> None:
        super().__init__(drawing)
        self._weights, self._device, self._recording = weights, device, recording or threading.RLock()
        self._holder: int | None = None
        drawing.ranks = drawing.ranks.beside("rollouts", self._require_going)
        self._ahead, self._seconds = ahead, seconds
        self._change = threading.Condition()
        self._waiting: deque[Rollout] = deque()
        self._begun = 0  # 1 while one is being drawn
        self._mail: tuple[Weights, int] | None = None
        self._failure: BaseException | None = None
        self._stop = False
        self._thread: threading.Thread | None = None

    def publish(self, version: int) -> None:
        """Leave a copy for the thread, which takes the newest before each rollout."""
        copies = [(name, tensor.detach().to(self._device, copy=True)) for name, tensor in self._weights()]
        with self._change:
            self._mail = (copies, version)
            self._change.notify_all()
        self._hold()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lowbit-rollouts", daemon=True)
            self._thread.start()

    def take(self) -> Rollout:
        """The oldest rollout. Raises LowbitError, saying what is missing, when none comes within `rollout.seconds`."""
        self._let_go()
        rollout = self._oldest()
        self._hold()
        return rollout

    def _hold(self) -> None:
        """Have the lock. Raises LowbitError when the thread does not let it go within `rollout.seconds`."""
        if self._holder is None:
            if not self._recording.acquire(timeout=self._seconds):
                raise LowbitError(
                    f"the sampler has been recording a step for longer than rollout.seconds={self._seconds:g}: its "
                    f"thread is {self.drawing.doing}"
                )
            self._holder = threading.get_ident()

    def _let_go(self) -> None:
        if self._holder == threading.get_ident():
            self._holder = None
            self._recording.release()

    def _oldest(self) -> Rollout:
        deadline = time.monotonic() + self._seconds
        with self._change:
            while not self._waiting:
                if self._failure is not None:
                    raise self._failure
                if not self._change.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise LowbitError(
                        f"no conversations came within rollout.seconds={self._seconds:g}: rollout "
                        f"{self.position.index} is missing, its thread is {self.drawing.doing}"
                    )
            rollout = self._waiting.popleft()
            self._change.notify_all()
            return rollout

    def _run(self) -> None:
        try:
            while True:
                with self._change:
                    while not self._stop and ((self._mail is None and self.last_update is None) or self._full()):
                        self._change.wait()
                    if self._stop:
                        return
                    mail, self._mail = self._mail, None
                    self._begun = 1
                    position = Position(self.position.index, self.position.prompts)
                if mail is not None:
                    self.drawing.doing = "taking over new weights"
                    self.last_update = self.sampler.update(*mail)
                rollout = self.drawing.draw(position, self.sampler.version)
                with self._change:
                    self._begun = 0
                    self.position = position
                    self._waiting.append(rollout)
                    self._change.notify_all()
        except BaseException as error:
            with self._change:
                self._failure = error
                self._change.notify_all()

    def _require_going(self) -> None:
        """Ends a wait for other ranks, whose threads may have ended."""
        if self._stop:
            raise LowbitError("the run is over")

    def _full(self) -> bool:
        return len(self._waiting) + self._begun >= self._ahead

    def state(self) -> tuple[Position, list[Rollout]]:
        """See `Producer.state`; what is being drawn at this moment is drawn again."""
        with self._change:
            return Position(self.position.index, self.position.prompts), list(self._waiting)

    def resume(self, position: Position, waiting: list[Rollout]) -> None:
        """See `Producer.resume`."""
        super().resume(position, waiting)
        self._waiting.extend(waiting)

    def close(self) -> None:
        """End the thread; one in the middle of a rollout ends with it, and is not waited for longer than a minute."""
        with self._change:
            self._stop = True
            self._change.notify_all()
        self._let_go()
        if self._thread is not None:
            self._thread.join(timeout=60.0)


def aligned(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """States of all ranks' loaders, none of which is ahead of another in what it has drawn.

    A rank's thread may have finished a rollout more than another's when a checkpoint is written. That one is drawn
    again: prompts are counted over all ranks.
    """
    least = min(states, key=lambda state: int(state["index"]))
    index = int(least["index"])
    return [
        state
        | {"index": index, "prompts": least["prompts"]}
        | {"waiting": [rollout for rollout in state["waiting"] if int(rollout["index"]) < index]}
        for state in states
    ]
