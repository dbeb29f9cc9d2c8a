"""Out of memory, in words: which settings would fit, by the arithmetic of `lowbit plan`.

PyTorch raises its OutOfMemoryError for a GPU, and a plain RuntimeError for the CPU's allocator.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lowbit.configs.schema import Recompute, RunConfig
from lowbit.errors import OutOfMemoryError
from lowbit.trainer.hardware import device_memory, device_name
from lowbit.trainer.plan import plan

CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
CHEAPEST_FIRST = (Recompute.none, Recompute.selective, Recompute.full)
"""By the work that recomputing adds."""


@contextmanager
def explain_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Raise what `advice` says (one line) in place of PyTorch's error for exhausted memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(advice()) from error
    except RuntimeError as error:
        if CPU_ALLOCATOR not in str(error):
            raise
        raise OutOfMemoryError(advice()) from error


def ran_out(config: RunConfig, vocab_size: int, dtype: torch.dtype, device: torch.device, *, saved: bool) -> str:
    """A training run's advice: where it was, what to change, and how to go on. saved: there is a checkpoint."""
    change = what_to_change(config, vocab_size, dtype.itemsize, device_memory(device))
    go_on = "; the newest checkpoint is intact and the same command goes on from it" if saved else ""
    return (
        f"{device_name(device)} ran out of memory at batch.micro_batch={config.batch.micro_batch}, "
        f"data.sequence_length={config.data.sequence_length}, engine.recompute={config.engine.recompute.value}: "
        f"{change} (`lowbit plan` with the same overrides says what takes how much){go_on}"
    )


def what_to_change(config: RunConfig, vocab_size: int, compute_bytes: int, memory_bytes: int | None) -> str:
    """Settings that take less memory than the run's: those that should fit in `memory_bytes`, least costly first.

    A smaller micro-batch divides every step's sequences, so that the gradients stay what they were.
    """
    steps = math.gcd(config.batch.sequences, *(stage.sequences for stage in config.batch.warmup))
    now, recompute = config.batch.micro_batch, config.engine.recompute
    divisors = [size for size in range(1, min(steps, now) + 1) if steps % size == 0]
    most = plan(config, vocab_size, compute_bytes=compute_bytes, memory_bytes=memory_bytes).largest_micro_batch
    choices = []
    for kind in CHEAPEST_FIRST[CHEAPEST_FIRST.index(recompute) :]:
        smaller = [size for size in divisors if size < now or kind is not recompute]
        fitting = [size for size in smaller if size <= most.get(kind.value, now)]
        if fitting:
            changed = [f"batch.micro_batch={fitting[-1]}"] if fitting[-1] < now else []
            changed += [f"engine.recompute={kind.value}"] if kind is not recompute else []
            choices.append(" ".join(changed))
    if choices:
        return f"try {' or '.join(choices)}"
    return "by the plan nothing of this model fits at this length: take a smaller model or data.sequence_length"
