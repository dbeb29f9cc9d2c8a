"""Combinations that cannot work, found before anything is loaded.

Types and names are `strict.py`'s business; here are ranges and relations between keys. Every error names the keys,
their values, and a value that would work.
"""

import glob
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.configs.schema import (
    CommKind,
    EngineKind,
    MlpKind,
    RopeScaling,
    RunConfig,
    ScheduleKind,
    SourceKind,
    TokenizerKind,
)
from lowbit.configs.strict import show
from lowbit.errors import ConfigError

BYTE_VOCABULARY = 257
"""256 byte values and the end-of-text id: the least a byte-level tokenizer can have."""


class Range(NamedTuple):
    """Numbers from `low` to `high`; round brackets exclude the end, as in the error's text."""

    low: float
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def words(self) -> str:
        low = f"{'greater than' if self.open_low else 'at least'} {self.low:g}"
        if self.high == float("inf"):
            return low
        return f"{low} and {'less than' if self.open_high else 'at most'} {self.high:g}"


COUNT = Range(1)
NATURAL = Range(0)
POSITIVE = Range(0, open_low=True)
FRACTION = Range(0, 1)
BETA = Range(0, 1, open_high=True)
INSIDE = Range(0, 1, open_low=True, open_high=True)

RANGES: dict[str, Range] = {
    "seed": Range(0, 2**63 - 1),
    "max_steps": COUNT,
    "max_tokens": COUNT,
    "max_minutes": POSITIVE,
    "model.layers": COUNT,
    "model.width": COUNT,
    "model.heads": COUNT,
    "model.kv_heads": COUNT,
    "model.head_dim": COUNT,
    "model.mlp_width": COUNT,
    "model.logit_softcap": POSITIVE,
    "model.norm_eps": POSITIVE,
    "model.max_sequence": COUNT,
    "model.init_std": POSITIVE,
    "model.mup_base_width": COUNT,
    "model.vocab_multiple": COUNT,
    "model.vocab_rows": COUNT,
    "model.attention_z": NATURAL,
    "model.moe.experts": NATURAL,
    "model.moe.top_k": COUNT,
    "model.moe.expert_width": COUNT,
    "model.moe.shared": NATURAL,
    "model.moe.first_dense": NATURAL,
    "model.moe.gate_scale": POSITIVE,
    "model.moe.balance_loss": NATURAL,
    "model.moe.z_loss": NATURAL,
    "model.moe.bias_rate": NATURAL,
    "model.moe.capacity": POSITIVE,
    "model.rope.theta": Range(1, open_low=True),
    "model.rope.factor": Range(1),
    "model.rope.original_sequence": COUNT,
    "model.rope.low_freq_factor": POSITIVE,
    "model.rope.high_freq_factor": POSITIVE,
    "model.rope.beta_fast": POSITIVE,
    "model.rope.beta_slow": POSITIVE,
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
    "optim.eps": POSITIVE,
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
    "engine.zero_stage": Range(0, 3),
    "engine.bucket_mib": COUNT,
    "engine.rank_timeout_seconds": Range(5),
    "comm.exact_below": NATURAL,
}

EXAMPLES: dict[str, Any] = {
    "max_steps": 1000,
    "max_tokens": 10_000_000,
    "max_minutes": 10,
    "model.head_dim": 64,
    "model.logit_softcap": 30,
    "model.mup_base_width": 256,
    "model.vocab_rows": 151_936,
    "model.moe.capacity": 1.25,
    "optim.ema_decay": 0.999,
    "precision.stabilisers.oscireset.start_step": 8000,
}
"""A value that works, for keys whose default is null; the others offer their default."""


def validate(config: RunConfig) -> None:
    """Raise ConfigError for the first setting that cannot work.

    Reads the file system only to see whether named paths exist.
    """
    checks: tuple[Callable[[RunConfig], None], ...] = (
        _ranges, _run, _heads, _layers, _experts, _rope, _sequences, _batch, _engine, _expert_parallel, _schedule,
        _rules, _switches, _stabilisers, _sources, _tokenizer,
    )  # fmt: skip
    for check in checks:
        check(config)


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = (
            config[part] if isinstance(config, dict) else config[int(part)] if part.isdigit() else getattr(config, part)
        )
    return config


def refuse(config: RunConfig, *keys: str, why: str, works: str) -> ConfigError:
    """The error for a combination: `key=value key=value: why; works`."""
    given = " ".join(f"{key}={show(_get(config, key))}" for key in keys)
    return ConfigError(f"{given}: {why}; {works}")


