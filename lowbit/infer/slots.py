"""What is waiting, what is running, and where: the sampler's bookkeeping, on the host and on the device.

A `Group` is a request: its prompt is read once, and its samples start from that reading one by one as slots become
free. A `Row` is one sample. Running rows fill the slots from the front, without holes, so that a step computes as few
slots as it can: a row that ends is replaced by the next one waiting, or by the last one running.

On the device a slot is a line of numbers, which the decoding step reads and moves on by itself (`lines`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.infer.lines import TABLE, TOKEN
from lowbit.infer.requests import Request, Sample
from lowbit.infer.sampling import uniforms

NOISE_CHUNK = 1 << 20
"""Numbers of noise that are made at once."""


@dataclass(eq=False)
class Row:
    """One sample."""

    group: "Group"
    sample: int
    """Its number."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    drawn: int = 0
    """Tokens, with those that are on their way to the host."""
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    noise: Tensor | None = None
    """FP64 [max_new_tokens or more]: of each of its tokens."""

    def result(self) -> Sample:
        """As the user gets it."""
        assert self.finish_reason is not None
        return Sample(self.tokens, self.logprobs, self.finish_reason, self.versions)


@dataclass(eq=False)
class Group:
    """A request on its way."""

    request: Request
    rows: list[Row] = field(default_factory=list)
    started: int = 0
    """Samples that have a slot, or had one."""
    blocks: list[int] = field(default_factory=list)
    """Of the prompt, held until the last sample has started."""
    cached: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    hidden: Tensor | None = None
    """[width], behind the prompt's last token; None: not read yet."""
    version: int = -1
    """Of the weights it was read with."""

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def end(self) -> int:
        """Tokens of the longest sample with its prompt."""
        return self.length + self.request.max_new_tokens


@dataclass(eq=False)
class Drawn:
    """Tokens on their way to the host."""

    rows: list[Row]
    values: Tensor
    """FP64 [>= rows, 2]: token and logprob."""
    ready: torch.cuda.Event | None
    version: int


def groups_of(requests: Sequence[Request]) -> list[Group]:
    """The requests with a row for each sample."""
    groups = []
    for request in requests:
        group = Group(request)
        group.rows = [Row(group, request.first_sample + i) for i in range(request.samples)]
        groups.append(group)
    return groups


class Noise:
    """Gives rows their uniform numbers, made for many of them at once."""

    def __init__(self, rows: Sequence[Row], seed: int, device: torch.device) -> None:
        self._rows, self._seed, self._device = deque(rows), seed, device

    def give(self, rows: Sequence[Row]) -> None:
        """Make sure that these, the next ones in order, have theirs."""
        while any(row.noise is None for row in rows):
            longest = max(row.group.request.max_new_tokens for row in self._rows)
            count = min(len(self._rows), max(NOISE_CHUNK // longest, 1))
            self._make([self._rows.popleft() for _ in range(count)])

    def _make(self, rows: list[Row]) -> None:
        longest = max(row.group.request.max_new_tokens for row in rows)
        words = [[row.group.request.key, row.sample, row.group.length] for row in rows]
        key, sample, begin = torch.tensor(words, dtype=torch.int64).to(self._device)[:, :, None].unbind(1)
        position = begin + torch.arange(longest, device=self._device)
        for row, noise in zip(rows, uniforms(self._seed, key, sample, position), strict=True):
            row.noise = noise


class Slots:
    """The running rows and their lines on the device."""

    def __init__(self, count: int, table: int, longest: int, device: torch.device) -> None:
        """`table`: blocks of a row. `longest`: most new tokens of a row."""
        self.count, self.table, self.longest = count, table, longest
        self.lines = torch.zeros(count, TABLE + table, dtype=torch.int64, device=device)
        self.noise = torch.zeros(count, longest, dtype=torch.float64, device=device)
        self.rows: list[Row] = []
        """By slot."""
        self._noise_lines = list(range(count - 1, -1, -1))
        self._noise_of: dict[Row, int] = {}

    @property
    def free(self) -> int:
        return self.count - len(self.rows)

    def start(self, rows: Sequence[Row], tokens: Tensor) -> None:
        """Put rows in the next slots; `tokens` int64 [rows], their first ones, already drawn."""
        lines = []
        for row in rows:
            row.slot = len(self.rows)
            self.rows.append(row)
            line = self._noise_of[row] = self._noise_lines.pop()
            table = row.blocks + [0] * (self.table - len(row.blocks))
            lines.append([0, row.group.length, row.group.length, line, *table])
        begin = len(self.rows) - len(rows)
        part = self.lines[begin : len(self.rows)]
        part.copy_(torch.tensor(lines, dtype=torch.int64), non_blocking=True)
        part[:, TOKEN] = tokens
        for length, alike in groupby(rows, key=_noise_length):  # made together: equally long
            few = list(alike)
            where = self._sent([self._noise_of[row] for row in few])
            self.noise[where, :length] = torch.stack([row.noise for row in few if row.noise is not None])

    def end(self, rows: Sequence[Row]) -> None:
        """Free rows' slots; the last running rows take them."""
        moved: dict[Row, int] = {}  # from which slot
        for row in rows:
            last = self.rows.pop()
            if last is not row:
                moved.setdefault(last, last.slot)
                self.rows[row.slot] = last
                last.slot = row.slot
            moved.pop(row, None)
            row.slot = -1
            self._noise_lines.append(self._noise_of.pop(row))
        if moved:  # to slots that stay, from such as do not
            to, of = self._sent([[row.slot for row in moved], list(moved.values())]).unbind()
            self.lines[to] = self.lines[of]
        self.lines[len(self.rows) : len(self.rows) + len(rows)] = 0

    def _sent(self, numbers: list[Any]) -> Tensor:
        """int64 on the device; the host does not wait for what the device is at."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.lines.device, non_blocking=True)

    def clear(self) -> None:
        """Nobody runs."""
        self.end(list(self.rows))


def _noise_length(row: Row) -> int:
    assert row.noise is not None
    return len(row.noise)
