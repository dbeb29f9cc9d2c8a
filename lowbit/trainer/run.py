"""A pretraining run from configuration to result: data, model, engine, checkpoint, loop, final words.

`pretrain` is what `lowbit pretrain` calls; `load_run` opens a finished or running run for generation and
evaluation. Everything a run leaves is in its folder: config.yaml, metrics.jsonl, run.log, tokenizer/, checkpoints/.
"""

import logging
import platform
import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import lowbit
from lowbit.configs.schema import RunConfig
from lowbit.configs.stored import load_config, save_config
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.data.loader import Cursor, Loader
from lowbit.data.storage import DISK_FULL
from lowbit.data.tokenizer import Tokenizer, load_tokenizer
from lowbit.errors import CheckpointError, LowbitError
from lowbit.infer.engine import Generator
from lowbit.models.cost import flops_per_token
from lowbit.models.probe import softmax_saturation
from lowbit.models.transformer import Transformer
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot, check_same
from lowbit.trainer.console import Console, duration
from lowbit.trainer.ema import Ema
from lowbit.trainer.engine import LocalEngine, load_tensors
from lowbit.trainer.evaluate import evaluate
from lowbit.trainer.guard import SpikeScore
from lowbit.trainer.hardware import (
    MFU_FORMULA,
    compute_dtype,
    device_memory,
    device_name,
    peak_flops,
    pick_device,
    set_deterministic,
)
from lowbit.trainer.lock import RunLock
from lowbit.trainer.loop import Hooks, Position, Trainer
from lowbit.trainer.memory import explain_out_of_memory, what_to_change
from lowbit.trainer.meters import StepMeter
from lowbit.trainer.metrics import MetricsLog
from lowbit.trainer.objective import NextToken
from lowbit.trainer.precision import RunPrecision, check_precision
from lowbit.trainer.schedule import limits_reached, sequences_at

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


@dataclass(frozen=True)
class LoadedRun:
    """A run opened for use."""

    run_dir: Path
    config: RunConfig
    model: Transformer
    tokenizer: Tokenizer
    step: int


