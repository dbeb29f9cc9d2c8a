"""vLLM behind the `Sampler` interface: for models and machines that it serves faster (`pip install vllm`).

**Not run by this project's tests**, whose machines have no vLLM: its calls were checked against the source of its
repository (`SamplingParams`, `LLM.generate`, `LLM.apply_model`, `LLM.reset_prefix_cache`, outputs; autumn 2026), and
tests/infer/test_contract.py, which the embedded engine passes, runs on it where vLLM and a GPU are.

What differs from the embedded engine: products are vLLM's kernels, so its log-probabilities are those of another
program, and the trainer's correction (rl/losses.py) is needed; a sample's noise is a generator of vLLM's seeded with
the hash of (seed, key, sample, length of the prompt), so samples differ from the embedded engine's; weights are BF16.

`logprobs_mode="processed_logprobs"` makes vLLM report what it drew from (temperature, top-k, top-p), as this project
defines it; its default reports the distribution before them, and a policy gradient with that is wrong at any
temperature but 1. New weights go through a file and the model's own `load_weights`, in this process, after which the
prefix cache is emptied and sums of magnitudes compared: a loader that skips a tensor does so in silence.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig
from lowbit.errors import ConfigError, WeightsError
from lowbit.infer.requests import Request, Sample, WeightsReport, check_requests
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.weights import fingerprint
from lowbit.models.hf.save import parts_of

TOLERANCE = 1e-6
"""Of the sums of magnitudes, which the worker takes over merged tensors and so in another order."""


class VllmSampler:
    """See `requests.Sampler`."""

    def __init__(self, folder: Path, config: ModelConfig, vocab_size: int, eot_id: int | None, **settings: Any) -> None:
        """
        Args:
            folder: the model as `lowbit export` writes it, of these settings. settings: more of vLLM's `LLM`, such as
                gpu_memory_utilization or tensor_parallel_size.

        Raises: ConfigError when vLLM is not installed.
        """
        try:
            import vllm
        except ImportError:
            raise ConfigError(
                "the sampler vllm is not installed: pip install 'lowbit[vllm]', or use embedded"
            ) from None
        self._vllm: Any = vllm
        self.config, self.vocab_size, self.eot_id = config, vocab_size, eot_id
        self.version = 0
        given = {
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": config.max_sequence,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
        }
        self._engine: Any = vllm.LLM(str(folder), **(given | settings))

    def sample(
        self, requests: Sequence[Request], sampling: SamplingConfig, *, seed: int, stop_ids: Sequence[int] = ()
    ) -> list[list[Sample]]:
        """See `requests.Sampler.sample`."""
        check_requests(requests, seed, self.vocab_size, self.config.max_sequence)
        stops = sorted(set(stop_ids) | (set() if self.eot_id is None else {self.eot_id}))
        prompts, params = [], []
        for request in requests:
            for number in range(request.first_sample, request.first_sample + request.samples):
                prompts.append({"prompt_token_ids": list(request.prompt)})
                params.append(self._params(request, number, sampling, seed, stops))
        if not prompts:
            return []
        outputs = iter(self._engine.generate(prompts, params, use_tqdm=False))
        return [[self._sample(next(outputs).outputs[0], stops) for _ in range(r.samples)] for r in requests]

    def _params(self, request: Request, number: int, sampling: SamplingConfig, seed: int, stops: list[int]) -> Any:
        key = f"{seed}:{request.key}:{number}:{len(request.prompt)}".encode()
        noise = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p,
            seed=noise,
            stop_token_ids=stops,
            ignore_eos=True,  # which ids end a completion is the caller's to say
            max_tokens=request.max_new_tokens,
            logprobs=0,  # of the token that was drawn alone
            detokenize=False,
        )

    def _sample(self, output: Any, stops: list[int]) -> Sample:
        tokens = list(output.token_ids)
        reason: Literal["stop", "length"] = "stop" if tokens and tokens[-1] in stops else "length"
        if output.finish_reason != reason:
            raise ConfigError(
                f"vLLM ended a completion with {output.finish_reason!r} whose last token says {reason!r}: this version "
                "treats stop ids in another way than this project knows"
            )
        logprobs = [float(found[token].logprob) for token, found in zip(tokens, output.logprobs, strict=True)]
        return Sample(tokens, logprobs, reason, [self.version] * len(tokens))

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightsReport:
        """See `requests.Sampler.update`; needs vLLM's workers to take functions, as in its own process they do."""
        from safetensors.torch import save_file

        begin = perf_counter()
        given = dict(weights)
        rows = self.config.vocab_rows or self.vocab_size
        parts = {n: t.to(torch.bfloat16).contiguous() for n, t in parts_of(self.config, given, rows).items()}
        sent = sum(float(fingerprint(part)) for part in parts.values())
        with TemporaryDirectory() as folder:
            path = Path(folder) / "weights.safetensors"
            save_file({name: part.cpu() for name, part in parts.items()}, path)
            held = sum(self._engine.apply_model(partial(load_into, path=str(path))))
        self._engine.reset_prefix_cache()
        if not abs(held - sent) <= TOLERANCE * sent:
            raise WeightsError(
                f"update of vLLM: {len(parts)} tensors were sent with sum |w| = {sent:.9g}, and it holds {held:.9g}"
            )
        self.version = version
        numbers = sum(part.numel() for part in parts.values())
        return WeightsReport(version, len(given), numbers, held, 0, perf_counter() - begin)


def load_into(model: Any, path: str) -> float:
    """In a worker: load a file into vLLM's model; the sum of magnitudes of what it then holds."""
    from safetensors.torch import load_file

    model.load_weights(iter(load_file(path).items()))
    held = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    return sum(float(fingerprint(parameter)) for parameter in held.values())
