"""The collective on real gloo processes, bit for bit against the two hops done with the independent coder.

Each world size is one launch that runs every case; what the ranks wrote is compared here.
"""

import os
from functools import cache
from pathlib import Path

import forked
import ml_dtypes
import numpy as np
import pytest
import torch
from collective_worker import REDUCTIONS, SCATTERS, inputs
from squinch_oracle import Oracle

from lowbit.comm.codec import Codec
from lowbit.comm.codecs import make_codec
from lowbit.comm.noise import Noise
from lowbit.comm.partition import pieces, scatter_pieces, share
from lowbit.comm.simulate import simulate

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("collective_worker.py")
Results = list[dict[str, np.ndarray]]


def launch(folder: Path, world: int, suite: str) -> list[int]:
    """Run a suite on `world` processes; their exit codes."""
    printed = [folder / f"printed{r}" for r in range(world)]
    ranks = [
        forked.start([str(WORKER), str(r), str(world), str(folder), suite], folder, os.environ, file, file)
        for r, file in enumerate(printed)
    ]
    return [rank.wait(timeout=240) for rank in ranks]


def load(folder: Path, world: int, suite: str) -> Results:
    return [dict(np.load(folder / f"{suite}_{r}.npz")) for r in range(world)]


@pytest.fixture(scope="module", params=[1, 2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    assert launch(folder, request.param, "all") == [0] * request.param
    return load(folder, request.param, "all")


# The two hops once more: NumPy, the independent coder, shares worked out here.


class Exact:
    """The coder of FP32."""

    multiple = 1

    def encode(self, x: np.ndarray) -> bytes:
        return x.astype(np.float32).tobytes()

    def decode(self, data: bytes, n: int) -> np.ndarray:
        return np.frombuffer(data, np.float32)[:n]


class Integers:
    """Blocks of 2048 integers of 8 bits, in NumPy. Messages are pairs (scales, codes)."""

    multiple = 2048

    def encode(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        blocks = x.reshape(-1, 2048)
        largest = np.abs(blocks).max(1)
        inverse = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
        return largest / np.float32(127), np.rint(blocks * inverse[:, None]).astype(np.int8)

    def decode(self, data: tuple[np.ndarray, np.ndarray], n: int) -> np.ndarray:
        return (data[1].astype(np.float32) * data[0][:, None]).ravel()[:n]


@cache
def coder(name: str) -> tuple[Oracle | Exact | Integers, int]:
    """A coder and the multiple of values that shares are filled up to."""
    if name == "fp32":
        return Exact(), 1
    if name == "int8":
        return Integers(), 2048
    oracle = Oracle(name.removesuffix("_fast"), search=not name.endswith("_fast"))
    return oracle, 16 * oracle.spec.block


def two_hops(shards: list[np.ndarray], name: str, factor: float) -> np.ndarray:
    """[n] for each rank -> the sum that all get."""
    code, multiple = coder(name)
    world, n = len(shards), len(shards[0])
    per = -(-n // world)
    per = -(-per // multiple) * multiple
    padded = [np.concatenate([s, np.zeros(world * per - n, np.float32)]) for s in shards]
    out = []
    for owner in range(world):
        total = None
        for x in padded:
            part = code.decode(code.encode(x[owner * per : (owner + 1) * per]), per)
            total = part if total is None else (total + part).astype(np.float32)
        total = (total * np.float32(factor)).astype(np.float32)
        out.append(code.decode(code.encode(total), per))
    return np.concatenate(out)[:n]


def expected_reduction(case, world: int, node_size: int, inside: type = np.float32) -> np.ndarray:  # type: ignore[no-untyped-def]
    """inside: what values are while they travel between the ranks of a node."""
    _, name, n, piece, dtype, kind, factor = case
    factor = 1 / world if factor is None else factor
    xs = [inputs(kind, n, r).to(getattr(torch, dtype)).float().numpy() for r in range(world)]
    if world == 1:
        return xs[0] * np.float32(factor)
    nodes = world // node_size
    out = np.zeros(n, np.float32)
    for begin in range(0, n, piece):
        end = min(begin + piece, n)
        if node_size == 1:
            out[begin:end] = two_hops([x[begin:end] for x in xs], name, factor)
            continue
        length = -(-(end - begin) // node_size)
        for place in range(node_size):
            shards = []
            for node in range(nodes):
                total = None
                for x in xs[node * node_size : (node + 1) * node_size]:
                    part = np.zeros(length, np.float32)
                    own = x[begin + place * length : min(end, begin + (place + 1) * length)]
                    part[: len(own)] = own.astype(inside)
                    total = part if total is None else (total + part).astype(np.float32)
                shards.append(total)
            a, b = begin + place * length, min(end, begin + (place + 1) * length)
            if b > a:
                out[a:b] = two_hops(shards, name if nodes > 1 else "fp32", factor)[: b - a]
    return out.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = (np.nan_to_num(v.astype(np.float32), nan=77.0).view(np.int32) for v in (a, b))
    return np.array_equal(a, b)


LEVELS = [("flat", lambda world: 1), ("nodes of 2", lambda world: 2), ("one node", lambda world: world)]


def test_reductions(ranks: Results) -> None:
    world = len(ranks)
    levels = {hop: size(world) for hop, size in LEVELS if f"{hop} squinch" in ranks[0]}
    assert len(levels) == {1: 1, 2: 3, 3: 2, 4: 3}[world]
    check_reductions(ranks, levels)


def check_reductions(ranks: Results, levels: dict[str, int]) -> None:
    """levels: a name and the ranks of a node."""
    for hop, node_size in levels.items():
        for case in REDUCTIONS:
            expected = expected_reduction(case, len(ranks), node_size)
            for rank in ranks:
                assert same(rank[f"{hop} {case[0]}"], expected), (hop, case)
        if node_size > 1:
            expected = expected_reduction(REDUCTIONS[1], len(ranks), node_size, ml_dtypes.bfloat16)
            assert all(same(rank[f"{hop} bf16 inside"], expected) for rank in ranks), hop


def test_the_simulation_gives_the_same_bits(ranks: Results) -> None:
    world = len(ranks)
    for hop, size in LEVELS:
        for name, codec, n, piece, dtype, kind, factor in REDUCTIONS:
            if (key := f"{hop} {name}") in ranks[0]:
                xs = [inputs(kind, n, r).to(getattr(torch, dtype)) for r in range(world)]
                out = simulate(xs, make_codec(codec), piece, factor, node_size=size(world) if world > 1 else 1)
                assert same(out.float().numpy(), ranks[0][key]), key


def test_the_mean_is_near_the_exact_one(ranks: Results) -> None:
    world = len(ranks)
    exact = np.mean([inputs("normal", 3000, r).double().numpy() for r in range(world)], axis=0)
    error = ranks[0]["flat squinch"] - exact
    relative = np.sqrt(np.square(error).sum() / np.square(exact).sum())
    assert relative < (0.08 if world > 1 else 1e-6)
    wide = np.mean([inputs("wide", 3000, r).double().numpy() for r in range(world)], axis=0)
    assert np.allclose(ranks[0]["flat exact"], wide, rtol=1e-5, atol=1e-6 * np.abs(wide).max())


def test_reduce_scatter(ranks: Results) -> None:
    """One rounding: the ordered sum of decoded messages, per rank and piece."""
    world = len(ranks)
    for hop, size in LEVELS:
        for name, codec, sizes, piece in SCATTERS:
            key = f"{hop} scatter {name}"
            if key not in ranks[0]:
                continue
            sizes = (sizes * world)[:world]
            xs = [inputs("normal", sum(sizes), r).numpy() for r in range(world)]
            node_size = size(world)
            for r in range(world):
                assert same(ranks[r][key], expected_scatter(xs, sizes, r, codec, piece, node_size)), (key, r)


def expected_scatter(
    xs: list[np.ndarray], sizes: list[int], rank: int, name: str, piece: int, node_size: int
) -> np.ndarray:
    world = len(xs)
    if world == 1:
        return xs[0]
    nodes = world // node_size
    code, multiple = coder(name if nodes > 1 else "fp32")
    count = max(1, -(-sum(sizes) // piece))
    per = -(-sizes[rank] // count)
    per = max(multiple, -(-per // multiple) * multiple)
    start = sum(sizes[:rank])
    out = np.zeros(sizes[rank], np.float32)
    for begin in range(0, sizes[rank], per):
        end = min(begin + per, sizes[rank])
        total = None
        for node in range(nodes):
            inner = None
            for x in xs[node * node_size : (node + 1) * node_size]:
                part = x[start + begin : start + end]
                inner = part if inner is None else (inner + part).astype(np.float32)
            decoded = code.decode(code.encode(inner), end - begin)
            total = decoded if total is None else (total + decoded).astype(np.float32)
        out[begin:end] = total * np.float32(1 / world)
    return out


def test_bytes_are_counted(ranks: Results) -> None:
    """Each rank sends every other one a message of its share, twice; nothing where there is one rank or one node."""
    world = len(ranks)
    for name, codec, n, piece, *_ in REDUCTIONS:
        made = make_codec(codec)
        sent = sum(2 * (world - 1) * made.nbytes(share(b - a, world, made.align)) for a, b in pieces(n, piece))
        assert all(rank[f"flat {name} bytes"] == sent for rank in ranks), name
        if world > 1:
            assert ranks[0][f"one node {name} bytes"] == 0
    made = make_codec("squinch")
    sent = (world - 1) * made.nbytes(1000)
    assert ranks[0]["flat scatter equal bytes"] == sent


def test_all_gather(ranks: Results) -> None:
    for hop, _ in LEVELS:
        for dtype in (torch.float32, torch.bfloat16):
            if (key := f"{hop} gather {dtype}") in ranks[0]:
                expected = torch.cat([inputs("normal", 1501, r).to(dtype).float() for r in range(len(ranks))]).numpy()
                assert all(same(rank[key], expected) for rank in ranks), key


def test_extras(ranks: Results) -> None:
    world = len(ranks)
    if world == 1:
        pytest.skip("one rank exchanges nothing")
    for k in range(4):
        xs = [inputs("normal", 4000 + k, r) for r in range(world)]
        out = simulate(xs, make_codec("sq48"), 1000).numpy()
        assert all(same(rank[f"in flight {k}"], out) for rank in ranks)
    assert all((rank["other"] == sum(range(world))).all() for rank in ranks)
    xs = [inputs("normal", 2000, r) for r in range(world)]
    out = simulate(xs, make_codec("sq48"), 1000, noise=Noise((5, 1))).numpy()
    assert all(same(rank["noise"], out) for rank in ranks)
    assert not same(out, simulate(xs, make_codec("sq48"), 1000).numpy())


def test_error_feedback(ranks: Results) -> None:
    """What was lost comes back: the sum of the steps' results plus the residuals is the sum of the exact means."""
    world = len(ranks)
    if world == 1:
        pytest.skip("one rank exchanges nothing")
    steps = [f"feedback {k}" for k in range(3)]
    for key in steps:
        assert all(same(rank[key], ranks[0][key]) for rank in ranks)
    exact = np.mean(
        [sum(inputs("normal", 5000, 10 * k + r).double().numpy() for k in range(3)) for r in range(world)], 0
    )
    got = sum(ranks[0][key].astype(np.float64) for key in steps)
    left = np.mean([rank["sent"].astype(np.float64) for rank in ranks], axis=0)
    owned = np.sum([rank["owned"].astype(np.float64) for rank in ranks], axis=0)  # each number has one owner
    assert all(((rank["owned"] != 0).sum() <= 2 * 2048) for rank in ranks)
    assert np.abs(got + left + owned - exact).max() < 1e-5
    without = np.abs(got - exact).max()
    assert without > 0.01


def test_error_feedback_of_a_reduce_scatter(ranks: Results) -> None:
    """The same for sums that their owners keep: only what was sent can get lost."""
    world = len(ranks)
    if world == 1:
        pytest.skip("one rank exchanges nothing")
    total = 1700 * (world - 1)
    steps = [np.mean([inputs("normal", total, 10 * k + r).double().numpy() for r in range(world)], 0) for k in range(3)]
    got = sum(np.concatenate([rank[f"scatter feedback {k}"] for rank in ranks]).astype(np.float64) for k in range(3))
    left = np.mean([rank["scatter residual"].astype(np.float64) for rank in ranks], axis=0)
    assert np.abs(got + left - sum(steps)).max() < 1e-5
    assert np.abs(got - sum(steps)).max() > 0.01


def test_stochastic_rounding_of_a_reduce_scatter(ranks: Results) -> None:
    """Each message has noise of its own: piece, sender, receiver."""
    world = len(ranks)
    if world == 1:
        pytest.skip("one rank exchanges nothing")
    codec = make_codec("sq48")
    xs = [inputs("normal", 900 * world, r) for r in range(world)]
    for r, rank in enumerate(ranks):
        pieces_of = scatter_pieces([900] * world, 1000, codec.align)
        for k, ranges in enumerate(pieces_of):
            a, b = ranges[r]
            sent = [codec.encode(x[a:b], Noise((5, 2, k, s, r))) for s, x in enumerate(xs)]
            expected = codec.sum_decode(torch.stack(sent), b - a, 1 / world).numpy()
            assert same(rank["scatter noise"][a - 900 * r : b - 900 * r], expected)


def test_ranks_that_differ_are_named(ranks: Results) -> None:
    if len(ranks) == 1:
        pytest.skip("one rank agrees with itself")
    for rank in ranks:
        message = str(rank["disagreement error"])
        assert "ranks [1]" in message or ("rank 0" in message and "[1]" in message), message


@pytest.mark.exhaustive
@pytest.mark.slow
def test_three_nodes_of_two(tmp_path: Path) -> None:
    assert launch(tmp_path, 6, "nodes") == [0] * 6
    found = load(tmp_path, 6, "nodes")
    for case in REDUCTIONS[:8]:
        expected = expected_reduction(case, 6, 2)
        assert all(same(rank[f"nodes of 2 {case[0]}"], expected) for rank in found), case[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_two_gpus(tmp_path: Path) -> None:
    """The same bits over NCCL, from the kernels."""
    world = min(4, torch.cuda.device_count())
    assert launch(tmp_path, world, "nccl") == [0] * world
    found = load(tmp_path, world, "nccl")
    check_reductions(found, {"flat": 1, "one node": world})
    test_reduce_scatter(found)
    test_all_gather(found)
    test_bytes_are_counted(found)
    test_ranks_that_differ_are_named(found)


@pytest.mark.gpu
def test_the_simulation_on_a_gpu_is_the_one_on_the_cpu() -> None:
    xs = [inputs("rows", 20_000, r) for r in range(4)]
    for name in ("squinch", "sq48", "int8"):
        for node_size in (1, 2):
            expected = simulate(xs, make_codec(name), 7000, node_size=node_size)
            out = simulate([x.cuda() for x in xs], make_codec(name), 7000, node_size=node_size)
            assert same(out.cpu().numpy(), expected.numpy()), name


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_is_named_within_seconds(how: str, tmp_path: Path) -> None:
    codes = launch(tmp_path, 3, how)
    assert codes[2] == 3
    for rank in range(2):
        found = dict(np.load(tmp_path / f"{how}_{rank}.npz"))
        assert "rank 2" in str(found["error"]), found
        assert float(found["seconds"]) < 8


# Without processes


def test_shares_cover_everything() -> None:
    for n in (0, 1, 127, 128, 129, 5000):
        for ranks in (1, 2, 3, 7):
            per = share(n, ranks, 128)
            assert per % 128 == 0 and per * ranks >= n
            assert n == per == 0 or (per - 128) * ranks < n
    assert pieces(10, 4) == [(0, 4), (4, 8), (8, 10)]
    for sizes in ([5, 5], [0, 1000, 3], [0, 0, 0], [129]):
        seen = [list[int]() for _ in sizes]
        for ranges in scatter_pieces(sizes, 64, 16):
            for r, (a, b) in enumerate(ranges):
                seen[r] += range(a, b)
        flat = [i for s in seen for i in s]
        assert flat == list(range(sum(sizes)))


def test_two_hops_lose_what_two_roundings_lose() -> None:
    """Signal to noise of the mean of 8 normal gradients: between one rounding's and 3.5 dB less."""
    torch.manual_seed(1)
    xs = [torch.randn(1 << 15) for _ in range(8)]
    exact = torch.stack(xs).double().mean(0)
    for name, one in (("squinch", 26.4), ("sq48", 28.7)):
        error = simulate(xs, make_codec(name)).double() - exact
        snr = float(10 * torch.log10(exact.square().sum() / error.square().sum()))
        assert one - 3.5 < snr < one, (name, snr)


def test_simulation_leaves_its_inputs_alone() -> None:
    xs = [torch.randn(1000) for _ in range(3)]
    copies = [x.clone() for x in xs]
    codec: Codec = make_codec("squinch")
    simulate(xs, codec)
    assert all(torch.equal(a, b) for a, b in zip(xs, copies, strict=True))
