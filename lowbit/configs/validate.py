"""Combinations that cannot work, found before anything is loaded.

Types and names are `strict.py`'s business; here are ranges, and relations between keys of the run and of several
sections. Relations inside a section are in `validate_model.py`, `validate_data.py` and `validate_precision.py`.
"""

import re
from pathlib import Path
from typing import Any

from lowbit.configs.checks import (
    BETA,
    COUNT,
    FRACTION,
    INSIDE,
    NATURAL,
    POSITIVE,
    Range,
    check_ranges,
    nearest_divisor,
    refuse,
    value_of,
)
from lowbit.configs.nearest import nearest_path
from lowbit.configs.schema import (
    SIX_BITS,
    VARLEN_WIDEST,
    Z_COLUMNS,
    AttentionKernel,
    CommKind,
    ComputeDtype,
    EngineKind,
    RunConfig,
    ScheduleKind,
)
from lowbit.configs.schema_model import head_dim_of
from lowbit.configs.validate_data import check_data
from lowbit.configs.validate_model import MODEL_EXAMPLES, MODEL_RANGES, check_model, check_used
from lowbit.configs.validate_precision import check_precision
from lowbit.errors import ConfigError

RANGES: dict[str, Range] = {
    "seed": Range(0, 2**63 - 1),
    "max_steps": COUNT,
    "max_tokens": COUNT,
    "max_minutes": POSITIVE,
    **MODEL_RANGES,
    "data.tokenizer.vocab_size": COUNT,
    "data.tokenizer.train_bytes": COUNT,
    "data.sequence_length": COUNT,
    "data.held_out": INSIDE,
    "data.pack_workers": NATURAL,
    "data.shard_tokens": COUNT,
    "data.prefetch": NATURAL,
    "batch.sequences": COUNT,
    "batch.micro_batch": COUNT,
    "optim.lr": POSITIVE,
    "optim.beta1": BETA,
    "optim.beta2": BETA,
    "optim.eps": Range(1e-30),  # well inside FP32, in which zero over zero would be NaN
    "optim.weight_decay": NATURAL,
    "optim.clip_norm": NATURAL,
    "optim.ema_decay": INSIDE,
    "optim.z_loss": NATURAL,
    "optim.muon.lr": POSITIVE,
    "optim.muon.momentum": BETA,
    "optim.muon.weight_decay": NATURAL,
    "optim.muon.ns_steps": COUNT,
    "optim.schedule.warmup_steps": NATURAL,
    "optim.schedule.decay_fraction": FRACTION,
    "optim.schedule.final_fraction": FRACTION,
    "checkpoint.every_steps": NATURAL,
    "checkpoint.keep_last": COUNT,
    "checkpoint.keep_every_steps": NATURAL,
    "evaluation.every_steps": NATURAL,
    "evaluation.max_tokens": COUNT,
    "evaluation.final_tokens": COUNT,
    "evaluation.sample_tokens": NATURAL,
    "logging.every_steps": COUNT,
    "precision.stabilisers.oscireset.start": FRACTION,
    "precision.stabilisers.oscireset.start_step": NATURAL,
    "precision.stabilisers.oscireset.period": COUNT,
    "precision.stabilisers.oscireset.window": COUNT,
    "precision.stabilisers.oscireset.threshold": POSITIVE,
    "precision.stabilisers.oscireset.tracked": Range(0, 1, open_low=True),
    "precision.stabilisers.oscireset.hysteresis": BETA,
    "precision.stabilisers.outcontrol.share": INSIDE,
    "precision.stabilisers.outcontrol.first_step": COUNT,
    "precision.stabilisers.outcontrol.steps": COUNT,
    "precision.stabilisers.clamp.deviations": POSITIVE,
    "precision.statistics.every_steps": NATURAL,
    "precision.statistics.sequences": COUNT,
    "engine.processes": COUNT,
    "engine.zero_stage": Range(0, 3),
    "engine.bucket_mib": COUNT,
    "engine.rank_timeout_seconds": Range(5),
    "comm.exact_below": NATURAL,
}

EXAMPLES: dict[str, Any] = {
    "max_steps": 1000,
    "max_tokens": 10_000_000,
    "max_minutes": 10,
    **MODEL_EXAMPLES,
    "optim.ema_decay": 0.999,
    "precision.stabilisers.oscireset.start_step": 8000,
}
"""A value that works, for keys whose default is null; the others offer their default."""


