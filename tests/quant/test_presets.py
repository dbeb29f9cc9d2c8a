"""Recipes against the papers' tables, and names resolved to policies: stages, descriptions, rules, switches."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from lowbit.configs.compose import compose
from lowbit.configs.schema import (
    AlignmentKind,
    PolicyConfig,
    PrecisionConfig,
    PrecisionRule,
    PrecisionSwitch,
    ProductConfig,
    RunConfig,
    SignsKind,
)
from lowbit.configs.validate import validate
from lowbit.errors import ConfigError
from lowbit.quant.formats import ELEMENT_FORMATS
from lowbit.quant.policy import Alignment, LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.resolve import Role, describe, resolve
from lowbit.quant.spec import SPECS, VARIANTS, Outer, Rounding, Scale

BF16 = ("BF16", "BF16", 0, "fresh")

TABLE: dict[str, tuple[Any, Any, Any, str]] = {  # fprop, dgrad, wgrad (left, right, rotation, signs), alignment
    "bf16": (BF16, BF16, BF16, "aligned"),
    "fp8_tensor": (*(("FP8_TENSOR", "FP8_TENSOR", 0, "fresh"),) * 3, "original"),
    "fp8_row": (*(("FP8_ROW", "FP8_ROW", 0, "fresh"),) * 3, "original"),
    "fp8_block": (
        ("FP8_BLOCK", "FP8_BLOCK_2D", 0, "fresh"),
        ("FP8_BLOCK", "FP8_BLOCK_2D", 0, "fresh"),
        ("FP8_BLOCK", "FP8_BLOCK", 0, "fresh"),
        "original",
    ),
    "mxfp8": (*(("MXFP8", "MXFP8", 0, "fresh"),) * 3, "original"),
    # arXiv 2509.25149: 2D weights, stochastic gradients, rotation of wgrad's inputs only, by one fixed vector of 16
    "nvfp4_nvidia": (
        ("NVFP4", "NVFP4_2D", 0, "fresh"),
        ("NVFP4_SR", "NVFP4_2D", 0, "fresh"),
        ("NVFP4_SR", "NVFP4", 16, "fixed"),
        "original",
    ),
    # arXiv 2510.27527: double blocks, nearest forward, all four backward operands stochastic under a rotation of 16
    "nvfp4_tetrajet": (
        ("NVFP4_TETRAJET", "NVFP4_TETRAJET", 0, "fresh"),
        *(("NVFP4_TETRAJET_SR", "NVFP4_TETRAJET_SR", 16, "fresh"),) * 2,
        "aligned",
    ),
    # arXiv 2601.22813: four over six forward, MS-EDEN under a rotation of 128 backward
    "nvfp4_quartet2": (
        ("NVFP4_46", "NVFP4_46", 0, "fresh"),
        *(("NVFP4_EDEN_PUBLISHED", "NVFP4_EDEN_PUBLISHED", 128, "fresh"),) * 2,
        "aligned",
    ),
    "nvfp4": (
        ("NVFP4_POW2_46", "NVFP4_POW2_46", 0, "fresh"),
        *(("NVFP4_POW2_EDEN", "NVFP4_POW2_EDEN", 128, "fresh"),) * 2,
        "aligned",
    ),
    "int8": (("INT8_ROW", "INT8_ROW", 0, "fresh"), BF16, BF16, "aligned"),
    "nvfp4_w4a16": (("BF16", "NVFP4_46", 0, "fresh"), BF16, BF16, "aligned"),
    "mxfp8_w8a16": (("BF16", "MXFP8", 0, "fresh"), BF16, BF16, "aligned"),
    "fp8_w8a16": (("BF16", "FP8_ROW", 0, "fresh"), BF16, BF16, "aligned"),
}


def row(policy: LinearPolicy) -> tuple[Any, ...]:
    products = (policy.fprop, policy.dgrad, policy.wgrad)
    return (*((p.left.name, p.right.name, p.rotation, p.signs.value) for p in products), policy.alignment.value)


@pytest.mark.parametrize("name", PRESETS)
def test_recipes(name: str) -> None:
    assert row(PRESETS[name]) == TABLE[name]
    assert not PRESETS[name].allow_bias


def test_every_recipe_is_in_the_table() -> None:
    assert PRESETS.keys() == TABLE.keys()


def test_published_roundings() -> None:
    assert SPECS["NVFP4_EDEN_PUBLISHED"].rounding is Rounding.MS_EDEN_PUBLISHED
    assert SPECS["NVFP4_POW2_EDEN"].rounding is Rounding.MS_EDEN


@cache
def composed(*overrides: str) -> RunConfig:
    return compose(list(overrides))


@pytest.mark.parametrize("name", PRESETS)
def test_each_recipe_is_a_choice_of_the_group(name: str) -> None:
    """`precision=NAME` trains in NAME, samples in its forward, and trains RL on that with a BF16 backward."""
    config = composed(f"precision={name}")
    validate(config)
    assert config.precision.name == name
    policy = resolve(config.precision)
    assert policy.training().default == PRESETS[name]
    assert policy.sampler.default.fprop == policy.trainer.default.fprop == PRESETS[name].fprop
    assert not policy.trainer.default.dgrad.quantised and not policy.trainer.default.wgrad.quantised
    assert policy.trainer.default.alignment is Alignment.ALIGNED
    assert bool(policy.rules) == (name == "nvfp4_nvidia")


@pytest.mark.parametrize("stage", Role)
def test_nvfp4_mlp_is_the_mlps_behind_the_first_block(stage: Role) -> None:
    """In each stage the same layers, so that sampler and trainer are one function."""
    policy = resolve(composed("precision=nvfp4_mlp").precision).phases(stage)[0]
    names = [f"blocks.{i}.{layer}" for i in (0, 1, 11) for layer in ("attention.q", "attention.out", "mlp.down")]
    rules = [policy.rule_of(name, 12) for name in names]
    low = [name for name, rule in zip(names, rules, strict=True) if (rule.policy if rule else policy.default).quantised]
    assert low == ["blocks.1.mlp.down", "blocks.11.mlp.down"]
    assert policy.default.fprop == PRESETS["nvfp4"].fprop


def test_the_four_stages_are_chosen_apart() -> None:
    policy = resolve(
        PrecisionConfig(forward="nvfp4", backward="mxfp8", wgrad="bf16", sampler="nvfp4_w4a16", trainer="int8")
    )
    training = policy.training().default
    assert training.fprop == PRESETS["nvfp4"].fprop
    assert training.dgrad == PRESETS["mxfp8"].dgrad and training.alignment is Alignment.ORIGINAL
    assert not training.wgrad.quantised
    assert policy.sampler.default == PRESETS["nvfp4_w4a16"]
    assert policy.trainer.default == PRESETS["int8"]


def test_a_description() -> None:
    mine = PolicyConfig(
        fprop=ProductConfig("MXFP6_E2M3", "NVFP4_46"),
        wgrad=ProductConfig("NVFP4_SR", "NVFP4", 16, SignsKind.fixed),
        alignment=AlignmentKind.original,
        mean_split=True,
    )
    policy = resolve(PrecisionConfig(forward="mine", backward="mine", define={"mine": mine})).training().default
    assert row(policy) == (
        ("MXFP6_E2M3", "NVFP4_46", 0, "fresh"),
        BF16,
        ("NVFP4_SR", "NVFP4", 16, "fixed"),
        "original",
    )
    assert policy.mean_split and describe(policy) == {
        "fprop": "MXFP6_E2M3 x NVFP4_46, mean split",
        "dgrad": "BF16",
        "wgrad": "NVFP4_SR x NVFP4, rotation 16 fixed",
        "alignment": "original",
    }


def test_the_mean_split_stays_with_a_quantised_input() -> None:
    """X is quantised by wgrad alone: what of the policy's stages does not quantise it does not split it either."""
    mine = PolicyConfig(wgrad=ProductConfig("MXFP8", "MXFP8"), alignment=AlignmentKind.original, mean_split=True)
    define = {"mine": mine}
    policy = resolve(PrecisionConfig(forward="mine", backward="mine", define=define))
    assert policy.training().default.mean_split
    assert not policy.sampler.default.mean_split and not policy.trainer.default.mean_split
    assert not resolve(PrecisionConfig(forward="mine", define=define)).training().default.mean_split
    useless = {"mine": PolicyConfig(base="nvfp4_w4a16", mean_split=True)}
    with pytest.raises(ConfigError, match=r"precision\.define\.mine: mean_split=true .* set mean_split=false"):
        resolve(PrecisionConfig(define=useless))


