"""What can be written as an override, from the schema and the preset folders: the answers of shell completion."""

import dataclasses
import typing
from enum import StrEnum
from typing import Any

from lowbit.configs.overrides import COMMANDS, PRETRAIN, Command, groups
from lowbit.configs.schema import RunConfig
from lowbit.configs.stored import plain
from lowbit.configs.strict import fields_of, show, unwrap_optional


def overrides_like(incomplete: str, command: str = "pretrain") -> list[str]:
    """Everything that may stand where `incomplete` is: `model=tiny`, `optim.lr=`, `optim.muon.`, ..."""
    sign = incomplete[: len(incomplete) - len(incomplete.lstrip("+~"))]
    text = incomplete.removeprefix(sign)
    of = next(c for c in COMMANDS if c.name == command)
    if "=" in text:
        key, _, value = text.partition("=")
        before, comma, _ = value.rpartition(",")  # a sweep: complete the last value of the list
        found = [f"{key}={before}{comma}{choice}" for choice in choices_of(key, of)]
    else:
        found = _keys(text, of)
    fitting = sorted(sign + c for c in found if c.startswith(text))
    if len(fitting) == 1 and fitting[0].endswith(".") and fitting[0] != incomplete:
        return overrides_like(fitting[0], command)  # a lone section: the shell would end the word behind its dot
    return fitting


def choices_of(key: str, command: Command[RunConfig] = PRETRAIN) -> list[str]:
    """The values a key can take, where they can be listed; else its default."""
    if key in groups(command):
        return groups(command)[key]
    hint, default = _lookup(key, command)
    if hint is None or dataclasses.is_dataclass(hint):
        return []
    inner, optional = unwrap_optional(hint)
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        return [*inner, *(["null"] if optional else [])]
    return ["true", "false"] if inner is bool else [show(plain(default)).replace(" ", "")]


def _lookup(key: str, command: Command[RunConfig]) -> tuple[Any, Any]:
    """Type and default of a dotted key; (None, None) where there is none."""
    hint: Any = command.config
    default: Any = command.config()
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


def _keys(text: str, command: Command[RunConfig]) -> list[str]:
    """Keys of the section that `text` is in: leaves as `key=` and `key=value`, sections as `key.`, groups as both."""
    parent = text.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    hint, default = _lookup(parent, command) if parent else (command.config, command.config())
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
            found += [f"{key}=", *(f"{key}={value}" for value in choices_of(key, command))]
    return found + [f"{group}=" for group in groups(command) if group.rpartition(".")[0] == parent]
