"""The random numbers of a teacher's cache, named by what they are for.

Every number is Philox4x32-10 of a counter (`lowbit.quant.philox`), and the counter says where it is used:

    key      = (cache seed, hash of the estimator's name)
    counter  = (index // 4, sample & 0xFFFFFFFF, position, sample >> 32 << 8 | lane)      word index % 4 of the result

`sample` is the global sample of the data order and `position` the row within it, so a row's randomness does not depend
on which process makes it, in which batch, or after how many interruptions. Samples of a second epoch have numbers of
their own: the same text gets a fresh draw there.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from lowbit.models.lm_head import compiled
from lowbit.quant.philox import MASK, layer_word, philox4x32


class Lane(IntEnum):
    """What a word decides."""

    TARGETS = 0
    WEIGHTS = 1
    ENTROPY = 2


@dataclass(frozen=True)
class Places:
    """Where the rows of a chunk are."""

    sample: Tensor
    """int64 [C]: global sample."""
    position: Tensor
    """int64 [C]: position within the sample; row t holds the targets for the token t + 1."""

    @staticmethod
    def of(samples: int, length: int, first: int = 0, device: torch.device | str = "cpu") -> "Places":
        """All positions of `samples` samples, of which the first is that global one, one after the other."""
        index = torch.arange(samples * length, device=device)
        return Places(first + index // length, index % length)

    def __getitem__(self, rows: slice) -> "Places":
        return Places(self.sample[rows], self.position[rows])

    def to(self, device: torch.device | str) -> "Places":
        """On another device."""
        return Places(self.sample.to(device), self.position.to(device))


@dataclass(frozen=True)
class Noise:
    """All random numbers of a cache."""

    seed: int
    """0..2**32-1."""
    name: str
    """What they are for, so that two estimators with one seed do not share their draws."""

    @property
    def key(self) -> tuple[int, int]:
        """The key's two words."""
        return self.seed & MASK, layer_word(f"distill.{self.name}")

    def words(self, places: Places, lane: Lane, count: int) -> Tensor:
        """int64 [C, count]: uniform 32-bit words of each row."""
        device = places.sample.device
        index = torch.arange((count + 3) // 4, device=device)
        named = (int(lane), *self.key)
        drawn = _words if device.type == "cpu" else compiled(_words)  # uncompiled, two hundred launches
        words: Tensor = drawn(index, places.sample, places.position, *(torch.full((), n, device=device) for n in named))
        return words[:, :count]

    def uniform(self, places: Places, lane: Lane, count: int) -> Tensor:
        """FP64 [C, count] in (0, 1): the centres of 2**32 equal intervals."""
        return (self.words(places, lane, count).double() + 0.5) * 2.0**-32


def _words(index: Tensor, sample: Tensor, position: Tensor, lane: Tensor, seed: Tensor, name: Tensor) -> Tensor:
    """int64 [C, 4 n] of counters index [n] at each sample and position [C]; the others are single words."""
    sample = sample[:, None]
    four = philox4x32((index[None], sample & MASK, position[:, None], sample >> 32 << 8 | lane), (seed, name))
    return torch.stack([w.expand(len(sample), -1) for w in four], dim=-1).flatten(1)
