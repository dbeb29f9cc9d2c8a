"""Noise from a counter, for stochastic rounding: a 32-bit mixer applied to (key, position).

The mixer is two rounds of xorshift and multiply whose constants C. Wellons found by search (github.com/skeeto/
hash-prospector, public domain): every input bit flips every output bit with probability 1/2 within 0.1%. Its two
multipliers are below 2**31, so products of 32-bit words stay inside int64 and nothing depends on how a device wraps.
There is no state: the same step of a run, repeated, draws the same numbers.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """Names a stream of random numbers."""

    key: tuple[int, ...]
    """For example run seed, optimizer step, rank, hop, chunk."""

    def fork(self, *words: int) -> "Noise":
        """A stream of its own for each choice of words."""
        return replace(self, key=self.key + words)

    def words(self) -> list[int]:
        """The key as a kernel takes it: 32-bit words with which a position is mixed, one after the other."""
        return [_mix_int(k & _MASK) for k in (len(self.key), *self.key)]

    def uniform(self, count: int, device: torch.device) -> Tensor:
        """FP32 [count]: multiples of 2**-24 in [0, 1)."""
        word = torch.arange(count, dtype=torch.int64, device=device) & _MASK
        for k in self.words():
            word = _mix(word ^ k)
        return (word >> 8).float() * 2.0**-24


def _mix(word: Tensor) -> Tensor:
    """int64 tensor of 32-bit words -> the same kind."""
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _MASK
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _MASK
    return word ^ (word >> 15)


def _mix_int(word: int) -> int:
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _MASK
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _MASK
    return word ^ (word >> 15)
