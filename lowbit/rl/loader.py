"""The batch source of the RL run: rollouts in, micro-batches of the next optimizer step out.

    weights of the trainer -> sampler -> rollout -> [log-probabilities of trainer, reference, teacher] -> micro-batches

A rollout feeds `rollout.updates` optimizer steps. What a step needs of the trainer's own log-probabilities before it
begins is read here, on the very micro-batches that will be trained on, so that they equal what the step computes. They
are needed when a rollout feeds several steps, when it is older than the weights, and when a correction rejects tokens,
because rejected tokens leave the denominator too.

A rollout in which every group has equal rewards teaches nothing: it is counted, said, and the next one is drawn; after
`rollout.empty_limit` of them in a row the run ends.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lowbit.configs.schema_rl import RlConfig
from lowbit.data.batch import Batch
from lowbit.data.loader import Cursor, Loader
from lowbit.errors import CheckpointError, LowbitError
from lowbit.models.transformer import Transformer
from lowbit.rl.batches import Counting, Packed, counting, drawn_index, empty, pack_conversations, training_batch, weigh
from lowbit.rl.losses import rejects
from lowbit.rl.objective import read_logprobs
from lowbit.rl.producer import Position, Producer
from lowbit.rl.rollout import Conversation, Rollout, metrics_of
from lowbit.trainer.engine import Engine, wants_compile

logger = logging.getLogger("lowbit")

LEFT_OUT = 0.2
"""A warning says so when more of the drawn tokens do not count."""


class RolloutLoader(Loader):
    """Gives steps; `metrics` says what the last one was made of."""

    def __init__(
        self,
        config: RlConfig,
        make_producer: Callable[[], Producer],
        engine: Engine,
        *,
        fingerprint: str,
        filler: int,
        reference: Transformer | None = None,
        teacher: Transformer | None = None,
        whole: Callable[[], AbstractContextManager[None]] = nullcontext,
        as_reference: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`make_producer`: called once the weights are there. `fingerprint`: of the task. `filler`: id of empty places.

        `whole`: inside it every rank has all weights. `as_reference`: inside it `reference` computes as one.
        """
        self.config, self.engine, self._make_producer = config, engine, make_producer
        self._made: Producer | None = None
        self.fingerprint, self.filler = fingerprint, filler
        self.reference, self.teacher = reference, teacher
        self.whole, self.as_reference = whole, as_reference
        self.steps = 0
        """Optimizer steps given out over the whole run: the version of the trainer's weights."""
        self.shown: Sequence[Conversation] = ()
        """Conversations of the step just given out, for people."""
        self._pending: deque[list[Conversation]] = deque()
        self._begun = 0  # version when training on the present rollout began
        self._empty = 0
        self._told = False
        self._row: dict[str, float] = {}
        self._full = wants_compile(config.engine.compile, engine.device)

    @property
    def producer(self) -> Producer:
        """Where rollouts come from."""
        if self._made is None:
            self._made = self._make_producer()
        return self._made

    # What the loop asks -----------------------------------------------------------------------------------------

    @property
    def cursor(self) -> Cursor:
        """Prompts that finished rollouts have used up."""
        return Cursor(self.producer.state()[0].prompts, self.config.seed, self.fingerprint)

    def seek(self, cursor: Cursor) -> None:
        """Go on from `cursor`. Raises CheckpointError when it counts prompts of another task."""
        if cursor.fingerprint != self.fingerprint:
            raise CheckpointError("the checkpoint counts prompts of another task: resume with the same task.* settings")

    def epochs(self) -> dict[str, float]:
        """Passes over the task's problems, where their number is known."""
        size = self._problems
        return {} if size is None else {"task": self.cursor.sample / size}

    _problems: int | None = None

    def set_problems(self, size: int | None) -> None:
        """How many problems the task has."""
        self._problems = size

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step."""
        began = time.perf_counter()
        self._row = {}
        if not self._pending:
            self._next_rollout()
        conversations = self.shown = self._pending.popleft()
        batches = self._training(conversations)
        self.steps += 1
        self._row["seconds/data"] = time.perf_counter() - began
        return batches

    def metrics(self) -> dict[str, float]:
        """Of the step just given out."""
        return self._row

    def close(self) -> None:
        """End what runs in the background."""
        if self._made is not None:
            self._made.close()

    # Rollouts ---------------------------------------------------------------------------------------------------

    def _next_rollout(self) -> None:
        """Fill `_pending`. Raises LowbitError after too many rollouts that teach nothing."""
        ranks = self.engine.ranks
        while True:
            began = time.perf_counter()
            with self.whole():
                self.producer.publish(self.steps)
                sync = time.perf_counter() - began
                rollout = self._take()
                wait = time.perf_counter() - began - sync
            self._begun = self.steps
            steps = min(self.config.rollout.updates, max(ranks.gather(len(rollout.groups))))
            self._measure(rollout, {"seconds/sync": sync, "seconds/wait": wait})
            if steps:
                self._empty = 0
                self._pending = deque([c for group in rollout.groups[i::steps] for c in group] for i in range(steps))
                self._score()
                return
            self._empty += 1
            reward = self._row.get("reward", 0.0)
            text = (
                f"rollout {rollout.index}: all groups have equal rewards (mean {reward:.3g}), so nothing can be learned"
            )
            if self._empty >= self.config.rollout.empty_limit:
                raise LowbitError(
                    f"{text}, as in the {self._empty - 1} before it (rollout.empty_limit={self._empty}): make the task "
                    "easier or harder, raise rollout.samples or rollout.temperature, or start from a better model "
                    "(init_from, warm_start)"
                )
            if self._empty % 5 == 1:
                logger.warning("%s; drawing the next", text)

    def _take(self) -> Rollout:
        """The next rollout that is not too old."""
        while True:
            rollout = self.producer.take()
            oldest = min(self.engine.ranks.gather(rollout.version))
            if self.steps - oldest <= self.config.rollout.staleness:
                return rollout
            if not self.config.rollout.staleness:
                raise LowbitError(
                    f"rollout {rollout.index} was drawn with weights of version {rollout.version}, and the trainer's "
                    f"are of version {self.steps}: the sampler did not take them over"
                )
            logger.warning("rollout %d is %d steps old and is dropped", rollout.index, self.steps - oldest)

    def _measure(self, rollout: Rollout, waits: dict[str, float]) -> None:
        """Metrics of a rollout, from the sums of all ranks; `waits`: what the trainer waited for."""
        counts = rollout.counts | {"rollouts": 1.0, "stale": float(self.steps - rollout.version)}
        everywhere = sorted(set().union(*self.engine.ranks.gather(sorted(counts))))
        sums = dict(zip(everywhere, self.engine.ranks.sum([counts.get(k, 0.0) for k in everywhere]), strict=True))
        world = self.engine.ranks.world
        seconds = {key: value / world for key, value in sums.items() if key.startswith("seconds/")}
        self._row |= metrics_of(sums) | seconds | waits
        drawing = max(seconds.get("seconds/rollout", 0.0), 1e-9)
        self._row["rollout_tokens_per_second"] = sums.get("drawn", 0.0) / drawing / world

    def _score(self) -> None:
        """Log-probabilities that are needed before the first step on a rollout."""
        config = self.config
        began = time.perf_counter()
        old = any(v < self._begun for group in self._pending for c in group for v in c.versions if v >= 0)
        own = config.rollout.updates > 1 or config.rollout.staleness > 0 or old or rejects(config.algorithm)
        wanted: list[tuple[str, Transformer]] = [("proximal", self.engine.model)] if own else []
        wanted += [("reference", self.reference)] if self.reference is not None else []
        wanted += [("teacher", self.teacher)] if self.teacher is not None else []
        for conversations in self._pending if wanted else ():
            for packed in self._packed(conversations):
                for name, model in wanted:
                    self._read(name, model, packed, conversations)
        self._row["seconds/score"] = time.perf_counter() - began

    def _read(self, name: str, model: Transformer, packed: Packed, conversations: Sequence[Conversation]) -> None:
        device = self.engine.device
        index = drawn_index(packed, conversations)
        batch = packed.batch.to(device)
        with self.as_reference() if name == "reference" else nullcontext():
            values = read_logprobs(model, batch, index.to(device), self.config.rollout.temperature).tolist()
        at = 0
        for place in packed.places:
            conversation = conversations[place.item]
            count = len(conversation.drawn)
            setattr(conversation, name, values[at : at + count])
            at += count

    def _packed(self, conversations: Sequence[Conversation]) -> list[Packed]:
        """Micro-batches, equally many on every rank."""
        length, rows = self.config.data.sequence_length, self.config.batch.micro_batch
        found = pack_conversations(conversations, length, rows, self.filler, self._full)
        most = max(self.engine.ranks.gather(len(found)))
        return found + [empty(length, rows, self.filler)] * (most - len(found))

    def _training(self, conversations: list[Conversation]) -> list[Batch]:
        config, algorithm = self.config, self.config.algorithm
        counts: list[Counting] = [counting(c, algorithm, config.teacher) for c in conversations]
        tokens = float(sum(sum(count.mask) for count in counts))
        used = float(sum(any(count.mask) for count in counts))
        drawn = float(sum(len(count.mask) for count in counts))
        total_tokens, total, total_drawn = self.engine.ranks.sum([tokens, used, drawn])
        if not total_tokens:
            raise LowbitError(
                f"step {self.steps + 1}: not one of {total_drawn:.0f} drawn tokens counts: the correction "
                f"({algorithm.correction.value}) rejects them or all answers were cut off; the sampler computes "
                "something else than the trainer, or rollout.max_new_tokens is too small"
            )
        weights = weigh(counts, algorithm, config.rollout.max_new_tokens * config.task.turns, (total_tokens, total))
        self._row["correction/rejected"] = left_out = 1.0 - total_tokens / total_drawn
        if left_out > LEFT_OUT and not self._told:
            self._told = True
            logger.warning(
                "step %d: %.0f%% of the drawn tokens do not count (correction/rejected): algorithm.correction=%s "
                "rejects them, or answers were cut off at rollout.max_new_tokens=%d and algorithm.overlong=%s",
                self.steps + 1, 100 * left_out, algorithm.correction.value, config.rollout.max_new_tokens,
                algorithm.overlong.value,
            )  # fmt: skip
        self._row["train_tokens"] = total_tokens
        packed = self._packed(conversations)
        return [training_batch(p, conversations, counts, weights, self._begun) for p in packed]

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """This rank's state as plain JSON, exact."""
        position, waiting = self.producer.state()
        return {
            "steps": self.steps,
            "begun": self._begun,
            "empty": self._empty,
            "index": position.index,
            "prompts": position.prompts,
            "pending": [[c.as_dict() for c in conversations] for conversations in self._pending],
            "waiting": [rollout.as_dict() for rollout in waiting],
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.steps, self._begun, self._empty = int(state["steps"]), int(state["begun"]), int(state["empty"])
        self._pending = deque([Conversation.of(c) for c in conversations] for conversations in state["pending"])
        position = Position(int(state["index"]), int(state["prompts"]))
        self.producer.resume(position, [Rollout.of(r) for r in state["waiting"]])
