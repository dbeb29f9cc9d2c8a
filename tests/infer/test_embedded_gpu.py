"""The engine on a GPU: captured steps, kernels, and the numbers of the CPU's rules."""

import random

import pytest
import torch
from sampler_oracle import LAYOUTS, VOCAB, logprobs_of, model_of, recomputed

from lowbit.configs.schema import MoeConfig, PrecisionConfig
from lowbit.infer import kernels
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.kv_codec import KvFormat
from lowbit.infer.requests import Request, Sample
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.layers import weights_and_state
from lowbit.models.transformer import Transformer
from lowbit.quant.resolve import resolve

pytestmark = pytest.mark.gpu
WIDE: dict[str, object] = {"width": 128, "heads": 4, "kv_heads": 2, "mlp_width": 256, "max_sequence": 192}
SAMPLINGS = [SamplingConfig(0.0), SamplingConfig(), SamplingConfig(0.7, top_k=5), SamplingConfig(1.3, top_p=0.8)]


def _model(dtype: torch.dtype, seed: int = 4, **changes: object) -> Transformer:
    return model_of(dtype, seed, **(WIDE | {"init_std": 0.1} | changes)).cuda()


def _requests(count: int = 12) -> list[Request]:
    pick = random.Random(1)
    begin = tuple(pick.randrange(VOCAB) for _ in range(70))
    prompts = [
        begin[: pick.choice([0, 10, 64, 70])] + tuple(pick.randrange(VOCAB) for _ in range(pick.randrange(1, 40)))
        for _ in range(count)
    ]
    return [Request(p, key, pick.randrange(1, 80), pick.randrange(1, 5)) for key, p in enumerate(prompts)]


def _apart(
    model: Transformer, requests: list[Request], got: list[list[Sample]], sampling: SamplingConfig
) -> torch.Tensor:
    """Differences of log-probabilities to one forward over everything."""
    return torch.cat(
        [
            torch.tensor(sample.logprobs) - logprobs_of(model, request, sample, sampling)
            for request, group in zip(requests, got, strict=True)
            for sample in group
        ]
    )


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_samples_are_those_of_recomputation(sampling: SamplingConfig, graphs: bool) -> None:
    model = _model(torch.float32)
    requests = [Request((5, 9, 1), 0, 20, 3), Request((7,), 1, 30, 2), Request(tuple(range(50)), 2, 9, 2)]
    engine = EmbeddedSampler(model, 0, slots=4, block=16, graphs=graphs)
    got = engine.sample(requests, sampling, seed=3, stop_ids=[1])
    for request, group in zip(requests, got, strict=True):
        for number, sample in enumerate(group):
            expected = recomputed(model, request, number, sampling, 3, {0, 1})
            assert (sample.tokens, sample.finish_reason) == (expected.tokens, expected.finish_reason)
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_in_bf16(layout: str) -> None:
    """The target: k3 below 5e-4 between the sampler and a forward over everything."""
    changes = {"moe": MoeConfig(experts=4, expert_width=64)} if layout == "experts" else dict(LAYOUTS[layout])
    model = _model(torch.bfloat16, **changes)
    requests = _requests()
    d = _apart(
        model,
        requests,
        EmbeddedSampler(model, None, slots=9).sample(requests, SamplingConfig(), seed=1),
        SamplingConfig(),
    )
    assert (d.exp() - 1 - d).mean() < 5e-4


@pytest.mark.parametrize("kv", [KvFormat.int8, KvFormat.fp8])
def test_few_bits_of_keys_and_values(kv: KvFormat) -> None:
    model, requests = _model(torch.bfloat16), _requests()
    engine = EmbeddedSampler(model, None, slots=9, kv=kv)
    d = _apart(model, requests, engine.sample(requests, SamplingConfig(), seed=1), SamplingConfig())
    assert d.square().mean().sqrt() < (0.05 if kv is KvFormat.int8 else 0.2)


@pytest.mark.parametrize("precision", [None, "nvfp4", "nvfp4_w4a16", "fp8_row"])
def test_captured_steps_go_on_with_new_weights(precision: str | None) -> None:
    """Nothing is captured again, and the samples are those of an engine built with the new weights."""
    policy = None if precision is None else resolve(PrecisionConfig(sampler=precision))
    old, new = _model(torch.bfloat16), _model(torch.bfloat16, seed=9)
    requests = _requests()
    engine = EmbeddedSampler(old, None, policy, slots=8)
    first = engine.sample(requests, SamplingConfig(), seed=1)
    graphs = [id(captured.graph) for captured in engine._steps._captured.values()]
    assert graphs, "steps were captured"
    engine.update(weights_and_state(new).items(), 1)
    second = engine.sample(requests, SamplingConfig(), seed=1)
    assert [id(captured.graph) for captured in engine._steps._captured.values()] == graphs
    fresh = EmbeddedSampler(new, None, policy, slots=8).sample(requests, SamplingConfig(), seed=1)
    assert [s.tokens for g in second for s in g] == [s.tokens for g in fresh for s in g]
    assert second != first


def test_captured_steps_are_those_as_written() -> None:
    model, requests = _model(torch.bfloat16), _requests()
    ours, plain = (
        EmbeddedSampler(model, 3, slots=7, deterministic=True, graphs=graphs).sample(requests, SamplingConfig(), seed=2)
        for graphs in (True, False)
    )
    assert ours == plain


@pytest.mark.parametrize("precision", [None, "nvfp4_w4a16"])
def test_chained_kernels_give_the_same(precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for what it reads, whichever kernels stand between."""
    from lowbit.infer.kernels import chain

    policy = None if precision is None else resolve(PrecisionConfig(sampler=precision))
    model, requests, found = _model(torch.bfloat16), _requests(), []
    for wanted in (False, True):
        monkeypatch.setattr(kernels, "chaining", lambda _, w=wanted: chain.chaining(w))
        engine = EmbeddedSampler(model, 3, policy, slots=7, deterministic=True)
        found += [engine.sample(requests, SamplingConfig(), seed=2) for _ in range(3)]
    assert all(samples == found[0] for samples in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", [None, "nvfp4", "nvfp4_w4a16"])
def test_deterministic_results_are_the_same_bit_for_bit(precision: str | None, dtype: torch.dtype) -> None:
    policy = None if precision is None else resolve(PrecisionConfig(sampler=precision))
    model, requests, pick = _model(dtype), _requests(), random.Random(2)
    engine = EmbeddedSampler(model, 3, policy, slots=16, deterministic=True)
    first = dict(zip([r.key for r in requests], engine.sample(requests, SamplingConfig(), seed=5), strict=True))
    for _ in range(4):
        some = pick.sample(requests, pick.randrange(1, len(requests)))
        for request, group in zip(some, engine.sample(some, SamplingConfig(), seed=5), strict=True):
            assert group == first[request.key]


def test_a_step_does_not_wait_for_the_device() -> None:
    """Between launches the host waits for events alone, one step behind."""
    model, requests = _model(torch.bfloat16), _requests(6)
    engine = EmbeddedSampler(model, None, slots=8)
    engine.sample(requests, SamplingConfig(), seed=1)
    engine.sample(requests, SamplingConfig(), seed=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = engine._state
        state.lines.zero_()
        engine._steps.run(1, state.table, SamplingConfig())
    finally:
        torch.cuda.set_sync_debug_mode("default")
