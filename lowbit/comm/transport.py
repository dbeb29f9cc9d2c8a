"""Messages between the ranks of a group: everybody to everybody, started now, waited for later.

NCCL has collectives for both movements. gloo's all-to-all leaves a third to a half of a slow link unused (measured:
49 to 90 Mbit/s of 100), so on gloo every pair of ranks exchanges directly, all pairs at once, each rank beginning with
its right neighbour so that no rank is sent to by all at the same time. gloo cannot move FP8, so everything travels as
bytes (uint8).
"""

import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.errors import RankError

# torch 2.13 has a new name for it and warns of the old one
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """Something under way. `wait` returns what arrived, uint8 [ranks, bytes]; on a GPU it only makes the current stream
    wait.
    """

    def __init__(
        self, arrived: Tensor, works: list[tuple[int, Any]], kept: list[Tensor], timeout: float | None
    ) -> None:
        self.arrived, self.works, self.kept, self.timeout = arrived, works, kept, timeout

    def wait(self) -> Tensor:
        for peer, work in self.works:
            try:
                done = work.wait() if self.timeout is None else work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise RankError(_lost(peer, error)) from error
            if done is False:
                raise RankError(_lost(peer, None))
        self.works, self.kept = [], []
        return self.arrived


def _lost(peer: int, error: Exception | None) -> str:
    reason = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0].splitlines()[0] if error else "timed out"
    name = f"rank {peer} did not answer" if peer >= 0 else "a rank did not answer"
    return f"gradient exchange: {name} ({reason}); see that rank's log"


class Transport:
    """One group's wire. Every rank must start the same movements in the same order."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.timeout = timeout
        self.bytes_sent = 0
        """Bytes that this rank has given to other ranks."""
        self._tag = 0
        self._names = dist.get_process_group_ranks(group)

    def exchange(self, send: Tensor, sizes: list[int], receive: int) -> Pending:
        """send: uint8 [sum of sizes], a message for each rank in turn. `receive`: bytes that each rank sends to this
        one. Arrives as [ranks, receive].
        """
        self.bytes_sent += sum(sizes) - sizes[self.rank]
        arrived = torch.empty(self.size, receive, dtype=torch.uint8, device=send.device)
        if send.is_cuda:
            work = dist.all_to_all_single(
                arrived.view(-1), send, [receive] * self.size, sizes, group=self.group, async_op=True
            )
            return Pending(arrived, [(-1, work)], [send], None)
        parts = list(torch.split(send, sizes))
        arrived[self.rank].copy_(parts[self.rank])
        return self._pairwise(arrived, parts)

    def gather(self, send: Tensor) -> Pending:
        """send: uint8 [bytes], the same message for every rank. Arrives as [ranks, bytes]."""
        self.bytes_sent += send.numel() * (self.size - 1)
        arrived = torch.empty(self.size, send.numel(), dtype=torch.uint8, device=send.device)
        if send.is_cuda:
            work = _all_gather(arrived.view(-1), send, group=self.group, async_op=True)
            return Pending(arrived, [(-1, work)], [send], None)
        arrived[self.rank].copy_(send)
        return self._pairwise(arrived, [send] * self.size)

    def _pairwise(self, arrived: Tensor, parts: list[Tensor]) -> Pending:
        works: list[tuple[int, Any]] = []
        self._tag = (self._tag + 1) % (1 << 20)
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            if arrived.shape[1]:
                work = dist.irecv(arrived[source], group=self.group, tag=self._tag, group_src=source)
                works.append((self._names[source], work))
        for step in range(1, self.size):
            target = (self.rank + step) % self.size
            if parts[target].numel():
                work = dist.isend(parts[target], group=self.group, tag=self._tag, group_dst=target)
                works.append((self._names[target], work))
        return Pending(arrived, works, parts, self.timeout)


def scatter_passes(group: dist.ProcessGroup | None = None) -> int:
    """How many times its input a rank sends in the backend's own reduce-scatter, for many ranks: gloo's sends twice."""
    return 2 if "gloo" in dist.get_backend(group) else 1


def node_groups(node_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Groups for a collective in two levels, of all ranks of the job, `node_size` neighbouring ranks on each node.

    Returns:
        between: this rank and those with its place on the other nodes. inside: the ranks of this rank's node.

    Every rank must call this. Raises `ValueError` if nodes would be of different sizes.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if node_size < 1 or world % node_size:
        raise ValueError(f"{world} ranks cannot be nodes of {node_size}: every node must run the same number of ranks")
    between, inside = None, None
    for place in range(node_size):
        ranks = list(range(place, world, node_size))
        group = dist.new_group(ranks)
        between = group if rank in ranks else between
    for node in range(world // node_size):
        ranks = list(range(node * node_size, (node + 1) * node_size))
        group = dist.new_group(ranks)
        inside = group if rank in ranks else inside
    assert between is not None and inside is not None
    return between, inside
