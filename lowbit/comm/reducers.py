"""What sums large gradients over the ranks: BF16 by the backend's own operations, or a codec by the two-hop collective.

`choose` measures both on the links that there are. Encoding costs time too, so on a fast link BF16 wins.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.comm.codecs import make_codec
from lowbit.comm.collective import TwoHop
from lowbit.comm.feedback import Feedback
from lowbit.comm.noise import Noise
from lowbit.comm.transport import node_groups
from lowbit.configs.schema import CommKind

MEASURED_NUMBERS = 1 << 22
"""Numbers that a measurement sends: 16 MiB of FP32."""
ROUNDS, MORE_ROUNDS, CLOSE = 3, 6, 1.1
"""Measurements of each candidate, and further ones where the best two are within a tenth of each other."""


class Handle(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Return when the result can be used: on a GPU, by what the current stream does from now on."""
        ...


class Reducer(Protocol):
    """Sums of large gradients over all ranks, in whatever code they travel; every rank calls it in the same order."""

    name: str

    @property
    def sent(self) -> float:
        """Bytes that this rank has sent to other nodes (to other ranks, where all are on one), ever."""
        ...

    @property
    def sent_inside(self) -> float:
        """Bytes that this rank has sent inside its node, where the two are apart."""
        ...

    def all_reduce(self, flat: Tensor, feedback: Feedback | None = None, noise: Noise | None = None) -> Handle:
        """flat [n] FP32, on every rank its own numbers -> their sum, in place, once it was waited for; the same bits on
        every rank. What was begun on a device goes on beside other work there.

        feedback: what coding lost of these numbers so far. noise: for stochastic rounding. Codecs only.
        """
        ...

    def reduce_scatter(
        self, chunks: list[Tensor], lost: list[Tensor] | None = None, noise: Noise | None = None
    ) -> Tensor:
        """One chunk for each rank, of lengths that all ranks agree on -> FP32, the sum of this rank's chunk.

        lost: what coding lost of each chunk so far, changed in place. noise: for stochastic rounding. Codecs only.
        """
        ...


class _Rounded:
    """A sum in BF16 under way, for an FP32 tensor."""

    def __init__(self, work: Any, rounded: Tensor, flat: Tensor) -> None:
        self._work, self._rounded, self._flat = work, rounded, flat

    def wait(self) -> None:
        """See `Handle.wait`."""
        self._work.wait()
        self._flat.copy_(self._rounded)


class Bf16Reducer:
    """Sums in BF16 by the backend's own operations: what DeepSpeed and DDP users have today.

    But gloo's reduce-scatter sends twice what it must, so that there ranks exchange BF16 directly, and sum in FP32.
    """

    name = "bf16"
    sent_inside = 0.0

    def __init__(self, rank: int, world: int) -> None:
        self._sent = 0.0
        self._rank = rank
        self._world = world
        self._direct = CodedReducer("bf16", rank, world, 1) if "gloo" in dist.get_backend() else None

    @property
    def sent(self) -> float:
        """See `Reducer.sent`."""
        return self._sent + (self._direct.sent if self._direct is not None else 0.0)

    def all_reduce(self, flat: Tensor, feedback: Feedback | None = None, noise: Noise | None = None) -> Handle:
        """See `Reducer.all_reduce`."""
        rounded = flat.to(torch.bfloat16)
        work = dist.all_reduce(rounded, async_op=True)
        self._sent += 2 * (self._world - 1) / self._world * rounded.nbytes
        return _Rounded(work, rounded, flat)

    def reduce_scatter(
        self, chunks: list[Tensor], lost: list[Tensor] | None = None, noise: Noise | None = None
    ) -> Tensor:
        """See `Reducer.reduce_scatter`."""
        if self._direct is not None:
            return self._direct.reduce_scatter(chunks)
        rows = _rows(chunks, torch.bfloat16)
        mine = rows.new_empty(rows.shape[1])
        dist.reduce_scatter_tensor(mine, rows.view(-1))
        self._sent += (self._world - 1) * mine.nbytes
        return mine[: chunks[self._rank].numel()].float()


