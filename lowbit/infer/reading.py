"""Reading prompts: their keys into the cache, and the hidden state behind each one, from which its samples start.

Prompts are read together as right-padded rows, as many as `most` tokens allow, each from where the prefix cache ends;
what is longer is read in pieces. Where results must not depend on what else is read (`table` given), a prompt is read
alone, in pieces of one block that begin where blocks begin, over the whole table: each block's keys are then the result
of the same sums, whoever computed them and whatever was found in the cache.
"""

from collections.abc import Sequence

import torch

from lowbit.infer.blocks import BlockPool
from lowbit.infer.cache import PagedCache, View
from lowbit.infer.slots import Group
from lowbit.models.transformer import Transformer

MULTIPLE = 16
"""Tokens of a piece on a GPU: a multiple of this, so that shapes are few."""


class Reader:
    """Reads prompts with one model into one cache."""

    def __init__(self, model: Transformer, cache: PagedCache, pool: BlockPool, most: int, table: int | None) -> None:
        """`most`: tokens at once. `table`: blocks of every row's table, where results must not depend on others."""
        self.model, self.cache, self.pool, self.most, self.table = model, cache, pool, most, table
        self.device = cache.keys.device

    def read(self, groups: Sequence[Group], version: int) -> None:
        """Read the prompts of these, whose blocks are placed, with weights of this version."""
        batch: list[Group] = []
        for group in groups:
            longest = max(other.length - other.cached for other in [*batch, group])
            if batch and (self.table is not None or longest * (len(batch) + 1) > self.most):
                self._read_together(batch)
                batch = []
            batch.append(group)
        if batch:
            self._read_together(batch)
        for group in groups:
            group.version = version
            self.pool.register(group.request.prompt, self._blocks_of(group), version)

    def _blocks_of(self, group: Group) -> list[int]:
        """Of its prompt; the last of its samples may have taken them over."""
        return (group.blocks or group.rows[-1].blocks)[: -(-group.length // self.cache.block)]

    def _read_together(self, groups: Sequence[Group]) -> None:
        new = [list(group.request.prompt[group.cached :]) for group in groups]
        longest, padded = max(map(len, new)), self.table is not None or self.device.type == "cuda"
        piece = self.cache.block
        if self.table is None:
            piece = min(longest, max(self.most // len(groups), 1))
            if padded:
                piece = -(-piece // MULTIPLE) * MULTIPLE
        blocks = [self._blocks_of(group) for group in groups]
        width = self.table or max(map(len, blocks))
        table = torch.tensor([row + [0] * (width - len(row)) for row in blocks], device=self.device)
        for begin in range(0, longest, piece):
            parts = [tokens[begin : begin + piece] for tokens in new]
            size = piece if padded else max(map(len, parts))
            feed = torch.tensor([part + [0] * (size - len(part)) for part in parts], device=self.device)
            start = torch.tensor([group.cached + begin for group in groups], device=self.device)
            counts = torch.tensor([len(part) for part in parts], device=self.device)
            fresh = self.table is None and begin == 0 and not any(group.cached for group in groups)
            hidden = self.model(feed, cache=View(self.cache, table, start, counts, fresh))
            for row, (group, tokens) in enumerate(zip(groups, new, strict=True)):
                if begin < len(tokens) <= begin + piece:
                    group.hidden = hidden[row, len(tokens) - 1 - begin].clone()
