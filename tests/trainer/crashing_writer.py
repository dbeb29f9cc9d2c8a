"""Saves checkpoints until it is killed: run by test_checkpoint.py as a process of its own.

    crashing_writer.py FOLDER point N     killed by itself (SIGKILL) at the N-th system call that changes the folder
    crashing_writer.py FOLDER random SEED killed by its parent at random moments, 12 times over

Prints one JSON line a child: how it ended. Each child is a fork, so that torch is imported once.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from lowbit.configs.schema import CheckpointConfig
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot

SIZE = 50_000


def snapshot(step: int) -> Snapshot:
    full = {name: torch.full((SIZE,), float(step) + i) for i, name in enumerate("ab")}
    return Snapshot(step, dict(full), {f"{name}.exp_avg": -tensor for name, tensor in full.items()}, None, {"at": step})


def save_some(folder: Path, first: int, steps: int, background: bool) -> None:
    store = CheckpointStore(folder, CheckpointConfig(keep_last=2, background=background))
    for step in range(first, first + steps):
        store.save(snapshot(step))
    store.wait()


def die_at(call: int) -> None:
    """From now on, the `call`-th operation on the folder is preceded by SIGKILL."""
    left = call

    def counted(operation):  # type: ignore[no-untyped-def]
        def wrapped(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return wrapped

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def child(work) -> int:  # type: ignore[no-untyped-def]
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return pid


def main() -> None:
    torch.set_num_threads(1)
    folder, mode, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if mode == "point":
        for call in range(number):
            place = folder / str(call)
            save_some(place, 1, 2, False)

            def work(call: int = call, place: Path = place) -> None:
                die_at(call)
                save_some(place, 2, 2, False)  # step 2 again, then a new one that retires an old one

            _, status = os.waitpid(child(work), 0)
            print(json.dumps({"call": call, "status": status}), flush=True)
    else:
        generator = random.Random(number)
        for turn in range(12):
            first = 100 * turn
            pid = child(lambda first=first: save_some(folder, first, 100, True))
            time.sleep(generator.uniform(0.01, 0.25))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            print(json.dumps({"turn": turn, "status": status}), flush=True)


if __name__ == "__main__":
    main()
