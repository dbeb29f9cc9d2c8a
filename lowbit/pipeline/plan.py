"""What a pipeline will take, before anything runs: tokens, work, memory, disk and time.

Sizes are `trainer.plan`'s for each stage's run. Work is floating-point operations in the convention of models/cost.py:
a training token costs the model's `flops_per_token`, a token that is only read (by the teacher, by the sampler) a third
of it. Time is an estimate (`timing`), and so is the size of the teacher's cache (`distill.expected`). Where nothing
follows from the settings (a limit of time, problems from a file) it says n/a.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowbit.configs.schema import OptimizerKind, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.validate_distill import student_tokens
from lowbit.configs.validate_pipeline import runs_of
from lowbit.distill.codec import Layout
from lowbit.distill.expected import expected_bytes
from lowbit.errors import CheckpointError, LowbitError
from lowbit.models.adapters import MARK, adapt
from lowbit.models.cost import flops_per_token, parameter_parts
from lowbit.models.transformer import Transformer
from lowbit.pipeline.stages import in_words, naming
from lowbit.pipeline.timing import READ, SHARE, conversation, measured_rate, times
from lowbit.trainer.aligned import columns
from lowbit.trainer.console import duration
from lowbit.trainer.hardware import GIB, compute_dtype, device_name, pick_device
from lowbit.trainer.imported import beginning
from lowbit.trainer.plan import Plan, planned_vocabulary
from lowbit.trainer.plan import plan as plan_run

ON_CPU = 1.6
"""What a process on a CPU holds besides its libraries, as a multiple of what the plan counts: kernels are not fused
there, and leave more behind."""
FACTOR = 2
"""How far the time of a whole pipeline may be off."""


@dataclass(frozen=True)
class Part:
    """One line of a plan."""

    name: str
    tokens: int | None
    flops: int | None
    memory: int
    """Bytes on one device."""
    disk: int
    """Most bytes at any time, in the stage's folder."""
    precision: str


def parts_of(stage: Stage, run: RunConfig) -> list[Part]:
    """A stage's work, part by part."""
    dtype = compute_dtype(run.precision, pick_device(run.device))
    vocabulary, words = planned_vocabulary(run), in_words(stage, run)
    made = plan_run(run, vocabulary, compute_bytes=dtype.itemsize)
    kept = _checkpoints(run, made, made.length.steps)
    if isinstance(run, RlConfig):
        trained = _rewarded(run, made, vocabulary, kept, words)
    else:
        name = "distill: student" if isinstance(run, DistillConfig) else stage.value
        trained = [Part(name, made.length.tokens, made.total_flops, made.memory.total, kept, words)]
    shared = plan_run(run, vocabulary, compute_bytes=dtype.itemsize, ranks=run.engine.processes).memory.total
    if not (isinstance(run, RlConfig) and run.lora.rank):  # of which little is shared out
        elsewhere = made.memory.total - shared  # what other ranks keep
        trained = [replace(part, memory=part.memory - elsewhere) for part in trained]
    return [_cache(run, vocabulary), *trained] if isinstance(run, DistillConfig) else trained


def require_space(stage: Stage, run: RunConfig, folder: Path) -> None:
    """Raise LowbitError when the disk has less room than a stage's checkpoints and cache will take."""
    with naming(stage):
        needed = sum(part.disk for part in parts_of(stage, run))
    there = next(path for path in (folder, *folder.parents) if path.exists())
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    free = shutil.disk_usage(there).free
    if free < needed - used:
        raise LowbitError(
            f"{stage} takes about {(needed - used) / 1e6:,.1f} MB in {folder}, and {free / 1e6:,.1f} are free: free "
            "some space or keep fewer checkpoints (checkpoint.keep_last); the same command goes on there"
        )


def describe(config: PipelineConfig) -> list[str]:
    """The printed lines of `lowbit pipeline --plan`."""
    parts: list[Part] = []
    seconds: list[float | None] = []
    rates: dict[tuple[torch.device, torch.dtype], float] = {}
    for stage, given in runs_of(config).items():
        with naming(stage):
            run = with_models_given(given)
        device = pick_device(run.device)
        place = (device, compute_dtype(run.precision, device))
        if place not in rates:
            rates[place] = measured_rate(*place)
        found = parts_of(stage, run)
        parts += found
        seconds += times(run, planned_vocabulary(run), [part.tokens for part in found], rates[place])
    rows = [["stage", "tokens", "FLOPs", "memory", "disk", "time, about", "precision"]]
    for part, taken in zip(parts, seconds, strict=True):
        rows.append(_row(part.name, part.tokens, part.flops, part.memory, part.disk, taken, part.precision))
    memory, disk = max(part.memory for part in parts), sum(part.disk for part in parts)
    rows.append(_row("all", None, _sum([part.flops for part in parts]), memory, disk, _sum(seconds), ""))
    products = ", ".join(
        f"{rate / 1e12:,.3g} TFLOP/s in {str(dtype).removeprefix('torch.')} on {device_name(device)}"
        for (device, dtype), rate in rates.items()
    )
    return [
        *columns(rows, right=range(1, 6)),
        f"memory: of one device, the largest part for all (a process on a CPU holds about {ON_CPU:g} times as much)",
        f"disk: checkpoints and the teacher's cache below runs/{config.run_name}, packed documents "
        f"({config.data.cache_dir}) apart",
        f"time: within a factor of {FACTOR} on a machine without other work, from a moment of each stage's steps; on a "
        f"GPU, and for models too large for that, a rougher {SHARE:.0%} of a large product's rate ({products}, "
        "measured just now); packing and compiling come on top",
    ]


