"""Sampling against a reference in plain Python numbers, and its noise against statistics."""

import math

import pytest
import torch

from lowbit.errors import ConfigError
from lowbit.infer.sampling import SamplingConfig, choose, draw, sampling_logprobs, uniform


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


def test_low_temperatures_stay_finite() -> None:
    logits = torch.randn(3, 40) * 50
    got = sampling_logprobs(logits, SamplingConfig(1e-30))
    assert torch.equal(got.argmax(-1), logits.argmax(-1)) and not bool(got.isnan().any())
    assert torch.equal(draw(got, [0.0, 0.5, 1 - 2**-53]), logits.argmax(-1))


def test_draws_follow_the_distribution() -> None:
    logprobs = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).log()
    n = 20_000
    tokens = draw(logprobs.expand(n, -1), [uniform(1, 2, position) for position in range(n)])
    share = torch.bincount(tokens, minlength=4) / n
    for got, expected in zip(share.tolist(), [0.5, 0.0, 0.3, 0.2], strict=True):
        assert abs(got - expected) <= 4 * (expected * (1 - expected) / n) ** 0.5


def test_draws_never_leave_the_support() -> None:
    logprobs = torch.tensor([float("-inf"), 0.5, float("-inf"), 0.5, float("-inf")]).log()
    logprobs[[1, 3]] = math.log(0.5)
    logprobs = torch.where(logprobs.isnan(), float("-inf"), logprobs)
    for noise, token in ((0.0, 1), (0.4999, 1), (0.5001, 3), (1 - 2**-53, 3)):
        assert draw(logprobs[None], [noise]).item() == token


def test_noise_depends_on_each_key() -> None:
    values = {uniform(seed, prompt, position) for seed in range(9) for prompt in range(9) for position in range(9)}
    assert len(values) == 9**3 and all(0 <= value < 1 for value in values)
    assert uniform(1, 23, 4) != uniform(12, 3, 4)
    assert uniform(5, 6, 7) == uniform(5, 6, 7)


def test_greedy_takes_the_likeliest_and_reports_the_models_own_logprob() -> None:
    logits = torch.randn(4, 30)
    token, logprob = choose(logits, SamplingConfig(0.0, top_k=2, top_p=0.1), [0.1] * 4)
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logprob, logits.log_softmax(-1).amax(-1))


@pytest.mark.gpu
def test_a_deterministic_run_can_sample_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, noise = torch.randn(8, 1000, generator=generator), [i / 8 for i in range(8)]
    settings = SamplingConfig(0.8, top_p=0.9)
    expected, _ = choose(logits, settings, noise)
    torch.use_deterministic_algorithms(True)
    try:
        found, _ = choose(logits.cuda(), settings, noise)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found.cpu(), expected)


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
