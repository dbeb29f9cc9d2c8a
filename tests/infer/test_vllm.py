"""What is sent to vLLM and how its answers are read, with a stand-in that has the fields of its source.

vLLM itself is run by test_contract.py, where it is installed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sampler_oracle import VOCAB, model_of

from lowbit.errors import ConfigError, WeightsError
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.vllm import VllmSampler
from lowbit.models.layers import weights_and_state


class Worker(torch.nn.Module):
    """Merges q, k and v, as vLLM does, and can drop a tensor in silence."""

    def __init__(self, dropped: str | None) -> None:
        super().__init__()
        self.dropped = dropped

    def load_weights(self, weights: Any) -> None:
        kept = {name.replace(".", "_"): tensor for name, tensor in weights if name != self.dropped}
        merged = torch.cat([tensor for name, tensor in kept.items() if "_proj" in name and tensor.shape[1] == 32])
        rest = {name: tensor for name, tensor in kept.items() if not ("_proj" in name and tensor.shape[1] == 32)}
        for name, tensor in {"merged": merged, **rest}.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))


class Llm:
    dropped: str | None = None

    def __init__(self, folder: str, **settings: Any) -> None:
        self.settings, self.resets, self.asked = settings, 0, []

    def generate(self, prompts: list[dict[str, list[int]]], params: list[dict[str, Any]], use_tqdm: bool) -> list[Any]:
        self.asked = [prompts, params]
        logprob = SimpleNamespace(logprob=-0.5)
        outputs = []
        for param in params:
            ends = param["max_tokens"] > 2
            tokens = [9, 8, param["stop_token_ids"][-1]] if ends else [9, 8]
            found = [{token: logprob, 77: logprob} for token in tokens]
            reason = "stop" if ends else "length"
            outputs.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=found, finish_reason=reason)])
            )
        return outputs

    def apply_model(self, function: Callable[[Any], float]) -> list[float]:
        return [function(Worker(self.dropped))]

    def reset_prefix_cache(self) -> None:
        self.resets += 1


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> VllmSampler:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Llm, SamplingParams=lambda **fields: fields))
    return VllmSampler(Path("hf"), model_of().config, VOCAB, 3)


def test_requests_and_answers(sampler: VllmSampler) -> None:
    requests = [Request((1, 2), 5, 7, 2, 4), Request((6,), 6, 2)]
    got = sampler.sample(requests, SamplingConfig(0.5, top_k=4), seed=9, stop_ids=[10])
    prompts, params = sampler._engine.asked
    assert prompts == [{"prompt_token_ids": [1, 2]}] * 2 + [{"prompt_token_ids": [6]}]
    assert [p["max_tokens"] for p in params] == [7, 7, 2] and len({p["seed"] for p in params}) == 3
    assert all(p["stop_token_ids"] == [3, 10] and p["ignore_eos"] and p["logprobs"] == 0 for p in params)
    assert all((p["temperature"], p["top_k"], p["top_p"]) == (0.5, 4, 1.0) for p in params)
    assert [[(s.tokens, s.logprobs, s.finish_reason) for s in group] for group in got] == [
        [([9, 8, 10], [-0.5] * 3, "stop")] * 2,
        [([9, 8], [-0.5] * 2, "length")],
    ]
    assert sampler._engine.settings["logprobs_mode"] == "processed_logprobs"
    sampler.sample([requests[0]], SamplingConfig(), seed=9)
    assert [p["seed"] for p in sampler._engine.asked[1]] == [p["seed"] for p in params[:2]]
    assert sampler._engine.asked[1][0]["top_k"] == 0, "vLLM's word for all tokens"


def test_updates(sampler: VllmSampler) -> None:
    model = model_of(seed=9)
    report = sampler.update(weights_and_state(model).items(), 2)
    assert (sampler.version, report.tensors, sampler._engine.resets) == (2, 36, 1)
    sampler._engine.dropped = "model.layers.1.self_attn.k_norm.weight"
    with pytest.raises(WeightsError, match=r"36 tensors were sent with sum \|w\|"):
        sampler.update(weights_and_state(model).items(), 3)


def test_it_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="not installed: pip install"):
        VllmSampler(Path("hf"), model_of().config, VOCAB, 3)