def validate(config: RunConfig) -> None:
    """Raise ConfigError for the first setting that cannot work.

    Reads the file system only to see whether named paths exist.
    """
    check_ranges(config, RANGES, EXAMPLES)
    _run(config)
    check_model(config)
    check_used(config)
    _sequences(config)
    _batch(config)
    _engine(config)
    _expert_parallel(config)
    _cuda_graphs(config)
    _attention_kernel(config)
    _schedule(config)
    check_precision(config)
    check_data(config)


def _run(config: RunConfig) -> None:
    folder = Path(config.run_name)
    if not folder.parts or ".." in folder.parts or folder.is_absolute() or not config.run_name.isprintable():
        raise refuse(config, "run_name", why="must name a folder below runs/", works="run_name=pretrain would work")
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", config.device):
        raise refuse(config, "device", why="must be auto, cpu, cuda or cuda:N", works="device=cuda:0 would work")
    limits = ("max_steps", "max_tokens", "max_minutes")
    if all(value_of(config, key) is None for key in limits):
        raise refuse(config, *limits, why="the run would never end", works="give at least one, as in max_steps=1000")
    if config.deterministic and config.max_minutes is not None:
        raise refuse(
            config,
            "deterministic",
            "max_minutes",
            why="a run that ends by the clock differs from time to time",
            works="max_minutes=null with max_steps=1000 would work",
        )
    if config.resume not in ("auto", "none") and not Path(config.resume).expanduser().exists():
        why = f"no such file or folder{nearest_path(config.resume, ('auto', 'none'))}"
        raise refuse(config, "resume", why=why, works="use resume=auto, resume=none or a path that exists")


def _sequences(config: RunConfig) -> None:
    length, longest = config.data.sequence_length, config.model.max_sequence
    if length > longest:
        raise refuse(
            config,
            "data.sequence_length",
            "model.max_sequence",
            why="the model cannot take so long a sequence",
            works=f"data.sequence_length={longest} or model.max_sequence={length} would work",
        )
    if config.data.shard_tokens <= length:
        why = "a shard must hold more than one sequence"
        works = f"data.shard_tokens={max(16_777_216, 2 * length)} would work"
        raise refuse(config, "data.shard_tokens", "data.sequence_length", why=why, works=works)
    sample = config.evaluation.sample_tokens
    prompt = len(config.evaluation.sample_prompt.encode()) + 1  # tokens it can have at most, the separator included
    if sample and sample + prompt > longest:
        why = f"the sample and its prompt of up to {prompt} tokens must fit the model"
        works = f"evaluation.sample_tokens={max(0, longest - prompt)} would work"
        raise refuse(config, "evaluation.sample_tokens", "model.max_sequence", why=why, works=works)


def _batch(config: RunConfig) -> None:
    b = config.batch
    _whole_micro_batches(config, "batch.sequences")
    previous = 0
    for i, stage in enumerate(b.warmup):
        key = f"batch.warmup.{i}"
        if stage.until_tokens <= previous:
            why = f"each stage must end after the one before it, here after {previous} tokens"
            works = f"{previous + 1_000_000} would work"
            raise refuse(config, f"{key}.until_tokens", why=why, works=works)
        if stage.sequences < 1:
            raise refuse(config, f"{key}.sequences", why="must be at least 1", works=f"{b.micro_batch} would work")
        _whole_micro_batches(config, f"{key}.sequences")
        previous = stage.until_tokens


def _engine(config: RunConfig) -> None:
    if config.comm.kind is not CommKind.none and config.engine.kind is EngineKind.local:
        why = "one process has nobody to send gradients to"
        works = "engine=deepspeed, started with torchrun, or comm=none would work"
        raise refuse(config, "comm.kind", "engine.kind", why=why, works=works)
    if config.engine.processes > 1 and config.engine.kind is EngineKind.local:
        why, works = "it is one process", "engine.kind=deepspeed would work"
        raise refuse(config, "engine.processes", "engine.kind", why=why, works=works)
    for key in ("comm.error_feedback", "comm.stochastic_rounding"):
        if value_of(config, key) and config.comm.kind not in SIX_BITS:
            why = "only a 6-bit code that is chosen by name has it"
            raise refuse(config, key, "comm.kind", why=why, works=f"comm.kind=sq48 or {key}=false would work")
    if config.comm.error_feedback and config.comm.stochastic_rounding:
        why = "what one gives back on average the other gives back exactly"
        works = "comm.stochastic_rounding=false would work"
        raise refuse(config, "comm.error_feedback", "comm.stochastic_rounding", why=why, works=works)


