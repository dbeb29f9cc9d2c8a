"""The command line in a process that sends itself a signal, at one place of a pipeline; run by test_killed.py.

    ending_itself.py SIGNAL PLACE ARGUMENTS...

A place is what is about to be done when the signal comes (SIGKILL, or SIGINT as Ctrl-C):

    begin:STAGE       the manifest says that the stage runs, and nothing of it is there
    train:RUN:N       a run (pretrain, distill, rl/warm_start, rl) takes a step, N taken
    checkpoint:STEP   a checkpoint whose files are written takes its name, which ends like this
    shard:N           the cache's shard N is made
    record:N          that shard is written, and its record is not
    cache             all shards are there, and the cache's manifest does not say so
    end:STAGE         the stage has run, and the manifest does not say so
    manifest:N        a manifest with N finished stages is written, and does not have its name yet
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowbit.cli.main import main
from lowbit.distill import making
from lowbit.pipeline import run as pipeline
from lowbit.trainer.loop import Trainer

NUMBER, PLACE = int(sys.argv[1]), sys.argv[2]


def preceded(owner: Any, name: str, place: Callable[..., str]) -> None:
    """Before `owner.name` is called, the signal comes if that is the place, which follows from the arguments."""
    real = getattr(owner, name)

    def call(*arguments: Any, **more: Any) -> Any:
        if place(*arguments) == PLACE:
            os.kill(os.getpid(), NUMBER)
        return real(*arguments, **more)

    setattr(owner, name, call)


def renamed(path: Path, to: Path) -> str:
    if path.name.startswith(".writing-"):
        return "checkpoint:" + str(to)[-len(PLACE.partition(":")[2]) :]
    if path.name == ".pipeline.json.new":
        stages = json.loads(path.read_text())["stages"].values()
        return f"manifest:{sum(stage['state'] == 'done' for stage in stages)}"
    return ""


def written(path: Path, content: Any, needed: int = 0) -> str:
    if path.name.startswith("shard-"):
        return f"record:{int(path.stem.partition('-')[2])}"
    return "cache" if path.name == making.MANIFEST and content["shards"] is not None else ""


preceded(Trainer, "train_step", lambda t: f"train:{t.config.run_name.partition('/')[2]}:{t.position.step}")
preceded(making.CacheMaker, "_make_shard", lambda _, shard: f"shard:{shard}")
preceded(making, "write_json", written)
preceded(pipeline.Pipeline, "_recording", lambda _, stage, record: f"begin:{stage}")
preceded(pipeline, "reached", lambda stage, folder: f"end:{stage}")
preceded(Path, "rename", renamed)
preceded(Path, "replace", renamed)
sys.argv = ["lowbit", *sys.argv[3:]]
main()
