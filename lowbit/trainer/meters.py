"""Where the time of a run goes, and how fast it trains.

tokens/s counts whole optimizer steps (all micro-batches and the optimizer) over the time since the last
reading, evaluation and checkpoints left out; their shares of the wall clock are reported beside it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowbit.trainer.hardware import memory_gib, mfu


class StepMeter:
    """Adds up times and tokens between two readings."""

    def __init__(self, device: torch.device, flops_per_token: float, peak_flops: float | None, world: int) -> None:
        self._device = device
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._world = world
        self._mark = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._parts = {"data": 0.0, "eval": 0.0, "checkpoint": 0.0}
        self._steps = 0.0
        self._tokens = 0
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time spent inside counts as `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - start

    def start_step(self) -> None:
        """An optimizer step begins."""
        self._step_start = time.perf_counter()

    def end_step(self, tokens: int) -> float:
        """An optimizer step over `tokens` tokens (all ranks) ended; seconds of wall clock since the last one ended."""
        now = time.perf_counter()
        self._steps += now - self._step_start
        self._tokens += tokens
        elapsed, self._mark = now - self._mark, now
        return elapsed

    def read(self) -> dict[str, float | None]:
        """Metrics since the last reading, which this one resets."""
        wall = max(time.perf_counter() - self._since, 1e-9)
        speed = self._tokens / self._steps / self._world if self._steps else 0.0
        row: dict[str, float | None] = {
            "tokens_per_second": speed,
            "mfu": mfu(speed, self._flops_per_token, self._peak_flops),
            "memory_gib": memory_gib(self._device),
        }
        row |= {f"time/{name}": seconds / wall for name, seconds in self._parts.items()}
        self._reset()
        return row
