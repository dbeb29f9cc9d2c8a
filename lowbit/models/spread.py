"""Expert parallelism: each rank keeps a part of every layer's experts, and tokens travel to theirs.

    sorted rows --all-to-all--> the ranks that have their experts --experts--> --all-to-all--> back, in the same order

Rank r of w has the experts [r E/w, (r + 1) E/w). The numbers of rows go ahead of them, and every rank waits for them
once a layer and pass: nothing is padded and nothing is dropped. The backward pass sends gradients the opposite ways, so
each rank ends with the gradient of its own experts over the tokens of all ranks; nothing of it is left to reduce. All
ranks must make the same passes, as they do when they share a step's micro-batches evenly.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.models.router import Collect, Dispatch


class Spread:
    """The way from this rank's rows to the experts of all ranks and back."""

    def __init__(self, rank: int, world: int, experts: int) -> None:
        """`experts`: of a layer, over all ranks; a multiple of `world`."""
        self.rank, self.world = rank, world
        self.local = experts // world
        self.sent_bytes = 0
        """To other ranks' experts and back so far, in training; numbers of rows left out."""
        # Not at import, which would bring in the compiler.
        self._outside = torch.compiler.disable(self._there_and_back)  # type: ignore[no-untyped-call]

    @property
    def mine(self) -> slice:
        """The experts of this rank."""
        return slice(self.rank * self.local, (self.rank + 1) * self.local)

    def __call__(self, rows: Tensor, offsets: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """rows [n, width] sorted by expert, offsets int32 [experts of all ranks] -> what the experts make of them.

        experts: this rank's, as a function of their rows and offsets.
        """
        result: Tensor = self._outside(rows, offsets, experts)
        return result

    def _there_and_back(self, rows: Tensor, offsets: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        counts = offsets.diff(prepend=offsets.new_zeros(1)).view(self.world, self.local)  # by rank and its expert
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts.contiguous())
        numbers = torch.stack((counts.sum(1), coming.sum(1))).tolist()  # the wait for the device
        sent, received = numbers
        counter = self if torch.is_grad_enabled() else None  # an evaluation's are no step's
        there: Tensor = Exchange.apply(rows, sent, received, counter)  # type: ignore[no-untyped-call]
        # They came rank after rank, each sorted; the experts want them expert after expert.
        number = torch.arange(self.local, device=rows.device).repeat(self.world)
        expert = number.repeat_interleave(coming.flatten(), output_size=there.shape[0])
        order = expert.sort(stable=True).indices
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        ends = coming.sum(0).cumsum(0).int()
        sorted_rows: Tensor = Dispatch.apply(there, order, place, 1)  # type: ignore[no-untyped-call]
        made = experts(sorted_rows, ends)
        back: Tensor = Collect.apply(made, order, place, 1)  # type: ignore[no-untyped-call]
        result: Tensor = Exchange.apply(back.flatten(0, 1), received, sent, counter)  # type: ignore[no-untyped-call]
        return result


class Exchange(torch.autograd.Function):
    """Rows to other ranks: the first sent[0] to rank 0, and so on; received[r] come from rank r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], spread: Spread | None) -> Tensor:
        ctx.numbers, ctx.spread = (sent, received), spread
        return exchanged(x, sent, received, spread)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.numbers
        return exchanged(grad, received, sent, ctx.spread), None, None, None


def exchanged(x: Tensor, sent: list[int], received: list[int], spread: Spread | None) -> Tensor:
    """x [sum of sent, width] -> [sum of received, width], as bytes, which every backend knows."""
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out.view(torch.uint8), x.contiguous().view(torch.uint8), received, sent)
    if spread is not None:
        spread.sent_bytes += (sum(sent) - sent[spread.rank]) * x.shape[1] * x.element_size()
    return out