def test_a_description_from_the_command_line_based_on_another_one() -> None:
    config = compose(
        [
            "precision=nvfp4",
            "precision.define.a={base: nvfp4, fprop: {left: MXFP8, right: MXFP8}}",
            "precision.define.b.base=a",
            "precision.define.b.mean_split=true",
            "precision.forward=b",
        ]
    )
    validate(config)
    policy = resolve(config.precision).training().default
    assert policy.fprop.left.name == "MXFP8" and policy.mean_split
    assert policy.dgrad == PRESETS["nvfp4"].dgrad and policy.wgrad == PRESETS["nvfp4"].wgrad


def test_biased_gradients_only_when_asked_for() -> None:
    product = ProductConfig("NVFP4_46", "NVFP4_46")
    with pytest.raises(ConfigError, match=r"precision\.define\.mine: dgrad: NVFP4_46 .*allow_bias"):
        resolve(PrecisionConfig(define={"mine": PolicyConfig(dgrad=product)}))
    policy = resolve(PrecisionConfig(backward="mine", define={"mine": PolicyConfig(dgrad=product, allow_bias=True)}))
    assert policy.training().default.dgrad.left.name == "NVFP4_46"


@pytest.mark.parametrize("name", [*SPECS, *VARIANTS])
def test_every_format_can_be_named_in_a_description(name: str) -> None:
    """And with them every rounding, scale and element that there is."""
    eden = "EDEN" in name
    config = PrecisionConfig(
        forward="mine",
        define={"mine": PolicyConfig(fprop=ProductConfig("BF16", name, 128 if eden else 0))},
    )
    found = resolve(config).training().default.fprop.right.spec
    assert found is not None and found == (SPECS | VARIANTS)[name]


