"""Tensors laid end to end, as they travel, and back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def end_to_end(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """All numbers of the tensors, flat; none, of the kind of `like`, where there are no tensors."""
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0)


def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor's numbers into the tensors that it was put together from."""
    for tensor, numbers in zip(tensors, cut(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(numbers.view(tensor.shape))


def cut(flat: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    """A flat tensor in consecutive pieces, views of it."""
    begin = 0
    for length in lengths:
        yield flat.narrow(0, begin, length)
        begin += length


def buckets(tensors: Sequence[Tensor], numbers: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors of about `numbers` numbers together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > numbers:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
