"""Checkpoints of runs with LoRA: what they remember of it, and the plain weights in them.

A checkpoint holds the frozen weights and the adapters, each by its name, and in its meta the `lora` section that made
them. Whoever opens it for anything but going on (generation, evaluation, export, the start of another run) gets the
plain model of the sums, so nothing else has to know.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit.errors import CheckpointError
from lowbit.models.adapters import merged
from lowbit.trainer.identity import differences, shorten
from lowbit.trainer.snapshot import Snapshot

META = "lora"
"""Key of a checkpoint's meta; absent or null without adapters."""


def plain_weights(snapshot: Snapshot) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint's model as those of a model without adapters."""
    lora = snapshot.meta.get(META)
    return snapshot.model if lora is None else merged(snapshot.model, lora["rank"], lora["alpha"])


def require_same_adapters(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError, naming the difference, when a checkpoint's `lora` is not what the run now asks for."""
    if lines := differences(META, saved, now):
        raise CheckpointError(
            f"the checkpoint has other adapters: {shorten(lines)}; resume with its settings, or start a new run from "
            "it with init_from=FOLDER, which adds its adapters to the weights"
        )