def test_named_formats_have_every_kind_of_part() -> None:
    named = [*SPECS.values(), *VARIANTS.values()]
    assert {spec.rounding for spec in named} == set(Rounding)
    assert {spec.scale for spec in named} == set(Scale) and {spec.outer for spec in named} == set(Outer)
    assert {spec.element.name for spec in named} | {"E8M0"} >= {fmt.name for fmt in ELEMENT_FORMATS}
    assert not SPECS.keys() & VARIANTS.keys()
    for spec in VARIANTS.values():
        base = SPECS[spec.name.rpartition("_")[0]]
        assert replace(spec, name=base.name, rounding=base.rounding) == base and spec.rounding is not base.rounding


MISTAKES: list[tuple[PrecisionConfig, list[str]]] = [
    (PrecisionConfig(forward="nvfp5"), ["precision.forward=nvfp5", "bf16, fp8_tensor", "nearest: nvfp4"]),
    (PrecisionConfig(dgrad="NVFP4"), ["precision.dgrad=NVFP4", "nearest: nvfp4"]),
    (PrecisionConfig(sampler="w4a16"), ["precision.sampler=w4a16", "nearest: nvfp4_w4a16"]),
    (PrecisionConfig(trainer=""), ["precision.trainer=", "choices are bf16"]),
    (PrecisionConfig(rules=[PrecisionRule("x", "mxpf8")]), ["precision.rules.0.policy=mxpf8", "nearest: mxfp8"]),
    (PrecisionConfig(switch=[PrecisionSwitch(0.5, wgrad="bf61")]), ["precision.switch.0.wgrad=bf61", "nearest: bf16"]),
    (
        PrecisionConfig(define={"mine": PolicyConfig(fprop=ProductConfig("NVFP4_47"))}),
        ["precision.define.mine.fprop.left=NVFP4_47", "BF16, MXFP8", "nearest: NVFP4_46"],
    ),
    (
        PrecisionConfig(define={"mine": PolicyConfig(fprop=ProductConfig("BF16", "mxfp8"))}),
        ["precision.define.mine.fprop.right=mxfp8", "nearest: MXFP8"],
    ),
    (
        PrecisionConfig(define={"a": PolicyConfig(wgrad=ProductConfig("NVFP4_46_MAE", "MXFP8_SR"))}),
        ["precision.define.a: wgrad: NVFP4_46_MAE chooses its scale after rounding", "allow_bias=true"],
    ),
    (PrecisionConfig(define={"mxfp8": PolicyConfig()}), ["precision.define.mxfp8", "preset has this name"]),
    (PrecisionConfig(define={"a": PolicyConfig("b")}), ["precision.define.a.base=b", "no such precision"]),
    (PrecisionConfig(define={"a": PolicyConfig("b"), "b": PolicyConfig("a")}), ["based on each other"]),
    (
        PrecisionConfig(define={"a": PolicyConfig(wgrad=ProductConfig("MXFP8", "MXFP8", 32))}),
        ["precision.define.a.wgrad: rotation=32", "16 or 128"],
    ),
    (
        PrecisionConfig(define={"a": PolicyConfig(wgrad=ProductConfig("NVFP4_EDEN", "NVFP4_EDEN", 16))}),
        ["precision.define.a.wgrad: NVFP4_EDEN", "rotation=128"],
    ),
    (
        PrecisionConfig(forward="nvfp4", dgrad="nvfp4", wgrad="mxfp8"),
        ["dgrad's policy quantises dequantised operands and wgrad's original", "precision.define"],
    ),
    (PrecisionConfig(switch=[PrecisionSwitch(0.1, forward="bf16")] * 9), ["9 entries", "at most 8"]),
]


