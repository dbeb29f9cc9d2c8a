"""Conversations drawn from a policy, with their rewards.

A conversation is one list of token ids that only ever grows: the prompt, what the model drew, what an environment
said in between, what the model drew next. Each drawn token keeps the sampler's log-probability and the version of the
weights that drew it; tokens that nobody drew have version -1 and are never trained on.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.configs.schema_rl import Overlong, RlConfig
from lowbit.errors import DataError
from lowbit.infer.requests import Request, Sample, Sampler
from lowbit.infer.sampling import SamplingConfig
from lowbit.rl.prompts import Prompts
from lowbit.rl.rewards import RewardPool
from lowbit.rl.tasks import Example, Split, Task

logger = logging.getLogger("lowbit")


@dataclass
class Conversation:
    """One sample of one prompt."""

    number: int
    """The prompt's, over the whole run."""
    sample: int
    example: Example
    prompt: int
    """Tokens of the prompt."""
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens behind the prompt; 0 where nobody drew one."""
    versions: list[int] = field(default_factory=list)
    """Of the same; -1 where nobody drew one."""
    finish: str = ""
    """stop, length (a turn was cut off) or context (no room for another turn)."""
    turns: list[str] = field(default_factory=list)
    parts: dict[str, float] | None = None
    advantage: float | None = None
    """None: not trained on."""
    proximal: list[float] | None = None
    """The trainer's log-probabilities of the drawn tokens when training on them began."""
    reference: list[float] | None = None
    teacher: list[float] | None = None

    @property
    def reward(self) -> float | None:
        """Sum of the parts."""
        return None if self.parts is None else math.fsum(self.parts.values())

    @property
    def drawn(self) -> list[int]:
        """Places, counted behind the prompt, of the tokens that were drawn."""
        return [i for i, version in enumerate(self.versions) if version >= 0]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, exact: for checkpoints."""
        return vars(self) | {"example": self.example.as_dict()}

    @staticmethod
    def of(values: dict[str, Any]) -> "Conversation":
        """From `as_dict`."""
        return Conversation(**(values | {"example": Example.of(values["example"])}))


@dataclass
class Rollout:
    """What was drawn at once: groups of conversations with rewards."""

    index: int
    """Number of the rollout in the run."""
    version: int
    """Of the weights in use when it was begun."""
    groups: list[list[Conversation]]
    counts: dict[str, float] = field(default_factory=dict)
    """Sums that metrics are made of."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        groups = [[c.as_dict() for c in group] for group in self.groups]
        return {"index": self.index, "version": self.version, "groups": groups, "counts": self.counts}

    @staticmethod
    def of(values: dict[str, Any]) -> "Rollout":
        """From `as_dict`."""
        groups = [[Conversation.of(c) for c in group] for group in values["groups"]]
        return Rollout(int(values["index"]), int(values["version"]), groups, dict(values["counts"]))


def longest_conversation(config: RlConfig) -> int:
    """Most tokens of a conversation."""
    return min(config.model.max_sequence, config.data.sequence_length + 1)


def check_prompts(config: RlConfig, task: Task, prompts: Prompts, count: int = 64) -> None:
    """Look at some problems before anything is trained. Raises DataError when none fits the context."""
    longest, new = longest_conversation(config), config.rollout.max_new_tokens
    lengths = []
    for number in range(count):
        example = task.example(Split.train, config.seed, number)
        if number == 0:
            prompts.check_round_trip(example.prompt)
        lengths.append(len(prompts.encode(example)))
    if min(lengths) + new > longest:
        raise DataError(
            f"every one of {count} prompts is too long: the shortest has {min(lengths)} tokens, and with "
            f"rollout.max_new_tokens={new} a context of {longest} (the lesser of model.max_sequence and "
            f"data.sequence_length + 1) leaves room for {longest - new}"
        )


