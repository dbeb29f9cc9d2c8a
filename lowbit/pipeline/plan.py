"""What a pipeline will take, before anything runs: tokens, work, memory, disk, and the least time it can last.

Sizes are `trainer.plan`'s for each stage's run. Work is floating-point operations in the convention of models/cost.py:
a training token costs the model's `flops_per_token`, a token that is only read (by the teacher, by the sampler) a third
of it. Time is that work at the rate of a large matrix product, which is measured for a moment on the device: a run is
never faster, and a small model, an emulated format, evaluation and data make it slower. Where no bound follows from the
settings (a limit of time, problems from a file) it says n/a.
"""

import shutil
import time
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
from lowbit.errors import LowbitError
from lowbit.models.adapters import MARK, adapt
from lowbit.models.cost import flops_per_token, parameter_parts
from lowbit.models.transformer import Transformer
from lowbit.pipeline.stages import in_words, naming
from lowbit.trainer.aligned import columns
from lowbit.trainer.console import duration
from lowbit.trainer.hardware import compute_dtype, device_name, pick_device
from lowbit.trainer.plan import Plan, planned_vocabulary
from lowbit.trainer.plan import plan as plan_run

GIB = 2**30
READ = 3
"""A token that is only read costs a third of one that is trained on."""


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
    kept = _checkpoints(run, made)
    if isinstance(run, DistillConfig):
        trained = Part("distill: student", made.length.tokens, made.total_flops, made.memory.total, kept, words)
        return [_cache(run, vocabulary), trained]
    if isinstance(run, RlConfig):
        return _rewarded(run, made, vocabulary, kept, words)
    return [Part(stage.value, made.length.tokens, made.total_flops, made.memory.total, kept, words)]


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
    runs = runs_of(config)
    parts = [part for stage, run in runs.items() for part in parts_of(stage, run)]
    run = next(iter(runs.values()))
    device = pick_device(run.device)
    dtype = compute_dtype(config.precision, device)
    rate = measured_rate(device, dtype)
    rows = [["stage", "tokens", "FLOPs", "memory", "disk", "time, at least", "precision"]]
    for part in parts:
        seconds = None if part.flops is None else part.flops / rate
        rows.append(_row(part.name, part.tokens, part.flops, part.memory, part.disk, seconds, part.precision))
    flops = None if any(p.flops is None for p in parts) else sum(p.flops or 0 for p in parts)
    memory, disk = max(p.memory for p in parts), sum(p.disk for p in parts)
    rows.append(_row("all", None, flops, memory, disk, None if flops is None else flops / rate, ""))
    word = str(dtype).removeprefix("torch.")
    return [
        *columns(rows, right=range(1, 6)),
        f"memory: of one device, the largest part for all; disk: checkpoints and the teacher's cache below "
        f"runs/{config.run_name}, packed documents ({config.data.cache_dir}) apart",
        f"time: the work at {rate / 1e12:,.3g} TFLOP/s, a large {word} product as measured just now on "
        f"{device_name(device)}; small models, emulated formats, evaluation and data take more",
    ]


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product, the best of a few."""
    size = 4096 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        _wait(device)
        started = time.perf_counter()
        a @ b
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return float(2 * size**3 / best)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checkpoints(run: RunConfig, made: Plan, adapters: int = 0) -> int:
    """Bytes of the checkpoints that are kept, and of the one that is being written. adapters: numbers in LoRA's."""
    averaged = made.memory.parameters if run.optim.ema_decay is not None else 0
    each = 4 * (made.parameters.total + adapters) + made.memory.optimizer + averaged
    steps = made.length.steps or 0
    more = steps // run.checkpoint.keep_every_steps if run.checkpoint.keep_every_steps else 0
    return each * (run.checkpoint.keep_last + 1 + more)


def _cache(run: DistillConfig, vocabulary: int) -> Part:
    """The teacher reads, and what is kept of it is written."""
    length, batch, cache = run.data.sequence_length, run.cache.micro_batch, run.cache
    wanted = cache.tokens or student_tokens(run)
    positions = -(-wanted // (length * batch)) * length * batch
    model = run.teacher.model
    weights = parameter_parts(model, vocabulary).total
    width = max(model.mlp_width, model.width)
    bits = Layout(cache.estimator, cache.targets, vocabulary).most_bits
    work = flops_per_token(model, vocabulary, length) // READ * positions
    dtype = compute_dtype(cache_precision := run.teacher.precision, pick_device(run.device))
    memory = weights * 4 + batch * length * width * 4 * dtype.itemsize
    words = f"reads in {'fp32' if dtype is torch.float32 else 'bf16'}"
    if cache_precision.forward != "bf16":
        words = f"reads in {cache_precision.forward}"
    return Part("distill: teacher's cache", positions, work, memory, positions * bits // 8, words)


def _rewarded(run: RlConfig, made: Plan, vocabulary: int, kept: int, words: str) -> list[Part]:
    """At most: every answer as long as it may be."""
    from lowbit.rl.tasks import Split, make_task

    each = flops_per_token(run.model, vocabulary, run.data.sequence_length)
    prompt = 0
    if not run.task.path:
        example = make_task(run.task).example(Split.train, run.seed, 0)
        prompt = len(run.task.template.replace("{prompt}", example.prompt).encode()) + 1
    whole = prompt + run.rollout.max_new_tokens * run.task.turns
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
                kept,
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
            _checkpoints(run, made, adapters) if adapters else kept,
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
    name: str, tokens: int | None, flops: int | None, memory: int, disk: int, seconds: float | None, precision: str
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
