"""One rank of a distributed test: runs the cases it is given and writes what it got.

python collective_worker.py RANK WORLD FOLDER SUITE
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lowbit.comm.codecs import make_codec
from lowbit.comm.collective import TwoHop
from lowbit.comm.noise import Noise
from lowbit.comm.transport import node_groups
from lowbit.errors import ConfigError, RankError

# name, codec, values, values in a piece, input type, kind of values, factor
REDUCTIONS = [
    ("squinch", "squinch", 3000, 1 << 20, "float32", "normal", None),
    ("sq48", "sq48", 2500, 1000, "float32", "rows", None),
    ("sq48_fast", "sq48_fast", 1111, 700, "float32", "wide", 1.0),
    ("a quarter", "sq48", 2000, 1 << 20, "float32", "normal", 0.25),
    ("one value", "squinch", 1, 64, "float32", "normal", None),
    ("empty shares", "sq48", 130, 1 << 20, "float32", "normal", None),
    ("bf16 input", "sq48", 1500, 600, "bfloat16", "normal", None),
    ("not finite", "squinch", 2000, 900, "float32", "bad", None),
    ("many pieces", "squinch", 4000, 256, "float32", "rows", None),
    ("int8", "int8", 5000, 3000, "float32", "normal", None),
    ("exact", "fp32", 3000, 1000, "float32", "wide", None),
]

# name, codec, values of each rank (repeated for more ranks), values in a piece
SCATTERS = [
    ("equal", "squinch", [1000], 1 << 20),
    ("pieces", "sq48", [1000], 700),
    ("unequal", "squinch", [300, 0, 1700, 5], 800),
    ("one owner", "sq48", [0, 900, 0, 0], 1 << 20),
]


def inputs(kind: str, n: int, rank: int) -> torch.Tensor:
    from test_squinch import values

    return torch.from_numpy(values(kind, n, seed=100 + rank))


def reductions(rank: int, world: int, hop: str, node_size: int = 1, device: str = "cpu") -> dict[str, np.ndarray]:
    """Every reduction over all ranks, in one level or two; with two also one in BF16 inside nodes."""
    between, inside = node_groups(node_size)
    found = {}
    if node_size > 1:
        _, codec, n, piece, _, kind, factor = REDUCTIONS[1]
        two_hop = TwoHop(between, make_codec(codec), piece, inside, intra_codec=make_codec("bf16"), timeout=60)
        x = inputs(kind, n, rank).to(device)
        two_hop.all_reduce_(x, factor).wait()
        found[f"{hop} bf16 inside"] = x.cpu().numpy()
        two_hop.close()
    for name, codec, n, piece, dtype, kind, factor in REDUCTIONS:
        two_hop = TwoHop(between, make_codec(codec), piece, inside if node_size > 1 else None, timeout=60)
        x = inputs(kind, n, rank).to(device, getattr(torch, dtype))
        two_hop.all_reduce_(x, factor).wait()
        found[f"{hop} {name}"] = x.float().cpu().numpy()
        found[f"{hop} {name} bytes"] = np.array([two_hop.bytes_sent])
        two_hop.close()
    for name, codec, sizes, piece in SCATTERS:
        sizes = (sizes * world)[:world]
        if node_size > 1 and len(set(sizes)) > 1:
            continue
        two_hop = TwoHop(between, make_codec(codec), piece, inside if node_size > 1 else None, timeout=60)
        x = inputs("normal", sum(sizes), rank).to(device)
        before = x.clone()
        out = torch.empty(sizes[two_hop.rank], device=device)
        two_hop.reduce_scatter(x, out, sizes=sizes).wait()
        assert torch.equal(x, before) and two_hop.rank == rank
        found[f"{hop} scatter {name}"] = out.cpu().numpy()
        found[f"{hop} scatter {name} bytes"] = np.array([two_hop.bytes_sent])
        two_hop.close()
    two_hop = TwoHop(between, make_codec("squinch"), 900, inside if node_size > 1 else None, timeout=60)
    for dtype in (torch.float32, torch.bfloat16):
        mine = inputs("normal", 1501, rank).to(device, dtype)
        out = torch.empty(1501 * world, dtype=dtype, device=device)
        two_hop.all_gather(mine, out).wait()
        found[f"{hop} gather {dtype}"] = out.float().cpu().numpy()
    two_hop.close()
    return found


def extras(rank: int) -> dict[str, np.ndarray]:
    """Error feedback over steps, stochastic rounding, several reductions in flight beside other traffic."""
    found = {}
    two_hop = TwoHop(dist.new_group(), make_codec("int4"), 3000, timeout=60)
    sent = torch.zeros(5000)
    feedback = two_hop.feedback(sent)
    for step in range(3):
        x = inputs("normal", 5000, 10 * step + rank)
        two_hop.all_reduce_(x, feedback=feedback).wait()
        found[f"feedback {step}"] = x.numpy()
    found["sent"], found["owned"] = sent.numpy(), feedback.spread().numpy()
    again = two_hop.feedback(sent.clone())
    again.take(feedback.spread())
    assert torch.equal(again.spread(), feedback.spread())

    sizes = [0, *[1700] * (dist.get_world_size() - 1)]
    residual = torch.zeros(sum(sizes))
    for step in range(3):
        x, out = inputs("normal", sum(sizes), 10 * step + rank), torch.empty(sizes[rank])
        two_hop.reduce_scatter(x, out, sizes=sizes, residual=residual).wait()
        found[f"scatter feedback {step}"] = out.numpy()
    found["scatter residual"] = residual.numpy()
    two_hop.close()

    two_hop = TwoHop(dist.new_group(), make_codec("sq48"), 1000, timeout=60)
    x = inputs("normal", 2000, rank)
    two_hop.all_reduce_(x, noise=Noise((5, 1))).wait()
    found["noise"] = x.numpy()
    world = dist.get_world_size()
    x, out = inputs("normal", 900 * world, rank), torch.empty(900)
    two_hop.reduce_scatter(x, out, noise=Noise((5, 2))).wait()
    found["scatter noise"] = out.numpy()

    tensors = [inputs("normal", 4000 + k, rank) for k in range(4)]
    works = [two_hop.all_reduce_(t) for t in tensors]
    other = torch.full((1000,), float(rank))
    dist.all_reduce(other)  # the main group, from another thread, while ours is busy
    for work in reversed(works):
        work.wait()
    for k, t in enumerate(tensors):
        found[f"in flight {k}"] = t.numpy()
    found["other"] = other.numpy()
    return found


def disagreement(rank: int) -> dict[str, np.ndarray]:
    """Rank 1 is set up with another codec: every rank must hear of it."""
    try:
        TwoHop(dist.new_group(), make_codec("squinch" if rank == 1 else "sq48"), 1000)
    except ConfigError as error:
        return {"error": np.array(str(error))}
    return {}


def lost(rank: int, how: str) -> dict[str, np.ndarray]:
    """The last rank dies, or hangs: the others must say so within seconds."""
    two_hop = TwoHop(dist.new_group(), make_codec("squinch"), 1000, timeout=4)
    x = torch.randn(3000)
    two_hop.all_reduce_(x).wait()
    if rank == dist.get_world_size() - 1:
        if how == "dies":
            sys.exit(3)
        time.sleep(9)
        sys.exit(3)
    start = time.monotonic()
    try:
        two_hop.all_reduce_(x).wait()
    except RankError as error:
        return {"error": np.array(str(error)), "seconds": np.array(time.monotonic() - start)}
    return {}


def main() -> None:
    rank, world, folder, suite = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store_{suite}"), world)
    backend = "nccl" if suite == "nccl" else "gloo"
    if suite == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    found: dict[str, np.ndarray] = {}
    if suite == "all":
        found |= reductions(rank, world, "flat")
        if world % 2 == 0:
            found |= reductions(rank, world, "nodes of 2", 2)
        if world > 1:
            found |= reductions(rank, world, "one node", world)
            found |= extras(rank)
            found |= {f"disagreement {k}": v for k, v in disagreement(rank).items()}
    elif suite == "nodes":
        found |= reductions(rank, world, "nodes of 2", 2)
    elif suite == "nccl":
        found |= reductions(rank, world, "flat", device="cuda")
        found |= reductions(rank, world, "one node", world, device="cuda")
        found |= {f"disagreement {k}": v for k, v in disagreement(rank).items()}
    else:
        found |= lost(rank, suite)
    np.savez(folder / f"{suite}_{rank}.npz", **found)
    if suite in ("all", "nodes", "nccl"):
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
