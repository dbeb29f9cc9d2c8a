"""How long a stage will take: a moment of its own work, timed, and how often that comes.

On a CPU the stage's model, with random weights, takes a step on random tokens in each precision that the run comes to
(an emulated format with what emulation costs), reads, and draws answers: all stages together in a few seconds. A GPU's
blocks would first have to be compiled, which takes a minute, and of a large model a CPU finishes no sequence in a
moment; there the time is the work at `SHARE` of the rate of a large matrix product.

Not in it: packing documents, compiling, and other work on the machine. What a stage does around its steps is `AROUND`.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lowbit.configs.schema import CompileMode, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_rl import RlConfig
from lowbit.data.batch import Batch
from lowbit.distill.codec import Layout
from lowbit.distill.expected import encode_typical
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.cost import flops_per_token
from lowbit.models.lm_head import lm_head_nll
from lowbit.quant.resolve import resolve
from lowbit.rl.task_run import run_config
from lowbit.rl.tasks import Split, make_task
from lowbit.trainer.engine import LocalEngine
from lowbit.trainer.hardware import compute_dtype, pick_device
from lowbit.trainer.loaded import build_model
from lowbit.trainer.objective import NextToken
from lowbit.trainer.plan import run_length
from lowbit.trainer.precision import RunPrecision
from lowbit.trainer.schedule import decaying

READ = 3
"""A token that is only read costs a third of one that is trained on."""
SHARE = 0.3
"""Of the rate of a large product, what whole steps reach on a GPU."""
AROUND = 3.0
"""Seconds of a stage besides its steps: opening the data, building the model, a sample, the last checkpoint."""
MOMENT = 0.05
"""Seconds at the rate of a large product that work to be timed may last; it takes a few times as long."""
LONGEST = 0.15
"""The same of one sequence: a model that needs longer is not timed."""


def conversation(run: RlConfig) -> tuple[int, int]:
    """Tokens of a typical prompt, 0 where problems come from a file; and of the longest conversation about it."""
    if run.task.path:
        return 0, 0
    example = make_task(run.task).example(Split.train, run.seed, 0)
    prompt = len(run.task.template.replace("{prompt}", example.prompt).encode()) + 1
    return prompt, prompt + run.rollout.max_new_tokens * run.task.turns


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product, the best of a few."""
    size = 4096 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def product() -> None:
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return float(2 * size**3 / best(product))


def times(run: RunConfig, vocabulary: int, tokens: Sequence[int | None], rate: float) -> list[float | None]:
    """Seconds of each part of a stage, of which `tokens` are the tokens (None: not known, and then the time is what the
    clock ends it after, if it does).

    rate: `measured_rate` of its device.
    """
    if isinstance(run, RlConfig):
        return _rewarded(run, vocabulary, tokens, rate)
    trained = _trained(run, vocabulary, tokens[-1], rate)
    return [_cached(run, vocabulary, tokens[0], rate), trained] if isinstance(run, DistillConfig) else [trained]


def _trained(run: RunConfig, vocabulary: int, tokens: int | None, rate: float) -> float | None:
    steps = run_length(run).steps
    if tokens is None or steps is None:
        return _limit(run)
    watch, evaluation = Stopwatch(run, vocabulary, rate), run.evaluation
    between = (steps - 1) // evaluation.every_steps if evaluation.every_steps else 0
    read = between * evaluation.max_tokens + evaluation.final_tokens
    pace = watch.pace()
    return min(AROUND + tokens * pace.trained + steps * pace.step + read * pace.evaluated, _limit(run) or math.inf)


