"""A sampler in the trainer's process, by the plain generator, until the embedded engine takes its place."""

import hashlib
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowbit.errors import CheckpointError
from lowbit.infer.engine import Generator
from lowbit.infer.requests import Request, Sample, WeightsReport
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.transformer import Transformer


class GeneratorSampler:
    """See `infer.requests.Sampler`. Requests of one shape are drawn together."""

    def __init__(self, model: Transformer, eot_id: int) -> None:
        self.version = 0
        self._model = model
        self._generator = Generator(model, eot_id)

    def sample(
        self, requests: Sequence[Request], sampling: SamplingConfig, *, seed: int, stop_ids: Sequence[int] = ()
    ) -> list[list[Sample]]:
        """See `Sampler.sample`."""
        found: dict[int, list[Sample]] = {}
        shapes: dict[tuple[int, int], list[int]] = {}
        for i, request in enumerate(requests):
            shapes.setdefault((request.samples, request.max_new_tokens), []).append(i)
        for (samples, new), members in shapes.items():
            first = requests[members[0]]
            key = f"{seed}:{first.key}:{first.first_sample}:{len(first.prompt)}".encode()
            noise = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
            completions = self._generator.generate(
                [requests[i].prompt for i in members],
                max_new_tokens=new,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=noise,
                stop_ids=stop_ids,
                samples=samples,
            )
            for place, i in enumerate(members):
                found[i] = [
                    Sample(c.tokens, c.logprobs, c.finish_reason, [self.version] * len(c.tokens))
                    for c in completions[place * samples : (place + 1) * samples]
                ]
        return [found[i] for i in range(len(requests))]

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightsReport:
        """See `Sampler.update`."""
        begin = time.perf_counter()
        mine = dict(self._model.named_parameters())
        for name, tensor in weights:
            if name not in mine:
                raise CheckpointError(f"the sampler has no weight {name}")
            into = mine.pop(name)
            if into.data_ptr() != tensor.data_ptr():
                into.copy_(tensor)
        if mine:
            raise CheckpointError(f"the sampler got no weight {next(iter(mine))}")
        self.version = version
        numbers = [p.numel() for p in self._model.parameters()]
        return WeightsReport(version, len(numbers), sum(numbers), 0.0, 0, time.perf_counter() - begin)