@pytest.mark.parametrize(("config", "fragments"), MISTAKES, ids=[f[0] for _, f in MISTAKES])
def test_mistakes(config: PrecisionConfig, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_switch_that_makes_a_conflict_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="alignment"):
        resolve(PrecisionConfig(forward="nvfp4", backward="nvfp4", switch=[PrecisionSwitch(0.5, wgrad="mxfp8")]))
    both = [PrecisionSwitch(0.5, wgrad="mxfp8"), PrecisionSwitch(0.5, dgrad="mxfp8")]
    assert len(resolve(PrecisionConfig(forward="nvfp4", backward="nvfp4", switch=both)).phases()) == 2


# Switches -----------------------------------------------------------------------------------------------------


def test_switches_change_products_apart_and_later_ones_win() -> None:
    policy = resolve(
        PrecisionConfig(
            forward="nvfp4",
            backward="nvfp4",
            switch=[
                PrecisionSwitch(at=0.9, forward="bf16"),
                PrecisionSwitch(at_step=5, backward="bf16", wgrad="nvfp4"),
                PrecisionSwitch(at_decay=True, forward="mxfp8"),
            ],
        )
    )
    ours, bf16 = PRESETS["nvfp4"], PRESETS["bf16"]
    for active, expected in (
        ((False, False, False), (ours.fprop, ours.dgrad, ours.wgrad)),
        ((True, False, False), (bf16.fprop, ours.dgrad, ours.wgrad)),
        ((False, True, False), (ours.fprop, bf16.dgrad, ours.wgrad)),
        ((True, False, True), (PRESETS["mxfp8"].fprop, ours.dgrad, ours.wgrad)),
    ):
        found = policy.training(active).default
        assert (found.fprop, found.dgrad, found.wgrad) == expected
        assert found.alignment is Alignment.ALIGNED
    due = [[s.due(step, progress, falling) for s in policy.switches] for step, progress, falling in TIMES]
    assert due == [[False, False, False], [False, True, False], [False, True, True], [True, True, True]]
    assert [s.when for s in policy.switches] == [
        "at 90% of the run",
        "after step 5",
        "when the learning rate begins to fall",
    ]
    assert len(policy.phases()) == 6 and policy.phases()[0] == policy.training()
    assert policy.phases(active=(True, True, True)) == [policy.training((True, True, True))]
    assert policy.phases(Role.sampler) == [policy.sampler]