def _cached(run: DistillConfig, vocabulary: int, tokens: int | None, rate: float) -> float | None:
    teacher = replace(run, model=run.teacher.model, precision=run.teacher.precision)
    watch, count = Stopwatch(teacher, vocabulary, rate), max(16, min(2048, (1 << 20) // vocabulary))
    stored = 0.0
    if watch.timed:
        layout = Layout(run.cache.estimator, run.cache.targets, vocabulary)
        stored = best(lambda: encode_typical(layout, count)) / count
    return None if tokens is None else tokens * (watch.read() + stored)


def _rewarded(run: RlConfig, vocabulary: int, tokens: Sequence[int | None], rate: float) -> list[float | None]:
    prompt, whole = conversation(run)
    watch = Stopwatch(run_config(run), vocabulary, rate)
    pace = watch.pace()
    drawn = watch.drawn(run, prompt, whole) if prompt else 0.0
    found: list[float | None] = []
    if run.warm_start.steps and (supervised := tokens[0]) is not None:
        start = run.warm_start
        looks = start.steps // start.check_steps if start.check_steps else 1
        found.append(supervised * pace.trained + start.steps * pace.step + looks * run.task.examine * drawn)
    elif run.warm_start.steps:
        found.append(None)
    if tokens[-1] is None or run.max_steps is None:
        return [*found, _limit(run)]
    every = run.evaluation.every_steps
    looks = 2 + (run.max_steps - 1) // every if every else 2
    conversations = tokens[-1] // whole + looks * run.task.examine
    seconds = AROUND + tokens[-1] * pace.trained + run.max_steps * pace.step + conversations * drawn
    return [*found, min(seconds, _limit(run) or math.inf)]


def _limit(run: RunConfig) -> float | None:
    """Seconds after which the clock ends a run; None where it does not."""
    return None if run.max_minutes is None else AROUND + 60 * run.max_minutes


@dataclass(frozen=True)
class Pace:
    """Seconds of a run's single pieces of work."""

    trained: float
    """A token, on average over the run's precisions."""
    evaluated: float
    """A token, measured in the run's last forward and, where that is quantised, in the one without."""
    step: float = 0.0
    """What an optimizer step takes besides its tokens."""


class Stopwatch:
    """A run's model at work for a moment, where that is possible."""

    def __init__(self, run: RunConfig, vocabulary: int, rate: float) -> None:
        length, device = run.data.sequence_length, pick_device(run.device)
        self.run, self.rate = run, rate
        self.devices = run.engine.processes if device.type == "cuda" else 1  # ranks on one CPU share its cores
        self.flops = flops_per_token(run.model, vocabulary, length)
        self.timed = device.type == "cpu" and length * self.flops <= LONGEST * rate
        if self.timed:
            self.model = build_model(run, vocabulary, compute_dtype(run.precision, device), device)
            self.model.init_weights(run.seed)
            self.precision = RunPrecision(run, self.model)
            sequences = min(run.batch.micro_batch, max(1, int(MOMENT * rate / self.flops) // length))
            tokens = torch.randint(vocabulary, (sequences, length))
            self.batch = Batch(tokens, tokens, torch.ones(tokens.shape), None, tokens.numel())

    @property
    def supposed(self) -> float:
        """Seconds of a token's training where nothing is timed."""
        return self.flops / (SHARE * self.rate * self.devices)

    def pace(self) -> Pace:
        """Of training and evaluation."""
        if not self.timed:
            return Pace(self.supposed, self.supposed / READ)
        settings = replace(self.run.engine, compile=CompileMode.off, cuda_graphs=False)
        engine = LocalEngine(self.model, self.run.optim, settings)
        tokens, trained = self.batch.valid_tokens, 0.0
        for active, share in self._phases():
            self.precision.set_active(active)
            trained += share * best(lambda: engine.micro_step(NextToken(), self.batch, 1 / tokens))

        def step() -> None:
            for parameter in self.model.parameters():  # the optimizer lets go of gradients
                parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
            engine.gradient_norm()
            engine.step(0.0, 0.5)

        evaluated = self.read()
        if self.precision.quantised:
            with self.precision.high():
                evaluated += self.read()
        return Pace(trained / tokens, evaluated, best(step))

    def _phases(self) -> list[tuple[tuple[bool, ...], float]]:
        """Which switches hold, in the order of the run, and for what share of it."""
        switches, parts = self.precision.policy.switches, 50
        steps = run_length(self.run).steps or 0
        found: Counter[tuple[bool, ...]] = Counter()
        for progress in ((part + 0.5) / parts for part in range(parts)):
            falling = decaying(self.run.optim.schedule, progress)
            found[tuple(s.due(int(progress * steps), progress, falling) for s in switches)] += 1
        return [(active, count / parts) for active, count in found.items()]

    @torch.no_grad()
    def read(self) -> float:
        """Seconds of a token that is only read, in the forward as it is now."""
        if not self.timed:
            return self.supposed / READ
        model, batch = self.model, self.batch

        def forward() -> None:
            hidden = model(batch.tokens).flatten(0, 1)
            lm_head_nll(hidden, model.head_weight, batch.targets.flatten(), vocab_size=model.vocab_size)

        return best(forward) / batch.valid_tokens

    def drawn(self, run: RlConfig, prompt: int, whole: int) -> float:
        """Seconds of a conversation: its prompt read, its answers drawn."""
        if not self.timed:
            return whole * self.supposed / READ
        samples, new = run.rollout.samples, run.rollout.max_new_tokens
        most = int(MOMENT * self.rate / self.flops) // (samples * (prompt + new))
        groups = max(1, min(run.batch.sequences // samples, most))
        requests = [Request((0,) * prompt, key, new, samples) for key in range(groups)]
        sampler = EmbeddedSampler(self.model, None, resolve(run.precision), slots=run.rollout.slots, share=True)
        taken = best(lambda: sampler.sample(requests, SamplingConfig(), seed=1))
        return run.task.turns * taken / (groups * samples)


def best(work: Callable[[], object]) -> float:
    """Seconds that `work` takes, the shortest of a few times: the first may prepare what the others find, and what
    else the machine does comes and goes."""
    shortest, spent, times = float("inf"), 0.0, 0
    while times < 2 or (times < 5 and spent < MOMENT):
        started = time.perf_counter()
        work()
        taken = time.perf_counter() - started
        shortest, spent, times = min(shortest, taken), spent + taken, times + 1
    return shortest
