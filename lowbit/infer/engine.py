"""The generation engine: prefill the prompts as one right-padded batch, then decode all rows together.

A row ends at `max_new_tokens`, or with a stop id, which is part of its completion. Rows that have ended ride along
until the last one does. A row's text does not depend on its batch mates: masks keep rows apart, and noise is
keyed by (seed, index of the prompt, position). Several samples of one prompt are branches of a tree (`infer/tree.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowbit.errors import ConfigError, DataError
from lowbit.infer.cache import StaticKVCache
from lowbit.infer.sampling import SamplingConfig, choose, uniform
from lowbit.infer.tree import TreeKVCache
from lowbit.models.layers import KVCache, frozen_weights
from lowbit.models.lm_head import lm_head_logits
from lowbit.models.transformer import Transformer


@dataclass(frozen=True)
class Completion:
    """What was generated behind one prompt."""

    tokens: list[int]
    logprobs: list[float]
    """FP32 log-probability of each token under the distribution it was drawn from (greedy: see sampling.py)."""
    finish_reason: Literal["length", "stop"]


class Generator:
    """Generates with one model; `eot_id`, when there is one, always stops a row."""

    def __init__(self, model: Transformer, eot_id: int | None) -> None:
        self.model = model
        self.eot_id = eot_id

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        samples: int = 1,
    ) -> list[Completion]:
        """Complete every prompt (lists of token ids), as one batch.

        Args:
            samples: completions of each prompt, which is then read and stored once for all of them. The result has
                those of the first prompt first, as if the prompt had been given so many times.

        Raises:
            ConfigError: sampling settings out of range, or prompt and new tokens longer than the model takes.
            DataError: an empty prompt, or an id outside the vocabulary.
        """
        stops = self._stops(stop_ids)
        if samples < 1:
            raise ConfigError(f"samples={samples} must be at least 1")
        rows = len(prompts) * samples
        tokens: list[list[int]] = [[] for _ in range(rows)]
        logprobs: list[list[float]] = [[] for _ in range(rows)]
        stopped = [False] * rows
        sampling = SamplingConfig(temperature, top_k, top_p)
        for new, new_logprobs in self._steps(prompts, max_new_tokens, sampling, seed, samples):
            for row, (token, logprob) in enumerate(zip(new, new_logprobs, strict=True)):
                if stopped[row]:
                    continue
                tokens[row].append(token)
                logprobs[row].append(logprob)
                stopped[row] = token in stops
            if all(stopped):
                break
        return [
            Completion(ids, values, "stop" if done else "length")
            for ids, values, done in zip(tokens, logprobs, stopped, strict=True)
        ]

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[int]:
        """The tokens of `generate([prompt], ...)`, each as soon as it is there. Errors are raised at the call."""
        stops = self._stops(stop_ids)
        steps = self._steps([prompt], max_new_tokens, SamplingConfig(temperature, top_k, top_p), seed)

        def tokens() -> Iterator[int]:
            for (token,), _ in steps:
                yield token
                if token in stops:
                    return

        return tokens()

    def _stops(self, stop_ids: Sequence[int]) -> set[int]:
        return set(stop_ids) | (set() if self.eot_id is None else {self.eot_id})

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingConfig,
        seed: int,
        samples: int = 1,
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Check everything now; the iterator returned then gives a token and its logprob for each row, step by step."""
        if not prompts:
            return iter(())
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
        for index, prompt in enumerate(prompts):
            self._check_prompt(index, prompt, max_new_tokens)
        given = [list(prompt) for prompt in prompts]
        if samples > 1:
            return self._decode_trees(given, max_new_tokens, sampling, seed, samples)
        return self._decode(given, max_new_tokens, sampling, seed)

    def _check_prompt(self, index: int, prompt: Sequence[int], max_new_tokens: int) -> None:
        if not prompt:
            raise DataError(f"prompt {index} is empty: begin with the end-of-text id to generate from nothing")
        for position, token in enumerate(prompt):
            if not 0 <= token < self.model.vocab_size:
                raise DataError(
                    f"prompt {index} has id {token} at position {position}, outside the vocabulary of "
                    f"{self.model.vocab_size}: was it encoded by the model's tokenizer?"
                )
        longest = self.model.config.max_sequence
        if len(prompt) + max_new_tokens > longest:
            raise ConfigError(
                f"prompt {index} of {len(prompt)} tokens and max_new_tokens={max_new_tokens} exceed "
                f"model.max_sequence={longest}"
            )

    def _decode(
        self, prompts: list[list[int]], max_new_tokens: int, sampling: SamplingConfig, seed: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        model = self.model
        device = model.head_weight.device
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        rows = torch.arange(len(prompts), device=device)
        last = torch.tensor(lengths, device=device) - 1
        feed = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        cache = StaticKVCache(model.config, len(prompts), longest + max_new_tokens, model.compute_dtype, device)
        with frozen_weights(model, model.compute_dtype):
            head = self._head()
            for step in range(max_new_tokens):
                noise = [uniform(seed, row, length + step) for row, length in enumerate(lengths)]
                token, logprob = self._next(self._hidden(feed, cache)[rows, last], head, sampling, noise)
                cache.advance(lengths if step == 0 else [1] * len(prompts))
                yield token.tolist(), logprob.tolist()
                feed, last = token[:, None], torch.zeros_like(last)

    def _decode_trees(
        self, prompts: list[list[int]], max_new_tokens: int, sampling: SamplingConfig, seed: int, samples: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        """As `_decode`, with `samples` branches behind each prompt."""
        model = self.model
        device = model.head_weight.device
        lengths = [len(prompt) for prompt in prompts]
        rows, last = torch.arange(len(prompts), device=device), torch.tensor(lengths, device=device) - 1
        feed = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts], device=device)
        cache = TreeKVCache(model.config, lengths, samples, max_new_tokens, model.compute_dtype, device)
        with frozen_weights(model, model.compute_dtype):
            head = self._head()
            hidden = self._hidden(feed, cache)[rows, last].repeat_interleave(samples, dim=0)  # [B K, width]
            cache.advance_prompts()
            for step in range(max_new_tokens):
                noise = [
                    uniform(seed, row * samples + branch, length + step)
                    for row, length in enumerate(lengths)
                    for branch in range(samples)
                ]
                token, logprob = self._next(hidden, head, sampling, noise)
                yield token.tolist(), logprob.tolist()
                if step + 1 < max_new_tokens:
                    hidden = self._hidden(token.view(-1, samples), cache).flatten(0, 1)
                    cache.advance_branches()

    def _head(self) -> Tensor:
        """The LM head's weight in the compute type."""
        head = None if self.model.head is None else self.model.head.frozen
        return self.model.head_weight.detach().to(self.model.compute_dtype) if head is None else head

    @torch.no_grad()
    def _hidden(self, feed: Tensor, cache: KVCache) -> Tensor:
        """One forward over `feed` [B, T] -> [B, T, width]."""
        hidden: Tensor = self.model(feed, cache=cache)
        return hidden

    @torch.no_grad()
    def _next(
        self, hidden: Tensor, head: Tensor, sampling: SamplingConfig, noise: list[float]
    ) -> tuple[Tensor, Tensor]:
        """The tokens behind hidden states [rows, width], and their logprobs."""
        softcap = self.model.config.logit_softcap
        logits = lm_head_logits(hidden, head, vocab_size=self.model.vocab_size, softcap=softcap)
        return choose(logits, sampling, noise)
