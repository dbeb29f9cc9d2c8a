"""What every sampler owes its callers, whichever engine it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sampler_oracle import VOCAB, logprobs_of, model_of

from lowbit.errors import ConfigError, DataError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request, Sampler
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.hf.save import save_model
from lowbit.models.layers import weights_and_state
from lowbit.models.transformer import Transformer

EOT = 0
WIDE: dict[str, object] = {"width": 128, "heads": 2, "kv_heads": 1, "mlp_width": 256, "qk_norm": True, "init_std": 0.1}


def _model(seed: int = 4) -> Transformer:
    return model_of(seed=seed, **WIDE)


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sampler]:
    if request.param == "embedded":
        yield EmbeddedSampler(_model(), EOT, slots=5)
        return
    pytest.importorskip("vllm", reason="vLLM is not installed: its side of the contract is not run")
    from lowbit.infer.vllm import VllmSampler

    model = _model()
    save_model(tmp_path / "hf", model.config, weights_and_state(model), VOCAB, eos_id=EOT)
    yield VllmSampler(tmp_path / "hf", model.config, VOCAB, EOT, gpu_memory_utilization=0.2, enforce_eager=True)


def _tolerance(engine: Sampler) -> float:
    return 2e-5 if isinstance(engine, EmbeddedSampler) else 0.1  # BF16 weights and products


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(0.6), SamplingConfig(1.2, top_k=9, top_p=0.9)], ids=str
)
def test_logprobs_are_of_the_sampling_distribution(engine: Sampler, sampling: SamplingConfig) -> None:
    requests = [Request((1, 2, 3), 0, 12, 4), Request((9,), 1, 20, 2)]
    got = engine.sample(requests, sampling, seed=1)
    assert [len(group) for group in got] == [4, 2]
    for request, group in zip(requests, got, strict=True):
        for sample in group:
            assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions)
            assert 1 <= len(sample.tokens) <= request.max_new_tokens
            expected = logprobs_of(_model(), request, sample, sampling)
            near = (torch.tensor(sample.logprobs) - expected).abs()
            assert float(near.nan_to_num(posinf=0.0).quantile(0.9)) < _tolerance(engine)


def test_ends(engine: Sampler) -> None:
    """Every stop id ends a completion and is its last token, and only there; else it has its full length."""
    stops = {EOT, 11, 12, 13, 14}
    samples = [
        s
        for group in engine.sample(
            [Request((5, 6), i, 15, 8) for i in range(3)], SamplingConfig(), seed=2, stop_ids=[*stops - {EOT}]
        )
        for s in group
    ]
    for sample in samples:
        assert not stops & set(sample.tokens[:-1])
        assert sample.finish_reason == ("stop" if sample.tokens[-1] in stops else "length")
        assert sample.finish_reason == "stop" or len(sample.tokens) == 15
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    [[one]] = engine.sample([Request((5, 6), 0, 1)], SamplingConfig(), seed=2)
    assert len(one.tokens) == 1


def test_noise(engine: Sampler) -> None:
    """The same for the same keys; of its own for each sample, prompt and seed; nothing to do with batch mates."""
    request = Request((1, 2, 3), 7, 12, 4)
    [group] = engine.sample([request], SamplingConfig(), seed=1)
    assert [s.tokens for s in engine.sample([Request((4,), 1, 5), request], SamplingConfig(), seed=1)[1]] == [
        s.tokens for s in group
    ]
    assert len({tuple(s.tokens) for s in group}) == 4
    [[third]] = engine.sample([Request((1, 2, 3), 7, 12, 1, 2)], SamplingConfig(), seed=1)
    assert third.tokens == group[2].tokens
    for other, seed in ((Request((1, 2, 3), 8, 12, 4), 1), (request, 2)):
        assert [s.tokens for s in engine.sample([other], SamplingConfig(), seed=seed)[0]] != [s.tokens for s in group]


def test_greedy(engine: Sampler) -> None:
    [[a, b]] = engine.sample([Request((1, 2, 3), 7, 12, 2)], SamplingConfig(0.0), seed=1)
    assert a.tokens == b.tokens


def test_new_weights(engine: Sampler) -> None:
    request, new = Request(tuple(range(1, 30)), 7, 12, 2), _model(seed=8)
    [before] = engine.sample([request], SamplingConfig(), seed=1)
    report = engine.update(weights_and_state(new).items(), 3)
    assert engine.version == report.version == 3 and report.tensors == len(weights_and_state(new))
    [after] = engine.sample([request], SamplingConfig(), seed=1)
    assert all(sample.versions == [3] * len(sample.tokens) for sample in after)
    assert [s.tokens for s in after] != [s.tokens for s in before]
    near = (torch.tensor(after[0].logprobs) - logprobs_of(new, request, after[0], SamplingConfig())).abs()
    assert float(near.quantile(0.9)) < _tolerance(engine), "no key of the old weights is left"


def test_mistakes(engine: Sampler) -> None:
    for request, kind, text in (
        (Request((), 0, 3), DataError, "prompt 0 is empty"),
        (Request((1, VOCAB), 0, 3), DataError, f"id {VOCAB} at position 1"),
        (Request((1,), 0, 0), ConfigError, "max_new_tokens=0"),
        (Request((1,) * 40, 0, 9), ConfigError, r"exceed model\.max_sequence=48"),
    ):
        with pytest.raises(kind, match=text):
            engine.sample([request], SamplingConfig(), seed=1)
    assert engine.sample([], SamplingConfig(), seed=1) == []
