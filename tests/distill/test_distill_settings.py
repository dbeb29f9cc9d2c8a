"""Settings of `lowbit distill` as typed, resolved to its configuration."""

import pytest

from lowbit.configs.compose import compose, compose_for
from lowbit.configs.overrides import DISTILL
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.validate_distill import validate_distill
from lowbit.errors import ConfigError


def resolved(*overrides: str) -> DistillConfig:
    config = compose_for(DISTILL, overrides)
    assert isinstance(config, DistillConfig)
    return config


@pytest.mark.parametrize("name", ["nvfp4", "fp8_row", "nvfp4_w4a16", "fp32"])
def test_the_teachers_precision_is_a_preset_or_keys_of_one(name: str) -> None:
    """The student's stays what it is, and keys of it win over the preset."""
    given = resolved(f"teacher.precision={name}", "precision=mxfp8")
    assert given.teacher.precision == compose([f"precision={name}"]).precision
    assert given.precision == compose(["precision=mxfp8"]).precision
    changed = resolved("teacher.precision.compute=fp32", f"teacher.precision={name}")
    assert changed.teacher.precision.compute == "fp32"
    assert changed.teacher.precision.forward == given.teacher.precision.forward
    assert resolved().teacher.precision == DistillConfig().teacher.precision


def test_the_teachers_model_is_a_preset_or_keys_of_one() -> None:
    given = resolved("teacher.model=30m", "model=tiny", "teacher.model.layers=3")
    assert given.teacher.model.width == compose(["model=30m"]).model.width and given.teacher.model.layers == 3
    assert given.model == compose(["model=tiny"]).model
    assert resolved("distill=gpu").teacher.model == compose(["model=150m"]).model
    assert resolved("distill=gpu", "teacher.model=30m").teacher.model == compose(["model=30m"]).model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.precision=nvpf4", r"teacher.precision=nvpf4: teacher.precision takes one of auto, .*nearest: nvfp4"),
        ("teacher.model=31m", r"teacher.model=31m: teacher.model takes one of .*nearest: 3\w*m"),
        (
            "teacher.precision=null",
            r"teacher.precision takes the name of a preset, .*set keys as teacher.precision.KEY=",
        ),
        (
            "cache.path=ß/ü",
            r"cache.path=ß/ü: cannot be read; quote a value with spaces, letters beyond ASCII, or any of",
        ),
        ("teacher.precision.forward=3.5", r"teacher.precision.forward=3.5: expected text"),
    ],
)
def test_mistakes_about_the_teacher_name_what_would_work(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(override)


def test_letters_beyond_ascii_are_read_as_the_message_says() -> None:
    assert resolved("cache.path='ß/ü'").cache.path == "ß/ü"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.temperature=1e-30", r"must be at least 0.01 and at most 100; cache.temperature=1.0 would work"),
        ("cache.temperature=1e9", r"must be at least 0.01 and at most 100; "),
        ("cache.seed=4294967296", r"must be at least 0 and at most 4294967295; cache.seed=1 would work"),
        ("cache.tokens=0", r"must be at least 1 and at most 1099511627776; "),
        (
            "cache.more=[a/b/../c,a/b/../c]",
            r"cache.path= cache.more=\[.*\]: a cache is named twice, .* leave it",
        ),
    ],
)
def test_numbers_out_of_their_range_and_caches_named_twice_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_distill(resolved(override))
    for temperature in (0.01, 100.0):
        validate_distill(resolved(f"cache.temperature={temperature}"))


def test_a_cache_beside_itself_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ConfigError, match=r"cache.path=c1 cache.more=\[c1\]: a cache is named twice"):
        validate_distill(resolved("cache.path=c1", "cache.more=[c1]"))