def _cuda_graphs(config: RunConfig) -> None:
    key, works = "engine.cuda_graphs", "engine.cuda_graphs=false would work"
    if not config.engine.cuda_graphs:
        return
    if config.engine.kind is not EngineKind.local:
        raise refuse(config, key, "engine.kind", why="one process on one GPU replays micro-batches", works=works)
    if config.model.moe.experts:
        raise refuse(config, key, "model.moe.experts", why="where tokens go is not the same each time", works=works)
    if config.model.attention_z:
        raise refuse(config, key, "model.attention_z", why="what it measures would not be read", works=works)
    if config.device == "cpu":
        raise refuse(config, key, "device", why="a CPU has no graphs", works=works)


def _attention_kernel(config: RunConfig) -> None:
    key, works = "engine.attention", "engine.attention=flex would work"
    if config.engine.attention is not AttentionKernel.varlen:
        return
    if config.model.attention_softcap is not None:
        why = "the kernel knows no cap"
        raise refuse(config, key, "model.attention_softcap", why=why, works=works)
    if config.precision.compute is ComputeDtype.fp32:
        raise refuse(config, key, "precision.compute", why="the kernel multiplies BF16", works=works)
    head_dim = head_dim_of(config.model)
    keys = ("model.head_dim",) if config.model.head_dim else ("model.width", "model.heads")
    if head_dim % 8:
        raise refuse(config, key, *keys, why="the kernel takes heads of a multiple of 8", works=works)
    if head_dim > VARLEN_WIDEST - (Z_COLUMNS if config.model.attention_z else 0):
        more = ("model.attention_z",) if config.model.attention_z else ()
        why = f"the kernel takes heads of {VARLEN_WIDEST} at most" + (f", {Z_COLUMNS} less with Z-Reg" if more else "")
        raise refuse(config, key, *keys, *more, why=why, works=works)


def _expert_parallel(config: RunConfig) -> None:
    key, engine = "engine.expert_parallel", config.engine
    if not engine.expert_parallel:
        return
    if not config.model.moe.experts:
        works = f"{key}=false would work"
        raise refuse(config, key, "model.moe.experts", why="the model has no experts", works=works)
    if engine.kind is EngineKind.local:
        works = "engine.kind=deepspeed would work"
        raise refuse(config, key, "engine.kind", why="one process has all experts", works=works)
    if engine.zero_stage not in (1, 2):
        works = "engine.zero_stage=1 would work"
        raise refuse(config, key, "engine.zero_stage", why="it goes with ZeRO 1 and 2", works=works)


def check_world(config: RunConfig, world: int) -> None:
    """Raise ConfigError when `world` processes cannot run this together; every one of them says the same."""
    if world > 1 and config.engine.kind is EngineKind.local:
        raise ConfigError(
            f"engine.kind=local with {world} processes: it is one process; engine=deepspeed would work, or start "
            "without torchrun"
        )
    unit = world * config.batch.micro_batch
    keys = ["batch.sequences", *(f"batch.warmup.{i}.sequences" for i in range(len(config.batch.warmup)))]
    for key in keys:
        sequences = value_of(config, key)
        if sequences % unit:
            whole = max(1, round(sequences / unit)) * unit
            fitting = [m for m in range(1, config.batch.micro_batch + 1) if sequences % (world * m) == 0]
            works = f"{key}={whole}" + (f" or batch.micro_batch={fitting[-1]}" if fitting else "") + " would work"
            why = f"{world} processes cannot share a step evenly in whole micro-batches"
            raise refuse(config, key, "batch.micro_batch", why=why, works=works)


def _whole_micro_batches(config: RunConfig, key: str) -> None:
    sequences, micro_batch = value_of(config, key), config.batch.micro_batch
    if sequences % micro_batch:
        whole = max(1, round(sequences / micro_batch)) * micro_batch
        divisor = nearest_divisor(sequences, micro_batch)
        works = f"{key}={whole} or batch.micro_batch={divisor} would work"
        raise refuse(config, key, "batch.micro_batch", why="a step must be whole micro-batches", works=works)


def _schedule(config: RunConfig) -> None:
    s, key = config.optim.schedule, "optim.schedule"
    if s.kind is ScheduleKind.wsd and s.decay_fraction == 0 and s.final_fraction != 1:
        works = f"{key}.kind=constant or {key}.decay_fraction=0.3 would work"
        raise refuse(config, f"{key}.kind", f"{key}.decay_fraction", why="nothing would decay", works=works)