def _ranges(config: RunConfig) -> None:
    check_ranges(config, RANGES)


def check_ranges(config: RunConfig, ranges: dict[str, Range]) -> None:
    """Raise ConfigError for the first number outside its range; null is inside every one."""
    defaults = type(config)()
    for key, allowed in ranges.items():
        value = _get(config, key)
        if value is not None and not allowed.holds(value):
            example = EXAMPLES.get(key, _get(defaults, key))
            raise refuse(config, key, why=f"must be {allowed.words()}", works=f"{key}={show(example)} would work")


def _run(config: RunConfig) -> None:
    folder = Path(config.run_name)
    if not folder.parts or ".." in folder.parts or folder.is_absolute() or not config.run_name.isprintable():
        raise refuse(config, "run_name", why="must name a folder below runs/", works="run_name=pretrain would work")
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", config.device):
        raise refuse(config, "device", why="must be auto, cpu, cuda or cuda:N", works="device=cuda:0 would work")
    limits = ("max_steps", "max_tokens", "max_minutes")
    if all(_get(config, key) is None for key in limits):
        raise refuse(config, *limits, why="the run would never end", works="give at least one, as in max_steps=1000")
    if config.deterministic and config.max_minutes is not None:
        raise refuse(
            config,
            "deterministic",
            "max_minutes",
            why="a run that ends by the clock differs from time to time",
            works="max_minutes=null with max_steps=1000 would work",
        )
    if config.resume not in ("auto", "none") and not Path(config.resume).exists():
        raise refuse(
            config, "resume", why="no such file or folder", works="use resume=auto, resume=none or a path that exists"
        )


def _heads(config: RunConfig) -> None:
    m = config.model
    if m.head_dim is None and m.width % m.heads:
        whole = [h for h in range(m.kv_heads, m.width + 1, m.kv_heads) if m.width % (2 * h) == 0]
        best = min(whole, key=lambda h: abs(h - m.heads), default=None)
        works = f"model.heads={best} would work, or set model.head_dim" if best else "set model.head_dim"
        raise refuse(config, "model.width", "model.heads", why="heads must divide the width", works=works)
    if m.heads % m.kv_heads:
        works = f"model.kv_heads={_nearest_divisor(m.heads, m.kv_heads)} would work"
        raise refuse(config, "model.heads", "model.kv_heads", why="kv_heads must divide heads", works=works)
    head_dim = m.head_dim or m.width // m.heads
    if head_dim % 2:
        keys = ("model.head_dim",) if m.head_dim else ("model.width", "model.heads", "model.head_dim")
        why = f"a head of width {head_dim} has no pairs to rotate, it must be even"
        raise refuse(config, *keys, why=why, works=f"model.head_dim={head_dim + 1} would work")


def _layers(config: RunConfig) -> None:
    m = config.model
    if any(window < 0 for window in m.windows):
        why = "a window is positive, or 0 for a global layer"
        raise refuse(config, "model.windows", why=why, works="model.windows=[] would work")
    shared = m.kv_from
    good = len(shared) == m.layers and all(0 <= s <= i and shared[s] == s for i, s in enumerate(shared))
    if shared and not good:
        why = f"each of {m.layers} layers uses its own keys, or those of an earlier layer that has some"
        raise refuse(config, "model.kv_from", "model.layers", why=why, works="model.kv_from=[] would work")


def _experts(config: RunConfig) -> None:
    moe, key = config.model.moe, "model.moe"
    if not moe.experts:
        return
    if moe.top_k > moe.experts:
        works = f"{key}.top_k={moe.experts} would work"
        raise refuse(config, f"{key}.top_k", f"{key}.experts", why="a token needs so many experts", works=works)
    if moe.first_dense >= config.model.layers:
        works = f"{key}.first_dense=0 would work"
        raise refuse(config, f"{key}.first_dense", "model.layers", why="no layer would have experts", works=works)


def _nearest_divisor(number: int, wish: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wish), d))