def with_models_given(run: RunConfig) -> RunConfig:
    """A stage's run with the model that lies in the folder which it was told to begin from, if it was.

    Raises CheckpointError when that is neither a run's nor a Hugging Face model's.
    """
    if isinstance(run, DistillConfig) and run.teacher.path:
        try:
            model, _ = beginning(Path(run.teacher.path).expanduser())
        except CheckpointError as error:
            raise CheckpointError(str(error).replace("init_from=", "teacher.path=", 1)) from None
        return replace(run, teacher=replace(run.teacher, model=model))
    if isinstance(run, RlConfig) and run.init_from:
        model, tokenizer = beginning(Path(run.init_from).expanduser())
        return replace(run, model=model, data=replace(run.data, tokenizer=tokenizer))
    return run


def _sum(numbers: Sequence[float | None]) -> float | None:
    """None where one is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _checkpoints(run: RunConfig, made: Plan, steps: int | None, adapters: int = 0) -> int:
    """Most bytes of checkpoints: those that are kept and the one that is being written, or as many as there will be.

    steps: of the run, None if not known. adapters: numbers in LoRA's.
    """
    averaged = made.memory.parameters if run.optim.ema_decay is not None else 0
    each = 4 * (made.parameters.total + adapters) + made.memory.optimizer + averaged
    checkpoint, most = run.checkpoint, run.checkpoint.keep_last + 1
    if steps is None:
        return each * most
    written = -(-steps // checkpoint.every_steps) if checkpoint.every_steps else 1
    more = steps // checkpoint.keep_every_steps if checkpoint.keep_every_steps else 0
    return each * min(most + more, written)


def _cache(run: DistillConfig, vocabulary: int) -> Part:
    """The teacher reads, and what is kept of it is written."""
    length, batch, cache = run.data.sequence_length, run.cache.micro_batch, run.cache
    wanted = cache.tokens or student_tokens(run)
    positions = -(-wanted // (length * batch)) * length * batch
    model = run.teacher.model
    weights = parameter_parts(model, vocabulary).total
    width = max(model.mlp_width, model.width)
    shards = -(-positions // max(length * batch, cache.shard_tokens))
    layout = Layout(cache.estimator, cache.targets, vocabulary)
    size = expected_bytes(layout, positions // length, length, shards)
    work = flops_per_token(model, vocabulary, length) // READ * positions
    dtype = compute_dtype(cache_precision := run.teacher.precision, pick_device(run.device))
    memory = weights * 4 + batch * length * width * 4 * dtype.itemsize
    words = f"reads in {'fp32' if dtype is torch.float32 else 'bf16'}"
    if cache_precision.forward != "bf16":
        words = f"reads in {cache_precision.forward}"
    return Part("distill: teacher's cache", positions, work, memory, size, words)


def _rewarded(run: RlConfig, made: Plan, vocabulary: int, kept: int, words: str) -> list[Part]:
    """At most: every answer as long as it may be."""
    each = flops_per_token(run.model, vocabulary, run.data.sequence_length)
    prompt, whole = conversation(run)
    known = prompt > 0 and run.max_steps is not None
    steps = run.max_steps or 0
    lines = []
    if run.warm_start.steps:
        tokens = run.warm_start.steps * run.warm_start.examples * whole
        lines.append(
            Part(
                "rl: supervised start, at most",
                tokens if prompt else None,
                tokens * each if prompt else None,
                made.memory.total,
                _checkpoints(run, made, run.warm_start.steps),
                words.partition("; ")[2],
            )
        )
    made, adapters = _adapted(run, made, vocabulary)
    drawn = steps * run.batch.sequences * whole
    lines.append(
        Part(
            "rl: rollouts and training",
            drawn if known else None,
            drawn * (each + each // READ) if known else None,
            made.memory.total + run.rollout.slots * whole * made.kv_cache_bytes_per_token,
            _checkpoints(run, made, run.max_steps, adapters) if adapters else kept,
            words,
        )
    )
    return lines


def _adapted(run: RlConfig, made: Plan, vocabulary: int) -> tuple[Plan, int]:
    """With LoRA: gradients and optimizer state are those of what trains, by AdamW; and how many numbers it adds."""
    lora = run.lora
    if not lora.rank:
        return made, 0
    with torch.device("meta"):
        model = Transformer(run.model, vocabulary)
    adapt(model, lora.rank, lora.alpha, lora.targets, run.seed, lora.also)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    adapters = sum(parameter.numel() for name, parameter in model.named_parameters() if MARK in name)
    adamw = replace(run, optim=replace(run.optim, kind=OptimizerKind.adamw))
    dtype = compute_dtype(run.precision, pick_device(run.device))
    memory, total = plan_run(adamw, vocabulary, compute_bytes=dtype.itemsize).memory, made.parameters.total
    memory = replace(
        memory,
        parameters=memory.parameters + 4 * adapters,
        gradients=memory.gradients * trained // total,
        optimizer=memory.optimizer * trained // total,
    )
    return replace(made, memory=memory), adapters


def _row(
    name: str, tokens: int | None, flops: float | None, memory: int, disk: int, seconds: float | None, precision: str
) -> list[str]:
    return [
        name,
        ("" if name == "all" else "n/a") if tokens is None else f"{tokens:,}",
        "n/a" if flops is None else f"{flops:.3g}",
        f"{memory / GIB:.3f} GiB",
        f"{disk / 1e6:,.1f} MB",
        "n/a" if seconds is None else duration(seconds) if seconds >= 1 else "under 1s",
        precision,
    ]
