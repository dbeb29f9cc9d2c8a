"""Sampling against a reference in plain Python numbers, and its noise against statistics."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit.errors import ConfigError
from lowbit.infer.sampling import BLOCK, SamplingConfig, choose, draw, running_sum, sampling_logprobs, uniforms


def _reference(logits: list[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """Log-probabilities by sorting and summing Python floats."""
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[:top_k]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in kept}
    total, mass, support = sum(weights.values()), 0.0, []
    for i in kept:
        if support and mass >= top_p:
            break
        support.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in support)
    return [math.log(weights[i] / total) if i in support else float("-inf") for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35, 1e-6])
def test_distribution_is_the_references(temperature: float, top_k: int | None, top_p: float) -> None:
    logits = torch.randn(5, 40) * 2
    logits[0, 10:14] = logits[0].max() + 1.0  # ties at the top
    got = sampling_logprobs(logits, SamplingConfig(temperature, top_k, top_p))
    assert got.dtype == torch.float32
    expected = torch.tensor([_reference(row.tolist(), temperature, top_k, top_p) for row in logits])
    assert torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(5))


@pytest.mark.parametrize("vocab", [32_768, 151_936])
def test_large_vocabularies_cost_no_digits(vocab: int) -> None:
    logits = 4 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    expected = logits.double().log_softmax(-1)
    assert (sampling_logprobs(logits, SamplingConfig()).double() - expected).abs().max() < 5e-6


def test_low_temperatures_stay_finite() -> None:
    logits = torch.randn(3, 40) * 50
    got = sampling_logprobs(logits, SamplingConfig(1e-30))
    assert torch.equal(got.argmax(-1), logits.argmax(-1)) and not bool(got.isnan().any())
    noise = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert torch.equal(draw(got, noise), logits.argmax(-1))


def _noise(count: int, seed: int = 1) -> torch.Tensor:
    return uniforms(seed, torch.tensor(2), torch.tensor(3), torch.arange(count))


@pytest.mark.parametrize("vocab", [4, BLOCK, 3 * BLOCK + 17])
def test_draws_follow_the_distribution(vocab: int) -> None:
    """Chi-square over the likely tokens, wherever they lie among the blocks."""
    n = 40_000
    logprobs = (3 * torch.randn(vocab)).log_softmax(-1)
    logprobs[1] = float("-inf")
    logprobs = logprobs.log_softmax(-1)
    tokens = torch.cat([draw(logprobs.expand(1000, -1), part) for part in _noise(n).split(1000)])
    p = logprobs.double().exp()
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[1] == 0
    likely = n * p >= 5
    parts = torch.cat((n * p[likely], n * p[~likely].sum()[None]))
    found = torch.cat((counts[likely], counts[~likely].sum()[None]))
    chi = float(((found - parts).square() / parts.clamp(min=1e-9))[parts > 0].sum())
    freedom = int(likely.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("place", [0, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_draws_never_leave_the_support(place: int) -> None:
    logprobs = torch.full((2 * BLOCK + 10,), float("-inf"))
    others = [place, (place + 7) % len(logprobs)]
    logprobs[others] = math.log(0.5)
    low, high = sorted(others)
    for noise, token in ((0.0, low), (0.4999, low), (0.5001, high), (1 - 2**-53, high)):
        assert draw(logprobs[None], torch.tensor([noise], dtype=torch.float64)).item() == token


def test_running_sums() -> None:
    x = torch.rand(3, 1000, dtype=torch.float64)
    assert torch.equal(running_sum(x), x.cumsum(-1))


def test_noise_depends_on_each_key_and_is_uniform() -> None:
    seeds = [
        uniforms(seed, torch.arange(9)[:, None, None], torch.arange(9)[:, None], torch.arange(9)) for seed in (1, 2)
    ]
    values = torch.stack(seeds).flatten()
    assert len(set(values.tolist())) == 2 * 9**3
    assert bool(((values >= 0) & (values < 1)).all())
    big = [
        uniforms(s, torch.tensor(k), torch.tensor(0), torch.tensor(0)) for s, k in ((5, 1 << 40), (1 << 40, 5), (5, 5))
    ]
    assert len(set(map(float, big))) == 3
    many = _noise(50_000)
    counts = torch.bincount((many * 20).long(), minlength=20).double()
    assert float(((counts - 2500).square() / 2500).sum()) < 19 + 4 * 38**0.5
    assert abs(float((many[1:] * many[:-1]).mean()) - 0.25) < 0.005, "neighbours are independent"


def test_where_each_key_goes() -> None:
    """The counter and key as the module's docstring has them (Philox itself is tested in tests/quant)."""
    from lowbit.quant.philox import philox4x32

    words = philox4x32(tuple(torch.tensor(n) for n in (7, 3, 5, 1)), (torch.tensor(11), torch.tensor(2 ^ 0x5A3D1E77)))
    expected = ((int(words[0]) >> 5) * (1 << 26) + (int(words[1]) >> 6)) / (1 << 53)
    assert float(uniforms((2 << 32) | 11, torch.tensor((1 << 32) | 5), torch.tensor(3), torch.tensor(7))) == expected


def test_greedy_takes_the_likeliest_and_reports_the_models_own_logprob() -> None:
    logits = torch.randn(4, 30)
    token, logprob = choose(logits, SamplingConfig(0.0, top_k=2, top_p=0.1), torch.full((4,), 0.1, dtype=torch.float64))
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logprob, logits.log_softmax(-1).amax(-1))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_the_kernels_in_the_interpreter() -> None:
    script = Path(__file__).with_name("draw_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["drawn"]


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    from draw_cases import all_cases, compare

    all_cases("cuda")
    for vocab in (32_768, 151_936, 1 << 20):
        compare(vocab, 1.0, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [SamplingConfig(0.8, top_p=0.9), SamplingConfig(1.0), SamplingConfig(0.7, top_k=40)]
)
def test_a_gpu_draws_the_same_tokens(settings: SamplingConfig) -> None:
    """With the same noise, bit for bit, also where PyTorch is asked for reproducible kernels only."""
    generator = torch.Generator().manual_seed(1)
    logits, noise = torch.randn(64, 1000, generator=generator), _noise(64)
    assert torch.equal(uniforms(1, *(torch.tensor(n).cuda() for n in (2, 3)), torch.arange(64).cuda()).cpu(), noise)
    expected, logprobs = choose(logits, settings, noise)
    torch.use_deterministic_algorithms(True)
    try:
        found, theirs = choose(logits.cuda(), settings, noise.cuda())
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found.cpu(), expected)
    torch.testing.assert_close(theirs.cpu(), logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingConfig(**settings)  # type: ignore[arg-type]
    assert key in str(error.value)
