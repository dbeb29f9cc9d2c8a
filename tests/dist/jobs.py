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
from pathlib import Path
from typing import Any

from lowbit.configs.schema import (
    BatchConfig,
    CheckpointConfig,
    CompileMode,
    ComputeDtype,
    DataConfig,
    EngineConfig,
    EngineKind,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    SourceKind,
    TokenizerConfig,
    TokenizerKind,
)


def make_corpus(folder: Path) -> Path:
    """60 documents of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(60):
        words = " ".join(f"word{(i * 7 + j * j) % 23}" for j in range(20 + i % 17))
        (folder / f"{i:02d}.txt").write_text(f"document {i}\n{words}\n")
    return folder


def tiny(folder: Path, steps: int = 6, **engine: Any) -> RunConfig:
    """Steps of twelve sequences, which 1, 2, 3 and 4 ranks can share; a checkpoint every two."""
    config = RunConfig(
        run_name="tiny",
        device="cpu",
        max_steps=steps,
        model=ModelConfig(layers=2, width=32, heads=2, kv_heads=1, mlp_width=48, max_sequence=64),
        data=DataConfig(
            sources={"files": SourceConfig(kind=SourceKind.files, path=str(make_corpus(folder / "corpus")))},
            tokenizer=TokenizerConfig(kind=TokenizerKind.bytes),
            sequence_length=32,
            held_out=0.1,
            cache_dir=str(folder / "data"),
            pack_workers=1,
        ),
        batch=BatchConfig(sequences=12, micro_batch=1),
        optim=replace(OptimConfig(ema_decay=0.9), schedule=ScheduleConfig(warmup_steps=2)),
        precision=PrecisionConfig(compute=ComputeDtype.fp32),
        engine=EngineConfig(kind=EngineKind.deepspeed, compile=CompileMode.off, rank_timeout_seconds=30),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=9),
        evaluation=EvalConfig(every_steps=3, max_tokens=512, final_tokens=512, sample_tokens=8, sample_prompt="doc"),
        logging=LoggingConfig(every_steps=1),
    )
    return replace(config, engine=replace(config.engine, **engine))


def local(config: RunConfig, backend: str = "gloo") -> RunConfig:
    """The same run in one process without DeepSpeed, on the device that `backend` is for."""
    device = "cuda" if backend == "nccl" else "cpu"
    return replace(config, device=device, engine=replace(config.engine, kind=EngineKind.local))


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The run's metrics."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def newest(run_dir: Path) -> dict[str, Any]:
    """Every tensor of the newest checkpoint: weights, optimizer, moving average."""
    from safetensors.torch import load_file

    folder = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return {f"{f.stem}/{name}": t for f in folder.glob("*.safetensors") for name, t in load_file(f).items()}


def disturb(what: dict[str, Any]) -> None:
    """Have something go wrong on one rank: before its step number `step`, or when data are prepared."""
    from lowbit.errors import DataError
    from lowbit.trainer import loop, run

    if os.environ["RANK"] != str(what["rank"]):
        return
    kind = what["kind"]
    if kind == "data":

        def fail(*_: Any) -> None:
            raise DataError("the corpus is gone")

        run.prepare_data = fail  # type: ignore[assignment]
        return
    train_step = loop.Trainer.train_step

    def step(self: loop.Trainer) -> dict[str, Any]:
        if self.position.step == what["step"]:
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
            elif kind == "nan":
                self.engine.model.blocks[1].mlp.down.weight.data.fill_(float("nan"))  # type: ignore[union-attr]
        return train_step(self)

    loop.Trainer.train_step = step  # type: ignore[method-assign]


def main() -> None:
    """Run the jobs; what a job raises is printed as JSON, with its class, and the next one begins."""
    import torch

    from lowbit.configs.stored import load_config
    from lowbit.errors import LowbitError
    from lowbit.trainer.launch import open_ranks
    from lowbit.trainer.run import pretrain_on

    torch.set_num_threads(1)
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
            except LowbitError as error:
                print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)


if __name__ == "__main__":
    main()
