"""The one training loop. Read `Trainer.fit` and `Trainer.train_step`: that is all of it.

A step is: the micro-batches of this rank, forward and backward on each, one look at the loss and the gradient
norm on the host (the step's only synchronisation), and, if both are finite, the optimizer. Nothing from a bad
step is applied or saved. The learning rate and the batch size are functions of where the run is, so a resumed
run needs nothing but its position.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lowbit.configs.schema import EngineKind, RunConfig
from lowbit.data.batch import Batch
from lowbit.data.loader import Loader
from lowbit.errors import Interrupted, NonFiniteError
from lowbit.trainer.console import Console
from lowbit.trainer.ema import Ema
from lowbit.trainer.engine import Engine
from lowbit.trainer.guard import first_bad
from lowbit.trainer.layer_metrics import LayerMetrics
from lowbit.trainer.meters import StepMeter
from lowbit.trainer.metrics import MetricsLog
from lowbit.trainer.objective import Objective
from lowbit.trainer.precision import RunPrecision, rehearsal
from lowbit.trainer.schedule import lr_scale, progress
from lowbit.trainer.signals import SignalGuard
from lowbit.trainer.spikes import SpikeScore
from lowbit.trainer.stabilise import Stabilisers


@dataclass
class Position:
    """Where a run is: all the loop's own state, saved with every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, over all ranks."""
    seconds: float = 0.0
    """Wall-clock time spent, over all resumptions."""
    spike: SpikeScore = field(default_factory=SpikeScore)


@dataclass
class Hooks:
    """What the loop asks of the run around it."""

    evaluate: Callable[[bool], dict[str, float]]
    """Validation metrics; the argument says whether this is the last, longer one."""
    save: Callable[[Position], None]
    """Write a checkpoint of the position just reached, perhaps in the background."""
    flush: Callable[[], None]
    """Wait until everything saved is on the disk."""


