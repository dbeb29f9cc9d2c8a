"""From what the user wrote to one frozen `RunConfig`.

    overrides --check--> overrides --Hydra compose--> plain tree --strict build--> RunConfig

Hydra chooses presets and merges them over a base that holds every key of the schema, so that it too refuses keys it
does not know; `strict.build` then has the last word on keys and types. Past this module nobody sees a DictConfig.
Presets come last in the defaults list and may override other groups; what the user writes wins over both.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from lowbit.configs.overrides import COMMANDS, LIMITS, PRETRAIN, Command, Config, check, with_own_limits
from lowbit.configs.schema import DataConfig, RunConfig
from lowbit.configs.stored import plain
from lowbit.configs.strict import build
from lowbit.errors import ConfigError

CONFIG_MODULE = "lowbit.configs"


@cache
def register_schema() -> None:
    """Hand Hydra the base of the defaults list: every key with its default; sources come from their group. Once."""
    from hydra.core.config_store import ConfigStore

    for command in COMMANDS:
        base = plain(dataclasses.replace(command.config(), data=DataConfig(sources={})))
        base |= {section: {} for section in command.sparse}
        ConfigStore.instance().store(name=f"{command.name}_schema", node=base, provider="lowbit")


def compose_tree(overrides: Sequence[str], command: Command[RunConfig] = PRETRAIN, *, with_hydra: bool = False) -> Any:
    """Hydra's DictConfig for one run, checked but not yet typed; `with_hydra` keeps the `hydra` node.

    Raises ConfigError (one line) for every mistake in `overrides` and for whatever Hydra refuses.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    checked = check(with_own_limits(overrides), command)
    register_schema()
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            return hydra.compose(command.name, overrides=checked, return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error, overrides)) from None


def replaced_limits(overrides: Sequence[str], command: Command[RunConfig] = PRETRAIN) -> list[str]:
    """Of a run's checked overrides: which limits of the preset the user's own have taken the place of, in words."""
    from omegaconf import OmegaConf

    gone = [text.partition("=")[0] for text in with_own_limits(overrides)[len(overrides) :]]
    if not gone:
        return []
    sections = {key.rpartition(".")[0] for key in gone}
    own = [text for text in overrides if _limits(text, sections)]
    preset = compose_tree([text for text in overrides if text not in own], command)
    values = {key: value for key in gone if (value := OmegaConf.select(preset, key)) is not None}
    return [
        f"{' '.join(text for text in own if _limits(text, {key.rpartition('.')[0]}))} takes the place of the preset's "
        f"{key}={value}; give both to have whichever comes first"
        for key, value in values.items()
    ]


def _limits(text: str, sections: Collection[str]) -> bool:
    """Whether an override sets a limit of one of these sections ("" is the top)."""
    section, _, key = text.lstrip("+").partition("=")[0].rpartition(".")
    return key in LIMITS and section in sections


def to_config(command: Command[Config], tree: Any) -> Config:
    """A composed DictConfig (or plain mapping) as the command's class: interpolations resolved, then built strictly."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(tree, DictConfig):
        try:
            tree = OmegaConf.to_container(
                OmegaConf.masked_copy(tree, [str(k) for k in tree if k != "hydra"]), resolve=True
            )
        except OmegaConfBaseException as error:
            raise ConfigError(_one_line(error, [])) from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"the configuration is a {type(tree).__name__}, not a mapping of keys")
    return build(command.config, command.fill(tree) if command.fill is not None else tree)


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of one run from its overrides, typed; `validate.validate` checks that it can run."""
    return compose_for(PRETRAIN, overrides)


def compose_for(command: Command[Config], overrides: Sequence[str] = ()) -> Config:
    """The same of another command."""
    return to_config(command, compose_tree(overrides, command))


def _one_line(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's or OmegaConf's message as one line, beginning with the override it speaks of where that is known."""
    cause = f" ({error.__cause__})" if error.__cause__ and "Error merging override" in str(error) else ""
    text = " ".join(f"{error}{cause}".split()) or type(error).__name__
    named = [o for o in overrides if o.lstrip("+~").partition("=")[0] in text]
    guilty = max(named, key=lambda o: len(o.lstrip("+~").partition("=")[0]), default=None)
    return f"{guilty}: {text}" if guilty and not text.startswith(guilty) else text
