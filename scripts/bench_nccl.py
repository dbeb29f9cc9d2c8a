"""`bench_comm.py nccl`: a gradient's all-reduce by the backend and in two hops of few bits, on the ranks of a torchrun.

Columns, each the slowest rank's median:

    ms           the whole reduction
    wire ms      the same messages, not coded: what the link alone takes
    coding ms    the same coding, nothing sent: encode, sum and encode again, decode
    hidden       of the shorter of the two, what goes on beside the longer: (wire + coding - ms) / min(wire, coding)
    predicted    by `lowbit.comm.cost` with the link's rate as the backend's BF16 reaches it at the largest size
    bytes/value  that a rank gave to others, counted; `on lo` where the loopback device carried them

On a machine without GPUs gloo does it, as a check of the script.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from measure import Row, gpu_seconds, wall_seconds
from shaped_network import sent_bytes
from torch import Tensor

from lowbit.comm.codec import Codec
from lowbit.comm.codecs import make_codec
from lowbit.comm.collective import TwoHop
from lowbit.comm.cost import CPU_CODINGS, GPU_CODINGS, Link, reduction_seconds
from lowbit.comm.noise import Noise
from lowbit.comm.partition import pieces, share

LAUNCH = 3e-4
"""Seconds that the host takes to launch a hop of a piece."""


class Uncoded(Codec):
    """Messages as long as a codec's, of which nothing is made."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self.name, self.bits, self.align = f"{codec.name} uncoded", codec.bits, codec.align
        self._codec, self._device = codec, device

    def nbytes(self, n: int) -> int:
        """The codec's."""
        return self._codec.nbytes(n)

    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """Any bytes."""
        return torch.empty(self.nbytes(len(x)), dtype=torch.uint8, device=self._device)

    def decode(self, message: Tensor, n: int) -> Tensor:
        """Any numbers."""
        return torch.empty(n, device=self._device)

    def encode_rows(self, x: Tensor, rows: int, per_row: int, noise: Noise | None = None) -> Tensor:
        """Any bytes."""
        return torch.empty(rows, self.nbytes(per_row), dtype=torch.uint8, device=self._device)

    def decode_rows(self, messages: Tensor, per_row: int, out: Tensor) -> None:
        """`out` stays."""

    def sum_encode(self, messages: Tensor, n: int, factor: float, noise: Noise | None = None) -> Tensor:
        """Any bytes."""
        return torch.empty(self.nbytes(n), dtype=torch.uint8, device=self._device)


def coding_alone(codec: Codec, x: Tensor, ranks: int, chunk: int) -> None:
    """What a rank codes in an all-reduce of x [n], in pieces of `chunk`: messages of others are its own."""
    for a, b in pieces(x.numel(), chunk):
        per_rank = share(b - a, ranks, codec.align)
        messages = codec.encode_rows(x[a:b], ranks, per_rank)
        message = codec.sum_encode(messages, per_rank, 1 / ranks)
        codec.decode_rows(message.expand(ranks, -1).contiguous(), per_rank, x[a:b])


@contextmanager
def group_of_all() -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The ranks that torchrun has started, on NCCL where there is a GPU."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = dist.new_group()
    assert group is not None
    try:
        yield group, device
    finally:
        dist.destroy_process_group()


def slowest(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, on the slowest rank."""
    timed = gpu_seconds if device.type == "cuda" else lambda run, *n: wall_seconds(run, device, *n)
    seconds = torch.tensor([timed(run, repeats, 1)], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Sizes of `args.sizes`, the largest first, which says how fast the link is; on rank 0."""
    with group_of_all() as (group, device):
        rows: list[Row] = []
        link: Link | None = None
        for megabytes in sorted(args.sizes, reverse=True):
            found, link = _size(args, megabytes, group, device, link)
            rows = found + rows
        return rows if dist.get_rank() == 0 else []


def _size(
    args: argparse.Namespace, megabytes: float, group: dist.ProcessGroup, device: torch.device, link: Link | None
) -> tuple[list[Row], Link]:
    """Every way to reduce a gradient of so many megabytes in BF16."""
    world, n = group.size(), int(megabytes * 1e6) // 2
    x = torch.randn(n, device=device)
    low = x.bfloat16()
    rows: list[Row] = []
    for name, numbers in (("fp32", x), ("bf16", low)):
        seconds = slowest(lambda numbers=numbers: dist.all_reduce(numbers, group=group), device, args.repeats)  # type: ignore[misc]
        rows.append(
            {"MB in BF16": megabytes, "ranks": world, "way": f"{dist.get_backend()} {name}", "ms": 1e3 * seconds}
        )
    bits = 2 * (world - 1) / world * 16 * n
    link = link or Link(bits / seconds, efficiency=1.0, latency=LAUNCH)
    codings = {coding.name: coding for coding in (GPU_CODINGS if device.type == "cuda" else CPU_CODINGS)}
    for kind in args.kinds.split(","):
        codec = make_codec(kind)
        for count in args.pieces:
            chunk = max(min(n, 1 << 20), -(-n // count))
            x.normal_()
            row = _two_hop(codec, x, group, chunk, args.repeats)
            predicted = reduction_seconds(n, world, codings[kind], link, pieces=len(pieces(n, chunk)))
            rows.append(rows[0] | {"way": f"{kind} in {len(pieces(n, chunk))}"} | row | {"predicted": 1e3 * predicted})
    for row in rows:
        row["over bf16"] = rows[1]["ms"] / row["ms"]
        row["link GB/s"] = bits / 8e9 / (rows[1]["ms"] / 1e3)
    return rows, link


def _two_hop(codec: Codec, x: Tensor, group: dist.ProcessGroup, chunk: int, repeats: int) -> Row:
    """A reduction in two hops, with what it is made of."""
    two_hop, uncoded = TwoHop(group, codec, chunk), TwoHop(group, Uncoded(codec, x.device), chunk)
    whole = slowest(lambda: two_hop.all_reduce_(x).wait(), x.device, repeats)
    wire = slowest(lambda: uncoded.all_reduce_(x).wait(), x.device, repeats)
    coding = slowest(lambda: coding_alone(codec, x, group.size(), chunk), x.device, repeats)
    counted, on_loopback = [], []
    for _ in range(2):
        dist.barrier(group)
        before = two_hop.bytes_sent, sent_bytes("lo")
        two_hop.all_reduce_(x).wait()
        if x.is_cuda:
            torch.cuda.synchronize()
        dist.barrier(group)
        counted.append(two_hop.bytes_sent - before[0])
        on_loopback.append((sent_bytes("lo") - before[1]) / group.size())
    for each in (two_hop, uncoded):
        each.close()
    return {
        "ms": 1e3 * whole,
        "wire ms": 1e3 * wire,
        "coding ms": 1e3 * coding,
        "hidden": min(1.0, max(0.0, (wire + coding - whole) / min(wire, coding))),
        "bytes/value": statistics.median(counted) / x.numel(),
        "on lo": statistics.median(on_loopback) / x.numel(),
    }
