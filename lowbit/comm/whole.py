"""ZeRO 0: gradients all-reduced in buckets, which leave while the backward pass goes on.

A bucket holds neighbouring parameters, and the backward pass reaches the last ones first: buckets leave from the last
to the first, each as soon as its gradients are there and the one before it has left. The order and cut are the same on
every rank and in every step, whatever arrives when, so that collectives match and a resumed run repeats its messages.
At most `AHEAD` are under way: the pass waits for links that cannot keep up, rather than fill the memory with copies.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbit.comm.flat import buckets, end_to_end, write_back
from lowbit.comm.reducers import Handle

AHEAD = 2
"""Buckets under way at once: while one travels, the next is being coded."""


class WholeReduction:
    """The buckets of some parameters, reduced once a step."""

    def __init__(self, parameters: Sequence[Tensor], numbers: int, begin: Callable[[int, Tensor], Handle]) -> None:
        """
        Args:
            parameters: in the model's order. numbers: gradients in a bucket, about.
            begin: starts the reduction of a bucket's flat gradients, in place; gets the bucket's index, too.
        """
        self.buckets = list(buckets(parameters, numbers))
        self._begin = begin
        self._bucket_of = {id(p): index for index, bucket in enumerate(self.buckets) for p in bucket}
        self._missing: list[int] = []
        """Gradients that each bucket waits for; empty while nothing leaves early."""
        self._left = len(self.buckets)
        """Buckets that have not been begun; the last of them is the next one."""
        self._under_way: deque[tuple[Handle, Tensor, list[Tensor]]] = deque()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """The coming backward pass brings each gradient its last part: buckets may leave as it does."""
        self._missing = [len(bucket) for bucket in self.buckets]

    def finish(self) -> None:
        """Reduce whatever has not left yet, and wait for all: gradients are sums over the ranks now."""
        while self._left:
            self._begin_next()
        while self._under_way:
            self._end_oldest()
        self._left, self._missing = len(self.buckets), []

    def _arrived(self, parameter: Tensor) -> None:
        if not self._missing:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._left and not self._missing[self._left - 1]:
            self._begin_next()

    @torch.no_grad()
    def _begin_next(self) -> None:
        if len(self._under_way) == AHEAD:
            self._end_oldest()
        self._left -= 1
        bucket = self.buckets[self._left]
        flat = end_to_end([gradient(p) for p in bucket], bucket[0])
        self._under_way.append((self._begin(self._left, flat), flat, bucket))

    @torch.no_grad()
    def _end_oldest(self) -> None:
        work, flat, bucket = self._under_way.popleft()
        work.wait()
        write_back(flat, [gradient(p) for p in bucket])


def gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zeros from now on where it has none, because on other ranks it may have one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
