"""A sampler on a GPU of its own, while the trainer has another.

PyTorch allocates, launches and captures on the *current* device of the calling thread, and Triton's kernels follow it.
The engine is therefore made, updated and run inside its own device, whoever calls it; outside, the current device is
what it was. Weights arrive by an explicit copy: each tensor of an update is copied to the engine's device and counted
there like any other (`weights.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lowbit.infer.requests import Request, Sample, Sampler, WeightsReport
from lowbit.infer.sampling import SamplingConfig


class Elsewhere:
    """A `Sampler` whose calls run with `device` as the current one."""

    def __init__(self, make: Callable[[], Sampler], device: torch.device) -> None:
        """`make`: builds the sampler, on `device`."""
        self.device = device
        with self._here():
            self.inner = make()
        self.version = self.inner.version

    def sample(
        self, requests: Sequence[Request], sampling: SamplingConfig, *, seed: int, stop_ids: Sequence[int] = ()
    ) -> list[list[Sample]]:
        """See `Sampler.sample`."""
        with self._here():
            return self.inner.sample(requests, sampling, seed=seed, stop_ids=stop_ids)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightsReport:
        """See `Sampler.update`."""
        with self._here():
            report = self.inner.update(weights, version)
        self.version = self.inner.version
        return report

    def _here(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
