"""A reinforcement-learning run from configuration to result: warm start, rollouts, the one training loop, evaluation.

run folder             the run, as `lowbit pretrain` leaves one: `lowbit generate` and `lowbit export` take it
run folder/rl.yaml     everything that was set
run folder/samples.jsonl   conversations, readable: text, rewards by part, token ids, log-probabilities, versions
run folder/warm_start  the supervised run before it, where `warm_start.steps` asks for one; all weights train in it

The sampler has modules of its own, in its own precision, and the trainer's very parameters: nothing is copied, and a
new version of the weights is only quantised again. A sampler that draws ahead of the trainer, or on a device of its
own (`rollout.device`), has copies. With LoRA the one quantises the sums of weights and adapters, and the other has
copies of the sums.
"""

import logging
import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch

from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import save_config
from lowbit.configs.validate_rl import warm_start_config
from lowbit.data.loader import Loader
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.models.adapters import adapt, without_adapters
from lowbit.models.transformer import Transformer
from lowbit.quant.report import collapse
from lowbit.rl.examine import SETTINGS
from lowbit.rl.loader import RolloutLoader
from lowbit.rl.objective import PolicyGradient
from lowbit.rl.producer import AheadProducer, CopyingProducer, Drawing, Producer, aligned
from lowbit.rl.rollout import check_prompts
from lowbit.rl.samples import SampleLog
from lowbit.rl.task_run import TaskRun, WarmStart
from lowbit.rl.tasks import Split
from lowbit.trainer.checkpoint import Snapshot
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.engine import Engine
from lowbit.trainer.files import SAMPLES
from lowbit.trainer.hardware import find_device
from lowbit.trainer.launch import open_ranks
from lowbit.trainer.loaded import build_model, load_run, shown_path
from lowbit.trainer.loop import Position, Trainer
from lowbit.trainer.lora import META, require_same_adapters
from lowbit.trainer.metrics import MetricsLog
from lowbit.trainer.objective import Objective
from lowbit.trainer.precision import RunPrecision
from lowbit.trainer.run import RunResult, execute

logger = logging.getLogger("lowbit")


def train(config: RlConfig, run_dir: Path) -> RunResult:
    """Train as configured in `run_dir`, resuming from what is there as `config.resume` says."""
    with open_ranks(config) as (ranks, device):
        run_dir = Path(ranks.share(str(run_dir)))
        return train_on(config, run_dir, ranks, device)


def train_on(config: RlConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> RunResult:
    """The same on ranks that have found each other already."""
    if config.rollout.device:
        find_device(config.rollout.device, "rollout.device")  # a mistake is told before the warm start
    if config.warm_start.steps:
        folder = run_dir / "warm_start"
        if ranks.share(not (run_dir / "checkpoints").is_dir() if ranks.first else None):
            logger.info("warm start: %d supervised steps on the task's own solutions", config.warm_start.steps)
            execute(lambda: WarmStart(warm_start_config(config), folder, ranks, device), folder, ranks).before_more()
        config = replace(config, init_from=str(folder))
    return execute(lambda: Reinforcement(config, run_dir, ranks, device), run_dir, ranks)


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
        if not rollout.staleness and not rollout.device:
            return Producer(Drawing(self.rl, self.judge, self.ranks))
        apart = find_device(rollout.device) if rollout.device else self.device
        drawing = Drawing(self.rl, self._collector(apart), self.ranks)
        if not rollout.staleness:
            return CopyingProducer(drawing, self.weights)
        ahead = rollout.staleness // rollout.updates
        recording = self.recording if apart == self.device else None
        return AheadProducer(drawing, self.weights, ahead, rollout.seconds, apart, recording)

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
        save_config(self.rl, self.run_dir / SETTINGS)
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
            loader.resume(aligned(states)[self.ranks.rank])
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
        logger.info("      lowbit eval %s", shlex.quote(folder))
        logger.info("      lowbit report %s", shlex.quote(folder))
        return RunResult(self.run_dir, position.step, position.tokens, math.nan, math.nan, "")