class Trainer:
    """Drives an engine over a loader until a limit of the configuration is reached."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loader: Loader,
        objective: Objective,
        hooks: Hooks,
        log: MetricsLog,
        console: Console,
        meter: StepMeter,
        precision: RunPrecision,
        stabilisers: Stabilisers,
        ema: Ema | None = None,
        position: Position | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.loader = loader
        self.objective = objective
        self.hooks = hooks
        self.log = log
        self.console = console
        self.meter = meter
        self.precision = precision
        self.stabilisers = stabilisers
        self.ema = ema
        self.position = position or Position()
        self.layers = LayerMetrics(engine.model, engine.ranks)
        self._signals = SignalGuard()
        self._stop = False  # whether some rank was asked to end; the same on all of them

    def fit(self) -> None:
        """Train until the first limit; evaluates and saves on the way and at the end.

        Raises:
            Interrupted: a signal came; the state was saved first.
            NonFiniteError: a loss or gradient was NaN or infinite; the last checkpoint is from before it.
        """
        with self._signals:
            while not self.done:
                self.engine.ranks.move(f"step {self.position.step + 1}")
                row = self.train_step()
                last = self.done
                self.engine.ranks.move(f"the end of step {self.position.step}", patient=True)
                if last or self._due(self.config.evaluation.every_steps):
                    with self.meter.part("eval"):
                        row |= self.hooks.evaluate(last)
                    self._agree(0.0)  # a signal may have come meanwhile
                    last = self.done  # what was measured may end the run
                self._log(row)
                stop = self._stop and not last
                if last or stop or self._due(self.config.checkpoint.every_steps):
                    with self.meter.part("checkpoint"):
                        self.hooks.save(self.position)
                if stop:
                    self.hooks.flush()
                    signal = self._signals.requested or "a signal to another rank"
                    raise Interrupted(f"interrupted by {signal}: saved at step {self.position.step}")
            self.hooks.flush()

    @property
    def asked_to_end(self) -> str:
        """The signal that came while the run was ending by itself, the same on all ranks; empty if none did."""
        if self._stop or (self.engine.ranks.world == 1 and self._signals.requested):
            return self._signals.requested or "a signal to another rank"
        return ""

    def train_step(self) -> dict[str, Any]:
        """One optimizer step; returns its metrics."""
        config, position, engine = self.config, self.position, self.engine
        self.meter.start_step()
        with self.meter.part("data"):
            batches = self.loader.next_step()
        mine = (sum(batch.valid_tokens for batch in batches), sum(batch.tokens.numel() for batch in batches))
        valid, tokens = engine.ranks.sum(mine)
        scale = lr_scale(config.optim.schedule, position.step, self.progress)
        self._begin_step(batches, valid)
        self.layers.begin_step()
        nll = torch.zeros((), device=engine.device)
        moments: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(batches):
            engine.ranks.move(f"step {position.step + 1}, micro-batch {index + 1} of {len(batches)}")
            self.precision.begin_micro_batch(position.step, engine.rank * len(batches) + index, engine.rank)
            last = index == len(batches) - 1
            out = engine.micro_step(self.objective, batch.to(engine.device), 1.0 / valid, last)
            nll += out.nll_sum
            moments = {name: sums.double() + moments.get(name, 0.0) for name, sums in out.moments.items()}
        engine.ranks.move(f"step {position.step + 1}, gradient norm")
        norm = engine.gradient_norm()
        if engine.device.type == "cuda":  # which is busy for a while
            self.loader.send_ahead(engine.device)
        numbers = torch.cat([norm.double()[None], nll.double()[None], *moments.values()])
        grad_norm, *local = numbers.tolist()  # the step's one wait for the device
        loss, *means = (total / valid for total in engine.ranks.sum(local))
        self._require_finite(loss, grad_norm, batches)
        engine.step(scale, _clip_scale(grad_norm, config.optim.clip_norm))
        self.layers.end_step()
        position.step += 1
        position.tokens += int(tokens)
        measured = self.stabilisers.after_step(position.step, self.progress)
        if self.ema is not None:
            self.ema.update()
        position.seconds += self._agree(self.meter.end_step(int(tokens)))
        return {
            "step": position.step,
            "tokens": position.tokens,
            "seconds": position.seconds,
            "loss": loss,
            "lr": scale * config.optim.lr,
            "grad_norm": grad_norm,
            "spike_score": position.spike.update(loss),
            **engine.traffic(),
            "sequences": int(tokens) // config.data.sequence_length,
            **_estimates(moments, means, valid),
            **measured,
        }

    def _agree(self, elapsed: float) -> float:
        """Seconds that the step took by rank 0's clock, which is all ranks' for limits and learning rates.

        Signals are agreed on with them: what one rank was asked, all do.
        """
        ranks = self.engine.ranks
        seconds, asked = ranks.sum([elapsed if ranks.first else 0.0, float(self._signals.requested is not None)])
        self._stop = asked > 0
        return seconds

    @property
    def progress(self) -> float:
        """How much of the run is done, 0 to 1, by whichever limit is nearest."""
        return progress(self.config, self.position.step, self.position.tokens, self.position.seconds)

    @property
    def done(self) -> bool:
        """Whether a limit is reached."""
        return self.progress >= 1.0

    def _begin_step(self, batches: list[Batch], valid: float) -> None:
        """The precision of the coming step; before the first one, a rehearsal of those that follow."""
        engine = self.engine

        def loss(batch: Batch = batches[0]) -> torch.Tensor:
            return self.objective(engine.model, batch.to(engine.device)).loss_sum

        # A backward pass there ends in reductions, also with one rank
        hooked = self.config.engine.kind is EngineKind.deepspeed and self.config.engine.zero_stage == 3
        rehearse = None if hooked else rehearsal(loss, engine.model)
        self.precision.begin_step(self.position.step, self.progress, rehearse)
        self.precision.begin_micro_batch(self.position.step, engine.rank * len(batches), engine.rank)
        self.stabilisers.before_step(self.position.step + 1, batches, loss, valid)

    def _due(self, every: int) -> bool:
        return every > 0 and self.position.step % every == 0

    def _log(self, row: dict[str, Any]) -> None:
        """Show every step; write those that are due, the last, and those in which something was measured."""
        measured = any(key.startswith(("val_", "quant/")) for key in row)
        if self._due(self.config.logging.every_steps) or self.done or measured:
            row |= self.meter.read() | self.layers.read()
            row |= {f"epoch/{name}": value for name, value in self.loader.epochs().items()}
            self.log.log(row)
        self.console.step(row, self.progress)

    def _require_finite(self, loss: float, grad_norm: float, batches: list[Batch]) -> None:
        """Stop before the optimizer sees a bad gradient, naming the first layer that went wrong."""
        if math.isfinite(loss) and math.isfinite(grad_norm) and grad_norm > 0:
            return
        step = self.position.step + 1
        if grad_norm == 0:
            raise NonFiniteError(f"step {step}: every gradient is zero (loss {loss:g}); nothing would be learned")
        raise NonFiniteError(
            f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}; first bad: {self._first_bad(batches)}; "
            "the step was not applied; lower optim.lr, or go on from an earlier checkpoint with resume=PATH"
        )

    def _first_bad(self, batches: list[Batch]) -> str:
        """The first layer with a non-finite output on these micro-batches, else the first such gradient.

        With several ranks the answer is that of the first one that has any, and every rank looks at all its batches,
        because their passes may need each other.
        """
        engine = self.engine
        found: list[str] = []
        try:
            for batch in batches:
                forward = partial(self.objective, engine.model, batch.to(engine.device))
                if (name := first_bad(engine.model, forward)) is not None:
                    found.append(f"output of {name}")
                    if engine.world == 1:
                        break
        except torch.OutOfMemoryError:  # uncompiled, the forward pass takes more than the step did
            found.append("not known, for lack of memory to run the forward pass again")
        for rank, name in enumerate(engine.ranks.gather(found[0] if found else "")):
            if name:
                return name if engine.world == 1 else f"{name}, on rank {rank}"
        return f"gradient of {engine.first_bad_gradient() or 'no single layer (the norm overflowed)'}"


def _estimates(names: Iterable[str], means: Sequence[float], count: float) -> dict[str, float]:
    """Metrics from the means of quantities and of their squares, two a name: the mean and its standard error."""
    row: dict[str, float] = {}
    for i, name in enumerate(names):
        mean, square = means[2 * i : 2 * i + 2]
        row |= {name: mean, f"{name}_se": math.sqrt(max(0.0, square - mean * mean) / count)}
    return row


def _clip_scale(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of this L2 norm down to `max_norm`; 1 where it is within, or clipping is off."""
    return max_norm / norm if 0 < max_norm < norm else 1.0