TIMES = [(4, 0.4, False), (5, 0.5, False), (8, 0.8, True), (9, 0.9, True)]
"""Step, progress, whether the learning rate falls."""


def test_the_default_runs() -> None:
    """On a CPU the last tenth in NVFP4, unless another precision is chosen; on a GPU all of it."""
    cpu = resolve(compose([]).precision)
    assert not cpu.training().default.quantised and cpu.training([True]).default == PRESETS["nvfp4"]
    assert [switch.at for switch in cpu.switches] == [0.9]
    assert not resolve(compose(["precision=auto"]).precision).switches
    gpu = resolve(compose(["preset=gpu"]).precision)
    assert gpu.training().default == PRESETS["nvfp4"] and not gpu.switches


def test_the_policy_as_plain_values_tells_precisions_apart() -> None:
    def plain(*overrides: str) -> dict[str, Any]:
        return resolve(composed(*overrides).precision).as_dict()

    found = [plain(f"precision={name}") for name in PRESETS]
    found.append(plain("precision=nvfp4", "precision.sampler=bf16"))
    found.append(plain("precision=nvfp4", "precision.rules=[{match: '.*up', policy: bf16}]"))
    found.append(plain("precision=nvfp4", "precision.switch=[{at: 0.5, forward: bf16}]"))
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
    assert plain("precision=nvfp4") == plain("precision=auto", "precision.forward=nvfp4", "precision.backward=nvfp4")


def test_rules_in_another_order_and_switches_of_one_time_are_told_apart() -> None:
    """Removing one of two switches of the same time, or exchanging two rules, is another precision."""
    mine = "+precision.define.mine={base: %s}"

    def plain(*overrides: str) -> dict[str, Any]:
        return resolve(composed("precision=nvfp4", *overrides).precision).as_dict()

    first, second = "{at: 0.5, forward: bf16}", "{at: 0.5, backward: bf16}"
    rules = ["{match: '.*up', policy: bf16}", "{match: '.*', policy: mxfp8}"]
    found = [plain(f"precision.switch=[{text}]") for text in (first, second, f"{first},{second}", f"{second},{first}")]
    found += [plain(f"precision.rules=[{','.join(order)}]") for order in (rules, rules[::-1], rules[:1])]
    found += [plain(mine % base, "precision.switch=[{at: 0.5, forward: mine}]") for base in ("bf16", "mxfp8")]
    found += [plain(), plain("precision.backend=emulated")]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
    assert all(json.loads(json.dumps(values)) == values for values in found), "a checkpoint gives the same back"


def test_what_differs_from_a_checkpoint() -> None:
    switch = "precision.switch=[{at: 0.5, forward: bf16}]"
    mine = resolve(composed("precision=nvfp4", switch).precision)
    assert mine.differences(json.loads(json.dumps(mine.as_dict()))) == {}
    other = resolve(composed("precision=nvfp4", switch, "precision.backend=te", "precision.dgrad=bf16").precision)
    eden = "NVFP4_POW2_EDEN x NVFP4_POW2_EDEN, rotation 128 fresh"
    assert other.differences(mine.as_dict()) == {"backend": ("auto", "te"), "training.dgrad": (eden, "BF16")}
    without = resolve(composed("precision=nvfp4").precision).as_dict()
    assert list(mine.differences(without)) == ["switch"]
    old = {key: mine.as_dict()[key] for key in ("training", "sampler", "trainer")}
    old |= {"rules": {}, "switch": {"at 50% of the run": "forward bf16"}}
    assert mine.differences(old) == {}
    assert list(other.differences(old)) == ["training.dgrad"]
