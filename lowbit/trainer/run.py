"""A pretraining run from configuration to result: data, model, engine, checkpoint, loop, final words.

`pretrain` is what `lowbit pretrain` calls, in every process of the job. Everything a run leaves is in its folder, which
rank 0 alone writes: config.yaml, precision.json, metrics.jsonl, samples.jsonl, run.log, tokenizer/, checkpoints/.
"""

import json
import logging
import math
import platform
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import lowbit
from lowbit.configs.paths import with_absolute_paths
from lowbit.configs.schema import EngineKind, RunConfig
from lowbit.configs.stored import save_config
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.data.loader import Cursor, Loader
from lowbit.data.storage import DISK_FULL
from lowbit.errors import CheckpointError, DataError, Interrupted, LowbitError
from lowbit.models.cost import flops_per_token
from lowbit.models.layers import state_buffers
from lowbit.models.probe import softmax_saturation
from lowbit.models.transformer import Transformer
from lowbit.trainer.alike import require_alike
from lowbit.trainer.announce import introduce, keep_sample, sample_text, say_finished, say_result
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot
from lowbit.trainer.console import Console
from lowbit.trainer.distributed import ALONE, Ranks
from lowbit.trainer.ema import Ema
from lowbit.trainer.engine import Engine, LocalEngine
from lowbit.trainer.evaluate import Evaluation, evaluate
from lowbit.trainer.files import CONFIG, PRECISION
from lowbit.trainer.guard import require_finite
from lowbit.trainer.hardware import (
    MFU_FORMULA,
    compute_dtype,
    peak_flops,
    pick_device,
    set_deterministic,
)
from lowbit.trainer.identity import check_same
from lowbit.trainer.imported import begin_from
from lowbit.trainer.launch import open_ranks
from lowbit.trainer.layer_metrics import without_state
from lowbit.trainer.loaded import build_model, shown_path
from lowbit.trainer.lock import RunLock
from lowbit.trainer.loop import Hooks, Position, Trainer
from lowbit.trainer.memory import explain_out_of_memory, ran_out
from lowbit.trainer.meters import StepMeter
from lowbit.trainer.metrics import MetricsLog, NoLog
from lowbit.trainer.objective import NextToken, Objective
from lowbit.trainer.precision import RunPrecision, check_precision
from lowbit.trainer.resume import check_settings, data_settings, fits, open_snapshot
from lowbit.trainer.schedule import limits_reached, sequences_at
from lowbit.trainer.spikes import SpikeScore
from lowbit.trainer.stabilise import Stabilisers

logger = logging.getLogger("lowbit")


@dataclass(frozen=True)
class RunResult:
    """What a run reached."""

    run_dir: Path
    step: int
    tokens: int
    val_bpb: float
    trigram_bpb: float
    sample: str
    asked_to_end: str = ""
    """The signal that came in its last step: it changed nothing there, but nothing is to follow. Empty: none came."""

    def before_more(self) -> None:
        """What is to follow this run asks here. Raises Interrupted if a signal came in its last step."""
        if self.asked_to_end:
            raise Interrupted(f"interrupted by {self.asked_to_end} when {shown_path(self.run_dir)} was done")


def pretrain(config: RunConfig, run_dir: Path) -> RunResult:
    """Train as configured in `run_dir` (made if missing), resuming from what is there as `config.resume` says.

    Each process that a launcher started calls this; rank 0's `run_dir` is the one that counts.
    """
    with open_ranks(config) as (ranks, device):
        return pretrain_on(config, Path(ranks.share(str(run_dir))), ranks, device)


