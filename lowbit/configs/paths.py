"""Paths of a configuration that is kept: they mean the same from whatever folder they are read in later."""

import dataclasses
from pathlib import Path
from typing import TypeVar

from lowbit.configs.schema import RunConfig, SourceConfig, SourceKind

Config = TypeVar("Config", bound=RunConfig)


def with_absolute_paths(config: Config) -> Config:
    """The configuration with the paths of its data absolute; a data set's name on a hub is no path and stays."""
    data, tokenizer = config.data, config.data.tokenizer
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            sources={name: _source(source) for name, source in data.sources.items()},
            tokenizer=dataclasses.replace(tokenizer, path=_absolute(tokenizer.path)),
            cache_dir=str(Path(data.cache_dir).expanduser().absolute()),
        ),
    )


def _source(source: SourceConfig) -> SourceConfig:
    if source.kind is SourceKind.huggingface and not Path(source.path).exists():
        return source
    return dataclasses.replace(source, path=_absolute(source.path))


def _absolute(path: str) -> str:
    """A path or glob from the root; an empty one says that there is none."""
    return str(Path(path).expanduser().absolute()) if path else ""
