"""Runs small enough to train in a second, and what their folders hold: for every test that trains something whole."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lowbit.configs.schema import (
    BatchConfig,
    CheckpointConfig,
    CompileMode,
    ComputeDtype,
    DataConfig,
    EngineConfig,
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


def make_corpus(folder: Path, documents: int = 60) -> Path:
    """Documents of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        words = " ".join(f"word{(i * 7 + j * j) % 23}" for j in range(20 + i % 17))
        (folder / f"{i:02d}.txt").write_text(f"document {i}\n{words}\n")
    return folder


def tiny_run(corpus: Path, cache: Path) -> RunConfig:
    """Six deterministic FP32 steps of a two-layer byte model, a checkpoint every two."""
    return RunConfig(
        run_name="tiny",
        deterministic=True,
        device="cpu",
        max_steps=6,
        model=ModelConfig(layers=2, width=32, heads=2, kv_heads=1, mlp_width=48, max_sequence=64),
        data=DataConfig(
            sources={"files": SourceConfig(kind=SourceKind.files, path=str(corpus))},
            tokenizer=TokenizerConfig(kind=TokenizerKind.bytes),
            sequence_length=32,
            held_out=0.1,
            cache_dir=str(cache),
            pack_workers=1,
        ),
        batch=BatchConfig(sequences=8, micro_batch=4),
        optim=replace(OptimConfig(), schedule=ScheduleConfig(warmup_steps=2)),
        precision=PrecisionConfig(compute=ComputeDtype.fp32),
        engine=EngineConfig(compile=CompileMode.off),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=3),
        evaluation=EvalConfig(every_steps=3, max_tokens=512, final_tokens=512, sample_tokens=8, sample_prompt="doc"),
        logging=LoggingConfig(every_steps=1),
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def tensors(run_dir: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a step's checkpoint, or of the newest: weights, optimizer, moving average, stabilisers."""
    checkpoints = sorted((run_dir / "checkpoints").glob("step_*" if step is None else f"step_{step:08d}"))
    return {
        f"{file.stem}/{name}": t
        for file in checkpoints[-1].glob("*.safetensors")
        for name, t in load_file(file).items()
    }


class Stop(Exception):
    """A crash."""


def crash_after(step: int, config: RunConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and crash once the checkpoint of `step` is on the disk."""
    from lowbit.trainer.run import Pretraining, pretrain

    save = Pretraining._save

    def crash(self: Pretraining, position: Any) -> None:
        save(self, position)
        if position.step == step:
            self.store.wait()
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(Pretraining, "_save", crash)
        with pytest.raises(Stop):
            pretrain(config, run_dir)
