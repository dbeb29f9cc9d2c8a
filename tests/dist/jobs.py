"""Whole runs of a tiny model on several ranks: the configuration, and a worker that runs several of them.

`jobs.py FOLDER BACKEND` runs the jobs in FOLDER/jobs.json one after the other, in one set of processes: each is a
configuration file and a run's folder, perhaps with something that is to go wrong.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tiny_runs import make_corpus, tiny_run

from lowbit.configs.schema import BatchConfig, CheckpointConfig, CompileMode, EngineConfig, EngineKind, RunConfig


def tiny(folder: Path, steps: int = 6, **engine: Any) -> RunConfig:
    """Steps of twelve sequences, which 1, 2, 3 and 4 ranks can share; a checkpoint every two."""
    base = tiny_run(make_corpus(folder / "corpus"), folder / "data")
    execution = EngineConfig(kind=EngineKind.deepspeed, compile=CompileMode.off, rank_timeout_seconds=30)
    return replace(
        base,
        deterministic=False,
        max_steps=steps,
        batch=BatchConfig(sequences=12, micro_batch=1),
        optim=replace(base.optim, ema_decay=0.9),
        engine=replace(execution, **engine),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=9),
    )


def local(config: RunConfig, backend: str = "gloo") -> RunConfig:
    """The same run in one process without DeepSpeed, on the device that `backend` is for."""
    device = "cuda" if backend == "nccl" else "cpu"
    return replace(config, device=device, engine=replace(config.engine, kind=EngineKind.local))


def disturb(what: dict[str, Any]) -> None:
    """Have something go wrong on one rank, or on all: before its step number `step`, or while a run is built."""
    from lowbit.comm import deepspeed
    from lowbit.errors import DataError
    from lowbit.trainer import deepspeed_engine, loop, run

    if os.environ["RANK"] != str(what.get("rank", os.environ["RANK"])):
        return
    kind = what["kind"]
    if kind == "version":
        deepspeed.OLDEST, deepspeed.BEFORE = (9, 9, 9), (10, 0)
        return
    if kind == "build":  # others are in the collectives of building theirs

        def build(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("one over nothing")

        deepspeed_engine.ClientOptimizer = build  # type: ignore[assignment,misc]
        return
    if kind == "data":

        def fail(*_: Any) -> None:
            raise DataError("the corpus is gone")

        run.prepare_data = fail  # type: ignore[assignment]
        return
    train_step = loop.Trainer.train_step

    def step(self: loop.Trainer) -> dict[str, Any]:
        if self.position.step == what["step"]:
            if "backward" in what:  # in the middle of the step's nth backward pass
                passes = count(1)
                weight = self.engine.model.blocks[0].mlp.down.weight  # type: ignore[union-attr]
                weight.register_post_accumulate_grad_hook(
                    lambda _: go_wrong(kind, self) if next(passes) == what["backward"] else None
                )
            else:
                go_wrong(kind, self)
        return train_step(self)

    loop.Trainer.train_step = step  # type: ignore[method-assign]


def go_wrong(kind: str, trainer: Any) -> None:
    """What `kind` says, now."""
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "raise":
        raise ZeroDivisionError("one over nothing")
    elif kind == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "zero":
        stock = trainer.engine.micro_step
        trainer.engine.micro_step = lambda work, batch, _, last=True: stock(work, batch, 0.0, last)
    elif kind == "nan":
        trainer.engine.model.blocks[1].mlp.down.weight.data.fill_(float("nan"))


def refuse_text(*_: Any, **__: Any) -> str:
    """In place of tensors as text, which no run has a use for."""
    raise AssertionError("a tensor was written out")


def main() -> None:
    """Run the jobs; what a job raises is printed as JSON, with its class, and the next one begins."""
    import torch
    from nearness import exact_muon

    from lowbit.configs.stored import load_config
    from lowbit.errors import LowbitError, RankError
    from lowbit.trainer.launch import open_ranks
    from lowbit.trainer.run import pretrain_on

    torch.set_num_threads(1)
    exact_muon()
    torch._tensor_str._str = refuse_text  # type: ignore[attr-defined]
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    jobs = json.loads((folder / "jobs.json").read_text())
    configs = [load_config(Path(job["config"])) for job in jobs]
    if backend == "nccl":
        configs = [replace(config, device="cuda") for config in configs]
    with open_ranks(configs[0]) as (ranks, device):
        for job, config in zip(jobs, configs, strict=True):
            if "disturb" in job:
                disturb(job["disturb"])
            try:
                result = pretrain_on(config, Path(job["run_dir"]), ranks, device)
                print(json.dumps({"step": result.step, "val_bpb": result.val_bpb}), flush=True)
            except RankError:  # ends the block, as in a run: whoever watches says what the others died of
                raise
            except LowbitError as error:
                print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)


if __name__ == "__main__":
    main()
