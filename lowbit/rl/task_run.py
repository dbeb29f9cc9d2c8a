"""A run on a task, whatever it trains for: its tokenizer and problems, its sampler, its evaluation, and the supervised
run before reinforcement learning.

An evaluation has the model answer held-out problems greedily, and has the answers checked.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, cast

import torch

from lowbit.configs.schema import RunConfig, TokenizerKind
from lowbit.configs.schema_rl import RlConfig
from lowbit.data.dataset import Dataset
from lowbit.data.loader import Loader
from lowbit.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer
from lowbit.infer.elsewhere import Elsewhere
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.kv_codec import KvFormat
from lowbit.models.adapters import merged_weights
from lowbit.quant.resolve import resolve
from lowbit.rl.examine import marks, problems
from lowbit.rl.precision import trainer_precision
from lowbit.rl.producer import Weights
from lowbit.rl.prompts import Prompts
from lowbit.rl.rewards import RewardPool
from lowbit.rl.rollout import Collector, check_prompts
from lowbit.rl.supervised import SupervisedLoader
from lowbit.rl.tasks import Task, fingerprint, make_task
from lowbit.trainer.checkpoint import Snapshot
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.engine import LocalEngine, wants_compile
from lowbit.trainer.loop import Position, Trainer
from lowbit.trainer.objective import NextToken, Objective
from lowbit.trainer.run import Pretraining, RunResult

logger = logging.getLogger("lowbit")


class TaskData:
    """What stands in for a data set: a tokenizer and a task."""

    def __init__(self, tokenizer: Tokenizer, task: Task) -> None:
        self.tokenizer = tokenizer
        self.task = task
        self.fingerprint = fingerprint(task)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint remembers."""
        return {"fingerprint": self.fingerprint, "tokenizer": self.tokenizer.digest} | self.task.describe()


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run without documents."""
    given = config.data.tokenizer
    return bytes_tokenizer() if given.kind is TokenizerKind.bytes else load_tokenizer(given.path, given.eot)


def run_config(config: RlConfig) -> RunConfig:
    """The trainer's run: what its folder keeps as config.yaml."""
    plain = RunConfig(**{name: getattr(config, name) for name in RunConfig.__dataclass_fields__})
    return replace(plain, precision=trainer_precision(config.precision))


class TaskRun(Pretraining):
    """A run on a task: evaluated by what the model answers, greedily, to held-out problems."""

    def __init__(self, config: RlConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> None:
        super().__init__(run_config(config), run_dir, ranks, device)
        self.rl = config
        self.task = make_task(config.task)
        self.rewards: RewardPool | None = None
        self.first_accuracy: float | None = None
        self.recording = RLock()
        """Of the samplers' steps; whoever trains beside a sampler has it."""

    def _prepare_data(self) -> Dataset:
        data = TaskData(tokenizer_of(self.config), self.task)
        self.prompts = Prompts(data.tokenizer, self.rl.task)
        self.rewards = RewardPool(self.rl.task, self.rl.reward)
        return cast(Dataset, data)

    def _collector(self, apart: torch.device | None = None) -> Collector:
        """With a sampler of the trainer's very parameters, or of copies on the device `apart`. The weights have to be
        there already."""
        assert self.rewards is not None

        def make() -> EmbeddedSampler:
            return EmbeddedSampler(
                self.model,
                self.data.tokenizer.eot_id,
                resolve(self.rl.precision),
                slots=self.rl.rollout.slots,
                kv=KvFormat(self.rl.rollout.cache.value),
                deterministic=self.config.deterministic,
                share=apart is None,
                device=apart,
                recording=self.recording,
            )

        with self.whole():
            sampler = make() if apart is None else Elsewhere(make, apart)
        return Collector(self.rl, self.task, self.prompts, sampler, self.rewards)

    @cached_property
    def judge(self) -> Collector:
        """What evaluates, and what draws unless something draws ahead."""
        return self._collector()

    def weights(self) -> Weights:
        """The trainer's weights and state by name, adapters added; whole where the caller made them so (`whole`)."""
        return list(merged_weights(self.model).items())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every rank has all weights."""
        assert self.engine is not None
        with nullcontext() if isinstance(self.engine, LocalEngine) else self.engine.whole_model():
            yield

    def _evaluate(self, last: bool) -> dict[str, float]:
        """Greedy answers to held-out problems, the same ones each time."""
        ranks, numbers = self.ranks, problems(self.task, self.rl.task.examine)
        with self.whole():
            self.judge.sampler.update((), self.judge.sampler.version)
            total, good, asked, length = ranks.sum(marks(self.judge, numbers[ranks.rank :: ranks.world]))
        asked = max(asked, 1.0)
        self._final_bpb = good / asked  # the base keeps one number of the last evaluation: here it is this one
        if self.first_accuracy is None:
            self.first_accuracy = self._final_bpb
        return {"val_accuracy": good / asked, "val_reward": total / asked, "val_length": length / asked}

    def close(self) -> None:
        super().close()
        if self.rewards is not None:
            self.rewards.close()

    def _conclude(self, position: Position) -> RunResult:
        logger.info("held-out greedy accuracy %.1f%%", 100 * (self._final_bpb or 0.0))
        return RunResult(self.run_dir, position.step, position.tokens, math.nan, math.nan, "")


class WarmTrainer(Trainer):
    """The loop, until the answers are right often enough."""

    enough = False

    @property
    def done(self) -> bool:
        """See `Trainer.done`."""
        return self.enough or super().done


class WarmStart(TaskRun):
    """Supervised steps on solved problems."""

    trainer_class = WarmTrainer
    _enough = False

    def build(self) -> Trainer:
        """See `Pretraining.build`."""
        trainer = super().build()
        assert isinstance(trainer, WarmTrainer)
        trainer.enough = self._enough
        self._trainer = trainer
        return trainer

    def _evaluate(self, last: bool) -> dict[str, float]:
        row = super()._evaluate(last)
        settings = self.rl.warm_start
        self._enough = settings.check_steps > 0 and row["val_accuracy"] >= settings.accuracy
        self._trainer.enough = self._enough
        return row

    def _own_state(self) -> dict[str, Any]:
        return {"enough": self._enough}

    def _resume(self, snapshot: Snapshot | None) -> Position:
        if snapshot is not None:
            self._enough = bool(snapshot.meta.get("enough", False))
        return super()._resume(snapshot)

    def _make_loader(self) -> Loader:
        check_prompts(self.rl, self.task, self.prompts)
        return SupervisedLoader(
            self.task,
            self.prompts,
            seed=self.config.seed,
            examples=self.rl.warm_start.examples,
            length=self.config.data.sequence_length,
            rows=self.config.batch.micro_batch,
            fingerprint=self.data.fingerprint,
            full=wants_compile(self.config.engine.compile, self.device),
            ranks=self.ranks,
        )

    def _make_objective(self) -> Objective:
        return NextToken(self.config.optim.z_loss)
