"""Any number as a setting of the model: a model whose loss and gradients are numbers, or one line that names it."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from lowbit.configs.checks import value_of
from lowbit.configs.schema import ModelConfig, MoeConfig, RopeScaling, RunConfig
from lowbit.configs.strict import locate, unwrap_optional
from lowbit.configs.validate_model import MODEL_RANGES
from lowbit.errors import ConfigError
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.transformer import Transformer

SMALL = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64)
BASES = {
    "dense": SMALL,
    "experts": dataclasses.replace(
        SMALL, moe=MoeConfig(experts=4, expert_width=16, shared=1, bias_rate=1e-3, capacity=1.0)
    ),
    **{kind: dataclasses.replace(SMALL, rope=dataclasses.replace(SMALL.rope, scaling=kind, factor=2.0)) for kind in
       (RopeScaling.linear, RopeScaling.ntk, RopeScaling.llama3, RopeScaling.yarn)},
}  # fmt: skip


def _changed(config: Any, key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    return dataclasses.replace(config, **{first: _changed(getattr(config, first), rest, value) if rest else value})


def _trains(config: ModelConfig) -> None:
    model = Transformer(config, 50)
    model.init_weights(0)
    tokens = torch.randint(0, 50, (2, 17))
    hidden = model(tokens).flatten(0, 1)
    head = lm_head_loss(
        hidden, model.head_weight, tokens.flatten(), torch.ones(34), vocab_size=50, softcap=config.logit_softcap
    )
    auxiliary = model.take_auxiliary()
    loss = head.loss_sum if auxiliary is None else head.loss_sum + 34 * auxiliary
    loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(loss.detach()))
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def _sections(key: str) -> list[str]:
    """The models in which a setting does something."""
    if ".moe." in key:
        return ["experts"]
    return list(BASES) if ".rope." in key else ["dense", "experts"]


NUMBERS = [key for key in MODEL_RANGES if unwrap_optional(locate(key))[0] is float]


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_at_the_ends_of_their_ranges_and_beyond(key: str) -> None:
    ends = MODEL_RANGES[key]
    beyond = [math.inf, -math.inf, math.nan, ends.low - 1]
    ends_and_more = [ends.low, ends.low + 1e-300, ends.low + 1e-30, ends.low + 1e-9, ends.low + 1, 1e12, 1e30, 1e300]
    for name in _sections(key):
        for value in [*ends_and_more, *([ends.high] if ends.high < math.inf else [])]:
            config = _changed(RunConfig(model=BASES[name]), key, value).model
            try:
                _trains(config)
            except ConfigError as error:
                assert key in str(error) and "\n" not in str(error)
        for value in beyond:
            with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
                Transformer(_changed(RunConfig(model=BASES[name]), key, value).model, 50)


@pytest.mark.parametrize("key", [key for key in MODEL_RANGES if key not in NUMBERS])
def test_counts_of_any_size(key: str) -> None:
    """Nothing is begun that would not end, and no size overflows on its way into a shape."""
    for name in _sections(key):
        base = RunConfig(model=BASES[name])
        for value in (0, -1, 10**30, 10**400):
            config = _changed(base, key, value).model
            if value == 0 and MODEL_RANGES[key].holds(0):
                _trains(config)
                continue
            with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
                Transformer(config, 50)
        for value in (1, 3):
            config = _changed(base, key, value).model
            try:
                _trains(config)
            except ConfigError as error:
                assert key in str(error) or "a sequence of 17 tokens" in str(error), error
            assert value_of(RunConfig(model=config), key) == value


@pytest.mark.parametrize("window", [-1, 2**31, 10**30, 10**400])
def test_windows_are_positions(window: int) -> None:
    _trains(dataclasses.replace(SMALL, windows=[2**31 - 1, 1]))
    with pytest.raises(ConfigError, match=r"model\.windows"):
        Transformer(dataclasses.replace(SMALL, windows=[4, window]), 50)


def test_the_largest_sizes_have_shapes() -> None:
    """All at once, in what a layer is made of: 64 bits hold the number of bytes."""
    for sizes in (
        ("model.moe.experts", "model.moe.expert_width", "model.width"),
        ("model.heads", "model.head_dim", "model.width"),
        ("model.vocab_rows", "model.width"),
        ("model.moe.shared", "model.moe.expert_width", "model.width"),
    ):
        assert 4 * math.prod(int(MODEL_RANGES[key].high) for key in sizes) < 2**63, sizes
