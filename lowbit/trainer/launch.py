"""From a launcher's variables to a job's ranks.

`torchrun` (and `deepspeed --no_local_rank`) start each process with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. The address is that of a key-value store, through which the processes find each other,
build their groups (NCCL between GPUs, gloo between CPUs), post results (`distributed.Ranks`) and watch over each other
(`watch.Watch`). One process without a launcher needs none of it, except for the DeepSpeed engine, which wants a group
even when it is alone.
"""

import atexit
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lowbit.configs.schema import EngineKind, RunConfig
from lowbit.configs.validate import check_world
from lowbit.errors import ConfigError, LowbitError
from lowbit.trainer.distributed import ALONE, Ranks
from lowbit.trainer.hardware import pick_device
from lowbit.trainer.watch import Watch

JOIN_SECONDS = 300
"""How long the first processes of a job wait for the last to start."""


@dataclass(frozen=True)
class Place:
    """This process among those that a launcher started."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    host: str = ""
    port: int = 0
    hosted: bool = False
    """Whether the launcher itself runs the store; else rank 0 does."""
    attempt: str = "0"
    """Counts the launcher's restarts of the whole job."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place":
        """Read a launcher's variables. Raises ConfigError when they are incomplete."""
        if "WORLD_SIZE" not in environment:
            return cls()
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or str(world)
            return cls(
                rank,
                world,
                int(environment.get("LOCAL_RANK", rank)),
                int(local),
                environment["MASTER_ADDR"],
                int(environment["MASTER_PORT"]),
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"WORLD_SIZE={environment['WORLD_SIZE']} says that there are several processes, but their other "
                f"variables are incomplete or wrong ({error}): start them with torchrun"
            ) from None


def local_device(name: str, place: Place) -> torch.device:
    """The device of this process: with several on a machine each takes its own GPU."""
    if place.local_world == 1 or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return pick_device(name)
    if name not in ("auto", "cuda"):
        raise ConfigError(
            f"device={name} with {place.local_world} processes on this machine: each takes its own GPU, so use "
            "device=cuda (or device=cpu)"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < place.local_world:
        raise ConfigError(
            f"{place.local_world} processes on a machine with {count} GPUs: start --nproc_per_node={max(count, 1)} "
            "processes, or use device=cpu"
        )
    return pick_device(f"cuda:{place.local_rank}")


@contextmanager
def open_ranks(config: RunConfig) -> Iterator[tuple[Ranks, torch.device]]:
    """The job's ranks and this one's device, for as long as the block lasts.

    Inside the block, an error of this rank is told to the others, and one of theirs ends the block with RankError.
    """
    place = Place.of(os.environ)
    check_world(config, place.world)
    device = local_device(config.device, place)
    if config.engine.kind is EngineKind.local:
        yield ALONE, device
        return
    if dist.is_initialized() and place.world > 1:
        raise LowbitError("these processes are in a job already: run what follows in it (trainer.run.pretrain_on)")
    backend = "nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=2 * config.engine.rank_timeout_seconds + 60)
    if place.world == 1:
        _group_of_one(backend)
        yield Ranks(), device
        return
    store = _join(place)
    watch = Watch(_join(place), place.rank, place.world, config.engine.rank_timeout_seconds)
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("gradients", store),
            rank=place.rank,
            world_size=place.world,
            timeout=patience,
            device_id=device if device.type == "cuda" else None,
        )
        numbers = dist.new_group(backend="gloo", timeout=patience) if backend != "gloo" else dist.group.WORLD
        ranks = Ranks(
            place.rank, place.world, place.local_rank, place.local_world, PrefixStore("board", store), numbers, watch
        )
        watch.start()
        yield ranks, device
    except BaseException as error:
        reason = watch.explain(error)
        if place.rank == 0 and not place.hosted:
            watch.linger()
        raise reason from error
    else:
        watch.finish()
        _leave(store, place, watch, config.engine.rank_timeout_seconds)
    finally:
        watch.stop()
        if dist.is_initialized() and watch.failure is None:
            dist.destroy_process_group()


def _leave(store: Store, place: Place, watch: Watch, seconds: float) -> None:
    """The process that runs the store stays until the others have read what they wait for, at most `seconds` long."""
    if place.rank > 0 or place.hosted:
        watch.stop()  # its posts would be the last use of the store
        store.set(f"left/{place.rank}", "")
        return
    others = [f"left/{rank}" for rank in range(1, place.world)]
    until = time.monotonic() + seconds
    while not store.check(others) and watch.failure is None and time.monotonic() < until:
        time.sleep(0.02)


def _group_of_one(backend: str) -> None:
    """The group that DeepSpeed wants; it stays until the process ends, because DeepSpeed remembers it."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)


def _join(place: Place) -> Store:
    """The store that all processes of the job share."""
    try:
        store = TCPStore(
            place.host,
            place.port,
            place.world,
            is_master=place.rank == 0 and not place.hosted,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, dist.DistError) as error:
        first = str(error).splitlines()[0]
        raise LowbitError(
            f"rank {place.rank} cannot reach the job's store at {place.host}:{place.port}: {first}"
        ) from None
    return PrefixStore(f"lowbit/{place.attempt}", store)
