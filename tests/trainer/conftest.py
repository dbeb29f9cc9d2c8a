"""A run small enough to train in a second."""

from dataclasses import replace
from pathlib import Path

import pytest

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


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 documents of different lengths."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(60):
        words = " ".join(f"word{(i * 7 + j * j) % 23}" for j in range(20 + i % 17))
        (folder / f"{i:02d}.txt").write_text(f"document {i}\n{words}\n")
    return folder


@pytest.fixture
def tiny_run(corpus: Path, tmp_path: Path) -> RunConfig:
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
            cache_dir=str(tmp_path / "data"),
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
