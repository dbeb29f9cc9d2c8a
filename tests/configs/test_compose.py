"""Composition: presets, what the user writes, and every kind of mistake as one line.

Oracles: OmegaConf's own structured merge for what a tree of values means; Hydra's own sweeper for the jobs of a sweep.
"""

import dataclasses
import typing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lowbit.configs.compose import compose, compose_tree, replaced_limits, to_config
from lowbit.configs.overrides import PIPELINE, PRETRAIN, expand_sweep, groups
from lowbit.configs.schema import OptimizerKind, RunConfig, SourceKind
from lowbit.configs.stored import plain
from lowbit.configs.strict import build
from lowbit.configs.validate import validate
from lowbit.errors import ConfigError
from lowbit.quant.presets import PRESETS


def thawed(cls: Any) -> Any:
    """A copy of a configuration dataclass that is not frozen, so that OmegaConf merges into it; containers empty."""
    fields: list[Any] = []
    for f in dataclasses.fields(cls):
        arguments = typing.get_args(f.type)
        if dataclasses.is_dataclass(f.type):
            inner = thawed(f.type)
            fields.append((f.name, inner, dataclasses.field(default_factory=inner)))
        elif typing.get_origin(f.type) in (list, dict):
            kind: Any = typing.get_origin(f.type)
            element = thawed(arguments[-1]) if dataclasses.is_dataclass(arguments[-1]) else arguments[-1]
            hint = list[element] if kind is list else dict[str, element]  # type: ignore[valid-type]
            fields.append((f.name, hint, dataclasses.field(default_factory=kind)))
        else:
            fields.append((f.name, f.type, dataclasses.field(default=f.default)))
    return dataclasses.make_dataclass(cls.__name__, fields)


def test_the_default_is_the_cpu_preset() -> None:
    config = compose()
    validate(config)
    assert config == compose(["preset=cpu"])
    assert config.model.name == "tiny" and list(config.data.sources) == ["python_docs"]


@cache
def composed(*overrides: str) -> RunConfig:
    """Of what several tests only read."""
    return compose(list(overrides))


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g, choices in groups().items() for c in choices])
def test_every_preset_is_a_run(group: str, choice: str, tmp_path: Path) -> None:
    overrides = [f"{group}={choice}"]
    if choice in ("files", "huggingface"):
        overrides.append(f"data.sources.{choice}.path={tmp_path}")
    if group == "comm" and choice != "none":  # one process has nobody to send gradients to
        overrides.append("engine=deepspeed")
    validate(composed(*overrides))


def test_groups_are_those_the_design_names() -> None:
    assert {k: set(v) for k, v in groups().items()} == {
        "preset": {"cpu", "gpu", "quick"},
        "model": {
            "quick",
            "tiny",
            "30m",
            "70m",
            "150m",
            "370m",
            "1b",
            "8b",
            "moe_tiny",
            "moe_30m_a10m",
            "moe_1b_a300m",
        },
        "data": {"python_docs", "files", "huggingface"},
        "optim": {"adamw", "muon"},
        "precision": {"auto", "fp32", "nvfp4_leg", "nvfp4_mlp", "stages", *PRESETS},
        "engine": {"local", "deepspeed"},
        "comm": {"none", "auto", "bf16", "squinch", "sq48", "sq48_fast"},
    }


def test_model_shapes() -> None:
    rows = {name: compose([f"model={name}"]).model for name in groups()["model"]}
    assert all(m.name == name for name, m in rows.items())
    shapes = {n: (m.layers, m.width, m.heads, m.kv_heads, m.mlp_width, m.tied_head) for n, m in rows.items()}
    assert shapes == {
        "quick": (2, 128, 2, 2, 352, False),
        "tiny": (4, 192, 3, 3, 512, False),
        "30m": (10, 384, 6, 6, 1024, False),
        "70m": (8, 512, 8, 8, 1024, False),
        "150m": (12, 768, 12, 12, 1536, False),
        "370m": (16, 1024, 16, 16, 4096, False),
        "1b": (16, 2048, 32, 8, 8192, True),
        "8b": (32, 4096, 32, 8, 14336, False),
        "moe_tiny": (4, 192, 3, 3, 512, False),
        "moe_30m_a10m": (8, 256, 4, 4, 704, True),
        "moe_1b_a300m": (16, 1024, 16, 4, 4096, True),
    }


