"""The former engine's interface, over `embedded.EmbeddedSampler`, for as long as RL's stand-in uses it."""

from collections.abc import Sequence

from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request, Sample
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.transformer import Transformer


class Generator:
    """Generates with one model, as its weights are at each call."""

    def __init__(self, model: Transformer, eot_id: int | None) -> None:
        self._sampler = EmbeddedSampler(model, eot_id, share=True)

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
    ) -> list[Sample]:
        """Complete every prompt; those of the first prompt first."""
        self._sampler.update()
        requests = [Request(tuple(prompt), i, max_new_tokens, samples) for i, prompt in enumerate(prompts)]
        groups = self._sampler.sample(requests, SamplingConfig(temperature, top_k, top_p), seed=seed, stop_ids=stop_ids)
        return [sample for group in groups for sample in group]
