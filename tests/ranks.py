"""Start processes as the ranks of a job, the way a launcher does but without its overhead, and collect them."""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked

WORKER = Path(__file__).parent / "dist" / "worker.py"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Ended:
    """How a rank ended."""

    rank: int
    code: int
    out: str
    err: str
    seconds: float
    """From the start of all ranks to this one's end."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


Nodes = int | Sequence[int]
"""Ranks of each machine; one number where all have as many, 0 where all ranks are on one."""


def environment(rank: int, world: int, port: int, nodes: Nodes) -> dict[str, str]:
    """A launcher's variables for one rank, as if it were on one of those machines.

    The tests' folder is on the path, for `tiny_runs`.
    """
    sizes = [nodes or world] * world if isinstance(nodes, int) else nodes
    place, node_size = [(place, size) for size in sizes for place in range(size)][rank]
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES and not k.startswith("TORCHELASTIC")}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), clean.get("PYTHONPATH")]))
    values = (str(rank), str(world), str(place), str(node_size), "127.0.0.1", str(port))
    return clean | dict(zip(VARIABLES, values, strict=True)) | {"OMP_NUM_THREADS": "1"}


def start(world: int, arguments: list[str], folder: Path, node_size: Nodes = 0) -> list[forked.Process]:
    """Start `python ARGUMENTS` as each of `world` ranks in `folder`."""
    port = free_port()
    return [
        forked.start(
            arguments,
            folder,
            environment(rank, world, port, node_size),
            folder / f"out{rank}",
            folder / f"err{rank}",
        )
        for rank in range(world)
    ]


def collect(processes: list[forked.Process], folder: Path, timeout: float = 600) -> list[Ended]:
    """Wait for all ranks; one that is still there after `timeout` seconds is killed, and its code is -9."""
    begun = time.monotonic()
    ended: dict[int, float] = {}
    try:
        while len(ended) < len(processes) and time.monotonic() - begun < timeout:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - begun
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    return [
        Ended(
            rank,
            p.wait(),
            (folder / f"out{rank}").read_text(),
            (folder / f"err{rank}").read_text(),
            ended.get(rank, timeout),
        )
        for rank, p in enumerate(processes)
    ]


def run(world: int, arguments: list[str], folder: Path, timeout: float = 600, node_size: Nodes = 0) -> list[Ended]:
    """Start and collect."""
    folder.mkdir(parents=True, exist_ok=True)
    return collect(start(world, arguments, folder, node_size), folder, timeout)


def run_cases(
    world: int, cases: list[dict[str, Any]], folder: Path, backend: str = "gloo", node_size: Nodes = 0
) -> Path:
    """Have `worker.py` run the cases, one after the other, in one set of processes; the folder with its results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    ended = run(world, [str(WORKER), str(folder), backend], folder, node_size=node_size)
    assert [e.code for e in ended] == [0] * world, "\n".join(f"rank {e.rank}:\n{e.err[-3000:]}" for e in ended)
    return folder
