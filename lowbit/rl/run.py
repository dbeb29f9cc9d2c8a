"""A reinforcement-learning run from configuration to result: warm start, rollouts, the one training loop, evaluation.

run folder             the run, as `lowbit pretrain` leaves one: `lowbit generate` and `lowbit export` take it
run folder/rl.yaml     everything that was set
run folder/samples.jsonl   conversations, readable: text, rewards by part, token ids, log-probabilities, versions
run folder/warm_start  the supervised run before it, where `warm_start.steps` asks for one; all weights train in it

The sampler has modules of its own, in its own precision, and the trainer's very parameters: nothing is copied, and a
new version of the weights is only quantised again. A sampler that draws ahead of the trainer has copies. With LoRA the
one quantises the sums of weights and adapters, and the other has copies of the sums.
"""

import logging
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from lowbit.configs.schema import RunConfig, TokenizerKind
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import save_config
from lowbit.configs.validate_rl import warm_start_config
from lowbit.data.dataset import Dataset
from lowbit.data.loader import Loader
from lowbit.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.kv_codec import KvFormat
from lowbit.models.adapters import adapt, merged_weights, without_adapters
from lowbit.models.transformer import Transformer
from lowbit.quant.report import collapse
from lowbit.quant.stages import resolve
from lowbit.rl.loader import RolloutLoader
from lowbit.rl.objective import PolicyGradient
from lowbit.rl.precision import trainer_precision
from lowbit.rl.producer import AheadProducer, Drawing, Producer, Weights
from lowbit.rl.prompts import Prompts
from lowbit.rl.rewards import RewardPool
from lowbit.rl.rollout import Collector, check_prompts
from lowbit.rl.samples import SampleLog
from lowbit.rl.supervised import SupervisedLoader
from lowbit.rl.tasks import Split, Task, fingerprint, make_task
from lowbit.trainer.checkpoint import Snapshot
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.engine import Engine, LocalEngine, wants_compile
from lowbit.trainer.files import SAMPLES
from lowbit.trainer.launch import open_ranks
from lowbit.trainer.loaded import build_model, load_run, shown_path
from lowbit.trainer.loop import Position, Trainer
from lowbit.trainer.lora import META, require_same_adapters
from lowbit.trainer.metrics import MetricsLog
from lowbit.trainer.objective import NextToken, Objective
from lowbit.trainer.precision import RunPrecision
from lowbit.trainer.run import Pretraining, RunResult, execute

logger = logging.getLogger("lowbit")


def train(config: RlConfig, run_dir: Path) -> RunResult:
    """Train as configured in `run_dir`, resuming from what is there as `config.resume` says."""
    with open_ranks(config) as (ranks, device):
        run_dir = Path(ranks.share(str(run_dir)))
        return train_on(config, run_dir, ranks, device)