def test_a_limit_that_the_user_sets_replaces_those_of_the_preset() -> None:
    def limits(*overrides: str) -> tuple[int | None, int | None, float | None]:
        config = compose(overrides)
        return config.max_steps, config.max_tokens, config.max_minutes

    assert limits() == limits("seed=2") and None not in (limits()[0], limits()[2])
    assert limits("max_steps=7") == (7, None, None)
    assert limits("max_tokens=5000") == (None, 5000, None)
    assert limits("max_minutes=2", "+max_steps=9") == (9, None, 2.0)
    assert [compose(job).max_minutes for job in expand_sweep(["max_steps=3,4"])] == [None, None]


def test_a_replaced_limit_is_said() -> None:
    """Only where the preset has another one, and in the section in which it stands."""
    steps = compose().max_steps
    assert replaced_limits(["seed=2", "max_minutes=2"]) == [
        f"max_minutes=2 takes the place of the preset's max_steps={steps}; give both to have whichever comes first"
    ]
    assert replaced_limits(["seed=2"]) == replaced_limits(["max_minutes=2", "+max_steps=9"]) == []
    assert replaced_limits(["preset=quick", "max_steps=9"]) == []
    [line] = replaced_limits(["pipeline=quick", "distill.max_tokens=9000", "rl.max_steps=1"], PIPELINE)
    assert line.startswith("distill.max_tokens=9000 takes the place of the preset's distill.max_steps=20;")


@pytest.mark.parametrize("preset", sorted(groups()["preset"]))
def test_a_preset_leaves_the_shape_to_the_model(preset: str) -> None:
    for name in groups()["model"]:
        assert compose([f"preset={preset}", f"model={name}"]).model == composed(f"model={name}").model


def test_what_the_user_writes_wins_over_a_preset_and_a_preset_over_groups() -> None:
    assert compose(["preset=gpu"]).model.name == "70m"
    assert compose(["preset=gpu"]).optim.kind is OptimizerKind.muon
    config = compose(["model=30m", "preset=gpu", "optim=adamw", "batch.sequences=8", "batch.micro_batch=4"])
    assert (config.model.name, config.optim.kind, config.batch.sequences) == ("30m", OptimizerKind.adamw, 8)


def test_groups_replace_the_sources() -> None:
    config = compose(["data=files", "data.sources.files.path=corpus"])
    assert list(config.data.sources) == ["files"]
    assert config.data.sources["files"].kind is SourceKind.files


def test_a_mixture_is_written_by_name() -> None:
    config = compose(["data.sources.mine.kind=files", "data.sources.mine.path=a b", "data.sources.mine.weight=3"])
    assert list(config.data.sources) == ["python_docs", "mine"]
    assert (config.data.sources["mine"].path, config.data.sources["mine"].weight) == ("a b", 3.0)
    assert "python_docs" not in compose(["data.sources.x.kind=files", "~data.sources.python_docs"]).data.sources
    whole = compose(["data.sources={a: {kind: files, path: x}}"])
    assert whole.data.sources["a"].path == "x"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("max_steps=7", "max_steps", 7),
        ("+max_steps=7", "max_steps", 7),
        ("++max_steps=7", "max_steps", 7),
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("max_minutes=null", "max_minutes", None),
        ("run_name=7", "run_name", "7"),
        ("run_name='a, b=c'", "run_name", "a, b=c"),
        ("logging.wandb=offline", "logging.wandb", "offline"),
        ("logging.wandb=false", "logging.wandb", "off"),
        ("deterministic=True", "deterministic", True),
        ("model.rope={theta: 5e5}", "model.rope.theta", 5e5),
        ("resume_allow=[data,model]", "resume_allow", ["data", "model"]),
        ("max_steps=${seed}", "max_steps", 1),
    ],
)
def test_values(override: str, key: str, value: Any) -> None:
    found: Any = compose([override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is (type(value) if not isinstance(value, str) else type(found))


def test_the_tree_means_what_omegaconf_says_it_means() -> None:
    overrides = ["preset=gpu", "model=1b", "optim.lr=1", "batch.warmup=[{until_tokens: 9, sequences: 32}]", "seed=3"]
    tree = compose_tree(overrides)
    reference = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(thawed(RunConfig)), tree))
    assert plain(to_config(PRETRAIN, tree)) == plain(reference)