class CodedReducer:
    """Sums by the two-hop collective, in the bits of a codec; FP32 inside a node, if there are several of several."""

    def __init__(self, codec: str, rank: int, world: int, node_size: int) -> None:
        self.name = codec
        self._rank = rank
        self._levels = two_levels(world, node_size)
        between, inside = node_groups(node_size) if self._levels else (dist.new_group(), None)
        self._hops = TwoHop(between, make_codec(codec), intra_group=inside)

    @property
    def sent(self) -> float:
        """See `Reducer.sent`."""
        return float(self._hops.bytes_sent)

    @property
    def sent_inside(self) -> float:
        """See `Reducer.sent_inside`."""
        return float(self._hops.inside.bytes_sent) if self._hops.inside is not None else 0.0

    def all_reduce(self, flat: Tensor, feedback: Feedback | None = None, noise: Noise | None = None) -> Handle:
        """See `Reducer.all_reduce`."""
        return self._hops.all_reduce_(flat, 1.0, feedback=feedback, noise=noise)

    def feedback(self, sent: Tensor) -> Feedback:
        """Error feedback for tensors of sent's length that are all-reduced; `sent` keeps what this rank lost."""
        return self._hops.feedback(sent)

    def reduce_scatter(
        self, chunks: list[Tensor], lost: list[Tensor] | None = None, noise: Noise | None = None
    ) -> Tensor:
        """See `Reducer.reduce_scatter`."""
        if self._levels:  # both levels together need equal parts
            rows = _rows(chunks, torch.float32)
            flat, sizes = rows.view(-1), [rows.shape[1]] * len(chunks)
        else:
            flat, sizes = torch.cat(chunks), [chunk.numel() for chunk in chunks]
        mine = flat.new_empty(sizes[self._rank])
        residual = torch.cat(lost) if lost is not None else None
        self._hops.reduce_scatter(flat, mine, 1.0, sizes, residual=residual, noise=noise).wait()
        if lost is not None and residual is not None:
            for own, left in zip(lost, torch.split(residual, sizes), strict=True):
                own.copy_(left)
        return mine[: chunks[self._rank].numel()]


def two_levels(world: int, node_size: int) -> bool:
    """Whether ranks exchange inside their nodes first: several nodes of several ranks each, all of one size."""
    return 1 < node_size < world and world % node_size == 0


def _rows(chunks: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Chunks of different lengths as rows of one, filled up with zeros."""
    rows = chunks[0].new_zeros((len(chunks), max(chunk.numel() for chunk in chunks)), dtype=dtype)
    for row, chunk in zip(rows, chunks, strict=True):
        row[: chunk.numel()] = chunk
    return rows


def make_reducer(
    kind: CommKind,
    whole: bool,
    place: tuple[int, int, int],
    device: torch.device,
    agree: Callable[[list[float]], list[float]],
) -> tuple[Reducer, str]:
    """What sums large gradients over the ranks, and what there is to say about the choice.

    Args:
        whole: by all-reduces (ZeRO 0) rather than reduce-scatters. place: rank, ranks, ranks of a node.
        agree: the largest over the ranks of each number.
    """
    rank, world, node_size = place
    if kind is CommKind.bf16:
        return Bf16Reducer(rank, world), ""
    if kind is not CommKind.auto:
        return CodedReducer(kind.value, rank, world, node_size), ""
    coded = CodedReducer(CommKind.sq48.value, rank, world, node_size)
    return choose([Bf16Reducer(rank, world), coded], whole, device, agree)


def choose(
    candidates: list[Reducer], whole: bool, device: torch.device, agree: Callable[[list[float]], list[float]]
) -> tuple[Reducer, str]:
    """The candidate that is fastest on these links, and a line about what was measured.

    They take turns, so that whatever else goes on slows down all of them, and the best of three rounds counts. Two that
    are close are measured longer: other work on the machine only ever adds time, so more rounds tell them apart.

    Args:
        whole: all-reduces (ZeRO 0) rather than reduce-scatters. agree: the largest over the ranks of each number.
    """
    seconds = [float("inf")] * len(candidates)
    for turn in range(1 + ROUNDS + MORE_ROUNDS):  # the first one warms up
        if turn == 1 + ROUNDS and sorted(seconds)[1] > CLOSE * min(seconds):
            break
        measured = agree([_time(reducer, whole, device) for reducer in candidates])
        if turn:
            seconds = [min(pair) for pair in zip(seconds, measured, strict=True)]
    best = min(range(len(candidates)), key=lambda index: seconds[index])
    rates = ", ".join(
        f"{reducer.name} {MEASURED_NUMBERS * 4 / time_taken / 2**20:,.0f} MiB/s"
        for reducer, time_taken in zip(candidates, seconds, strict=True)
    )
    return candidates[best], f"comm=auto: FP32 gradients pass at {rates}: {candidates[best].name} it is"


def _time(reducer: Reducer, whole: bool, device: torch.device) -> float:
    """Seconds of one reduction on this rank."""
    numbers = torch.linspace(-1, 1, MEASURED_NUMBERS, device=device)
    dist.barrier()
    begin = time.perf_counter()
    if whole:
        reducer.all_reduce(numbers).wait()
    else:
        reducer.reduce_scatter(list(numbers.chunk(dist.get_world_size())))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
