"""Weights that an optimizer step itself ruined: they reach no checkpoint, and the run fails."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowbit.configs.schema import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
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
from lowbit.configs.schema import ComputeDtype as Compute
from lowbit.errors import NonFiniteError
from lowbit.trainer.guard import require_finite
from lowbit.trainer.run import pretrain


def _config(folder: Path, **changes: object) -> RunConfig:
    (folder / "text").mkdir(exist_ok=True)
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text(f"{i} " * 60, encoding="utf-8")
    config = RunConfig(
        max_steps=2,
        model=ModelConfig(layers=1, width=16, heads=2, kv_heads=2, mlp_width=32),
        data=DataConfig(
            sources={"text": SourceConfig(kind=SourceKind.files, path=str(folder / "text"))},
            tokenizer=TokenizerConfig(kind=TokenizerKind.bytes),
            sequence_length=32,
            held_out=0.3,
            cache_dir=str(folder / "data"),
            pack_workers=1,
        ),
        batch=BatchConfig(sequences=2, micro_batch=2),
        optim=OptimConfig(schedule=ScheduleConfig(warmup_steps=0)),
        precision=PrecisionConfig(compute=Compute.fp32),
        evaluation=EvalConfig(max_tokens=64, final_tokens=64, sample_tokens=0),
        checkpoint=CheckpointConfig(every_steps=1),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_step_beyond_fp32_is_not_saved(tmp_path: Path, ema: float | None) -> None:
    good = _config(tmp_path, max_steps=1)
    pretrain(good, tmp_path / "run")
    before = sorted((tmp_path / "run" / "checkpoints").rglob("*"))
    bad = replace(good, max_steps=2, optim=replace(good.optim, lr=1e39, ema_decay=ema))
    with pytest.raises(NonFiniteError, match=r"step 2 left NaN or infinity in \d+ of \d+ tensors, first in the model "):
        pretrain(bad, tmp_path / "run")
    assert sorted((tmp_path / "run" / "checkpoints").rglob("*")) == before
    assert pretrain(replace(good, max_steps=2), tmp_path / "run").step == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["model", "optimizer", "ema"])
def test_the_tensor_is_named(part: str, value: float) -> None:
    parts = {
        "model": {"a": torch.ones(3), "empty": torch.ones(0), "ids": torch.ones(2, dtype=torch.int64)},
        "optimizer": {"a.exp_avg": torch.ones(3), "a.step": torch.ones(())},
        "ema": {"a": torch.ones(3, dtype=torch.bfloat16)},
    }
    require_finite(7, parts)
    name = next(iter(parts[part]))
    parts[part][name] = torch.tensor([1.0, value, 2.0], dtype=parts[part][name].dtype)
    with pytest.raises(NonFiniteError, match=f"step 7 left .* in 1 of 4 tensors, first in the {part} {name};"):
        require_finite(7, parts)
