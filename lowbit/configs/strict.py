"""The strict reader: plain values in, frozen dataclasses out, one clear line for each mistake.

`build` walks a dataclass and a plain mapping (from YAML or from Hydra) side by side. A key the dataclass lacks,
a value of another type, a word outside an enumeration or a value still missing is a `ConfigError` that names the
key, shows the value, says what is accepted, and offers the nearest valid name. Conversions are few and lossless:
an integer where a number is wanted, an integer where text is wanted (Hydra reads `run_name=7` as one).
"""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from lowbit.configs.nearest import nearest, suggest
from lowbit.configs.schema import RunConfig
from lowbit.errors import ConfigError

MISSING = "???"
"""What YAML presets write where the user must give a value (Hydra's convention)."""

T = TypeVar("T")


@cache
def fields_of(cls: type) -> dict[str, Any]:
    """Field names of a configuration dataclass and their types, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def unwrap_optional(hint: Any) -> tuple[Any, bool]:
    """`(X, True)` for `X | None`, else `(hint, False)`."""
    if isinstance(hint, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return inner[0], True
    return hint, False


def accepted(hint: Any) -> str:
    """What a field of this type takes, in words."""
    hint, optional = unwrap_optional(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        text = f"a list, [a, b, ...], each {accepted(arguments[0])}"
    elif origin is dict:
        text = f"a mapping from names to {accepted(arguments[1])}"
    elif dataclasses.is_dataclass(hint):
        text = "{" + ", ".join(fields_of(typing.cast(type, hint))) + "}"
    elif isinstance(hint, type) and issubclass(hint, StrEnum):
        text = "one of " + ", ".join(hint)
    else:
        text = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[hint]
    return f"{text}, or null" if optional else text


def schema_paths(cls: type = RunConfig, prefix: str = "") -> tuple[str, ...]:
    """Every dotted key, sections included. Entries of a mapping appear under the name `NAME`."""
    paths: list[str] = []
    for name, hint in fields_of(cls).items():
        hint, _ = unwrap_optional(hint)
        key = f"{prefix}{name}"
        paths.append(key)
        if typing.get_origin(hint) is dict:
            key, hint = f"{key}.NAME", typing.get_args(hint)[1]
            paths.append(key)
        if dataclasses.is_dataclass(hint):
            paths.extend(schema_paths(typing.cast(type, hint), f"{key}."))
    return tuple(paths)


def show(value: Any) -> str:
    """A value as the user would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(show(v) for v in value) + "]"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def unknown_key(key: str, value: str | None, section: type, prefix: str, root: type = RunConfig) -> ConfigError:
    """The error for a key that does not exist: its section's keys, and the nearest of them or of the whole schema."""
    given = key if value is None else f"{key}={value}"
    names = ", ".join(fields_of(section))
    where = f"{prefix.rstrip('.')} takes {names}" if prefix else f"top-level keys are {names}"
    whole = "." in key and not prefix  # its first part is no section
    best = nearest(key.removeprefix(prefix), schema_paths(root) if whole else fields_of(section))
    below = [path for path in schema_paths(root) if path.count(".") == 1 and path.endswith(f".{key}")]
    if below and not prefix:  # the very key, one section down
        best = below[0]
    hint = f"; nearest: {prefix}{best}" if best else suggest(key, schema_paths(root))
    return ConfigError(f"{given}: there is no key {key!r}; {where}{hint}")


def locate(key: str, value: str | None = None, root: type = RunConfig) -> Any:
    """The type of a dotted key of `root`; `value` is only shown in the error. Raises ConfigError for an unknown key."""
    hint: Any = root
    prefix = ""
    section: type
    for part in key.split("."):
        hint, _ = unwrap_optional(hint)
        origin = typing.get_origin(hint)
        if origin is dict:
            hint = typing.get_args(hint)[1]
        elif origin is list and part.isdigit():
            hint = typing.get_args(hint)[0]
        elif dataclasses.is_dataclass(hint):
            section = typing.cast(type, hint)
            if part not in fields_of(section):
                raise unknown_key(key, value, section, prefix, root)
            hint = fields_of(section)[part]
        else:
            parent = prefix.rstrip(".")
            raise ConfigError(
                f"{key}{'' if value is None else f'={value}'}: {parent} is {accepted(hint)} and has no keys below it"
                + suggest(key, schema_paths(root))
            )
        prefix += f"{part}."
    return hint


def _mismatch(key: str, value: Any, hint: Any, advice: str = "") -> ConfigError:
    kind = {bool: "true/false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    got = "null" if value is None else kind.get(type(value), type(value).__name__)
    return ConfigError(f"{key}={show(value)}: expected {accepted(hint)}, got {got}{advice}")


def build(hint: type[T], value: Any, key: str = "") -> T:
    """`value` (plain dict, list, scalar) as the type `hint`; absent fields take their defaults."""
    return typing.cast(T, _build(hint, value, key))


def _build(hint: Any, value: Any, key: str) -> Any:
    if isinstance(value, str) and value == MISSING:
        raise ConfigError(f"{key} has no value and this choice needs one; give {key}=... ({accepted(hint)})")
    inner, optional = unwrap_optional(hint)
    if value is None:
        if optional:
            return None
        raise _mismatch(key, value, hint)
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is list:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise _mismatch(key, value, hint)
        return [_build(arguments[0], v, f"{key}.{i}") for i, v in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _mismatch(key, value, hint)
        return {str(k): _build(arguments[1], v, f"{key}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(inner):
        return _build_dataclass(typing.cast(type, inner), value, key, hint)
    return _build_scalar(inner, value, key, hint)


def _build_dataclass(cls: type, value: Any, key: str, hint: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _mismatch(key, value, hint)
    prefix = f"{key}." if key else ""
    hints = fields_of(cls)
    for name, given in value.items():
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", show(given), cls, prefix)
    return cls(**{str(n): _build(hints[n], v, f"{prefix}{n}") for n, v in value.items()})


def _build_scalar(hint: type, value: Any, key: str, full: Any) -> Any:
    if issubclass(hint, StrEnum):
        if isinstance(value, bool) and "off" in hint.__members__:  # bare `off` and `on` are booleans in YAML
            value = "on" if value else "off"
        if isinstance(value, str) and value in hint.__members__:
            return hint(value)
        raise ConfigError(f"{key}={show(value)}: expected {accepted(full)}{suggest(show(value), hint.__members__)}")
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and is_integer:
        return value
    if hint is float and (is_integer or isinstance(value, float)):
        if not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{key}={show(value)}: expected a finite number")
        return float(value)
    if hint is str and isinstance(value, str):
        return str(value)
    if hint is str and is_integer:
        return str(value)
    raise _mismatch(key, value, full, _advice(hint, value, key))


def _advice(hint: type, value: Any, key: str) -> str:
    if hint is int and isinstance(value, float) and value.is_integer():
        return f"; write {key}={int(value)}"
    if hint is str and isinstance(value, (bool, float)):
        return f"; quote it: {key}=\"'{show(value)}'\""
    if hint in (int, float) and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return ""
        if math.isfinite(number) and (hint is float or number.is_integer()):
            return f"; write {key}={int(number) if hint is int else number} without quotes"
    return ""
