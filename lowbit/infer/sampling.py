"""From logits to a token: temperature, top-k, top-p, and noise that depends on nothing but its key.

The sampling distribution is softmax(logits / temperature) restricted to the `top_k` likeliest tokens, then to the
smallest set of the likeliest whose probability within those reaches `top_p`, and normalised again. Equal logits
are ordered by token id. The logprob of a token is the logarithm of its probability there: what a
policy-gradient estimator needs. Temperature 0 takes the likeliest token; its distribution would be a
point with logprob 0, so the logprob reported then is the model's own (temperature 1, all tokens).

**Noise** is one uniform number a token, 53 bits of Philox (`quant/philox.py`) under the counter (position, sample,
prompt's key) and the key (seed): the same bits on every device, and no generator state. It is inverted through the
cumulative distribution. (Gumbel noise would cost a number for each entry of the vocabulary, and its logarithms differ
between devices.) One inversion reads the probabilities twice: sums of 256 tokens first, then the one block that the
number falls into. No step of it waits for the device, and each is reproducible on a GPU, which `cumsum` is not: a
running sum is a product with a triangle of ones.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.errors import ConfigError
from lowbit.infer import kernels
from lowbit.quant.philox import MASK, philox4x32

BLOCK = 256
"""Tokens that are summed first."""
_PURPOSE = 0x5A3D1E77
"""Mixed into the key, so that these words are none of a quantiser's."""


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
        return log_softmax(logits)
    # Subtracting the greatest first keeps tiny temperatures from overflowing.
    logits = (logits - logits.amax(-1, keepdim=True)) / config.temperature
    if config.top_k is None and config.top_p == 1:
        return log_softmax(logits)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    if config.top_k is not None:
        ordered[..., config.top_k :] = float("-inf")
    if config.top_p < 1:
        probability = ordered.double().softmax(-1)
        before = running_sum(probability) - probability
        beyond = before >= config.top_p
        beyond[..., 0] = False
        ordered = ordered.masked_fill(beyond, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, index, log_softmax(ordered))


def log_softmax(x: Tensor) -> Tensor:
    """FP32 [B, V]. PyTorch's own is off by 4e-5 on a CPU at 150,000 tokens; its logsumexp sums in parts and is not."""
    return x - x.logsumexp(-1, keepdim=True)


def running_sum(x: Tensor) -> Tensor:
    """Running sum of each row, FP64 [B, n]; the same bits every time, also on a GPU."""
    if not x.is_cuda:
        return x.cumsum(-1)
    rows, n = x.shape
    blocks = _blocks(x)
    inside = blocks @ _triangle(BLOCK, x.device)
    totals = inside[..., -1]
    before = totals @ _triangle(totals.shape[1], x.device) - totals
    return (inside + before[..., None]).view(rows, -1)[:, :n]


def _blocks(x: Tensor) -> Tensor:
    """[rows, n] -> [rows, blocks, BLOCK], zeros behind."""
    missing = -x.shape[1] % BLOCK
    return (F.pad(x, (0, missing)) if missing else x).view(x.shape[0], -1, BLOCK)


@cache
def _triangle(n: int, device: torch.device) -> Tensor:
    """Ones on and above the diagonal: x @ it is the running sum of x. Kept: a decoding step has kernels enough."""
    return torch.ones(n, n, dtype=torch.float64, device=device).triu()


def uniforms(seed: int, key: Tensor, sample: Tensor, position: Tensor) -> Tensor:
    """Numbers in [0, 1), FP64, 53 bits each; key, sample and position int64 that broadcast to the result's shape.

    seed, key: 0..2**63-1. sample, position: 0..2**32-1.
    """
    counter = (position, sample, key & MASK, key >> 32)
    seeds = torch.tensor([seed & MASK, (seed >> 32) ^ _PURPOSE], dtype=torch.int64, device=position.device)
    high, low, _, _ = philox4x32(counter, (seeds[0], seeds[1]))
    return ((high >> 5).double() * (1 << 26) + (low >> 6).double()) / (1 << 53)


def draw(logprobs: Tensor, noise: Tensor) -> Tensor:
    """Invert the cumulative distribution: logprobs [B, V], noise FP64 [B] -> token ids int64 [B]."""
    p = _blocks(logprobs.exp())
    sums = p.sum(-1, dtype=torch.float64)  # [B, blocks]
    upto = running_sum(sums)
    threshold = noise * upto[:, -1]
    block = _first_beyond(upto, sums, threshold)
    chosen = p.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double()  # [B, BLOCK]
    inside = _first_beyond(running_sum(chosen), chosen, threshold - (upto - sums).gather(1, block[:, None])[:, 0])
    return block * BLOCK + inside


def _first_beyond(upto: Tensor, weights: Tensor, threshold: Tensor) -> Tensor:
    """First index with a positive weight at which the running sum exceeds the threshold, else the last positive one.

    All [B, n], the threshold [B] -> int64 [B].
    """
    index = torch.arange(weights.shape[1], device=weights.device)
    positive = weights > 0
    first = torch.where(positive & (upto > threshold[:, None]), index, weights.shape[1]).amin(-1)
    last = torch.where(positive, index, 0).amax(-1)
    return torch.minimum(first, last)


def drawn(logits: Tensor, config: SamplingConfig, noise: Tensor) -> Tensor:
    """`choose`, as FP64 [B, 2]: in two kernels on a GPU where all tokens take part."""
    plain = config.temperature > 0 and config.top_k is None and config.top_p == 1
    if plain and logits.is_cuda and logits.dtype is torch.float32 and logits.shape[1] <= kernels.MOST_TOKENS:
        values: Tensor = kernels.draw(logits, noise, config.temperature)
        return values
    token, logprob = choose(logits, config, noise)
    return torch.stack((token.double(), logprob.double()), dim=1)


def choose(logits: Tensor, config: SamplingConfig, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Next tokens of a batch: logits [B, V], noise FP64 [B] -> (ids int64 [B], FP32 logprobs [B])."""
    logprobs = sampling_logprobs(logits, config)
    token = logits.argmax(-1) if config.temperature == 0 else draw(logprobs, noise)
    return token, logprobs.gather(-1, token[:, None]).squeeze(-1)
