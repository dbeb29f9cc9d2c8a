"""A model whose weights ZeRO 3 has taken apart, whole again for a while and without what takes it apart."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def gathered(parameters: list[Any]) -> Iterator[None]:
    """Stage 3: all parameters whole on every rank."""
    missing = [p for p in parameters if p.ds_status.name == "NOT_AVAILABLE"]
    if missing:
        missing[0].all_gather(missing)
    try:
        yield
    finally:
        if missing:
            missing[0].partition(missing)


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """The model as it is written: no hooks that gather weights, and no compiled blocks."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    kept = [(module, kind, getattr(module, kind)) for module in model.modules() for kind in kinds]
    forwards = [(module, module.__dict__.pop("forward")) for module in model.modules() if "forward" in module.__dict__]
    for module, kind, _ in kept:
        setattr(module, kind, OrderedDict())
    try:
        yield
    finally:
        for module, kind, hooks in kept:
            setattr(module, kind, hooks)
        for module, forward in forwards:
            module.__dict__["forward"] = forward
