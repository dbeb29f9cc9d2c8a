"""A model, a tokenizer and a run small enough for a second. Helpers of this folder are imported by name."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
    ScheduleConfig,
    TokenizerConfig,
    TokenizerKind,
)
from lowbit.configs.schema_rl import AlgorithmConfig, RlConfig, RolloutConfig, TaskConfig

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def config() -> RlConfig:
    """Sums of one digit, four groups of four, on the CPU in FP32."""
    torch.set_num_threads(1)
    return RlConfig(
        deterministic=True,
        device="cpu",
        max_steps=3,
        model=ModelConfig(layers=1, width=32, heads=2, kv_heads=1, mlp_width=48, max_sequence=32),
        data=DataConfig(
            sources={}, tokenizer=TokenizerConfig(kind=TokenizerKind.bytes), sequence_length=24, prefetch=0
        ),
        batch=BatchConfig(sequences=16, micro_batch=4),
        optim=replace(OptimConfig(), lr=1e-2, schedule=ScheduleConfig(warmup_steps=1)),
        precision=PrecisionConfig(compute=ComputeDtype.fp32),
        engine=EngineConfig(compile=CompileMode.off),
        checkpoint=CheckpointConfig(every_steps=0),
        evaluation=EvalConfig(every_steps=0, sample_tokens=0),
        logging=LoggingConfig(every_steps=1, softmax_saturation=False),
        task=TaskConfig(size=1, examine=8),
        rollout=RolloutConfig(samples=4, max_new_tokens=4),
        algorithm=AlgorithmConfig(),
    )


@pytest.fixture
def even_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lowbit_test_rewards:even`, which an untrained model gets some of: the share of even bytes."""
    (tmp_path / "lowbit_test_rewards.py").write_text(
        "def even(completion, example):\n"
        "    data = completion.encode('utf-8', 'replace')\n"
        "    return sum(b % 2 == 0 for b in data) / max(len(data), 1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
