"""A run's configuration on disk: plain YAML, written once, read back strictly and equal.

The file is ordinary YAML that any tool reads and a person edits; no tags, no references. Reader and writer share one
rule that plain PyYAML lacks: `3e-4` is a number (YAML 1.2), and a text that looks like one is therefore quoted.
"""

import dataclasses
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, overload

import yaml

from lowbit.configs.schema import RunConfig
from lowbit.configs.strict import build
from lowbit.errors import ConfigError

Config = TypeVar("Config", bound=RunConfig)

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader with YAML 1.2 floats, refusing duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", node.start_mark)
        return dict(super().construct_mapping(node, deep))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """SafeDumper that quotes every text the loader would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def plain(value: Any) -> Any:
    """Dataclasses, enumerations and containers as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys; lists and everything else are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_yaml(config: Any) -> str:
    """The configuration as YAML, keys in the schema's order."""
    return str(yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def save_config(config: Any, path: Path) -> None:
    """Write the resolved configuration to `path`; one that is there is replaced as a whole."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(to_yaml(config), encoding="utf-8")
    temporary.replace(path)


@overload
def load_config(path: Path) -> RunConfig: ...
@overload
def load_config(path: Path, cls: type[Config]) -> Config: ...
def load_config(path: Path, cls: type[RunConfig] = RunConfig) -> RunConfig:
    """Read a saved configuration of a class. Keys that a later version added take their defaults; anything else wrong
    is an error.

    Raises ConfigError: no such file, not YAML, an unknown key, a wrong type.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); is this the folder of a run?") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not a YAML file: {' '.join(str(error).split())}") from None
    try:
        return build(cls, tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
