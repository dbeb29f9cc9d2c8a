"""A random order of 0..n-1 that needs no memory: any position's element is computed in O(1).

A Feistel network turns a bit string (left, right) into (right, left XOR F(right)), several times, with a different F
each round; every round can be undone, so the whole is a bijection of the 2**b strings whatever F is. With 2**b the next
power of two above n, an element that falls at or beyond n is fed in again until it lies below (*cycle walking*: a walk
along a cycle of the bijection that began below n must come back below n), which makes a bijection of 0..n-1. On
average that takes fewer than two passes. Up to 64 elements, where so small a network shuffles poorly, are sorted by
random numbers instead.

Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains" (2002). F mixes 32-bit words with MurmurHash3's
finalizer. It is no cipher; it only has to shuffle well.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_TABLE = 64


class Permutation:
    """The permutation of 0..size-1 that belongs to a key (any integers and strings)."""

    def __init__(self, size: int, *key: int | str) -> None:
        """`size` lies in 1..2**62."""
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"size={size} must lie in 1..2**62")
        self.size = size
        bits = (size - 1).bit_length()
        self._low, self._high = (bits + 1) // 2, bits // 2
        random = hashlib.shake_256(repr(key).encode()).digest(8 * _TABLE)
        self._keys = np.frombuffer(random, dtype="<u4")[:_ROUNDS]
        self._table = np.argsort(np.frombuffer(random, dtype="<u8")[:size], kind="stable") if size <= _TABLE else None

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Elements at positions `index`, int64 [...] in 0..size-1."""
        if index.size and (int(index.min()) < 0 or int(index.max()) >= self.size):
            raise IndexError(f"positions must lie in 0..{self.size - 1}")
        if self._table is not None:
            return self._table[index]
        out = self._network(index)
        outside = out >= self.size
        while outside.any():
            out[outside] = self._network(out[outside])
            outside = out >= self.size
        return out

    def _network(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """One pass over b-bit strings. The halves trade their widths each round and end as they began."""
        right_bits, left_bits = self._low, self._high
        left = (index >> right_bits).astype(np.uint32)
        right = (index & ((1 << right_bits) - 1)).astype(np.uint32)
        for key in self._keys:
            mixed = _mix(right ^ key) & np.uint32((1 << left_bits) - 1)
            left, right = right, left ^ mixed
            left_bits, right_bits = right_bits, left_bits
        return (left.astype(np.int64) << right_bits) | right.astype(np.int64)


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's 32-bit finalizer: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
