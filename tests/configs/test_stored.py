"""A stored configuration is plain YAML and comes back equal, whatever the values."""

import dataclasses
import tempfile
import types
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit.configs.compose import compose
from lowbit.configs.schema import RunConfig
from lowbit.configs.stored import load_config, plain, save_config, to_yaml
from lowbit.configs.strict import MISSING, schema_paths, show, unwrap_optional
from lowbit.errors import ConfigError

TEXT = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=12).filter(lambda t: t != MISSING)
TRAPS = st.sampled_from(
    [
        "1e3",
        "off",
        "null",
        "~",
        "3",
        "0x1f",
        "1_000",
        ".5",
        "-.inf",
        "${x}",
        "${y",
        "a: b",
        "# c",
        "1:30",
        "yes",
        "",
        " ",
        "'",
        "=",
        "<<",
    ]
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    if isinstance(hint, types.UnionType):
        return st.none() | values(unwrap_optional(hint)[0])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXT | TRAPS, values(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: values(hints[f.name]) for f in dataclasses.fields(hint)})
    if issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    numbers = {bool: st.booleans(), int: st.integers(), float: st.floats(allow_nan=False, allow_infinity=False)}
    return numbers.get(hint, TEXT | TRAPS)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(values(RunConfig))
def test_any_configuration_comes_back_equal(config: RunConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        assert load_config(path) == config


def test_any_yaml_reader_sees_the_same_plain_values() -> None:
    config = compose(["logging.wandb=off", "optim.eps=1e-8", "max_tokens=100000", "run_name='1e3'"])
    assert yaml.safe_load(to_yaml(config)) == plain(config)


LEAVES = [p for p in schema_paths() if "NAME" not in p]


@st.composite
def overrides(draw: st.DrawFn) -> dict[str, Any]:
    """Random keys of the schema, each with a random value that its type takes."""
    chosen: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(LEAVES), unique=True, max_size=12)):
        hint: Any = RunConfig
        for part in key.split("."):
            hint = typing.get_type_hints(hint)[part]
        inner, _ = unwrap_optional(hint)
        if not dataclasses.is_dataclass(inner) and typing.get_origin(inner) is None:
            word = st.from_regex(r"[a-z][a-z_/.-]{0,8}", fullmatch=True).filter(
                lambda w: w not in {"null", "nan", "inf"}
            )
            chosen[key] = draw(word if inner is str else values(hint))
    return chosen


@settings(max_examples=8, deadline=None)
@given(overrides())
def test_what_is_written_is_what_is_stored(given_: dict[str, Any]) -> None:
    config = compose([f"{key}={show(plain(value))}" for key, value in given_.items()])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        assert load_config(path) == config
    for key, value in given_.items():
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("max_stepz: 3", "max_stepz=3"),
        ("optim: {lr: fast}", "optim.lr=fast"),
        ("seed: 1\nseed: 2", "twice"),
        ("seed: [", "not a YAML file"),
        ("[1, 2]", "expected"),
        ("", "expected"),
        ("seed: !!python/object/apply:os.getcwd []", "not a YAML file"),
    ],
)
def test_an_edited_file_is_read_strictly(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fragment) as caught:
        load_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "config.yaml")


def test_a_key_that_a_later_version_added_takes_its_default(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("optim:\n  lr: 1e-3\n")
    assert load_config(path) == dataclasses.replace(RunConfig(), optim=dataclasses.replace(RunConfig().optim, lr=1e-3))