def train_on(config: RlConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> RunResult:
    """The same on ranks that have found each other already."""
    if config.warm_start.steps:
        folder = run_dir / "warm_start"
        if ranks.share(not (run_dir / "checkpoints").is_dir() if ranks.first else None):
            logger.info("warm start: %d supervised steps on the task's own solutions", config.warm_start.steps)
            execute(lambda: WarmStart(warm_start_config(config), folder, ranks, device), folder, ranks)
        config = replace(config, init_from=str(folder))
    return execute(lambda: Reinforcement(config, run_dir, ranks, device), run_dir, ranks)


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

    def _prepare_data(self) -> Dataset:
        data = TaskData(tokenizer_of(self.config), self.task)
        self.prompts = Prompts(data.tokenizer, self.rl.task)
        self.rewards = RewardPool(self.rl.task, self.rl.reward)
        return cast(Dataset, data)

    def _collector(self, share: bool) -> Collector:
        """With a sampler of the trainer's very parameters, or of copies. The weights have to be there already."""
        assert self.rewards is not None
        with self.whole():
            sampler = EmbeddedSampler(
                self.model,
                self.data.tokenizer.eot_id,
                resolve(self.rl.precision),
                slots=self.rl.rollout.slots,
                kv=KvFormat(self.rl.rollout.cache.value),
                deterministic=self.config.deterministic,
                share=share,
            )
        return Collector(self.rl, self.task, self.prompts, sampler, self.rewards)

    @cached_property
    def judge(self) -> Collector:
        """What evaluates, and what draws unless something draws ahead."""
        return self._collector(share=True)

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
        ranks, count = self.ranks, self.rl.task.examine
        size = self.task.size(Split.held_out)
        numbers = range(min(count, count if size is None else size))
        with self.whole():
            self.judge.sampler.update((), self.judge.sampler.version)
            groups = self.judge.draw(numbers[ranks.rank :: ranks.world], Split.held_out, 1, greedy=True)
        self.judge.check(groups)
        flat = [c for group in groups for c in group]
        rewards = [c.reward or 0.0 for c in flat]
        right = sum(reward >= 1.0 for reward in rewards)
        total, good, asked, length = ranks.sum([math.fsum(rewards), right, len(flat), sum(len(c.drawn) for c in flat)])
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


class RlTrainer(Trainer):
    """The loop, with what rollouts were like beside what training was like."""

    samples: SampleLog | None = None

    def train_step(self) -> dict[str, Any]:
        """See `Trainer.train_step`."""
        before = self.position.seconds
        row = super().train_step()
        loader, objective = cast(RolloutLoader, self.loader), cast(PolicyGradient, self.objective)
        measured = dict(loader.metrics())
        # every rank's greatest; `sum` is what ranks have, so each puts its own at its own place
        places = [0.0] * self.engine.world
        places[self.engine.rank] = objective.take_largest()
        row["mismatch/abs_max"] = max(self.engine.ranks.sum(places))
        wall = max(self.position.seconds - before, 1e-9)
        parts = {
            key.removeprefix("seconds/"): measured.pop(key) for key in list(measured) if key.startswith("seconds/")
        }
        training = max(wall - parts.pop("data", 0.0), 1e-9)
        row |= {f"share/{name}": seconds / wall for name, seconds in parts.items()}
        row["share/train"] = training / wall
        row["train_tokens_per_second"] = measured.pop("train_tokens", 0.0) / training / self.engine.world
        return row | measured

    def _log(self, row: dict[str, Any]) -> None:
        if self.samples is not None and (self._due(self.config.logging.every_steps) or self.done):
            self.samples.write(self.position.step, cast(RolloutLoader, self.loader).shown)
        super()._log(row)


class Reinforcement(TaskRun):
    """The run itself."""

    trainer_class = RlTrainer

    def build(self) -> Trainer:
        """See `Pretraining.build`."""
        trainer = super().build()
        assert isinstance(trainer, RlTrainer)
        if self.ranks.first:
            trainer.samples = SampleLog(self.run_dir / SAMPLES, self.rl.rollout.show, trainer.position.step)
        if not trainer.done and trainer.position.step == 0:
            row = {"step": 0, "tokens": 0} | self._evaluate(last=False)
            trainer.log.log(row)
            logger.info("before: held-out greedy accuracy %.1f%%", 100 * row["val_accuracy"])
        return trainer

    def _make_loader(self) -> Loader:
        assert self.engine is not None
        self.ranks.first_does(lambda: check_prompts(self.rl, self.task, self.prompts))
        loader = RolloutLoader(
            self.rl,
            self._make_producer,
            self.engine,
            fingerprint=self.data.fingerprint,
            filler=self.data.tokenizer.eot_id,
            reference=self._reference(),
            as_reference=lambda: without_adapters(self.model),
            teacher=self._teacher(),
            whole=self.whole,
        )
        loader.set_problems(self.task.size(Split.train))
        return loader

    def _make_producer(self) -> Producer:
        rollout = self.rl.rollout
        if not rollout.staleness:
            return Producer(Drawing(self.rl, self.judge, self.ranks))
        drawing = Drawing(self.rl, self._collector(share=False), self.ranks)
        return AheadProducer(drawing, self.weights, rollout.staleness // rollout.updates, rollout.seconds)

    def _reference(self) -> Transformer | None:
        """What the KL is to: another run, or what this one began with. With nothing but adapters to train that is the
        trainer's own model without them."""
        if not self.rl.algorithm.kl:
            return None
        lora, moves = self.rl.lora, self.config.model.moe.experts and self.config.model.moe.bias_rate
        if lora.rank and not lora.also and not moves and not self.rl.algorithm.reference:
            return self.model
        path = self.rl.algorithm.reference or self.config.init_from
        if path:
            return self._opened("algorithm.reference", path, "latest")
        model = build_model(self.config, self.data.tokenizer.vocab_size, self.dtype, self.device)
        RunPrecision(self.config, model)
        model.init_weights(self.config.seed)
        return model.requires_grad_(False)

    def _teacher(self) -> Transformer | None:
        config = self.rl.teacher
        return self._opened("teacher.path", config.path, config.checkpoint) if config.path else None

    def _opened(self, key: str, path: str, checkpoint: str) -> Transformer:
        """Another model with this run's tokenizer."""
        found = load_run(Path(path).expanduser(), checkpoint, str(self.device))
        if found.tokenizer.digest != self.data.tokenizer.digest:
            raise DataError(f"{key}={path}: has another tokenizer than this run, so their tokens cannot be compared")
        if found.model.config.max_sequence < self.config.data.sequence_length:
            raise ConfigError(
                f"{key}={path}: takes sequences of {found.model.config.max_sequence} tokens, and "
                f"data.sequence_length={self.config.data.sequence_length}"
            )
        return found.model.requires_grad_(False)

    def _make_engine(self) -> Engine:
        """With LoRA the weights, which are there, are frozen, and adapters are what the engine trains."""
        lora = self.rl.lora
        if lora.rank:
            layers = adapt(self.model, lora.rank, lora.alpha, lora.targets, self.config.seed, lora.also)
            logger.info("LoRA of rank %d on %s", lora.rank, collapse(layers))
            if not self.config.init_from:
                logger.warning("LoRA on weights that nothing has trained: set init_from or warm_start.steps")
        return super()._make_engine()

    @property
    def _adapters(self) -> dict[str, Any] | None:
        """What a checkpoint remembers of them."""
        return asdict(self.rl.lora) if self.rl.lora.rank else None

    def _snapshot(self) -> Snapshot | None:
        snapshot = super()._snapshot()
        if snapshot is not None:
            require_same_adapters(snapshot.meta.get(META), self._adapters)
        return snapshot

    def _make_objective(self) -> Objective:
        return PolicyGradient(self.rl.algorithm, self.rl.rollout.temperature)

    def _fill_folder(self, position: Position) -> MetricsLog:
        save_config(self.rl, self.run_dir / "rl.yaml")
        return super()._fill_folder(position)

    def _precision_reports(self) -> list[dict[str, Any]]:
        return self.precision.reports(sampler=True)

    def _own_state(self) -> dict[str, Any]:
        states = self.ranks.gather(cast(RolloutLoader, self.loader).state())
        return {"rl": {"ranks": states, "first_accuracy": self.first_accuracy}, META: self._adapters}

    def _resume(self, snapshot: Snapshot | None) -> Position:
        position = super()._resume(snapshot)
        if snapshot is None:
            return position
        own = snapshot.meta.get("rl")
        if own is None:
            raise CheckpointError("the checkpoint is of another kind of run: use it with init_from=FOLDER instead")
        self.first_accuracy = own["first_accuracy"]
        states, loader = own["ranks"], cast(RolloutLoader, self.loader)
        if len(states) == self.ranks.world:
            loader.resume(states[self.ranks.rank])
        else:
            waiting = sum(len(state["pending"]) + len(state["waiting"]) for state in states)
            if waiting:
                logger.warning("%d rollouts of %d ranks are drawn again by %d", waiting, len(states), self.ranks.world)
            loader.resume(states[0] | {"pending": [], "waiting": []})
        return position

    def _conclude(self, position: Position) -> RunResult:
        if self.first_accuracy is not None and self._final_bpb is not None:
            logger.info(
                "held-out greedy accuracy: %.1f%% before, %.1f%% after %d steps",
                100 * self.first_accuracy, 100 * self._final_bpb, position.step,
            )  # fmt: skip
        folder = shown_path(self.run_dir)
        prompt = shlex.quote(self.task.example(Split.held_out, self.config.seed, 0).prompt)
        logger.info("run folder: %s (conversations in samples.jsonl)", folder)
        logger.info("next: lowbit generate %s --prompt %s", shlex.quote(folder), prompt)
        logger.info("      lowbit report %s", shlex.quote(folder))
        return RunResult(self.run_dir, position.step, position.tokens, math.nan, math.nan, "")
