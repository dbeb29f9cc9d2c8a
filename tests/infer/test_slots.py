"""Slots of running rows: after any starts and ends each line is its row's, without holes."""

import random

import torch

from lowbit.infer.lines import NOISE, PROMPT, STORED, TABLE, TOKEN
from lowbit.infer.requests import Request
from lowbit.infer.slots import Group, Row, Slots


def started(slots: Slots, rows: list[Row], draw: random.Random) -> dict[Row, int]:
    """Put rows in slots; gives their first tokens."""
    tokens = [draw.randrange(1, 1000) for _ in rows]
    slots.start(rows, torch.tensor(tokens, dtype=torch.int64))
    return dict(zip(rows, tokens, strict=True))


def new_row(draw: random.Random, key: int, longest: int) -> Row:
    length, most = draw.randrange(1, 9), draw.randrange(1, longest + 1)
    row = Row(Group(Request(tuple(range(length)), key, most)), 0)
    row.blocks = [draw.randrange(100) for _ in range(draw.randrange(1, 4))]
    row.noise = torch.rand(draw.randrange(most, longest + 1), dtype=torch.float64)
    return row


def test_lines_follow_their_rows() -> None:
    draw = random.Random(1)
    torch.manual_seed(1)
    slots = Slots(8, 4, 5, torch.device("cpu"))
    first: dict[Row, int] = {}
    ends = 0
    for turn in range(300):
        if slots.free and draw.random() < 0.6:
            count = draw.randrange(1, slots.free + 1)
            first |= started(slots, [new_row(draw, 10 * turn + i, 5) for i in range(count)], draw)
        elif slots.rows:
            ended = draw.sample(slots.rows, draw.randrange(1, len(slots.rows) + 1))
            slots.end(ended)
            ends += len(ended)
            assert all(row.slot == -1 for row in ended) and not set(ended) & set(slots.rows)
        assert slots.free == 8 - len(slots.rows)
        assert [row.slot for row in slots.rows] == list(range(len(slots.rows)))
        noise_lines = slots.lines[: len(slots.rows), NOISE].tolist()
        assert len(set(noise_lines)) == len(noise_lines)
        for row, line in zip(slots.rows, slots.lines.tolist(), strict=False):
            assert row.noise is not None
            assert (line[TOKEN], line[STORED], line[PROMPT]) == (first[row], row.group.length, row.group.length)
            assert line[TABLE:] == row.blocks + [0] * (4 - len(row.blocks))
            assert torch.equal(slots.noise[line[NOISE], : len(row.noise)], row.noise)
        assert not slots.lines[len(slots.rows) :].any()
    assert ends > 300
    slots.clear()
    assert slots.free == 8 and not slots.lines.any()
