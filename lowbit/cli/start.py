"""`init_from=PATH`: a run that begins from a checkpoint takes its model and tokenizer from there too.

They become settings in front of the user's own, which may change what the weights allow, such as model.max_sequence.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowbit.errors import ConfigError

TOKENIZER = "data.tokenizer."


def with_start(overrides: Sequence[str]) -> list[str]:
    """The overrides, with those that `init_from` stands for in front.

    Raises: ConfigError, CheckpointError, DataError.
    """
    from lowbit.configs.overrides import parse

    parsed = {str(p.key_or_group): p for p in map(parse, overrides)}
    given = parsed.get("init_from")
    if given is None or not given.value():
        return list(overrides)
    if given.is_sweep_override():
        raise ConfigError(f"{given.input_line}: a sweep begins all its runs from one checkpoint")
    if "model" in parsed:
        raise ConfigError(
            f"{parsed['model'].input_line}: the model comes from init_from={given.value()}; leave model= out, or "
            "change single keys, such as model.max_sequence"
        )
    other = next((p for key, p in parsed.items() if f"{key}.".startswith(TOKENIZER) and key != f"{TOKENIZER}eot"), None)
    if other is not None:
        raise ConfigError(
            f"{other.input_line}: the weights of init_from={given.value()} mean the tokens of its own tokenizer; leave "
            "this out"
        )
    from lowbit.configs.stored import flatten, plain
    from lowbit.trainer.imported import beginning

    model, tokenizer = beginning(Path(str(given.value())).expanduser())
    settings = flatten({"model": plain(model), "data": {"tokenizer": plain(tokenizer)}})
    return [*(f"{key}={_written(value)}" for key, value in settings.items()), *overrides]


def _written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(_written(v) for v in value) + "]"
    return json.dumps(value)
