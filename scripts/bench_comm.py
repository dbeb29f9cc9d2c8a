"""Gradient communication: how fast the codecs are, and what they buy on slow and fast links. Tables, and JSON.

    python scripts/bench_comm.py codec                   # every codec on this machine's GPU (or CPU), bytes a second
    python scripts/bench_comm.py codec --device cpu      # the fast CPU path beside the reference it equals
    python scripts/bench_comm.py link                    # gloo over links shaped to 100 Mbit/s and 1 Gbit/s (root)
    python scripts/bench_comm.py auto --rates 100mbit,1gbit,2gbit     # what comm=auto takes there, and how right it is
    torchrun --nproc_per_node=2 scripts/bench_comm.py nccl            # two-hop against NCCL's all-reduce, 25 MB to 4 GB
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo torchrun ... nccl --repeats 3
    NCCL_MAX_NCHANNELS=1 torchrun ... nccl               # NVLink with fewer channels: where few bits break even

`link` measures a step's communication of ZeRO 0 (gradients all-reduced) and of ZeRO 1 and 2 (gradients to their owners,
weights gathered in BF16), against the cost model's prediction. Bytes are those that left the network device. `fp32` and
`bf16` are gloo's own; its reduce-scatter sends twice what it must, so `bf16_hops` sends BF16 pairwise, gradients and
weights, and speed-ups are over the faster of the two.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_nccl
import torch
import torch.distributed as dist
from measure import Row, gpu_seconds, print_table, told, write
from shaped_network import ShapedNetwork, sent_bytes, why_not
from torch import Tensor

from lowbit.comm.codec import Codec
from lowbit.comm.codecs import CODECS, Squinch, make_codec
from lowbit.comm.collective import TwoHop
from lowbit.comm.cost import CPU_CODINGS, Coding, Link, gather_seconds, parse_rate, reduction_seconds
from lowbit.comm.noise import Noise
from lowbit.comm.partition import piece_length
from lowbit.comm.reducers import Bf16Reducer, CodedReducer, Reducer, choose
from lowbit.comm.squinch import ReferenceSquinch
from lowbit.errors import ConfigError

# Codecs


def cpu_seconds(run: Callable[[], Any], repeats: int = 15) -> float:
    """Shortest processor time of a call on this thread: other processes do not count."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times)


