"""The sampler's precision: which are refused, and that it computes what the trainer computes."""

import dataclasses

import pytest
import torch
from sampler_oracle import logprobs_of, model_of

from lowbit.configs.schema import MoeConfig, PolicyConfig, PrecisionConfig, PrecisionRule, ProductConfig, SignsKind
from lowbit.errors import ConfigError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.precision import shadow
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy, candidates
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.linear_products import weight_factors
from lowbit.quant.presets import PRESETS
from lowbit.quant.resolve import Role, resolve

SPANNING = ["fp8_tensor", "nvfp4_nvidia", "nvfp4_quartet2"]
"""By the formats' definitions: one scale for the whole activation tensor."""
REQUESTS = [Request(tuple(range(1, 15)), 0, 20, 3), Request((6,), 1, 30, 2), Request((9, 8, 7), 2, 25, 2)]


def _trainer(model: Transformer, precision: PrecisionConfig) -> Transformer:
    """The same weights in the RL trainer's stage."""
    made = shadow(model, None, own=True)
    apply_policy(made, resolve(precision), seed=0, role=Role.trainer)
    return made


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    """Refused where activations are scaled across the batch; else the log-probabilities of the trainer's forward."""
    model = model_of(width=64, mlp_width=96)
    precision = PrecisionConfig(sampler=name)
    if name in SPANNING:
        with pytest.raises(ConfigError, match=r"precision\.sampler: a scale of .* spans the batch"):
            EmbeddedSampler(model, None, resolve(precision))
        return
    engine = EmbeddedSampler(model, None, resolve(precision), slots=3, block=4)
    trainer = _trainer(model, precision)
    _agree(engine, trainer, exactly=name == "bf16")
    sample = engine.sample([REQUESTS[1]], SamplingConfig(0.9), seed=1)[0][0]
    apart = torch.tensor(sample.logprobs) - logprobs_of(model, REQUESTS[1], sample, SamplingConfig(0.9))
    assert (float(apart.abs().max()) > 1e-3) == (name != "bf16"), "it is quantised"


def _agree(engine: EmbeddedSampler, trainer: Transformer, exactly: bool) -> None:
    """Log-probabilities less than 2e-5 apart.

    A quantiser is a staircase: sums that differ in their last bit, of one token and of many, now and then fall on two
    sides of a step. Where activations are rounded, to BF16 at least, that happens to some tokens; most must agree.
    """
    apart = []
    for request, group in zip(REQUESTS, engine.sample(REQUESTS, SamplingConfig(0.9), seed=1), strict=True):
        for sample in group:
            apart.append(torch.tensor(sample.logprobs) - logprobs_of(trainer, request, sample, SamplingConfig(0.9)))
    d = torch.cat(apart)
    if exactly:
        assert d.abs().max() < 2e-5
    else:
        assert (d.abs() < 2e-5).float().mean() > 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in (*SPANNING, "bf16")])
def test_the_weights_are_those_of_the_trainer_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = model_of(dtype, width=64, mlp_width=96)
    engine = EmbeddedSampler(model, None, resolve(PrecisionConfig(sampler=name)))
    trainer = candidates(_trainer(model, PrecisionConfig(sampler=name)))
    for layer_name, layer in candidates(engine.model).items():
        assert isinstance(layer, LowbitLinear) and layer.frozen is not None
        theirs = trainer[layer_name]
        assert isinstance(theirs, LowbitLinear)
        [factor] = weight_factors([theirs.weight], [theirs.key], [None], theirs.clock, theirs.policy, dtype)
        assert torch.equal(layer.frozen, factor.operand().to(dtype))
        after = factor.after()
        assert (after is None) == (layer.frozen_scale is None)
        assert after is None or (layer.frozen_scale is not None and torch.equal(layer.frozen_scale, after))


def _described(**changes: object) -> PrecisionConfig:
    product = ProductConfig(**{"left": "NVFP4_POW2", "right": "NVFP4_POW2"} | changes)  # type: ignore[arg-type]
    return PrecisionConfig(sampler="mine", define={"mine": PolicyConfig(fprop=product)})


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (_described(left="NVFP4_2D"), "NVFP4_2D activations spans the batch"),
        (_described(left="FP8_BLOCK_2D"), "FP8_BLOCK_2D activations spans the batch"),
        (_described(left="NVFP4_POW2_SR"), "NVFP4_POW2_SR rounds at random"),
        (_described(right="NVFP4_POW2_SR"), "NVFP4_POW2_SR rounds at random"),
        (_described(rotation=16), "rotation of 16 is drawn anew for every micro-batch"),
        (
            PrecisionConfig(sampler="mine", define={"mine": PolicyConfig(base="nvfp4", mean_split=True)}),
            "mean over tokens spans the batch",
        ),
        (
            PrecisionConfig(sampler="nvfp4", rules=[PrecisionRule(match=r"blocks\.0\..*", policy="fp8_tensor")]),
            r"precision\.rules\.0: a scale of FP8_TENSOR",
        ),
    ],
)
def test_what_depends_on_batch_mates_or_chance_is_refused(precision: PrecisionConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EmbeddedSampler(model_of(), None, resolve(precision))


def test_fixed_signs_and_row_scales_are_taken() -> None:
    for precision in (_described(rotation=16, signs=SignsKind.fixed), _described(left="NVFP4_ROW", right="NVFP4_2D")):
        EmbeddedSampler(model_of(), None, resolve(precision)).sample(REQUESTS, SamplingConfig(), seed=1)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_row"])
def test_experts(name: str) -> None:
    model = model_of(moe=MoeConfig(experts=4, expert_width=16))
    precision = PrecisionConfig(sampler=name)
    trainer = _trainer(model, precision)
    engine = EmbeddedSampler(model, None, resolve(precision), slots=3)
    _agree(engine, trainer, exactly=False)


def test_a_low_bit_model_gets_another_precision_in_its_sampler() -> None:
    model = model_of()
    base = dataclasses.asdict(model.config)
    trained = _trainer(model, PrecisionConfig(sampler="nvfp4"))
    engine = EmbeddedSampler(trained, None, resolve(PrecisionConfig(sampler="bf16")), slots=4)
    expected = EmbeddedSampler(model, None, slots=4).sample(REQUESTS, SamplingConfig(), seed=1)
    assert engine.sample(REQUESTS, SamplingConfig(), seed=1) == expected
    same = EmbeddedSampler(trained, None, slots=4).sample(REQUESTS, SamplingConfig(), seed=1)
    low = EmbeddedSampler(model, None, resolve(PrecisionConfig(sampler="nvfp4")), slots=4)
    assert low.sample(REQUESTS, SamplingConfig(), seed=1) == same != expected
    assert dataclasses.asdict(trained.config) == base


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int8", "fp8_row"])
def test_batch_mates_do_not_matter_bit_for_bit(name: str) -> None:
    policy = resolve(PrecisionConfig(sampler=name))
    engine = EmbeddedSampler(model_of(), None, policy, slots=16, block=8, deterministic=True)
    together = engine.sample(REQUESTS, SamplingConfig(), seed=1)
    for request, group in zip(REQUESTS, together, strict=True):
        assert engine.sample([request], SamplingConfig(), seed=1) == [group]
    assert engine.sample(REQUESTS[::-1], SamplingConfig(), seed=1) == together[::-1]
