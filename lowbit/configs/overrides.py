"""What a user writes after `lowbit pretrain`: `key=value`, `group=choice`, `+key=value`, `~key`, checked one by one.

Hydra's own parser reads the grammar (quotes, lists, dictionaries, sweeps). Every override is then compared with the
schema before Hydra composes anything, because Hydra alone lets `+unknown=1` and `steps=abc` through and says little
about the rest. The result is a list of overrides that Hydra can apply as they stand.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Generic, TypeVar

from lowbit.configs.nearest import nearest, suggest
from lowbit.configs.schema import RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stage_configs import fill, refuse_decided
from lowbit.configs.strict import build, fields_of, locate, schema_paths, show
from lowbit.errors import ConfigError

FREE_NAMES = ("data.sources.", "precision.define.")
"""Keys below these prefixes are names the user chooses, so they may be added and deleted."""


Config = TypeVar("Config", bound=RunConfig, covariant=True)


@dataclass(frozen=True)
class Command(Generic[Config]):
    """A command whose settings are composed from NAME.yaml beside this module."""

    name: str
    config: type[Config]
    presets: str
    """The group, its own, whose choices set everything at once."""
    own: tuple[str, ...] = ()
    """Further groups that no other command has."""
    without: tuple[str, ...] = ()
    """Groups that it has no use for."""
    placed: tuple[tuple[str, str], ...] = ()
    """Keys that take the choices of a group of another name: (key, group)."""
    sparse: tuple[str, ...] = ()
    """Sections in which only what was set stands until `fill` completes them."""
    fill: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None


PRETRAIN = Command("pretrain", RunConfig, "preset")
DISTILL = Command(
    "distill",
    DistillConfig,
    "distill",
    placed=(("teacher.model", "model"), ("teacher.precision", "precision")),
)
RL = Command("rl", RlConfig, "rl", ("task", "algorithm"), without=("data",))
PIPELINE: Command[Any] = Command[Any](
    "pipeline",
    PipelineConfig,
    "pipeline",
    without=("model", "optim"),
    placed=(
        ("teacher", "model"),
        ("student", "model"),
        *((f"{stage}.{group}", group) for stage in Stage for group in ("optim", "precision")),
        ("distill.teacher.precision", "precision"),
        ("rl.task", "task"),
        ("rl.algorithm", "algorithm"),
    ),
    sparse=tuple(Stage),
    fill=fill,
)
COMMANDS: tuple[Command[RunConfig], ...] = (PRETRAIN, DISTILL, RL, PIPELINE)


def groups(command: Command[RunConfig] | None = PRETRAIN) -> dict[str, list[str]]:
    """Preset groups of a command (None: of all) and their choices: folders beside this module that hold YAML files."""
    others = {g for c in COMMANDS if command is not None and c is not command for g in (c.presets, *c.own)}
    others |= set(command.without) if command is not None else set()
    folders = sorted((f for f in resources.files("lowbit.configs").iterdir() if f.is_dir()), key=lambda f: f.name)
    choices = {
        f.name: sorted(y.name.removesuffix(".yaml") for y in f.iterdir() if y.name.endswith(".yaml")) for f in folders
    }
    own = {name: found for name, found in choices.items() if found and name not in others}
    return own | {key: choices[group] for key, group in (command.placed if command is not None else ())}


def parse(text: str, command: Command[RunConfig] = PRETRAIN) -> Any:
    """Hydra's `Override` for one argument. Raises ConfigError for what is no override at all."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if text.startswith("-"):
        name = text.lstrip("-").split("=")[0].replace("-", "_")
        best = nearest(name, schema_paths(command.config))
        raise ConfigError(
            f"{text}: there is no such option; settings are given as {best or 'key'}=value, without dashes"
        )
    if "=" not in text and not text.startswith("~"):
        best = nearest(text, [*schema_paths(command.config), *groups(command)])
        raise ConfigError(f"{text}: not an override; write key=value{f', for example {best}=...' if best else ''}")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        key = text.partition("=")[0]
        raise ConfigError(
            f"{text}: cannot be read; quote a value with spaces, letters beyond ASCII, or any of ~{{}}[](),=: twice, "
            f"as in {key}=\"'a, b'\""
        ) from None


def is_hydra(override: Any) -> bool:
    """Whether the override configures Hydra itself (`hydra.run.dir=...`, `hydra/launcher=...`)."""
    key = str(override.key_or_group)
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))


def check(overrides: Sequence[str], command: Command[RunConfig] = PRETRAIN) -> list[str]:
    """Overrides of one run, each checked against the schema and rewritten for Hydra. Raises ConfigError."""
    parsed = [parse(text, command) for text in overrides]
    for p in parsed:
        if str(p.key_or_group) == "hydra.job.chdir" and p.value():
            raise ConfigError(f"{p.input_line}: settings name files from where the command is started; leave it out")
    own_presets = any(str(p.key_or_group) == "hydra.searchpath" for p in parsed)
    return [p.input_line if is_hydra(p) else _check_one(p, own_presets, command) for p in parsed]


def _check_one(override: Any, own_presets: bool, command: Command[RunConfig]) -> str:
    key, text = str(override.key_or_group), str(override.input_line)
    if override.is_sweep_override():
        raise ConfigError(f"{text}: several values make a sweep; add -m, or write a list as [a, b], or quote the text")
    choices = groups(command)
    if override.package is not None:
        raise ConfigError(f"{text}: packages (@) are not used here; write {key}=...")
    if override.is_delete():
        return _check_delete(key, text, choices, command)
    if key in choices:
        return _placed(command, key, _check_choice(key, override.value(), text, choices[key], own_presets))
    section, _, inner = key.partition(".")
    if section in command.sparse:
        refuse_decided(Stage(section), {inner: None})
    hint = _locate(key, text.partition("=")[2], choices, command)
    value = override.value()
    if not (isinstance(value, str) and "${" in value):  # interpolations are checked once resolved
        try:
            build(hint, value, key)
        except ConfigError as error:  # show the value as it was typed: 1e3, not 1000.0
            raise ConfigError(str(error).replace(f"{key}={show(value)}", text.lstrip("+"), 1)) from None
    return _rewrite(key, text, command)


