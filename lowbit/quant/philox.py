"""Random numbers from a counter: the noise of stochastic rounding and the signs of a rotation.

Philox4x32-10 scrambles a 128-bit counter under a 64-bit key into four 32-bit words (J. Salmon, M. Moraes, R. Dror,
D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). There is no state: recomputing a layer, or resuming
a run, gives the same words again. What names a word here:

    key      = (run seed, hash of the layer's full name)
    counter  = (index // 4, optimizer step, micro-batch, rank << 16 | lane)       word index % 4 of the result
    lane     = product << 8 | side << 4 | purpose

The two operands of a product must share their Hadamard signs and never their rounding noise (shared noise correlates
the errors and biases the product), hence `SHARED`, a side of its own, for signs.

Seed, layer, step, micro-batch and rank reach compiled code as int64 tensors: as Python ints every new value would be a
new compilation. The lane is a constant of the code. Words live in int64 tensors; a 32 x 32 bit product is taken in
two halves, so that nothing overflows (signed overflow is undefined in C++, and compilers use that).
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Product(IntEnum):
    """The three matrix products of a linear layer."""

    FPROP = 0
    DGRAD = 1
    WGRAD = 2


class Side(IntEnum):
    """Which factor of the product; SHARED is what both see."""

    LEFT = 0
    RIGHT = 1
    SHARED = 2


class Purpose(IntEnum):
    ELEMENTS = 0
    SCALES = 1
    SIGNS = 2


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four counter words and two key words (int64 in 0..2**32-1, broadcastable) -> four words of the same kind."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of word * constant; no intermediate exceeds 2**49."""
    low = word * (constant & 0xFFFF)
    high = word * (constant >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def layer_word(name: str) -> int:
    """32-bit hash of a layer's full name. Whoever names several layers should check that no two collide."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def make_key(seed: int, layer: str) -> Tensor:
    """int64 [2]: the words of a run's seed (0..2**32-1) and of a layer's name."""
    if not 0 <= seed <= MASK:
        raise ValueError(f"seed={seed} must lie in 0..2**32-1")
    return torch.tensor([seed, layer_word(layer)], dtype=torch.int64)


def make_clock(step: int = 0, micro_batch: int = 0, rank: int = 0) -> Tensor:
    """int64 [3]: optimizer step, global micro-batch index, rank. Code under torch.compile is handed the tensor and
    updates it in place."""
    if not (0 <= step <= MASK and 0 <= micro_batch <= MASK and 0 <= rank <= 0xFFFF):
        raise ValueError(f"step={step} and micro_batch={micro_batch} must lie in 0..2**32-1, rank={rank} in 0..65535")
    return torch.tensor([step, micro_batch, rank], dtype=torch.int64)


@dataclass(frozen=True)
class Stream:
    """The random words of one operand of one product of one layer at one time."""

    key: Tensor
    """int64 [2], from `make_key`."""
    clock: Tensor
    """int64 [3], from `make_clock`."""
    product: Product
    side: Side

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """int64 [count]: uniform 32-bit words."""
        side = Side.SHARED if purpose is Purpose.SIGNS else self.side
        lane = int(self.product) << 8 | int(side) << 4 | int(purpose)
        index = torch.arange((count + 3) // 4, dtype=torch.int64, device=self.key.device)
        step, micro_batch, rank = self.clock[0], self.clock[1], (self.clock[2] << 16) | lane
        four = philox4x32((index, step, micro_batch, rank), (self.key[0], self.key[1]))
        return torch.stack(four, dim=-1).reshape(-1)[:count]

    def halves(self, purpose: Purpose, count: int) -> Tensor:
        """int32 [count]: uniform 16-bit integers. Number i is the low (i even) or high half of word i // 2."""
        words = self.words(purpose, (count + 1) // 2)
        return torch.stack((words & 0xFFFF, words >> 16), dim=-1).reshape(-1)[:count].to(torch.int32)

    def signs(self, count: int) -> Tensor:
        """FP32 [count]: +1 or -1, the lowest bits of word i // 32 first. The same for both operands of the product."""
        words = self.words(Purpose.SIGNS, (count + 31) // 32)
        shift = torch.arange(32, dtype=torch.int64, device=words.device)
        bits = ((words[:, None] >> shift) & 1).reshape(-1)[:count]
        return 1.0 - 2.0 * bits.float()