def pretrain_on(config: RunConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> RunResult:
    """The same on ranks that have found each other already."""
    return execute(lambda: Pretraining(config, run_dir, ranks, device), run_dir, ranks)


def execute(make: "Callable[[], Pretraining]", run_dir: Path, ranks: Ranks) -> RunResult:
    """Make a run and see it through, alone in its folder."""
    with ExitStack() as stack:
        ranks.first_does(lambda: stack.enter_context(RunLock(run_dir)))
        run = make()
        try:
            with explain_out_of_memory(run.out_of_memory):
                return run.execute()
        except Interrupted as error:
            raise Interrupted(f"{error} in {shown_path(run_dir)}") from None
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise LowbitError(
                f"{error.filename or run_dir} cannot be written ({error.strerror}); checkpoints are intact: free some "
                "space, and the same command goes on from the newest"
            ) from error
        finally:
            run.close()


class Pretraining:
    """Builds the parts in the order in which a mistake is cheapest to find, then runs the loop."""

    trainer_class: type[Trainer] = Trainer

    def __init__(
        self, config: RunConfig, run_dir: Path, ranks: Ranks = ALONE, device: torch.device | None = None
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.ranks = ranks
        self.device = device or pick_device(config.device)
        self.dtype = compute_dtype(config.precision, self.device)
        check_precision(config)
        self.console = Console(run_dir, enabled=ranks.first)
        self.store = CheckpointStore(run_dir / "checkpoints", config.checkpoint, logger.warning)
        self.ema: Ema | None = None
        self.loader: Loader | None = None
        self.engine: Engine | None = None
        self.log: MetricsLog | None = None
        self._final_bpb: float | None = None  # what the last, longer evaluation measured

    def execute(self) -> RunResult:
        """The whole run; of a finished one only what it reached."""
        trainer = self.build()
        if trainer.done:
            self._finished(trainer.position)
        else:
            self._final_bpb = None
            trainer.fit()
        return replace(self._conclude(trainer.position), asked_to_end=trainer.asked_to_end)

    def build(self) -> Trainer:
        """Everything a run needs, resumed to where it was: the trainer is ready for its next step."""
        config = self.config
        set_deterministic(config.deterministic)
        self.data = self._prepare_data()
        self.token_bytes = self.data.tokenizer.token_bytes()
        snapshot = self._snapshot()
        self.model = self._make_model()
        self.precision = self.ranks.together(lambda: RunPrecision(config, self.model))
        require_alike(self.ranks, self.precision.reports())
        if snapshot is None:
            self._begin()
        self.engine = self.ranks.together(self._make_engine)
        self.loader = self._make_loader()
        self.stabilisers = Stabilisers(config.precision, self.model, self.engine)
        position = self._resume(snapshot)
        self.stabilisers.resume(None if snapshot is None else snapshot.stabilisers)
        self.log = self._open_folder(position)
        peak = peak_flops(self.device)
        self._introduce(peak)
        return self.trainer_class(
            config,
            self.engine,
            self.loader,
            self._make_objective(),
            Hooks(self._evaluate, self._save, self._flush),
            self.log,
            self.console,
            StepMeter(self.device, self._flops_per_token(), peak, self.ranks.world),
            self.precision,
            self.stabilisers,
            self.ema,
            position,
        )

    def close(self) -> None:
        """End background work; safe at any point. Whoever holds the run's lock next finds nobody writing."""
        if self.loader is not None:
            self.loader.close()
        if self.engine is not None:
            self.engine.close()
        try:
            self.store.wait()
        except CheckpointError as error:  # the run ends by an error of its own, which is the one to raise
            logger.error("%s", error)
        if self.log is not None:
            self.log.close()
        self.console.close()

    def out_of_memory(self) -> str:
        """What to say and to change when memory ran out."""
        config = self.config
        vocab_size = config.data.tokenizer.vocab_size if self.loader is None else self.data.tokenizer.vocab_size
        with suppress(CheckpointError):  # one that failed is not in the list
            self.store.wait()
        return ran_out(config, vocab_size, self.dtype, self.device, saved=bool(self.store.list()))

    # Building -------------------------------------------------------------------------------------------------

    def _make_model(self) -> Transformer:
        return build_model(self.config, self.data.tokenizer.vocab_size, self.dtype, self.device)

    def _begin(self) -> None:
        """First weights: drawn by the seed, or those of `init_from`."""
        start = self.config.init_from
        if not start:
            self.model.init_weights(self.config.seed)
            return
        step = begin_from(Path(start).expanduser(), self.model)
        logger.info("the run begins with the weights of %s%s", start, f", step {step}" if step else "")

    def _prepare_data(self) -> Dataset:
        """Rank 0 trains the tokenizer and packs; the others then find the files, or make theirs on another machine.

        A run that may not go on with its settings stops before.
        """
        config, ranks = self.config.data, self.ranks
        ranks.first_does(lambda: check_settings(self.config, self.store))
        mine = ranks.first_does(lambda: prepare_data(config, logger.info))
        data = ranks.together(lambda: mine or prepare_data(config, lambda _: None))
        prints = ranks.gather(data.fingerprint)
        if len(set(prints)) > 1:
            other = next(rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0])
            raise DataError(
                f"rank {other} found other documents than rank 0: every machine needs the same data sources"
            )
        return data

    def _make_engine(self) -> Engine:
        if self.config.engine.kind is EngineKind.local:
            return LocalEngine(self.model, self.config.optim, self.config.engine)
        from lowbit.trainer.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(self.model, self.config, self.ranks, self.device)

    def _open_folder(self, position: Position) -> MetricsLog:
        """Configuration, tokenizer and metrics in the run's folder, which belongs to rank 0."""
        log = self.ranks.first_does(lambda: self._fill_folder(position))
        return log or NoLog()

    def _fill_folder(self, position: Position) -> MetricsLog:
        save_config(with_absolute_paths(self.config), self.run_dir / CONFIG)
        self.data.tokenizer.save(self.run_dir / "tokenizer")
        text = json.dumps(self._precision_reports(), indent=1) + "\n"
        (self.run_dir / PRECISION).write_text(text, encoding="utf-8")
        return MetricsLog(self.run_dir, self.config.logging, asdict(self.config), after_step=position.step)

    def _precision_reports(self) -> list[dict[str, Any]]:
        """What precision.json says."""
        return self.precision.reports()

    def _make_objective(self) -> Objective:
        return NextToken(self.config.optim.z_loss)

    def _make_loader(self) -> Loader:
        return Loader(
            self.data,
            seed=self.config.seed,
            sequences_at=lambda sample: sequences_at(self.config, sample),
            micro_batch=self.config.batch.micro_batch,
            rank=self.ranks.rank,
            world=self.ranks.world,
            prefetch=self.config.data.prefetch,
            pin=self.device.type == "cuda",
        )

    def _flops_per_token(self) -> float:
        return flops_per_token(self.config.model, self.data.tokenizer.vocab_size, self.config.data.sequence_length)

    def _introduce(self, peak: float | None) -> None:
        """Say what will run, before it does."""
        assert self.engine is not None
        introduce(self.config, self.model, self.engine.groups(), self.ranks.world)
        for line in self.precision.lines():
            logger.info("%s", line)
        logger.info("%s", "MFU n/a: the peak of this device is not known" if peak is None else MFU_FORMULA)

    # Checkpoints ----------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        return {
            "tokenizer": self.data.tokenizer.digest,
            "data": self.data.describe(),
            "model": asdict(self.config.model),
        }

    def _own_state(self) -> dict[str, Any]:
        """What a kind of run adds to a checkpoint's meta; called on every rank."""
        return {}

    def _save(self, position: Position) -> None:
        assert self.loader is not None and self.engine is not None
        snapshot = Snapshot(
            step=position.step,
            model=self.engine.model_tensors() | state_buffers(self.model),
            optimizer=self.engine.optimizer_tensors(),
            ema=self.engine.collect(self.ema.state_tensors()) if self.ema else None,
            stabilisers=self.stabilisers.state(),
            exchange=self.engine.exchange_tensors() or None,
            meta={
                "tokens": position.tokens,
                "seconds": position.seconds,
                "spike": position.spike.as_dict(),
                "cursor": self.loader.cursor.as_dict(),
                "identity": self._identity(),
                "settings": data_settings(self.config.data),
                "vocab_size": self.data.tokenizer.vocab_size,
                "final_bpb": self._final_bpb,
                "precision": self.precision.state(),
                **self._own_state(),
                "versions": {
                    "lowbit": lowbit.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            },
        )
        self.ranks.first_does(lambda: self._write(snapshot))

    def _write(self, snapshot: Snapshot) -> None:
        require_finite(snapshot.step, snapshot.parts)
        self.store.save(snapshot)

    def _flush(self) -> None:
        self.ranks.first_does(self.store.wait)

    def _snapshot(self) -> Snapshot | None:
        """The checkpoint that `resume` names, on rank 0; on the others without its tensors. None for a fresh start."""
        snapshot = self.ranks.first_does(lambda: open_snapshot(self.config.resume, self.store))
        mine = None
        if snapshot is not None:
            loads = fits(snapshot, self.config.model, self.data.tokenizer.vocab_size)
            mine = [snapshot.step, snapshot.meta, snapshot.ema is not None, loads]
        notes: list[Any] | None = self.ranks.share(mine)
        if notes is None:
            return None
        step, meta, averaged, loads = notes
        check_same(meta["identity"], self._identity(), self.config.resume_allow, loads)
        return snapshot or Snapshot(step, {}, {}, {} if averaged else None, meta)

    def _resume(self, snapshot: Snapshot | None) -> Position:
        """Take over a checkpoint's tensors, and return the position that they, or fresh weights, belong to."""
        assert self.loader is not None and self.engine is not None
        if snapshot is not None and "caches" in snapshot.meta["identity"] and "caches" not in self._identity():
            raise CheckpointError(
                "the checkpoint is of a student of a teacher's cache: `lowbit distill train` goes on with it; to train "
                "its model otherwise, give another run_name and begin with its weights, init_from=FOLDER"
            )
        if snapshot is not None:
            self.engine.load(without_state(self.model, snapshot.model, self.ranks), snapshot.optimizer)
            self.engine.load_exchange(snapshot.exchange or {})
        if self.config.optim.ema_decay:  # built here: an average without a past starts at the weights as they are now
            self.ema = Ema(self.engine.weights(), self.config.optim.ema_decay, self.engine.refresh)
        if snapshot is None:
            return Position()
        if self.ema is not None and snapshot.ema is not None:
            self.ema.load_state_tensors(self.engine.distribute(snapshot.ema))
        self._final_bpb = snapshot.meta.get("final_bpb")
        self.precision.resume(snapshot.meta.get("precision"), snapshot.step)
        cursor = Cursor.from_dict(snapshot.meta["cursor"])
        if cursor.seed != self.config.seed:
            logger.warning("from here on seed=%d orders the data; so far it was %d", self.config.seed, cursor.seed)
        self.loader.seek(Cursor(cursor.sample, self.config.seed, self.data.fingerprint))
        logger.info("resumed at step %d (%d tokens)", snapshot.step, snapshot.meta["tokens"])
        return Position(
            step=snapshot.step,
            tokens=snapshot.meta["tokens"],
            seconds=snapshot.meta["seconds"],
            spike=SpikeScore.from_dict(snapshot.meta["spike"]),
        )

    # Evaluation and the end -----------------------------------------------------------------------------------

    def _evaluate(self, last: bool) -> dict[str, float]:
        assert self.engine is not None
        self.precision.begin_evaluation()
        budget = self.config.evaluation.final_tokens if last else self.config.evaluation.max_tokens
        result = self._measure(budget)
        if last:
            self._final_bpb = result.bpb
        row = {"val_bpb": result.bpb, "val_loss": result.loss}
        if self.precision.quantised:
            with self.precision.high():
                row["val_bpb_bf16"] = self._measure(budget).bpb
        elif self.dtype is torch.bfloat16:
            row["val_bpb_bf16"] = result.bpb
        if self.ema is not None:
            with self.ema.swapped():
                row["val_bpb_ema"] = self._measure(budget).bpb
        if self.config.logging.softmax_saturation:
            with self.engine.whole_model() as model:
                if model is not None:
                    batches = self.data.validation_batches(1, self.config.data.sequence_length)
                    batch = next(iter(batches)).to(self.device)
                    shares = softmax_saturation(model, batch.tokens, batch.visibility)
                    row["softmax_saturation"] = sum(shares) / len(shares)
        return row

    def _measure(self, max_tokens: int) -> Evaluation:
        """Validation of the model as it computes now, its batches shared out between the ranks."""
        ranks, micro_batch = self.ranks, self.config.batch.micro_batch
        batches = self.data.validation_batches(micro_batch, max_tokens, rank=ranks.rank, world=ranks.world)
        return evaluate(self.model, batches, self.token_bytes, ranks)

    def _finished(self, position: Position) -> None:
        """A run that had ended before: say so and what to raise; measure it if it ends now because of a lower limit."""
        limits = limits_reached(self.config, position.step, position.tokens, position.seconds)
        say_finished({key: getattr(self.config, key) for key in limits}, position)
        measured, saved = self._final_bpb is not None, self.ranks.share(bool(self.store.list()))
        if not measured:
            assert self.log is not None
            self.log.log({"step": position.step, "tokens": position.tokens} | self._evaluate(last=True))
        if not (measured and saved):
            self._save(position)
            self._flush()

    def _conclude(self, position: Position) -> RunResult:
        """Print what was reached and what to do next."""
        assert self._final_bpb is not None
        sample = self._sample()
        trigram = self.ranks.first_does(self.data.trigram_bpb)
        if trigram is None:
            return RunResult(self.run_dir, position.step, position.tokens, self._final_bpb, math.nan, "")
        if sample:
            keep_sample(self.run_dir, position.step, self.config.evaluation.sample_prompt, sample)
        say_result(self.run_dir, self._final_bpb, trigram, sample)
        return RunResult(self.run_dir, position.step, position.tokens, self._final_bpb, trigram, sample)

    def _sample(self) -> str:
        assert self.engine is not None
        if self.config.evaluation.sample_tokens == 0:
            return ""
        with self.engine.whole_model() as model:
            return "" if model is None else sample_text(model, self.data.tokenizer, self.config.evaluation)