MISTAKES = [  # overrides, what the one line must contain
    ("max_stepz=3", ["max_stepz=3", "nearest: max_steps"]),
    ("+max_stepz=3", ["max_stepz=3", "nearest: max_steps"]),
    ("++max_stepz=3", ["max_stepz=3", "nearest: max_steps"]),
    ("steps=1", ["steps=1", "nearest: max_steps"]),
    ("lr=1e-3", ["lr=1e-3", "nearest: optim.lr"]),
    ("+optim.lrr=1", ["optim.lrr=1", "optim takes kind, lr", "nearest: optim.lr"]),
    ("model.rope={thta: 3}", ["model.rope.thta=3", "nearest: model.rope.theta"]),
    ("data.sources.my.pathh=x", ["data.sources.my.pathh=x", "nearest: data.sources.my.path"]),
    ("data.sources.my={pathh: x}", ["data.sources.my.pathh=x", "nearest: data.sources.my.path"]),
    ("batch.warmup=[{until: 10, sequences: 4}]", ["batch.warmup.0.until=10", "nearest: batch.warmup.0.until_tokens"]),
    ("model.layers.x=3", ["model.layers.x=3", "an integer"]),
    ("modle=tiny", ["modle=tiny", "nearest: model"]),
    ("model=tyni", ["model=tyni", "150m, 1b, 30m", "nearest: tiny"]),
    ("preset=gpus", ["preset=gpus", "cpu, gpu", "nearest: gpu"]),
    ("engine=deepspede", ["engine=deepspede", "deepspeed, local"]),
    ("model=null", ["model=null", "name of a preset"]),
    ("model={layers: 3}", ["model={layers: 3}", "name of a preset", "model.KEY="]),
    ("max_steps=abc", ["max_steps=abc", "an integer", "text"]),
    ("max_steps=1e3", ["max_steps=1e3", "an integer", "write max_steps=1000"]),
    ("max_steps=2.5", ["max_steps=2.5", "an integer"]),
    ("max_steps=true", ["max_steps=true", "an integer"]),
    ("max_steps=", ["max_steps=", "an integer"]),
    ("optim.lr='1e-3'", ["optim.lr='1e-3'", "a number", "without quotes"]),
    ("optim.lr=nan", ["optim.lr=nan", "finite"]),
    ("optim.lr=inf", ["optim.lr=inf", "finite"]),
    (f"optim.lr=1{400 * '0'}", ["optim.lr=1000", "finite"]),
    ("seed=null", ["seed=null", "an integer"]),
    ("deterministic=1", ["deterministic=1", "true or false"]),
    ("run_name=true", ["run_name=true", "text", "quote it"]),
    ("optim.kind=adam", ["optim.kind=adam", "adamw, muon", "nearest: adamw"]),
    ("resume_allow=[data,seed]", ["resume_allow.1=seed", "tokenizer, data, model"]),
    ("model.mlp=swigloo", ["model.mlp=swigloo", "swiglu, relu2", "nearest: swiglu"]),
    ("optim.schedule=3", ["optim.schedule=3", "kind, warmup_steps"]),
    ("data.sources=3", ["data.sources=3", "mapping"]),
    ("resume_allow=data", ["resume_allow=data", "a list"]),
    ("data=files", ["data.sources.files.path", "has no value"]),
    ("data=huggingface", ["data.sources.huggingface.path", "has no value"]),
    ("~optim.lr", ["~optim.lr", "a run needs optim.lr"]),
    ("~model", ["~model", "a run needs model"]),
    ("~optim.lrr", ["optim.lrr", "nearest: optim.lr"]),
    ("~data.sources.nope", ["~data.sources.nope", "does not exist"]),
    ("hydra.rn.dir=x", ["hydra.rn.dir=x", "hydra.rn.dir"]),
    ("hydra.job.chdir=true", ["hydra.job.chdir=true", "leave it out"]),
    ("hydra/launcher=foo", ["hydra/launcher=foo", "basic"]),
    ("max_steps=1,2", ["max_steps=1,2", "-m"]),
    ("model=tiny,30m", ["model=tiny,30m", "-m"]),
    ("max_stepz", ["max_stepz", "key=value", "max_steps="]),
    ("--max-steps=3", ["--max-steps=3", "max_steps=value"]),
    ("run_name=a b=c", ["run_name=a b=c", "quote"]),
    ("max_steps={", ["max_steps={", "quote"]),
    ("model@x=tiny", ["model@x=tiny", "model="]),
    ("run_name=${nope}", ["nope"]),
    ("batch.warmup.0.sequences=3", ["batch.warmup.0.sequences=3", "out of range"]),
]


