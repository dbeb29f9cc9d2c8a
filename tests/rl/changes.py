"""A configuration with some keys replaced."""

from dataclasses import replace
from typing import Any

from lowbit.configs.schema_rl import RlConfig


def changed(config: RlConfig, **keys: Any) -> RlConfig:
    """The configuration with `section__key=value` (or `key=value`) replaced."""
    for name, value in keys.items():
        section, _, key = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value}) if key else value})
    return config