def _rope(config: RunConfig) -> None:
    m, r, key = config.model, config.model.rope, "model.rope"
    if r.scaling is RopeScaling.ntk and (m.head_dim or m.width // m.heads) == 2:
        why = "the base of a single pair does not matter, so there is nothing to stretch"
        raise refuse(config, f"{key}.scaling", why=why, works=f"model.head_dim=4 or {key}.scaling=linear would work")
    if r.scaling is RopeScaling.none and r.factor != 1:
        works = f"{key}.scaling=yarn (or linear, ntk, llama3) or {key}.factor=1 would work"
        raise refuse(config, f"{key}.factor", f"{key}.scaling", why="the factor would do nothing", works=works)
    if r.scaling is RopeScaling.llama3 and r.low_freq_factor >= r.high_freq_factor:
        keys = (f"{key}.low_freq_factor", f"{key}.high_freq_factor")
        raise refuse(config, *keys, why="low must be below high", works="1 and 4 would work")
    if r.scaling is RopeScaling.yarn and r.beta_slow >= r.beta_fast:
        keys = (f"{key}.beta_slow", f"{key}.beta_fast")
        raise refuse(config, *keys, why="slow must be below fast", works="1 and 32 would work")


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
        sequences = _get(config, key)
        if sequences % unit:
            whole = max(1, round(sequences / unit)) * unit
            fitting = [m for m in range(1, config.batch.micro_batch + 1) if sequences % (world * m) == 0]
            works = f"{key}={whole}" + (f" or batch.micro_batch={fitting[-1]}" if fitting else "") + " would work"
            why = f"{world} processes cannot share a step evenly in whole micro-batches"
            raise refuse(config, key, "batch.micro_batch", why=why, works=works)


def _whole_micro_batches(config: RunConfig, key: str) -> None:
    sequences, micro_batch = _get(config, key), config.batch.micro_batch
    if sequences % micro_batch:
        whole = max(1, round(sequences / micro_batch)) * micro_batch
        divisor = _nearest_divisor(sequences, micro_batch)
        works = f"{key}={whole} or batch.micro_batch={divisor} would work"
        raise refuse(config, key, "batch.micro_batch", why="a step must be whole micro-batches", works=works)


def _schedule(config: RunConfig) -> None:
    s, key = config.optim.schedule, "optim.schedule"
    if s.kind is ScheduleKind.wsd and s.decay_fraction == 0 and s.final_fraction != 1:
        works = f"{key}.kind=constant or {key}.decay_fraction=0.3 would work"
        raise refuse(config, f"{key}.kind", f"{key}.decay_fraction", why="nothing would decay", works=works)


def _rules(config: RunConfig) -> None:
    for i, rule in enumerate(config.precision.rules):
        match, share = f"precision.rules.{i}.match", f"precision.rules.{i}.last_blocks"
        try:
            re.compile(rule.match)
        except re.error as error:
            works = "for example blocks\\.0\\..* for the first block"
            raise refuse(config, match, why=f"is no regular expression ({error})", works=works) from None
        if not rule.match:
            raise refuse(config, match, why="must match a layer's whole name", works=f"{match}=.* names all of them")
        if not 0 < rule.last_blocks <= 1:
            why = "must be greater than 0 and at most 1"
            raise refuse(config, share, why=why, works=f"{share}=0.15 would work")


def _switches(config: RunConfig) -> None:
    for i, switch in enumerate(config.precision.switch):
        key = f"precision.switch.{i}"
        times = [f"{key}.at", f"{key}.at_step", f"{key}.at_decay"]
        if sum((switch.at is not None, switch.at_step is not None, switch.at_decay)) != 1:
            raise refuse(config, *times, why="a switch has one time", works="set one of them alone")
        parts = ("forward", "backward", "dgrad", "wgrad")
        if all(getattr(switch, part) is None for part in parts):
            keys = [f"{key}.{part}" for part in parts]
            raise refuse(config, *keys, why="nothing would change", works=f"{key}.forward=bf16 would work")
        if switch.at is not None and not 0 < switch.at < 1:
            works = f"{key}.at=0.9 would work"
            raise refuse(config, f"{key}.at", why="must be greater than 0 and less than 1", works=works)
        if switch.at_step is not None and switch.at_step < 1:
            raise refuse(config, f"{key}.at_step", why="must be at least 1", works=f"{key}.at_step=1 would work")
        if switch.at_step is not None and config.max_steps is not None and switch.at_step >= config.max_steps:
            works = f"{key}.at=0.9 follows the run's length"
            raise refuse(config, f"{key}.at_step", "max_steps", why="the run ends before it", works=works)
        if switch.at_decay and config.optim.schedule.kind is not ScheduleKind.wsd:
            why = "the learning rate of this schedule has no phase in which it begins to fall"
            works = f"optim.schedule.kind=wsd or {key}.at=0.7 would work"
            raise refuse(config, f"{key}.at_decay", "optim.schedule.kind", why=why, works=works)


def _stabilisers(config: RunConfig) -> None:
    s, key = config.precision.stabilisers, "precision.stabilisers"
    o, keys = s.oscireset, (f"{key}.oscireset.window", f"{key}.oscireset.period")
    if o.enabled and o.window > o.period - 2:
        why = "a window opens, watches and closes within a period"
        raise refuse(config, *keys, why=why, works=f"{keys[1]}={o.window + 2} would work")
    if o.enabled and o.start_step is not None and config.max_steps is not None and o.start_step >= config.max_steps:
        works = f"{key}.oscireset.start_step=null follows the run's length"
        raise refuse(config, f"{key}.oscireset.start_step", "max_steps", why="the run ends before it", works=works)
    last = s.outcontrol.first_step + s.outcontrol.steps - 1
    if s.outcontrol.enabled and config.max_steps is not None and last >= config.max_steps:
        keys, first = (f"{key}.outcontrol.first_step", f"{key}.outcontrol.steps"), max(1, config.max_steps // 20)
        works = f"{keys[0]}={first} {keys[1]}={first} would work"
        raise refuse(config, *keys, "max_steps", why="the run ends before its channels are known", works=works)
    if s.clamp.enabled and config.model.mlp is not MlpKind.relu2:
        why = "the bound is that of a squared ReLU"
        raise refuse(config, f"{key}.clamp.enabled", "model.mlp", why=why, works="model.mlp=relu2 would work")


def _sources(config: RunConfig) -> None:
    if not config.data.sources:
        works = "data=python_docs would work, or data=files data.sources.files.path=FOLDER"
        raise refuse(config, "data.sources", why="there is nothing to train on", works=works)
    for name in config.data.sources:
        _source(config, f"data.sources.{name}")


def _source(config: RunConfig, key: str) -> None:
    source = _get(config, key)
    if source.weight <= 0:
        works = f"{key}.weight=1 would work; ~{key} removes the source"
        raise refuse(config, f"{key}.weight", why="must be greater than 0", works=works)
    if source.max_documents is not None and source.max_documents < 1:
        works = f"{key}.max_documents=1000 would work, or null for all"
        raise refuse(config, f"{key}.max_documents", why="must be at least 1", works=works)
    if source.document_bytes < 1:
        works = f"{key}.document_bytes=1048576 would work"
        raise refuse(config, f"{key}.document_bytes", why="must be at least 1", works=works)
    path, kind = f"{key}.path", f"{key}.kind"
    if source.kind is SourceKind.python_docs and source.path:
        raise refuse(config, path, kind, why="python_docs reads no path", works=f"{kind}=files would work")
    if source.kind is not SourceKind.python_docs and not source.path:
        example = {"files": "corpus/", "conversations": "chats.jsonl"}.get(source.kind, "roneneldan/TinyStories")
        raise refuse(config, path, kind, why="this kind needs a path", works=f"for example {path}={example}")
    if source.kind in (SourceKind.files, SourceKind.conversations) and not _exists(source.path):
        why = f"no such file, folder or glob below {Path.cwd()}"
        raise refuse(config, path, why=why, works=f"give a path that exists, for example {path}=corpus/")


def _exists(path: str) -> bool:
    expanded = str(Path(path).expanduser())
    return Path(expanded).exists() or any(glob.iglob(expanded, recursive=True))  # noqa: PTH207 (absolute globs too)


def _tokenizer(config: RunConfig) -> None:
    t, key = config.data.tokenizer, "data.tokenizer"
    path, kind = f"{key}.path", f"{key}.kind"
    if t.kind is TokenizerKind.bpe and t.vocab_size < BYTE_VOCABULARY:
        why = f"byte-level BPE needs the 256 bytes and an end-of-text id, at least {BYTE_VOCABULARY}"
        raise refuse(config, f"{key}.vocab_size", kind, why=why, works=f"{key}.vocab_size=4096 would work")
    if t.kind is TokenizerKind.file and not t.path:
        works = f"give {path}=tokenizer.json, or {kind}=bpe"
        raise refuse(config, kind, path, why="this kind needs a path", works=works)
    if t.kind is TokenizerKind.file and not Path(t.path).expanduser().exists():
        why = f"no such file or folder below {Path.cwd()}"
        raise refuse(config, path, kind, why=why, works=f"give a path that exists, or {kind}=bpe, which trains one")
    if t.kind is TokenizerKind.bytes and t.path:
        works = f"{kind}=file would work, or {path}=\"''\""
        raise refuse(config, path, kind, why="bytes need no file", works=works)
    if t.eot is not None and t.kind is not TokenizerKind.file:
        works = f"{key}.eot=null would work"
        raise refuse(config, f"{key}.eot", kind, why="this kind has an end-of-text token of its own", works=works)