def _rewrite(key: str, text: str, command: Command[RunConfig]) -> str:
    """The override as Hydra wants it: names the user chose are added with `++`, all others exist already."""
    plain = text.lstrip("+")
    if key in dict(command.placed):
        return _placed(command, key, plain)
    free = (*FREE_NAMES, *(f"{section}." for section in command.sparse))
    return f"++{plain}" if f"{key}.".startswith(free) else plain


def _placed(command: Command[RunConfig], key: str, text: str) -> str:
    """A choice whose key is not its group's name, as Hydra writes it: `teacher=tiny` is `model@teacher=tiny`."""
    group = dict(command.placed).get(key)
    return text if group is None else f"{group}@{text}"


LIMITS = ("max_steps", "max_tokens", "max_minutes")
SECTIONS = ("", *(f"{stage}." for stage in Stage))
"""Where limits stand: at the top, or in a stage of a pipeline."""


def with_own_limits(overrides: Sequence[str]) -> list[str]:
    """A limit that the user sets replaces the preset's limits: those not named end no run that was meant to go on."""
    named = {str(parse(text).key_or_group) for text in overrides}
    others = []
    for section in SECTIONS:
        limits = [f"{section}{limit}" for limit in LIMITS]
        if named & set(limits):
            others += [f"{limit}=null" for limit in limits if limit not in named]
    return [*overrides, *others]


def for_hydra(overrides: Sequence[str], command: Command[RunConfig] = PRETRAIN) -> list[str]:
    """Overrides that were checked (each run's, for a sweep), rewritten for Hydra with their lists of values."""
    parsed = [parse(text) for text in with_own_limits(overrides)]
    return [
        p.input_line if is_hydra(p) or p.is_delete() else _rewrite(str(p.key_or_group), str(p.input_line), command)
        for p in parsed
    ]


def sweep_keys(overrides: Sequence[str]) -> list[str]:
    """Keys that have several values."""
    return [str(p.key_or_group) for p in map(parse, overrides) if p.is_sweep_override()]


def _locate(key: str, value: str, choices: dict[str, list[str]], command: Command[RunConfig]) -> Any:
    root: type = command.config
    if "." not in key and key not in fields_of(root):
        if key in groups(None):
            places = [place for place, group in command.placed if group == key]
            takes = f"{command.presets}={' or '.join(choices[command.presets])}"
            if places:
                takes = " and ".join(f"{place}={value}" for place in places)
            raise ConfigError(f"{key}={value}: {key} belongs to another command; lowbit {command.name} takes {takes}")
        best = nearest(key, [*schema_paths(root), *choices])
        if best in choices:
            raise ConfigError(
                f"{key}={value}: there is no key {key!r}; groups are {', '.join(choices)}; nearest: {best}"
            )
    return locate(key, value, root)


def _check_choice(group: str, value: Any, text: str, choices: list[str], own_presets: bool) -> str:
    name = str(value)
    if isinstance(value, (dict, list)) or value is None:
        raise ConfigError(
            f"{text}: {group} takes the name of a preset, one of {', '.join(choices)}; set keys as {group}.KEY=..."
        )
    if name not in choices and not own_presets:
        raise ConfigError(f"{text}: {group} takes one of {', '.join(choices)}{suggest(name, choices)}")
    return text.lstrip("+")


def _check_delete(key: str, text: str, choices: dict[str, list[str]], command: Command[RunConfig]) -> str:
    if key == command.presets:
        return text
    if key.startswith(FREE_NAMES) and key.count(".") == 2:
        return text
    if key not in choices:
        locate(key, root=command.config)
    raise ConfigError(
        f"{text}: a run needs {key}; only the preset and entries of data.sources and precision.define can be removed"
    )


def expand_sweep(overrides: Sequence[str], command: Command[RunConfig] = PRETRAIN) -> list[list[str]]:
    """Every combination of a multirun's comma lists, in Hydra's order, as override lists of single runs.

    `choice(...)`, `range(...)` and `glob(...)` count as lists. Intervals have no list: they need a sweeper plug-in,
    and Hydra's own sweeper refuses them, so they are an error here.
    """
    choices = groups(command)
    columns: dict[str, list[str]] = {}
    for text in overrides:
        override = parse(text, command)
        key = str(override.key_or_group)
        if not override.is_sweep_override():
            columns[key] = [text]  # the last of several settings of a key wins, as in Hydra
            continue
        if not override.is_discrete_sweep():
            raise ConfigError(f"{text}: an interval has no list of values; write {key}=a,b,c")
        values = _sweep_values(override, choices)
        if not values:
            raise ConfigError(f"{text}: matches nothing; choices are {', '.join(choices.get(key, []))}")
        columns[key] = [f"{override.get_key_element()}={value}" for value in values]
    return [list(row) for row in itertools.product(*columns.values())]


def _sweep_values(override: Any, choices: dict[str, list[str]]) -> list[str]:
    from hydra.core.override_parser.types import Glob

    value = override.value()
    if isinstance(value, Glob):
        return [str(name) for name in value.filter(choices.get(str(override.key_or_group), []))]
    return [str(v) for v in override.sweep_string_iterator()]
