"""A teacher small enough to train in a second. Helpers of this folder are imported by name."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_runs
import torch

from lowbit.configs.schema import (
    BatchConfig,
    CheckpointConfig,
    ComputeDtype,
    EvalConfig,
    LoggingConfig,
    PrecisionConfig,
)
from lowbit.configs.schema_distill import CacheConfig, DistillConfig, TeacherConfig
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.distill.making import CacheMaker
from lowbit.distill.teacher import Teacher, open_teacher
from lowbit.trainer.run import pretrain

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: 200 FP32 steps of a two-layer byte model."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("teacher")
    base = tiny_runs.tiny_run(tiny_runs.make_corpus(root / "corpus", 80), root / "data")
    config = replace(
        base,
        run_name="teacher",
        max_steps=200,
        batch=BatchConfig(sequences=8, micro_batch=8),
        optim=replace(base.optim, lr=1e-2),
        checkpoint=CheckpointConfig(every_steps=0),
        evaluation=EvalConfig(every_steps=0, max_tokens=512, final_tokens=512, sample_tokens=0),
        logging=LoggingConfig(every_steps=10, softmax_saturation=False),
    )
    pretrain(config, root / "run")
    return root / "run"


@pytest.fixture
def distillation(teacher_run: Path, tmp_path: Path) -> DistillConfig:
    """A student of that teacher on its data, and a cache of 512 positions in four shards."""
    from lowbit.configs.stored import load_config

    config = load_config(teacher_run / "config.yaml")
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    settings |= {"run_name": "student", "seed": 3, "max_steps": 6}
    settings["logging"] = LoggingConfig(every_steps=1, softmax_saturation=False)
    return DistillConfig(
        **settings,
        teacher=TeacherConfig(path=str(teacher_run), precision=PrecisionConfig(compute=ComputeDtype.fp32)),
        cache=CacheConfig(path=str(tmp_path / "cache"), targets=8, micro_batch=2, shard_tokens=128, tokens=512),
    )


@pytest.fixture
def teacher(distillation: DistillConfig) -> Teacher:
    return open_teacher(distillation.teacher, distillation.engine, torch.device("cpu"))


@pytest.fixture
def dataset(distillation: DistillConfig) -> Dataset:
    return prepare_data(distillation.data, lambda _: None)


@pytest.fixture
def maker(distillation: DistillConfig, teacher: Teacher, dataset: Dataset) -> Callable[..., CacheMaker]:
    """`maker(folder, targets=4, ...)`: a maker whose cache differs from the default in these settings."""

    def make(folder: Path, **settings: object) -> CacheMaker:
        cache = replace(distillation.cache, **settings)  # type: ignore[arg-type]
        return CacheMaker(folder, replace(distillation, cache=cache), cache.tokens or 0, teacher, dataset)

    return make
