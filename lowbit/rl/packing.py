"""Conversations into rows of tokens: whole, several to a row, apart by the visibility rule.

A row holds T tokens and, as targets, their successors; a conversation of n tokens takes n - 1 places, because its last
token is only a target. Which rows conversations go to follows from their lengths alone (first fit, longest first), so
the same conversations make the same batches. For compiled models every batch has all its rows, empty ones too, so that
shapes never change; elsewhere a batch has the rows it needs.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lowbit.data.batch import Batch
from lowbit.errors import DataError
from lowbit.models.visibility import Visibility


@dataclass(frozen=True)
class Place:
    """Where a conversation lies."""

    item: int
    """Its number in what was packed."""
    row: int
    """Row of the batch."""
    start: int
    """Its first place in the row."""


def place_rows(lengths: Sequence[int], length: int) -> list[list[tuple[int, int]]]:
    """Rows of (conversation, start), for conversations that take so many places each.

    Raises: DataError for one longer than a row, or of no place at all.
    """
    rows: list[list[tuple[int, int]]] = []
    free: list[tuple[int, int]] = []  # (room left, row), ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not 0 < lengths[item] <= length:
            raise DataError(
                f"a conversation of {lengths[item] + 1} tokens does not fit a row of data.sequence_length={length}"
            )
        fitting = next((pair for pair in free if pair[0] >= lengths[item]), None)
        if fitting is None:
            fitting = (length, len(rows))
            rows.append([])
        else:
            free.remove(fitting)
        room, row = fitting
        rows[row].append((item, length - room))
        insort(free, (room - lengths[item], row))
    return rows


def pack(
    conversations: Sequence[Sequence[int]], length: int, rows: int, filler: int, *, full: bool = True
) -> list[tuple[Batch, list[Place]]]:
    """Batches of `rows` rows with all conversations; weights are 0 everywhere and `valid_tokens` is 0.

    Args:
        conversations: token ids, at least 2 each. filler: the id of empty places. full: a batch has all its rows even
            if some are empty.
    """
    placed = place_rows([len(tokens) - 1 for tokens in conversations], length)
    parts = [placed[i : i + rows] for i in range(0, len(placed), rows)]
    return [_batch(conversations, part, length, rows if full else len(part), filler) for part in parts]


def _batch(
    conversations: Sequence[Sequence[int]], placed: list[list[tuple[int, int]]], length: int, rows: int, filler: int
) -> tuple[Batch, list[Place]]:
    tokens = np.full((rows, length), filler, dtype=np.int64)
    targets = tokens.copy()
    start = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    limit, position = start + 1, np.zeros_like(start)
    places = []
    for row, items in enumerate(placed):
        for item, begin in items:
            ids = np.asarray(conversations[item], dtype=np.int64)
            end = begin + len(ids) - 1
            tokens[row, begin:end], targets[row, begin:end] = ids[:-1], ids[1:]
            limit[row, begin:end] = end
            position[row, begin:end] = start[0, : end - begin]
            places.append(Place(item, row, begin))
    seen = Visibility(*(torch.from_numpy(part) for part in (start, limit, position))).with_ends()
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.zeros(rows, length), seen, 0), places


def empty_batch(length: int, rows: int, filler: int) -> Batch:
    """A batch without conversations, for a rank that has fewer than the others."""
    return _batch([], [], length, rows, filler)[0]


def with_weights(batch: Batch, weights: Tensor) -> Batch:
    """The same with other weights [rows, length], all of whose positive ones count as valid tokens."""
    return replace(batch, weights=weights, valid_tokens=int((weights > 0).sum()))
