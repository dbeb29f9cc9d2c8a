"""What a model is trained or evaluated on at once."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.models.visibility import Visibility


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length; `targets` are the tokens that follow `tokens`."""

    tokens: Tensor
    """int64 [B, T]."""
    targets: Tensor
    """int64 [B, T]; where the weight is 0 it is some valid id."""
    weights: Tensor
    """float32 [B, T]: 1 for a real target, 0 for padding."""
    visibility: Visibility | None
    """Who attends to whom; None means plain causal attention."""
    valid_tokens: int
    """Targets with weight 1."""

    replayable: ClassVar[bool] = True
    """Whether `tensors` are all that a pass over it reads, so that a CUDA graph of one serves others."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a pass reads, in an order of its own."""
        seen = self.visibility
        masks = (None,) * 4 if seen is None else (seen.start, seen.limit, seen.position, seen.ends)
        return self.tokens, self.targets, self.weights, *masks

    def clone(self) -> "Batch":
        """The same in memory of its own."""
        seen = None if self.visibility is None else self.visibility.clone()
        return Batch(self.tokens.clone(), self.targets.clone(), self.weights.clone(), seen, self.valid_tokens)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        """The same on another device; asynchronous from pinned memory."""
        return Batch(
            self.tokens.to(device, non_blocking=non_blocking),
            self.targets.to(device, non_blocking=non_blocking),
            self.weights.to(device, non_blocking=non_blocking),
            None if self.visibility is None else self.visibility.to(device, non_blocking=non_blocking),
            self.valid_tokens,
        )

    def head(self, count: int) -> "Batch":
        """The first `count` sequences, for a look at what a model does with them."""
        seen, weights = self.visibility, self.weights[:count]
        seen = None if seen is None else seen.rows(count)
        return Batch(self.tokens[:count], self.targets[:count], weights, seen, int((weights > 0).sum()))

    def pin(self) -> "Batch":
        """The same in page-locked memory, from which a GPU copies while it computes."""
        seen = self.visibility
        seen = None if seen is None else seen.pin()
        return Batch(
            self.tokens.pin_memory(), self.targets.pin_memory(), self.weights.pin_memory(), seen, self.valid_tokens
        )
