"""The process that checks answers: `python -m lowbit.rl.worker`, JSON lines in, JSON lines out.

First line in: the task's settings and the name of a reward function. First line out: `{"ready": true}`, or the error.
Then a line in for each conversation, and a line out with its reward by parts, null where there is none and why.
What checks print goes to standard error. The process ends with its input, or when its parent has died.
"""

import contextlib
import importlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from lowbit.configs.schema_rl import TaskConfig, TaskKind
from lowbit.errors import ConfigError
from lowbit.rl.tasks import Example, make_task

Check = Callable[[Sequence[str], Example], Any]


def load_function(name: str) -> Callable[[str, dict[str, Any]], Any]:
    """`package.module:function`. Raises ConfigError, naming what is missing."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"reward.function={name}: write package.module:function")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(f"reward.function={name}: cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(function):
        raise ConfigError(f"reward.function={name}: is no function")
    found: Callable[[str, dict[str, Any]], Any] = function
    return found


def make_check(settings: dict[str, Any], function: str) -> Check:
    """The check of a task, or the user's function."""
    if function:
        user = load_function(function)
        return lambda turns, example: user(turns[-1], example.as_dict())
    return make_task(TaskConfig(**(settings | {"kind": TaskKind(settings["kind"])}))).check


def parts_of(value: Any) -> dict[str, float] | None:
    """What a check returned, as parts. Raises ValueError for what is no reward."""
    if value is None:
        return None
    parts = value if isinstance(value, dict) else {"reward": value}
    numbers = {str(name): float(part) for name, part in parts.items()}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}")
    return numbers


def answer(check: Check, line: str) -> dict[str, Any]:
    """The reply to one line."""
    request = json.loads(line)
    try:
        parts = parts_of(check(request["turns"], Example.of(request["example"])))
    except Exception as error:
        return {"parts": None, "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(limit=-8)}
    return {"parts": parts, "why": "the check returned None" if parts is None else ""}


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        first = json.loads(sys.stdin.readline())
        try:
            check = make_check(first["task"], first["function"])
        except Exception as error:
            message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            replies.write(json.dumps({"ready": False, "why": message}) + "\n")
            return
        replies.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            replies.write(json.dumps(answer(check, line)) + "\n")


if __name__ == "__main__":
    main()