class Collector:
    """Draws conversations and has them checked."""

    def __init__(self, config: RlConfig, task: Task, prompts: Prompts, sampler: Sampler, rewards: RewardPool) -> None:
        self.config = config
        self.task = task
        self.prompts = prompts
        self.sampler = sampler
        self.rewards = rewards
        self.longest = longest_conversation(config)
        self._warned = False

    def draw(
        self, numbers: Sequence[int], split: Split, samples: int, *, greedy: bool = False
    ) -> list[list[Conversation]]:
        """Groups of `samples` conversations, one for each problem number; without rewards.

        A prompt that is too long for the context is left out, with a warning: its group is missing.
        """
        config, seed = self.config, self.config.seed
        groups: list[list[Conversation]] = []
        for number in numbers:
            example = self.task.example(split, seed, number)
            ids = self.prompts.encode(example)
            if len(ids) + config.rollout.max_new_tokens > self.longest:
                if not self._warned:
                    logger.warning(
                        "prompts of more than %d tokens are left out: first prompt %d, of %d tokens",
                        self.longest - config.rollout.max_new_tokens, number, len(ids),
                    )  # fmt: skip
                    self._warned = True
                continue
            groups.append([Conversation(number, s, example, len(ids), list(ids)) for s in range(samples)])
        self._first_turns(groups, samples, greedy)
        for _ in range(1, config.task.turns):
            going = [c for group in groups for c in group if not c.finish and self._reply(c)]
            if not going:
                break
            self._later_turns(going, greedy)
        for group in groups:
            for c in group:
                c.finish = c.finish or "stop"
        return groups

    def _sampling(self, greedy: bool) -> tuple[SamplingConfig, int]:
        """How to draw, and the seed: evaluations have another noise than training."""
        config = self.config
        return SamplingConfig(0.0 if greedy else config.rollout.temperature), config.seed

    def _first_turns(self, groups: list[list[Conversation]], samples: int, greedy: bool) -> None:
        sampling, seed = self._sampling(greedy)
        requests = [
            Request(tuple(g[0].tokens), g[0].number, self.config.rollout.max_new_tokens, samples) for g in groups
        ]
        drawn = self.sampler.sample(requests, sampling, seed=seed, stop_ids=self.prompts.stop_ids) if requests else []
        for group, found in zip(groups, drawn, strict=True):
            for conversation, sample in zip(group, found, strict=True):
                self._append(conversation, sample)

    def _later_turns(self, going: list[Conversation], greedy: bool) -> None:
        sampling, seed = self._sampling(greedy)
        most = self.config.rollout.max_new_tokens
        requests = [
            Request(tuple(c.tokens), c.number, min(most, self.longest - len(c.tokens)), 1, c.sample) for c in going
        ]
        drawn = self.sampler.sample(requests, sampling, seed=seed, stop_ids=self.prompts.stop_ids)
        for conversation, [sample] in zip(going, drawn, strict=True):
            self._append(conversation, sample)

    def _append(self, conversation: Conversation, sample: Sample) -> None:
        conversation.tokens += sample.tokens
        conversation.logprobs += sample.logprobs
        conversation.versions += sample.versions
        conversation.turns.append(self.prompts.text(sample.tokens))
        if sample.finish_reason == "length":
            conversation.finish = "length"

    def _reply(self, conversation: Conversation) -> bool:
        """Let the environment answer; whether the model has another turn."""
        text = self.task.reply(conversation.turns, conversation.example)
        if text is None:
            conversation.finish = "stop"
            return False
        ids = self.prompts.tokenizer.encode(text)
        if len(conversation.tokens) + len(ids) + 1 > self.longest:
            conversation.finish = "context"
            return False
        conversation.tokens += ids
        conversation.logprobs += [0.0] * len(ids)
        conversation.versions += [-1] * len(ids)
        return True

    def check(self, groups: Sequence[Sequence[Conversation]]) -> None:
        """Give every conversation its reward, where its check gives one."""
        flat = [c for group in groups for c in group]
        zero = self.config.algorithm.overlong is Overlong.zero
        for conversation, scored in zip(flat, self.rewards.score([(c.turns, c.example) for c in flat]), strict=True):
            conversation.parts = scored.parts
            if zero and conversation.finish == "length" and scored.parts is not None:
                conversation.parts = dict.fromkeys(scored.parts, 0.0)


def counts_of(groups: Sequence[Sequence[Conversation]]) -> dict[str, float]:
    """Sums over conversations: what `metrics_of` divides, after they were added up over ranks."""
    flat = [c for group in groups for c in group]
    counts: defaultdict[str, float] = defaultdict(float)
    counts["conversations"] += len(flat)
    counts["groups"] += len(groups)
    for c in flat:
        counts["drawn"] += len(c.drawn)
        counts["turns"] += len(c.turns)
        counts[f"finish/{c.finish}"] += 1
        if c.parts is None or c.reward is None:
            counts["failed"] += 1
            continue
        counts["rewarded"] += 1
        counts["reward"] += c.reward
        for name, value in c.parts.items():
            counts[f"reward/{name}"] += value
    return dict(counts)


def metrics_of(counts: dict[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums of all ranks."""
    conversations, rewarded = max(counts.get("conversations", 0), 1), max(counts.get("rewarded", 0), 1)
    row = {
        "reward": counts.get("reward", 0.0) / rewarded,
        "length": counts.get("drawn", 0.0) / conversations,
        "turns": counts.get("turns", 0.0) / conversations,
        "groups/zero_variance": counts.get("zero_variance", 0.0) / max(counts.get("groups", 0), 1),
        "rewards/failed": counts.get("failed", 0.0) / conversations,
        "stale/steps": counts.get("stale", 0.0) / max(counts.get("rollouts", 0), 1),
    }
    for name, value in counts.items():
        if name.startswith("reward/"):
            row[name] = value / rewarded
        elif name.startswith("finish/"):
            row[name] = value / conversations
    return row