@pytest.mark.parametrize(("override", "fragments"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_each_mistake_is_one_line_that_names_it(override: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    for fragment in fragments:
        assert fragment in message


def test_the_override_at_fault_is_named_and_not_one_that_is_part_of_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^~data\.sources\.nope: .*does not exist"):
        compose(["data=python_docs", "~data.sources.nope"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.lr=1e-3,3e-4", "seed=1,2,3"],
        ["model=tiny,30m", "optim.kind=choice(adamw,muon)", "max_steps=5"],
        ["seed=range(1,4)", "run_name='a,b','c d'"],
        ["batch.warmup=[],[{until_tokens: 5, sequences: 16}]"],
        ["seed=1,2", "seed=7"],
    ],
)
def test_a_sweep_is_the_jobs_hydra_would_start(overrides: list[str]) -> None:
    parsed = OverridesParser.create().parse_overrides(overrides)
    [reference] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    assert [meaning(job) for job in expand_sweep(overrides)] == [meaning(job) for job in reference]


def meaning(job: list[str]) -> list[tuple[str, Any]]:
    return [(o.key_or_group, o.value()) for o in OverridesParser.create().parse_overrides(job)]


def test_a_glob_sweeps_over_choices() -> None:
    assert expand_sweep(["precision=glob(bf*)"]) == [["precision=bf16"]]
    assert [row[0] for row in expand_sweep(["model=glob(*, exclude=*m)"])] == [
        f"model={name}" for name in ("1b", "8b", "moe_tiny", "quick", "tiny")
    ]


@pytest.mark.parametrize("override", ["optim.lr=interval(0,1)", "model=glob(x*)"])
def test_a_sweep_without_values_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"no list of values|matches nothing"):
        expand_sweep([override])


def test_plain_trees_are_read_as_strictly() -> None:
    assert build(RunConfig, {}) == RunConfig()
    for tree, fragment in [
        ({"optim": {"lr": "fast"}}, "optim.lr=fast"),
        ({"optim": [1]}, "optim="),
        ({"seed": 1, "sede": 2}, "sede=2"),
        ({"batch": {"warmup": [{"sequences": "4"}]}}, "batch.warmup.0.sequences=4"),
        ({"data": {"sources": {"a": {"kind": "web"}}}}, "data.sources.a.kind=web"),
    ]:
        with pytest.raises(ConfigError, match=fragment):
            build(RunConfig, tree)
    with pytest.raises(ConfigError):
        to_config(PRETRAIN, [1])
