"""From conversations to micro-batches: what each drawn token carries into the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.configs.schema_rl import AlgorithmConfig, Overlong, RlTeacherConfig
from lowbit.data.batch import Batch
from lowbit.rl.losses import Tokens, accepted, rejects, token_weights
from lowbit.rl.packing import Place, empty_batch, pack, with_weights
from lowbit.rl.rollout import Conversation


@dataclass(frozen=True)
class RlBatch(Batch):
    """A batch with the N drawn tokens that count."""

    index: Tensor | None = None
    """int64 [N]: their places in the flattened [B * T] targets."""
    drawn: Tokens | None = None
    """What the loss needs of them."""

    replayable = False

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "RlBatch":
        """The same on another device."""
        assert self.index is not None and self.drawn is not None
        plain = super().to(device, non_blocking)
        index = self.index.to(device, non_blocking=non_blocking)
        return RlBatch(**vars(plain), index=index, drawn=self.drawn.to(device, non_blocking))

    def head(self, count: int) -> "RlBatch":
        """The whole batch: its first rows alone may hold no drawn token, and conversations are weighed together."""
        return self


@dataclass(frozen=True)
class Packed:
    """A micro-batch of conversations and where they lie in it."""

    batch: Batch
    places: list[Place]


def pack_conversations(
    conversations: Sequence[Conversation], length: int, rows: int, filler: int, full: bool
) -> list[Packed]:
    """Micro-batches of `rows` rows of `length` tokens that hold all conversations; see `packing.pack`."""
    return [Packed(*found) for found in pack([c.tokens for c in conversations], length, rows, filler, full=full)]


def empty(length: int, rows: int, filler: int) -> Packed:
    """A micro-batch without conversations."""
    return Packed(empty_batch(length, rows, filler), [])


def drawn_index(packed: Packed, conversations: Sequence[Conversation]) -> Tensor:
    """Places of all drawn tokens in the flattened targets, conversation by conversation: int64 [N]."""
    length = packed.batch.tokens.shape[1]
    return torch.tensor(
        [
            place.row * length + place.start + conversations[place.item].prompt - 1 + i
            for place in packed.places
            for i in conversations[place.item].drawn
        ],
        dtype=torch.int64,
    )


@dataclass(frozen=True)
class Counting:
    """Which drawn tokens of a conversation count, and its advantages."""

    mask: list[bool]
    advantage: list[float]


def counting(conversation: Conversation, algorithm: AlgorithmConfig, teacher: RlTeacherConfig) -> Counting:
    """Of each drawn token whether it is trained on and with which advantage."""
    c, drawn = conversation, conversation.drawn
    learned = c.advantage is not None and not (algorithm.overlong is Overlong.mask and c.finish == "length")
    advantage = [c.advantage if learned and c.advantage is not None else 0.0] * len(drawn)
    if c.teacher is not None:
        learned = True
        own = [0.0] * len(drawn) if teacher.only else advantage
        advantage = [
            a + teacher.coefficient * (theirs - c.logprobs[i])
            for a, theirs, i in zip(own, c.teacher, drawn, strict=True)
        ]
    mask = [learned] * len(drawn)
    if learned and c.proximal is not None and drawn and rejects(algorithm):
        q = torch.tensor([c.logprobs[i] for i in drawn])
        one = torch.zeros(len(drawn), dtype=torch.int64)
        mask = accepted(torch.tensor(c.proximal), q, one, 1, algorithm).tolist()
    return Counting(mask, advantage)


def is_stale(conversation: Conversation, version: int) -> bool:
    """Whether older weights than the trainer's drew some of it."""
    return any(0 <= v < version for v in conversation.versions)


def training_batch(
    packed: Packed,
    conversations: Sequence[Conversation],
    counts: Sequence[Counting],
    weights: Sequence[float],
    begun: int,
) -> RlBatch:
    """What the objective reads.

    Args:
        counts: of each conversation. weights: what a counting token of each weighs. begun: version of the trainer's
            weights when training on these conversations began; those of older ones are compared with their sampler.
    """
    length = packed.batch.tokens.shape[1]
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in ("index", "q", "advantage", "p", "reference")}
    sizes, stale = [], []
    for place in packed.places:
        c, count = conversations[place.item], counts[place.item]
        used = np.asarray(count.mask, dtype=bool)
        drawn = np.asarray(c.drawn, dtype=np.int64)[used]
        parts["index"].append(drawn + (place.row * length + place.start + c.prompt - 1))
        parts["q"].append(np.asarray(c.logprobs, dtype=np.float32)[drawn])
        parts["advantage"].append(np.asarray(count.advantage, dtype=np.float32)[used])
        if c.proximal is not None:
            parts["p"].append(np.asarray(c.proximal, dtype=np.float32)[used])
        if c.reference is not None:
            parts["reference"].append(np.asarray(c.reference, dtype=np.float32)[used])
        sizes.append(len(drawn))
        stale.append(is_stale(c, begun))

    def joined(name: str) -> Tensor | None:
        if not parts[name]:
            return None
        return torch.from_numpy(np.concatenate(parts[name]))

    repeats = torch.tensor(sizes, dtype=torch.int64)
    none = torch.zeros(0)
    index = joined("index")
    places = torch.zeros(0, dtype=torch.int64) if index is None else index
    flat = torch.zeros(packed.batch.tokens.numel())
    flat[places] = 1.0
    weight = torch.tensor([weights[place.item] for place in packed.places], dtype=torch.float32)
    q, advantage = joined("q"), joined("advantage")
    tokens = Tokens(
        none if q is None else q,
        none if advantage is None else advantage,
        weight.repeat_interleave(repeats),
        torch.arange(len(sizes)).repeat_interleave(repeats),
        len(sizes),
        joined("p") if packed.places else none,
        joined("reference") if packed.places else none,
        torch.tensor(stale, dtype=torch.bool).repeat_interleave(repeats) if any(stale) else None,
    )
    batch = with_weights(packed.batch, flat.view_as(packed.batch.tokens))
    return RlBatch(**vars(batch), index=places, drawn=tokens)


def weigh(
    counts: Sequence[Counting], algorithm: AlgorithmConfig, longest: int, totals: tuple[float, float]
) -> list[float]:
    """What a counting token of each conversation weighs; `totals`: such tokens and conversations, over all ranks."""
    lengths = [sum(count.mask) for count in counts]
    return token_weights(lengths, algorithm.reduction, longest, max(int(totals[0]), 1), max(int(totals[1]), 1))