def pretrain(config: RunConfig, run_dir: Path) -> RunResult:
    """Train as configured in `run_dir` (made if missing), resuming from what is there as `config.resume` says."""
    with RunLock(run_dir):
        run = Pretraining(config, run_dir)
        try:
            with explain_out_of_memory(run.out_of_memory):
                return run.execute()
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

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self.device = pick_device(config.device)
        self.dtype = compute_dtype(config.precision, self.device)
        check_precision(config)
        self.console = Console(run_dir)
        self.store = CheckpointStore(run_dir / "checkpoints", config.checkpoint, logger.warning)
        self.ema: Ema | None = None
        self.loader: Loader | None = None
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
        return self._conclude(trainer.position)

    def build(self) -> Trainer:
        """Everything a run needs, resumed to where it was: the trainer is ready for its next step."""
        config = self.config
        set_deterministic(config.deterministic)
        self.data = prepare_data(config.data, logger.info)
        self.token_bytes = self.data.tokenizer.token_bytes()
        self.model = build_model(config, self.data.tokenizer.vocab_size, self.dtype, self.device)
        self.precision = RunPrecision(config, self.model)
        self.engine = LocalEngine(self.model, config.optim, config.engine)
        self.loader = self._make_loader()
        position = self._resume()
        save_config(config, self.run_dir / "config.yaml")
        self.data.tokenizer.save(self.run_dir / "tokenizer")
        self.log = MetricsLog(self.run_dir, config.logging, asdict(config), after_step=position.step)
        peak = peak_flops(self.device)
        self._introduce(peak)
        return Trainer(
            config,
            self.engine,
            self.loader,
            NextToken(config.optim.z_loss),
            Hooks(self._evaluate, self._save, self.store.wait),
            self.log,
            self.console,
            StepMeter(self.device, self._flops_per_token(), peak, self.engine.world),
            self.precision,
            self.ema,
            position,
        )

    def close(self) -> None:
        """End background work; safe at any point. Whoever holds the run's lock next finds nobody writing."""
        if self.loader is not None:
            self.loader.close()
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
        change = what_to_change(config, vocab_size, self.dtype.itemsize, device_memory(self.device))
        saved = "; the newest checkpoint is intact and the same command goes on from it" if self.store.list() else ""
        return (
            f"{device_name(self.device)} ran out of memory at batch.micro_batch={config.batch.micro_batch}, "
            f"data.sequence_length={config.data.sequence_length}, engine.recompute={config.engine.recompute.value}: "
            f"{change} (`lowbit plan` with the same overrides says what takes how much){saved}"
        )

    # Building -------------------------------------------------------------------------------------------------

    def _make_loader(self) -> Loader:
        return Loader(
            self.data,
            seed=self.config.seed,
            sequences_at=lambda sample: sequences_at(self.config, sample),
            micro_batch=self.config.batch.micro_batch,
            rank=self.engine.rank,
            world=self.engine.world,
            prefetch=self.config.data.prefetch,
            pin=self.device.type == "cuda",
        )

    def _flops_per_token(self) -> float:
        return flops_per_token(self.config.model, self.data.tokenizer.vocab_size, self.config.data.sequence_length)

    def _introduce(self, peak: float | None) -> None:
        """Say what will run, before it does."""
        parameters = sum(p.numel() for p in self.model.parameters())
        logger.info("model %s: %.1f million parameters", self.config.model.name, parameters / 1e6)
        for row in self.engine.optimizer.groups():
            logger.info("  %s", row)
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

    def _save(self, position: Position) -> None:
        assert self.loader is not None
        self.store.save(
            Snapshot(
                step=position.step,
                model=self.engine.model_tensors(),
                optimizer=self.engine.optimizer.state_tensors(),
                ema=self.ema.state_tensors() if self.ema else None,
                meta={
                    "tokens": position.tokens,
                    "seconds": position.seconds,
                    "spike": position.spike.as_dict(),
                    "cursor": self.loader.cursor.as_dict(),
                    "identity": self._identity(),
                    "vocab_size": self.data.tokenizer.vocab_size,
                    "final_bpb": self._final_bpb,
                    "precision": self.precision.state(),
                    "versions": {
                        "lowbit": lowbit.__version__,
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                    },
                },
            )
        )

    def _resume(self) -> Position:
        """Set all weights, from what `resume` names or anew, and return the position they belong to."""
        assert self.loader is not None
        snapshot = open_snapshot(self.config.resume, self.store)
        if snapshot is None:
            self.model.init_weights(self.config.seed)
        else:
            check_same(snapshot.meta["identity"], self._identity(), self.config.resume_allow)
            self.engine.load(snapshot.model, snapshot.optimizer)
        if self.config.optim.ema_decay:  # built here: an average without a past starts at the weights as they are now
            self.ema = Ema(self.model, self.config.optim.ema_decay)
        if snapshot is None:
            return Position()
        if self.ema is not None and snapshot.ema is not None:
            self.ema.load_state_tensors(snapshot.ema)
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
        settings = self.config.evaluation
        budget = settings.final_tokens if last else settings.max_tokens
        batches = self.data.validation_batches(self.config.batch.micro_batch, budget)
        result = evaluate(self.model, batches, self.token_bytes)
        if last:
            self._final_bpb = result.bpb
        row = {"val_bpb": result.bpb, "val_loss": result.loss}
        if self.precision.quantised:
            with self.precision.high():
                batches = self.data.validation_batches(self.config.batch.micro_batch, budget)
                row["val_bpb_bf16"] = evaluate(self.model, batches, self.token_bytes).bpb
        elif self.dtype is torch.bfloat16:
            row["val_bpb_bf16"] = result.bpb
        if self.ema is not None:
            with self.ema.swapped():
                batches = self.data.validation_batches(self.config.batch.micro_batch, budget)
                row["val_bpb_ema"] = evaluate(self.model, batches, self.token_bytes).bpb
        if self.config.logging.softmax_saturation:
            batch = next(iter(self.data.validation_batches(1, self.config.data.sequence_length))).to(self.device)
            shares = softmax_saturation(self.model, batch.tokens, batch.visibility)
            row["softmax_saturation"] = sum(shares) / len(shares)
        return row

    def _finished(self, position: Position) -> None:
        """A run that had ended before: say so and what to raise; measure it if it ends now because of a lower limit."""
        limits = limits_reached(self.config, position.step, position.tokens, position.seconds)
        given = {key: getattr(self.config, key) for key in limits}
        logger.info(
            "this run is finished (%s) at step %d after %d tokens and %s: to go on, raise the limit, as in %s",
            " ".join(f"{key}={value}" for key, value in given.items()),
            position.step,
            position.tokens,
            duration(position.seconds),
            " ".join(f"{key}={2 * value}" for key, value in given.items()),
        )
        measured, saved = self._final_bpb is not None, bool(self.store.list())
        if not measured:
            assert self.log is not None
            self.log.log({"step": position.step, "tokens": position.tokens} | self._evaluate(last=True))
        if not (measured and saved):
            self._save(position)
            self.store.wait()

    def _conclude(self, position: Position) -> RunResult:
        """Print what was reached and what to do next."""
        assert self._final_bpb is not None
        trigram = self.data.trigram_bpb()
        sample = self._sample()
        verdict = "below" if self._final_bpb < trigram else "NOT below"
        logger.info(
            "validation %.4f bits per byte, %s the byte-trigram baseline's %.4f", self._final_bpb, verdict, trigram
        )
        if sample:
            logger.info("sample:\n%s", sample)
        folder = shown_path(self.run_dir)
        logger.info("run folder: %s", folder)
        run = shlex.quote(folder)
        logger.info("next: lowbit generate %s --prompt 'import '", run)
        logger.info("      lowbit report %s", run)
        logger.info("      lowbit eval %s", run)
        return RunResult(self.run_dir, position.step, position.tokens, self._final_bpb, trigram, sample)

    def _sample(self) -> str:
        settings, tokenizer = self.config.evaluation, self.data.tokenizer
        if settings.sample_tokens == 0:
            return ""
        prompt = [tokenizer.eot_id, *tokenizer.encode(settings.sample_prompt)]
        length = min(settings.sample_tokens, self.config.model.max_sequence - len(prompt))
        generator = Generator(self.model, tokenizer.eot_id)
        [completion] = generator.generate([prompt], max_new_tokens=length, temperature=0.8, top_p=0.95, seed=1)
        whole = tokenizer.decode([*prompt, *completion.tokens])  # a token's text may depend on the one before it
        return settings.sample_prompt + whole[len(tokenizer.decode(prompt)) :]


