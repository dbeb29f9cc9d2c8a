"""Conversations for people: a few with every logged step, in `samples.jsonl` and on the screen."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowbit.rl.rollout import Conversation
from lowbit.trainer.jsonl import keep_rows_until, to_line

logger = logging.getLogger("lowbit")

LONGEST = 300
"""Characters of a text shown on the screen."""


class SampleLog:
    """Writes and shows `count` conversations a time; `after_step` is the step the run goes on from."""

    def __init__(self, path: Path, count: int, after_step: int) -> None:
        self._path, self._count = path, count
        keep_rows_until(path, after_step)

    def write(self, step: int, conversations: Sequence[Conversation]) -> None:
        """Of all conversations of a rollout some, evenly chosen."""
        every = max(1, len(conversations) // max(1, self._count))
        chosen = list(conversations)[::every][: self._count]
        with self._path.open("a", encoding="utf-8") as file:
            for conversation in chosen:
                file.write(to_line({"step": step} | row_of(conversation)))
        for conversation in chosen:
            logger.info("  %s", describe(conversation))


def row_of(c: Conversation) -> dict[str, Any]:
    """A conversation as one readable row."""
    return {
        "prompt_number": c.number,
        "sample": c.sample,
        "prompt": c.example.prompt,
        "turns": c.turns,
        "answer": c.example.answer,
        "reward": c.reward,
        "parts": c.parts,
        "advantage": c.advantage,
        "finish": c.finish,
        "prompt_tokens": c.prompt,
        "tokens": c.tokens,
        "logprobs": [round(value, 5) for value in c.logprobs],
        "versions": c.versions,
    }


def describe(c: Conversation) -> str:
    """A conversation on one line."""
    said = " | ".join(repr(turn) for turn in c.turns)
    reward = "none" if c.reward is None else f"{c.reward:g}"
    return f"{c.example.prompt[-LONGEST:]!r} -> {said[:LONGEST]}  reward {reward} ({c.finish})"