def codec_calls(codec: Codec, x: Tensor, ranks: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Each operation and the bytes that it moves at least: what it reads and what it writes."""
    n = x.numel()
    size, message = codec.nbytes(n), codec.encode(x)
    share = n // ranks // 4096 * 4096
    rows = codec.encode_rows(x[: ranks * share], ranks, share)
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    by_chance = {"encode, stochastic": (lambda: codec.encode(x, Noise((1, 2, 3))), x.nbytes + size)}
    return (by_chance if isinstance(codec, Squinch) and x.is_cuda else {}) | {
        "encode": (lambda: codec.encode(x), x.nbytes + size),
        "decode": (lambda: codec.decode_rows(message[None], n, out), out.nbytes + size),
        f"sum of {ranks}, encode": (lambda: codec.sum_encode(rows, share, 1 / ranks), (ranks + 1) * rows.shape[1]),
    }


def bench_codec(args: argparse.Namespace) -> list[Row]:
    """Bytes a second beside a copy of the same machine, and nanoseconds a value."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timed = gpu_seconds if device.type == "cuda" else cpu_seconds
    torch.set_num_threads(1)
    n = args.values or (1 << 28 if device.type == "cuda" else 1 << 22)
    source = torch.randn(n, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / timed(lambda: target.copy_(source))
    print(f"copy {copy / 1e9:.0f} GB/s on {torch.cuda.get_device_name() if device.type == 'cuda' else 'the CPU'}")
    rows: list[Row] = []
    coders = [(name, make_codec(name)) for name in args.codecs.split(",")]
    formats = [(name, codec) for name, codec in coders if isinstance(codec, Squinch)]
    for warps in args.warps:
        coders += [(f"{name} {warps} warps", Squinch(c.grid, c.search, warps)) for name, c in formats]
    for name, codec in coders:
        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
            for operation, (run, moved) in codec_calls(codec, source.to(dtype), 4).items():
                if dtype is torch.bfloat16 and not operation.startswith("encode"):
                    continue
                rows.append(codec_row(name, operation, dtype, timed(run), moved, copy, n))
        if device.type == "cpu" and isinstance(codec, Squinch):
            reference = ReferenceSquinch(codec.grid, codec.search)
            part = source[: 1 << 18]
            for operation, (run, moved) in codec_calls(reference, part, 4).items():
                seconds = cpu_seconds(run, 3)
                rows.append(codec_row(f"{name} reference", operation, torch.float32, seconds, moved, copy, 1 << 18))
    return rows


def codec_row(name: str, operation: str, dtype: torch.dtype, seconds: float, moved: float, copy: float, n: int) -> Row:
    return {
        "codec": name,
        "operation": operation,
        "from": str(dtype).removeprefix("torch."),
        "ms": seconds * 1e3,
        "ns/value": seconds / n * 1e9,
        "GB/s": moved / seconds / 1e9,
        "of copy": moved / seconds / copy,
    }


# Collectives


def reduction(kind: str, group: dist.ProcessGroup, chunk: int) -> tuple[Callable[[Tensor], None], TwoHop | None]:
    """An all-reduce of FP32 gradients (mean, in place) by the backend, or in two hops."""
    if kind == "fp32":
        return lambda x: _reduce_plain(x, group), None
    if kind == "bf16":
        return lambda x: _reduce_bf16(x, group), None
    two_hop = TwoHop(group, make_codec(plain_name(kind)), chunk or None)
    return lambda x: two_hop.all_reduce_(x).wait(), two_hop


def plain_name(kind: str) -> str:
    """The codec of a kind."""
    return kind.removesuffix("_hops")


def _reduce_plain(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)
    x.mul_(1 / group.size())


def _reduce_bf16(x: Tensor, group: dist.ProcessGroup) -> None:
    rounded = x.bfloat16()
    dist.all_reduce(rounded, group=group)
    x.copy_(rounded).mul_(1 / group.size())


def sharded(kind: str, group: dist.ProcessGroup, chunk: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Gradients [n] -> the mean of this rank's part, FP32 [n / ranks]; then every rank's part in BF16 -> FP32 [n], the
    owner's own rounded as well.
    """
    if kind in ("fp32", "bf16"):
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16

        def plain(x: Tensor, mine: Tensor, whole: Tensor) -> None:
            part, every = torch.empty(mine.numel(), dtype=dtype), torch.empty(whole.numel(), dtype=torch.bfloat16)
            dist.reduce_scatter_tensor(part, x.to(dtype), group=group)
            mine.copy_(part).mul_(1 / group.size())
            dist.all_gather_into_tensor(every, mine.bfloat16(), group=group)
            whole.copy_(every)

        return plain
    two_hop = TwoHop(group, make_codec(plain_name(kind)), chunk or None)

    def hops(x: Tensor, mine: Tensor, whole: Tensor) -> None:
        every = torch.empty(whole.numel(), dtype=torch.bfloat16)
        two_hop.reduce_scatter(x, mine).wait()
        two_hop.all_gather(mine.bfloat16(), every).wait()
        whole.copy_(every)

    return hops


def timed_on_all(run: Callable[[], None], group: dist.ProcessGroup, repeats: int) -> tuple[float, float]:
    """Best of the repeats by the slowest rank's clock (other work on the machine only ever adds), and bytes sent."""
    run()
    seconds, sent = [], []
    for _ in range(repeats):
        dist.barrier(group)
        bytes_before, begin = sent_bytes(), time.perf_counter()
        run()
        took = torch.tensor([time.perf_counter() - begin])
        dist.barrier(group)  # until then this rank may still be sending
        sent.append(sent_bytes() - bytes_before)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
        seconds.append(float(took))
    return min(seconds), statistics.median(sent)


def link_rank(args: argparse.Namespace) -> None:
    """One rank of `link`; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    group = dist.new_group()
    assert group is not None
    world, rank = dist.get_world_size(), dist.get_rank()
    n = args.values // world * world
    link = Link(parse_rate(args.rate), efficiency=0.93)
    torch.manual_seed(rank)
    x, mine, whole = torch.randn(n), torch.randn(n // world), torch.empty(n)
    codings = {coding.name: coding for coding in CPU_CODINGS}
    rows: list[Row] = []
    for kind in args.kinds.split(","):
        coding = _measured(codings.get(kind) or replace(codings["sq48"], bits=make_codec(plain_name(kind)).bits), kind)
        run, two_hop = reduction(kind, group, args.chunk)
        seconds, sent = timed_on_all(lambda run=run: run(x.clone()), group, args.repeats)  # type: ignore[misc]
        pieces = max(1, n // (args.chunk or piece_length(world, on_gpu=False)))
        predicted = reduction_seconds(n, world, coding, link, pieces=pieces)
        counted = two_hop.bytes_sent / (args.repeats + 1) if two_hop else float("nan")
        codec = n * 1e-9 * (coding.encode_ns * (1 + coding.two_hop / world) + 2 * coding.decode_ns)
        rows.append(link_row(args.rate, world, "0", kind, n, seconds, predicted, codec, sent, counted))
        both = sharded(kind, group, args.chunk)
        seconds, sent = timed_on_all(lambda both=both: both(x, mine, whole), group, args.repeats)  # type: ignore[misc]
        predicted = reduction_seconds(n, world, coding, link, scatter=True, pieces=pieces)
        predicted += gather_seconds(n, world, 2.0, link)
        codec = n * 1e-9 * (coding.encode_ns + coding.decode_ns)
        rows.append(link_row(args.rate, world, "1, 2", kind, n, seconds, predicted, codec, sent, float("nan")))
    if rank == 0:
        Path(args.out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def auto_rank(args: argparse.Namespace) -> None:
    """One rank of `auto`: what is chosen, and both candidates measured longer, in turn; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.randn(args.values // world * world)

    def agree(values: list[float]) -> list[float]:
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [float(value) for value in largest]

    rows: list[Row] = []
    for whole in (True, False):
        candidates: list[Reducer] = [Bf16Reducer(rank, world), CodedReducer("sq48", rank, world, 1)]
        chosen, words = choose(candidates, whole, torch.device("cpu"), agree)
        seconds: dict[str, list[float]] = {reducer.name: [] for reducer in candidates}
        for _ in range(args.repeats):
            for reducer in candidates:
                dist.barrier()
                begin = time.perf_counter()
                if whole:
                    reducer.all_reduce(numbers.clone()).wait()
                else:
                    reducer.reduce_scatter(list(numbers.chunk(world)))
                seconds[reducer.name] += agree([time.perf_counter() - begin])
        ms = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
        over = ms[chosen.name] / min(ms.values())
        row: Row = {"link": args.rate, "ranks": world, "ZeRO": "0" if whole else "1, 2", "chosen": chosen.name}
        rows.append(row | {f"{name} ms": value for name, value in ms.items()} | {"over the better": over})
        if rank == 0:
            print(words, flush=True)
    if rank == 0:
        Path(args.out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _measured(coding: Coding, kind: str) -> Coding:
    """The coding with this machine's own codec times."""
    codec, x = make_codec(plain_name(kind)), torch.randn(1 << 20)
    message, out = codec.encode(x), torch.empty(1 << 20)
    encode = cpu_seconds(lambda: codec.encode(x), 5) / x.numel() * 1e9
    decode = cpu_seconds(lambda: codec.decode_rows(message[None], x.numel(), out), 5) / x.numel() * 1e9
    return replace(coding, name=kind, encode_ns=encode, decode_ns=decode)


def link_row(
    rate: str,
    world: int,
    stage: str,
    kind: str,
    n: int,
    seconds: float,
    predicted: float,
    codec: float,
    sent: float,
    counted: float,
) -> Row:
    return {
        "link": rate,
        "ranks": world,
        "ZeRO": stage,
        "gradients": kind,
        "ms": seconds * 1e3,
        "predicted": predicted * 1e3,
        "codec ms": codec * 1e3,
        "bytes/param": sent / n,
        "counted": counted / n,
        "Mbit/s": sent * 8 / seconds / 1e6,
    }


def bench_link(args: argparse.Namespace) -> list[Row]:
    """`link_rank`, or `auto_rank`, in namespaces, for each rate and number of ranks."""
    if reason := why_not():
        print(f"skipped: {reason}")
        return []
    rows: list[Row] = []
    for rate in args.rates.split(","):
        values = args.values or (1 << 21 if parse_rate(rate) < 5e8 else 1 << 23)
        for ranks in map(int, args.ranks.split(",")):
            out = Path(args.out).with_name(f".rows_{os.getpid()}.json")
            command = [sys.executable, __file__, "_rank", "--rate", rate, "--values", str(values), "--out", str(out)]
            command += ["--kinds", args.kinds, "--chunk", str(args.chunk), "--repeats", str(args.repeats)]
            command += ["--of", args.command]
            with ShapedNetwork(ranks, rate) as network:
                processes = [network.start(rank, command) for rank in range(ranks)]
                codes = [process.wait(timeout=1200) for process in processes]
            if any(codes):
                raise SystemExit(f"{ranks} ranks on {rate}: exit codes {codes}")
            found = json.loads(out.read_text())
            rows += found if args.command == "auto" else [with_speedup(row, found) for row in found]
            out.unlink()
    return rows


def with_speedup(row: Row, rows: list[Row]) -> Row:
    base = min(r["ms"] for r in rows if r["gradients"].startswith("bf16") and r["ZeRO"] == row["ZeRO"])
    return {**row, "over BF16": base / row["ms"]}


def at_least(least: int) -> Callable[[str], int]:
    """An argument's type: whole numbers from `least` on."""

    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} on")
        return int(text)

    return number


def several(of: Callable[[str], Any]) -> Callable[[str], str]:
    """An argument's type: some of these with commas between them."""

    def checked(text: str) -> str:
        for part in text.split(","):
            of(part)
        return text

    return checked


def rate(text: str) -> str:
    """An argument's type: a link's rate."""
    try:
        parse_rate(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def kind(text: str) -> str:
    """An argument's type: how gradients travel."""
    if plain_name(text) not in CODECS:
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(CODECS)}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    codec = commands.add_parser("codec")
    codec.add_argument("--device")
    codec.add_argument("--codecs", type=several(kind), default=",".join(CODECS))
    codec.add_argument("--warps", type=int, nargs="*", default=[], help="also with this many warps a program (GPU)")
    link, auto, rank, nccl = (commands.add_parser(name) for name in ("link", "auto", "_rank", "nccl"))
    for one in (link, auto):
        one.add_argument("--rates", type=several(rate), default="100mbit,1gbit")
        one.add_argument("--ranks", type=several(at_least(2)), default="2,4")
    rank.add_argument("--rate", required=True)
    rank.add_argument("--of", choices=("link", "auto"), required=True)
    for one in (link, auto, rank):
        one.add_argument("--kinds", type=several(kind), default="fp32,bf16,bf16_hops,int8,squinch,sq48")
        one.add_argument("--chunk", type=at_least(0), default=0, help="values in a piece")
        one.add_argument("--repeats", type=at_least(1), default=3)
    nccl.add_argument("--kinds", type=several(kind), default="squinch,sq48,sq48_fast")
    nccl.add_argument("--pieces", type=at_least(1), nargs="+", default=[1, 4])
    nccl.add_argument("--repeats", type=at_least(1), default=10)
    nccl.add_argument("--sizes", type=at_least(1), nargs="+", default=[25, 100, 400, 1600, 4000], help="MB in BF16")
    for one in (codec, link, auto, rank):
        one.add_argument("--values", type=at_least(1), default=0)
    for one in (codec, link, auto, rank, nccl):
        one.add_argument("--out", default=f"bench_comm_{one.prog.split()[-1]}.json")
    args = parser.parse_args()
    if args.command == "_rank":
        (auto_rank if args.of == "auto" else link_rank)(args)
        return
    parts = {"codec": bench_codec, "link": bench_link, "auto": bench_link, "nccl": bench_nccl.rows_of}
    rows = parts[args.command](args)
    if rows:
        print_table(rows)
        write(Path(args.out), {"rows": rows})


if __name__ == "__main__":
    told(main)
