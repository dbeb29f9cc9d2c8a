"""Policies meet a model: who is exchanged, whose rule wins, what cannot work, and that time moves for all layers."""

from typing import Any

import pytest
import torch

from lowbit.configs.schema import ModelConfig, PolicyConfig, PrecisionConfig, PrecisionRule, PrecisionSwitch
from lowbit.errors import ConfigError
from lowbit.models.layers import Linear
from lowbit.models.transformer import Transformer
from lowbit.quant import apply
from lowbit.quant.apply import apply_policy, candidates, clocks, high_precision, lowbit_layers, set_clock, set_stage
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.report import PolicyReport, collapse
from lowbit.quant.resolve import Role, resolve

SMALL = ModelConfig(layers=4, width=32, heads=2, kv_heads=1, mlp_width=48, max_sequence=64)


def transformer(config: ModelConfig = SMALL) -> Transformer:
    model = Transformer(config, 60)
    model.init_weights(1)
    return model


def applied(model: Transformer, seed: int = 1, role: Role = Role.training, **settings: Any) -> PolicyReport:
    return apply_policy(model, resolve(PrecisionConfig(**settings)), seed=seed, dtype="fp32", role=role)


def policies(model: Transformer) -> dict[str, LinearPolicy]:
    """What each linear layer of the blocks computes in."""
    return {n: m.policy if isinstance(m, LowbitLinear) else LinearPolicy() for n, m in candidates(model).items()}


def test_the_exchange_keeps_parameters_and_names() -> None:
    model = transformer()
    before = dict(model.named_parameters())
    state = list(model.state_dict())
    report = applied(model, forward="nvfp4", backward="nvfp4")
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == state, "keys and clock are no state"
    assert len(lowbit_layers(model)) == 4 * 7 and set(policies(model).values()) == {PRESETS["nvfp4"]}
    assert type(model.head) is Linear and report.rows[0].count == 28


def test_nothing_quantised_changes_nothing() -> None:
    model = transformer()
    applied(model)
    assert not lowbit_layers(model) and not clocks(model)


def test_keys_are_the_seeds_and_the_names_and_the_clock_is_one() -> None:
    model = transformer()
    applied(model, seed=7, forward="nvfp4")
    keys = {name: tuple(layer.key.tolist()) for name, layer in lowbit_layers(model).items()}
    assert len(set(keys.values())) == 28
    assert keys["blocks.1.mlp.up"] == tuple(make_key(7, "blocks.1.mlp.up").tolist())
    [clock] = clocks(model)
    set_clock(clock, 5, 3, 2)
    assert all(layer.clock.tolist() == [5, 3, 2] for layer in lowbit_layers(model).values())
    huge = transformer()
    applied(huge, seed=2**63 - 1, forward="nvfp4")
    assert lowbit_layers(huge)["blocks.0.mlp.up"].key[0] != keys["blocks.0.mlp.up"][0]


def test_the_first_rule_that_matches_decides() -> None:
    model = transformer()
    rules = [
        PrecisionRule(r"blocks\.0\..*", "bf16"),
        PrecisionRule(r".*\.mlp\.(up|gate)", "mxfp8"),
        PrecisionRule(r"blocks\.[01]\..*", "fp8_row"),
    ]
    applied(model, forward="nvfp4", backward="nvfp4", rules=rules)
    found = policies(model)
    expected = {
        "blocks.0.mlp.up": "bf16",
        "blocks.1.mlp.up": "mxfp8",
        "blocks.1.mlp.down": "fp8_row",
        "blocks.2.mlp.down": "nvfp4",
        "blocks.3.mlp.gate": "mxfp8",
    }
    assert {name: found[name] for name in expected} == {name: PRESETS[p] for name, p in expected.items()}
    assert type(candidates(model)["blocks.0.mlp.up"]) is Linear


@pytest.mark.parametrize(("share", "blocks"), [(0.15, [3]), (0.5, [2, 3]), (1.0, [0, 1, 2, 3])])
def test_the_last_share_of_the_blocks(share: float, blocks: list[int]) -> None:
    model = transformer()
    applied(model, forward="nvfp4", rules=[PrecisionRule(".*up", "bf16", last_blocks=share)])
    assert [i for i in range(4) if not policies(model)[f"blocks.{i}.mlp.up"].quantised] == blocks


RULES = [  # what is wrong with the last rule
    ([PrecisionRule("blocks.*mlp.upp", "bf16")], "rules.0.match=blocks.*mlp.upp: matches no linear layer"),
    ([PrecisionRule("mlp.up", "bf16")], "rules.0.match=mlp.up: matches no linear layer"),
    ([PrecisionRule("head", "mxfp8")], "LM head always stay in high precision"),
    ([PrecisionRule("embedding", "mxfp8")], "matches no linear layer"),
    (
        [PrecisionRule(".*", "bf16"), PrecisionRule(".*up", "mxfp8")],
        r"earlier rules decide all of blocks.{0..3}.mlp.up",
    ),
    ([PrecisionRule(".*up", "bf16", last_blocks=0.1)], "matches no linear layer"),
]