# Pieces that generation and evaluation share ------------------------------------------------------------------


def load_run(run_dir: Path, checkpoint: str = "latest", device: str = "auto") -> LoadedRun:
    """Open a run's checkpoint for generation or evaluation, in the precision it was trained in.

    Raises:
        CheckpointError: there is no run or no readable checkpoint.
    """
    if not (run_dir / "config.yaml").is_file():
        raise CheckpointError(f"{run_dir} is not a run's folder: it has no config.yaml")
    config = load_config(run_dir / "config.yaml")
    store = CheckpointStore(run_dir / "checkpoints", config.checkpoint, logger.warning)
    snapshot = store.load(checkpoint, weights_only=True)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    where = pick_device(device)
    model = build_model(config, tokenizer.vocab_size, compute_dtype(config.precision, where), where)
    RunPrecision(config, model).resume(snapshot.meta.get("precision"), snapshot.step)
    load_tensors({name: p.detach() for name, p in model.named_parameters()}, snapshot.model)
    return LoadedRun(run_dir, config, model, tokenizer, snapshot.step)


def open_snapshot(resume: str, store: CheckpointStore) -> Snapshot | None:
    """The checkpoint that `resume` (auto, none or a path) names; None for a fresh start."""
    if resume == "none":
        if store.list():
            raise CheckpointError(
                f"{store.folder} already holds checkpoints and resume=none would mix two runs: "
                "choose another run_name, or delete the folder"
            )
        return None
    if resume == "auto":
        return store.load("latest") if store.list() else None
    return store.load(resume)


def shown_path(path: Path) -> str:
    """A path as people want to type it: relative to the working directory when it lies inside."""
    resolved, here = path.resolve(), Path.cwd()
    return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)


def build_model(config: RunConfig, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Transformer:
    """The model on `device`, weights not yet set."""
    with torch.device("meta"):
        model = Transformer(config.model, vocab_size, dtype)
    return model.to_empty(device=device)


def dataset_of(run: LoadedRun) -> Dataset:
    """The data a run was trained on, packed again if its shards are gone."""
    return prepare_data(run.config.data, logger.info)
