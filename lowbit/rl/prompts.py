"""From problems to the token ids that a model reads, and from its ids to the text that is checked.

A template is text around `{prompt}`; special tokens written in it become their ids, while special tokens in a problem
stay text. Nothing that a model wrote is ever encoded: texts are for checks and for people, ids for the model.
"""

import json
import logging
import re
from collections.abc import Sequence

from lowbit.configs.schema_rl import TaskConfig
from lowbit.data.tokenizer import Tokenizer
from lowbit.errors import ConfigError, DataError
from lowbit.rl.tasks import Example

logger = logging.getLogger("lowbit")


class Prompts:
    """A tokenizer with a task's template and stops."""

    def __init__(self, tokenizer: Tokenizer, config: TaskConfig) -> None:
        """Raises ConfigError for a template without a place for the prompt, or a stop that is not one token."""
        self.tokenizer = tokenizer
        before, found, after = config.template.partition("{prompt}")
        if not found:
            raise ConfigError(f"task.template={config.template}: {{prompt}} must stand in it, for the problem")
        self._special = special_tokens(tokenizer)
        self._before = self._with_special(before)
        self._after = self._with_special(after)
        begin = tokenizer.begin
        self._begin = [] if self._before[: len(begin)] == begin else begin
        self.stop_ids = tuple(self._stop(text) for text in config.stop)
        self.ends = {tokenizer.eot_id, *self.stop_ids}

    def encode(self, example: Example) -> tuple[int, ...]:
        """Ids of a problem. Raises DataError for an empty one."""
        if not example.prompt:
            raise DataError("a problem's prompt is empty: there is nothing to answer")
        return (*self._begin, *self._before, *self.tokenizer.encode(example.prompt), *self._after)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of one turn, without what ended it."""
        end = len(tokens) - 1 if tokens and tokens[-1] in self.ends else len(tokens)
        return self.tokenizer.decode(tokens[:end])

    def check_round_trip(self, text: str) -> None:
        """Warn when a text does not come back from its ids: the model reads something else than is written."""
        back = self.tokenizer.decode(self.tokenizer.encode(text))
        if back != text:
            logger.warning(
                "the tokenizer does not give prompts back as they were (%r became %r): the model reads the latter; "
                "training is right all the same, because ids are never made again from text",
                text[:60],
                back[:60],
            )

    def _with_special(self, text: str) -> list[int]:
        """Ids of a template's part."""
        if not text:
            return []
        names = sorted(self._special, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        ids: list[int] = []
        for piece in pieces:
            if piece:
                ids += [self._special[piece]] if piece in self._special else self.tokenizer.encode(piece)
        return ids

    def _stop(self, text: str) -> int:
        if text in self._special:
            return self._special[text]
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(f"task.stop: {text!r} is {len(ids)} tokens of this tokenizer, and a stop must be one")
        return ids[0]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens of a tokenizer by their text."""
    found = {tokenizer.eot: tokenizer.eot_id}
    if tokenizer.definition is not None:
        added = json.loads(tokenizer.definition).get("added_tokens") or []
        found |= {str(token["content"]): int(token["id"]) for token in added if token.get("special")}
    return found
