"""From logits to a token: temperature, top-k, top-p, and noise that depends on nothing but its key.

The sampling distribution is softmax(logits / temperature) restricted to the `top_k` likeliest tokens, then to the
smallest set of the likeliest whose probability within those reaches `top_p`, and normalised again. Equal logits
are ordered by token id. The logprob of a token is the logarithm of its probability there: what a
policy-gradient estimator needs. Temperature 0 takes the likeliest token; its distribution would be a
point with logprob 0, so the logprob reported then is the model's own (temperature 1, all tokens).

Noise is one uniform number a token, the hash of (seed, prompt index, position), inverted through the cumulative
distribution: the same prompt gets the same text alone and in a batch, and no generator state exists.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.errors import ConfigError


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is drawn; checked on construction."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    """Likeliest tokens kept; None keeps all."""
    top_p: float = 1.0
    """Probability kept, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be at least 1, or none to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]")


def sampling_logprobs(logits: Tensor, config: SamplingConfig) -> Tensor:
    """FP32 log-probabilities of the sampling distribution: logits [B, V] -> [B, V], -inf outside its support."""
    logits = logits.float()
    if config.temperature == 0:
        return logits.log_softmax(-1)
    # Subtracting the greatest first keeps tiny temperatures from overflowing.
    logits = (logits - logits.amax(-1, keepdim=True)) / config.temperature
    if config.top_k is None and config.top_p == 1:
        return logits.log_softmax(-1)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    if config.top_k is not None:
        ordered[..., config.top_k :] = float("-inf")
    if config.top_p < 1:
        probability = ordered.double().softmax(-1)
        before = _cumulative(probability) - probability
        beyond = before >= config.top_p
        beyond[..., 0] = False
        ordered = ordered.masked_fill(beyond, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, index, ordered.log_softmax(-1))


def _cumulative(probability: Tensor) -> Tensor:
    """Running sum of each row. CUDA's is not bitwise reproducible, and PyTorch refuses it where that was asked for."""
    if probability.is_cuda and torch.are_deterministic_algorithms_enabled():
        return probability.cpu().cumsum(-1).to(probability.device)
    return probability.cumsum(-1)


def uniform(seed: int, prompt: int, position: int) -> float:
    """A number in [0, 1), 53 bits, that depends on its three keys alone."""
    digest = hashlib.blake2b(f"{seed}:{prompt}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def draw(logprobs: Tensor, noise: Sequence[float]) -> Tensor:
    """Invert the cumulative distribution: logprobs [B, V], one uniform number a row -> token ids int64 [B]."""
    cumulative = _cumulative(logprobs.double().exp())
    # Scaled by the last entry, rounding cannot push the threshold beyond it; the first entry strictly above the
    # threshold has positive probability.
    threshold = torch.tensor(noise, dtype=torch.float64)[:, None].to(logprobs.device) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return token.clamp_(max=logprobs.shape[-1] - 1)


def choose(logits: Tensor, config: SamplingConfig, noise: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Next tokens of a batch: logits [B, V] -> (ids int64 [B], FP32 logprobs [B])."""
    logprobs = sampling_logprobs(logits, config)
    token = logits.argmax(-1) if config.temperature == 0 else draw(logprobs, noise)
    return token, logprobs.gather(-1, token[:, None]).squeeze(-1)
