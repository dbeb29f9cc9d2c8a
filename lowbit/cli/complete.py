"""Shell completion of `key=value` arguments, from the schema and the preset folders.

Bash treats `=` as a word break, so it asks about `model=ti` as the three words `model`, `=`, `ti` and replaces only
the last one. `answer_bash` joins such words, completes the whole, and answers with what follows the `=`. Other
shells ask through Typer's own callback (`candidates`). Keys come with their default as a second candidate: the shell
then shows it, and leaves the cursor right after the `=`.
"""

import dataclasses
import shlex
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from lowbit.configs.overrides import groups
from lowbit.configs.schema import RunConfig
from lowbit.configs.stored import plain
from lowbit.configs.strict import fields_of, show, unwrap_optional

COMMANDS = ("pretrain", "plan")
"""Commands whose arguments are overrides."""


def candidates(incomplete: str) -> list[str]:
    """Everything that may stand where `incomplete` is: `model=tiny`, `optim.lr=`, `optim.muon.`, ..."""
    sign = incomplete[: len(incomplete) - len(incomplete.lstrip("+~"))]
    text = incomplete.removeprefix(sign)
    if "=" in text:
        key, _, value = text.partition("=")
        before, comma, _ = value.rpartition(",")  # a sweep: complete the last value of the list
        found = [f"{key}={before}{comma}{choice}" for choice in choices_of(key)]
    else:
        found = _keys(text)
    return sorted(sign + c for c in found if c.startswith(text))


def choices_of(key: str) -> list[str]:
    """The values a key can take, where they can be listed; else its default."""
    if key in groups():
        return groups()[key]
    hint, default = _lookup(key)
    if hint is None or dataclasses.is_dataclass(hint):
        return []
    inner, optional = unwrap_optional(hint)
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        return [*inner, *(["null"] if optional else [])]
    return ["true", "false"] if inner is bool else [show(plain(default)).replace(" ", "")]


def _lookup(key: str) -> tuple[Any, Any]:
    """Type and default of a dotted key; (None, None) where there is none."""
    hint: Any = RunConfig
    default: Any = RunConfig()
    for part in key.split("."):
        if typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
            default = default.get(part, hint())
        elif dataclasses.is_dataclass(hint) and part in fields_of(typing.cast(type, hint)):
            hint = fields_of(typing.cast(type, hint))[part]
            default = getattr(default, part)
        else:
            return None, None
    return hint, default


def _keys(text: str) -> list[str]:
    """Keys of the section that `text` is in: leaves as `key=` and `key=value`, sections as `key.`, groups as both."""
    parent = text.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    hint, default = _lookup(parent) if parent else (RunConfig, RunConfig())
    if typing.get_origin(hint) is dict:
        return [f"{prefix}{name}." for name in typing.cast("dict[str, Any]", default)]
    if not dataclasses.is_dataclass(hint):
        return []
    found: list[str] = []
    for name, inner in fields_of(typing.cast(type, hint)).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(inner) or typing.get_origin(inner) is dict:
            found.append(f"{key}.")
        else:
            found += [f"{key}=", *(f"{key}={value}" for value in choices_of(key))]
    return found + ([f"{group}=" for group in groups()] if not parent else [])


def answer_bash(environment: Mapping[str, str]) -> bool:
    """Answer a completion request from bash about overrides on standard output; False if this is no such request."""
    if environment.get("_LOWBIT_COMPLETE") != "complete_bash":
        return False
    try:
        words = shlex.split(environment.get("COMP_WORDS", ""))
    except ValueError:  # an open quote
        return False
    position = int(environment.get("COMP_CWORD", "0"))
    if len(words) < 2 or words[1] not in COMMANDS or position < 2:
        return False
    current = words[position] if position < len(words) else ""
    if current.startswith("-"):
        return False
    whole = _join(words[2:position], current)
    tail = len(whole) - len(current.removeprefix("=") if current == "=" else current)
    print("\n".join(c[tail:] for c in candidates(whole)))
    return True


def _join(before: list[str], current: str) -> str:
    """The override that the cursor is in: `current` with the words that bash split off at `=`."""
    if current == "=":
        return f"{before[-1]}=" if before else current
    if before and before[-1] == "=":
        return f"{before[-2]}={current}" if len(before) > 1 else current
    return current
