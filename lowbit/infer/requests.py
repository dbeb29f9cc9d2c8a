"""What one asks of a sampler and what it gives back: token ids in, token ids out, whatever the engine.

The embedded engine (`embedded.py`) and vLLM (`vllm.py`) are both a `Sampler`. Text never crosses this line: decoding a
completion and encoding it again may give other ids, and a policy gradient of other ids is one of another sample.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from lowbit.errors import ConfigError, DataError
from lowbit.infer.sampling import SamplingConfig


@dataclass(frozen=True)
class Request:
    """A prompt and how many completions of it are wanted: a group."""

    prompt: tuple[int, ...]
    """Token ids; of a conversation everything so far, never rendered again."""
    key: int
    """Names the prompt for the noise, 0..2**63-1 (RL: the global number of the prompt)."""
    max_new_tokens: int
    samples: int = 1
    """Completions; their numbers are first_sample, first_sample + 1, ..."""
    first_sample: int = 0
    """A later turn of a conversation goes on under its own number."""


@dataclass(frozen=True)
class Sample:
    """One completion."""

    tokens: list[int]
    """A stop id that ended it is the last of them."""
    logprobs: list[float]
    """FP32 log-probability of each token under the distribution it was drawn from (greedy: see sampling.py)."""
    finish_reason: Literal["stop", "length"]
    versions: list[int]
    """Of the weights that each token was drawn with."""


@dataclass(frozen=True)
class WeightsReport:
    """What `Sampler.update` did."""

    version: int
    tensors: int
    """Tensors written: all that the model has."""
    parameters: int
    """Numbers in them."""
    fingerprint: float
    """Sum of |w| over all of them, as the sampler holds them; equal to the sender's up to rounding of the sum."""
    scales: int
    """Scales of quantised weights that were found finite and not zero."""
    seconds: float


class Sampler(Protocol):
    """Draws completions with weights that are replaced in place."""

    version: int
    """Of the weights in use; 0 until the first update."""

    def sample(
        self, requests: Sequence[Request], sampling: SamplingConfig, *, seed: int, stop_ids: Sequence[int] = ()
    ) -> list[list[Sample]]:
        """The samples of each request, in their order.

        Noise depends on (seed, key, number of the sample, position in the sequence) and nothing else.

        Args:
            seed: 0..2**63-1. stop_ids: end a completion, beside the engine's own end-of-text id.

        Raises:
            ConfigError: prompt and new tokens longer than the context, or a setting out of range.
            DataError: an empty prompt, or an id outside the vocabulary.
        """
        ...

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightsReport:
        """Replace every weight, in place; what was captured or compiled for the old ones goes on working.

        Raises:
            WeightsError: a tensor is missing, unknown, given twice, or has another shape; a scale is zero or not
                finite; the fingerprint of what is now held differs from that of what was sent.
        """
        ...


def check_requests(requests: Sequence[Request], seed: int, vocab_size: int, longest: int) -> None:
    """Raise what `Sampler.sample` raises; `longest`: tokens that the model takes."""
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed} must lie in 0..2**63-1")
    for index, request in enumerate(requests):
        for name in ("max_new_tokens", "samples"):
            if getattr(request, name) < 1:
                raise ConfigError(f"prompt {index}: {name}={getattr(request, name)} must be at least 1")
        if not (0 <= request.key < 1 << 63 and 0 <= request.first_sample < 1 << 31):
            raise ConfigError(
                f"prompt {index}: key={request.key} must lie in 0..2**63-1, first_sample={request.first_sample} in "
                "0..2**31-1"
            )
        if not request.prompt:
            raise DataError(f"prompt {index} is empty: begin with the end-of-text id to generate from nothing")
        for position, token in enumerate(request.prompt):
            if not 0 <= token < vocab_size:
                raise DataError(
                    f"prompt {index} has id {token} at position {position}, outside the vocabulary of {vocab_size}: "
                    "was it encoded by the model's tokenizer?"
                )
        if len(request.prompt) + request.max_new_tokens > longest:
            raise ConfigError(
                f"prompt {index} of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} exceed "
                f"model.max_sequence={longest}"
            )
