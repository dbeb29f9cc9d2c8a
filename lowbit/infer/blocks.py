"""Who owns which block of the KV cache: allocation, sharing, and the prefix cache.

The cache's memory is cut into blocks of equally many tokens, and a sequence has a table of blocks. A block that is full
never changes again, so sequences that begin with the same tokens may share it: the samples of a prompt, the later turns
of a conversation. Full blocks are found by a rolling hash,

    h_0 = H(version of the weights),   h_i = H(h_{i-1}, the ids of block i)

which names everything that the block's keys depend on: all tokens up to its end, and the weights. New weights salt
other names, so nothing of the old ones can be found again.

A block is in use (counted by its holders), idle (nobody's, but its name is known: the longest unused goes first when
room is needed), or free. Block 0 is nobody's: what padding and empty slots write goes there.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Bookkeeping only; the memory itself is `cache.PagedCache`."""

    def __init__(self, blocks: int, block: int) -> None:
        """`blocks`: with block 0. `block`: tokens of one."""
        self.blocks, self.block = blocks, block
        self._free = list(range(blocks - 1, 0, -1))
        self._holders = [0] * blocks
        self._name_of: dict[int, bytes] = {}
        self._found: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.hits = 0
        """Tokens whose keys were found and not computed."""

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give."""
        return len(self._free) + len(self._idle)

    def grow(self, blocks: int) -> None:
        """So many blocks from now on."""
        self._free += range(self.blocks, blocks)
        self._holders += [0] * (blocks - self.blocks)
        self.blocks = blocks

    def allocate(self, count: int) -> list[int] | None:
        """Blocks of one's own, or None if there are not so many."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._found.pop(self._name_of.pop(block))
            self._holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder of blocks that are in use or idle."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less. The end of a sequence becomes idle first: it is the least likely to be wanted again."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._name_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def match(self, tokens: Sequence[int], version: int) -> list[int]:
        """The known blocks that `tokens` begins with, held for the caller; the last token is never among theirs."""
        blocks = []
        for name in self._names(tokens[:-1], version):
            block = self._found.get(name)
            if block is None:
                break
            blocks.append(block)
        self.hold(blocks)
        self.hits += len(blocks) * self.block
        return blocks

    def register(self, tokens: Sequence[int], blocks: Sequence[int], version: int) -> None:
        """Make the full blocks of a sequence known; `blocks` hold the keys of `tokens`."""
        for name, block in zip(self._names(tokens, version), blocks, strict=False):
            if name not in self._found and block not in self._name_of:
                self._found[name], self._name_of[block] = block, name

    def forget(self) -> None:
        """Forget every name."""
        self._free += self._idle
        self._idle.clear()
        self._name_of.clear()
        self._found.clear()

    def _names(self, tokens: Sequence[int], version: int) -> list[bytes]:
        """The name of each full block."""
        name, names = str(version).encode(), []
        for end in range(self.block, len(tokens) + 1, self.block):
            ids = array("q", tokens[end - self.block : end]).tobytes()
            name = hashlib.blake2b(name + ids, digest_size=16).digest()
            names.append(name)
        return names