@pytest.mark.parametrize(("rules", "message"), RULES, ids=[m for _, m in RULES])
def test_a_rule_that_decides_nothing_is_an_error_unless_optional(rules: list[PrecisionRule], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        applied(transformer(), rules=rules)
    assert message in str(caught.value)
    optional = [*rules[:-1], PrecisionRule(rules[-1].match, rules[-1].policy, rules[-1].last_blocks, optional=True)]
    applied(transformer(), rules=optional)


def test_a_shape_that_cannot_be_quantised_is_named() -> None:
    odd = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, mlp_width=45, max_sequence=64)
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.down: fprop sums over in_features=45"):
        applied(transformer(odd), forward="nvfp4")
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.(gate|up): dgrad sums over out_features=45"):
        applied(transformer(odd), backward="nvfp4")
    later = [PrecisionSwitch(at=0.5, forward="nvfp4")]
    with pytest.raises(ConfigError, match="45"):
        applied(transformer(odd), switch=later)
    applied(transformer(odd), forward="nvfp4", backward="nvfp4", rules=[PrecisionRule(".*mlp.*", "bf16")])


def test_names_that_hash_alike_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "layer_word", lambda name: len(name))
    with pytest.raises(ConfigError, match=r"blocks\.0\.attention\.q and blocks\.0\.attention\.k have the same"):
        applied(transformer(), forward="nvfp4")


def test_a_model_is_exchanged_once() -> None:
    model = transformer()
    applied(model, forward="nvfp4")
    with pytest.raises(ConfigError, match="has a policy already"):
        applied(model, forward="nvfp4")


def test_roles_in_reinforcement_learning() -> None:
    rules = [PrecisionRule(r"blocks\.0\..*", "mxfp8")]
    for role, default, special in (
        (Role.training, PRESETS["nvfp4"], PRESETS["mxfp8"]),
        (Role.sampler, LinearPolicy(PRESETS["nvfp4"].fprop), LinearPolicy(PRESETS["mxfp8"].fprop)),
        (Role.trainer, LinearPolicy(PRESETS["nvfp4"].fprop), LinearPolicy(PRESETS["mxfp8"].fprop)),
    ):
        model = transformer()
        applied(model, role=role, forward="nvfp4", backward="nvfp4", rules=rules)
        found = policies(model)
        assert found["blocks.0.mlp.up"] == special and found["blocks.1.mlp.up"] == default


def test_a_layer_that_is_quantised_later_is_exchanged_at_once_and_computes_as_before() -> None:
    plain, model = transformer(), transformer()
    switch = [PrecisionSwitch(at=0.5, forward="nvfp4", backward="nvfp4")]
    policy = resolve(PrecisionConfig(switch=switch))
    apply_policy(model, policy, seed=1)
    assert len(lowbit_layers(model)) == 28
    tokens = torch.randint(0, 60, (2, 16))
    assert torch.equal(model(tokens), plain(tokens))
    set_stage(model, policy.training([True]))
    assert not torch.equal(model(tokens), plain(tokens))
    with high_precision(model):
        assert torch.equal(model(tokens), plain(tokens))
    assert set(policies(model).values()) == {PRESETS["nvfp4"]}
    with pytest.raises(ConfigError, match=r"was not among the run's phases.*precision\.switch"):
        set_stage(plain, policy.training([True]))


@pytest.mark.parametrize("name", [name for name, p in PRESETS.items() if p.quantised])
def test_every_recipe_gives_a_gradient_near_the_exact_one(name: str) -> None:
    """Eight bits within a few percent, four within the noise of four bits; siblings and alignment included."""
    tokens = torch.randint(0, 60, (2, 24))

    def gradient(model: Transformer) -> torch.Tensor:
        model(tokens).float().square().sum().backward()
        return torch.cat([m.weight.grad.flatten() for m in candidates(model).values() if m.weight.grad is not None])

    exact, model = gradient(transformer()), transformer()
    applied(model, define={"x": PolicyConfig(name)}, forward="x", backward="x")
    found = gradient(model)
    cosine = torch.nn.functional.cosine_similarity(exact, found, dim=0)
    assert torch.isfinite(found).all() and 0.9 < found.norm() / exact.norm() < 1.1
    assert cosine > (0.9 if "nvfp4" in name else 0.995)
    assert not torch.equal(exact, found)


def test_what_the_layers_are() -> None:
    assert collapse(candidates(transformer())) == "blocks.{0..3}.{attention.{q,k,v,out},mlp.{gate,up,down}}"
