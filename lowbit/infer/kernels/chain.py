"""Kernels that are there before the one before them has ended: programmatic dependent launch, from Hopper on.

A decoding step is some three hundred kernels of a few microseconds, and between two of them a GPU does nothing for one:
the programs of the one have to end before those of the next are placed. A kernel that is launched as a dependent is
placed as soon as every program of the one before it has said that it may be, or ended, and then waits where it has to:

    wait         until the kernel before has ended and what it wrote can be seen (and so with all before that)
    let_next     the next kernel may be placed beside this one; what others write it does not read before its own `wait`

Every kernel of a step waits, so that "the one before has ended" holds for all before it. What does not change while a
sampler runs, the weights, may be read before. CUDA graphs keep these dependencies (CUDA 12.3).

A kernel lets the next one in after it has waited itself, and a product when its programs come to their end. So no more
than two are there at once. Were they to do it at their beginning, a chain of ten would be placed as soon as there is
room for it, a product wherever a longer one has left some: many of its programs on a few processors, and none on the
others, whose bandwidth it does without (a third of a step's time: docs/LOG.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Before anything is read that another kernel writes, and before anything is written."""
    if CHAINED:
        gdc_wait()


@triton.jit
def let_next(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """After `wait`: the next kernel needs no more than room beside this one."""
    if CHAINED:
        gdc_launch_dependents()


_asked: ContextVar[bool] = ContextVar("chained", default=False)


@contextmanager
def chaining(wanted: bool) -> Iterator[None]:
    """Whether kernels that are launched in here are chained. It pays where products read weights before they wait
    (docs/LOG.md)."""
    before = _asked.set(wanted)
    try:
        yield
    finally:
        _asked.reset(before)


def chained(device: torch.device) -> dict[str, bool]:
    """How to launch on a device: arguments of a kernel whose constant CHAINED says whether it waits."""
    if not _asked.get() or device.type != "cuda" or not _can(device):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@cache
def _can(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
