"""Who attends to whom, from two integers a token.

Key j is visible to query i when start[j] <= i < limit[j]. With start[j] = j this is causal attention, cut off at
limit[j]: the end of j's document in a packed sequence, or of its branch in a tree. A smaller start[j] opens a
bidirectional span (prefix language models). Masks never come from token ids.

`position` is the token's depth for the rotary embedding: it restarts with each document.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.errors import DataError


@dataclass(frozen=True)
class Visibility:
    """Visibility of a batch; three int32 tensors [B, T]."""

    start: Tensor
    """First query index that sees this key."""
    limit: Tensor
    """One past the last query index that sees this key."""
    position: Tensor
    """Depth of the token, for the rotary embedding."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Visibility":
        """The same on another device."""
        return Visibility(
            self.start.to(device, non_blocking=non_blocking),
            self.limit.to(device, non_blocking=non_blocking),
            self.position.to(device, non_blocking=non_blocking),
        )

    def validate(self, max_sequence: int | None = None) -> None:
        """Check shapes, types and ranges, and that every token sees itself (else its softmax would be empty).

        Raises DataError naming the row and the token. Reads values, so on a GPU it waits for them.
        """
        shape = self.start.shape
        for name in ("start", "limit", "position"):
            tensor = getattr(self, name)
            if tensor.dim() != 2 or tensor.shape != shape or tensor.dtype != torch.int32:
                raise DataError(
                    f"visibility.{name} must be int32 [batch, tokens] like start {list(shape)}, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
        index = torch.arange(shape[1], device=self.start.device)
        self._require(
            (self.start >= 0) & (self.start <= index), "start", "must lie in 0..token, so that it sees itself"
        )
        self._require(
            (self.limit > index) & (self.limit <= shape[1]), "limit", "must lie in token+1..tokens in the row"
        )
        end = torch.iinfo(torch.int32).max if max_sequence is None else max_sequence
        self._require((self.position >= 0) & (self.position < end), "position", f"must lie in 0..{end - 1}")

    def _require(self, good: Tensor, name: str, rule: str) -> None:
        if bool(good.all()):
            return
        row, token = (int(i) for i in (~good).nonzero()[0])
        value = int(getattr(self, name)[row, token])
        raise DataError(f"visibility.{name}[{row}, {token}] = {value} of token {token} in row {row}: {rule}")


def causal(batch: int, length: int) -> Visibility:
    """Plain causal attention over `length` tokens. (`None` in place of a Visibility means the same and is faster.)"""
    index = torch.arange(length, dtype=torch.int32).expand(batch, length).contiguous()
    return Visibility(index, torch.full_like(index, length), index.clone())


def documents(first: Tensor) -> Visibility:
    """Causal attention inside each document of a packed sequence.

    Args:
        first: bool [B, T], true where a token begins a document. A row's first token always begins one (it may be
            the rest of a document that the cut between sequences has split).
    """
    if first.dim() != 2 or first.dtype != torch.bool:
        raise DataError(f"documents() takes a bool tensor [batch, tokens], got {first.dtype} {list(first.shape)}")
    length = first.shape[1]
    index = torch.arange(length, dtype=torch.int32, device=first.device).expand(first.shape)
    begin = torch.where(first, index, 0).cummax(dim=1).values
    # limit[j] = the first document start behind j: a running minimum from the right, shifted by one.
    next_first = torch.where(first, index, length).roll(-1, dims=1)
    next_first[:, -1] = length
    limit = next_first.flip(1).cummin(dim=1).values.flip(1)
    return Visibility(index.contiguous(), limit.to(torch.int32), (index - begin).to(torch.int32))
