"""Reinforcement learning that cannot work, found before anything is loaded.

The trainer's run is `validate`'s business; here is what reinforcement learning adds.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

from lowbit.configs.checks import COUNT, FRACTION, INSIDE, NATURAL, POSITIVE, Range, check_ranges, refuse
from lowbit.configs.nearest import nearest_path
from lowbit.configs.schema import (
    BatchConfig,
    DataConfig,
    EngineKind,
    EvalConfig,
    MlpKind,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TokenizerKind,
)
from lowbit.configs.schema_model import head_dim_of
from lowbit.configs.schema_rl import Correction, LoraAlso, LoraTarget, Loss, RlConfig, TaskKind
from lowbit.configs.validate import validate

RANGES = {
    "task.size": COUNT,
    "task.held_out": INSIDE,
    "task.turns": COUNT,
    "task.examine": COUNT,
    "reward.workers": COUNT,
    "reward.seconds": POSITIVE,
    "reward.failure_limit": FRACTION,
    "rollout.samples": COUNT,
    "rollout.updates": COUNT,
    "rollout.staleness": NATURAL,
    "rollout.max_new_tokens": COUNT,
    "rollout.temperature": NATURAL,
    "rollout.top_p": Range(0, 1, open_low=True),
    "rollout.slots": COUNT,
    "rollout.seconds": POSITIVE,
    "rollout.empty_limit": COUNT,
    "rollout.show": NATURAL,
    "algorithm.clip_low": Range(0, 1, open_low=True),
    "algorithm.clip_high": POSITIVE,
    "algorithm.dual_clip": Range(1, open_low=True),
    "algorithm.cispo_max": POSITIVE,
    "algorithm.kl": NATURAL,
    "algorithm.entropy": NATURAL,
    "algorithm.correction_max": Range(1),
    "algorithm.band_low": Range(0, 1),
    "algorithm.band_high": Range(1),
    "algorithm.refill": NATURAL,
    "teacher.coefficient": POSITIVE,
    "warm_start.steps": NATURAL,
    "warm_start.accuracy": FRACTION,
    "warm_start.check_steps": NATURAL,
    "warm_start.examples": COUNT,
    "warm_start.lr_scale": POSITIVE,
    "lora.rank": NATURAL,
    "lora.alpha": POSITIVE,
}


def validate_rl(config: RlConfig) -> None:
    """Raise ConfigError for the first setting that cannot work."""
    if config.data.sources:
        first = next(iter(config.data.sources))
        why = "there are no documents here: a task says what is learned"
        raise refuse(config, f"data.sources.{first}.kind", why=why, works=f"~data.sources.{first} would work")
    if config.data.tokenizer.kind is TokenizerKind.bpe:
        why = "there is no text to train a tokenizer on"
        works = "data.tokenizer.kind=bytes, or =file with data.tokenizer.path, or init_from=FOLDER would work"
        raise refuse(config, "data.tokenizer.kind", why=why, works=works)
    validate(_as_pretraining(config))
    check_ranges(config, RANGES)
    _run(config)
    _sampling(config)
    _context(config)
    _task(config)
    _groups(config)
    _algorithm(config)
    _folders(config)
    _lora(config)
    _experts(config)
    _stabilisers(config)


def _as_pretraining(config: RlConfig) -> RunConfig:
    """The keys of a run, with what reinforcement learning has no use for as it is in any run."""
    fields = {name: getattr(config, name) for name in RunConfig.__dataclass_fields__}
    fields["data"] = replace(config.data, sources={"none": SourceConfig()})
    fields["batch"] = BatchConfig(config.batch.micro_batch, config.batch.micro_batch)
    fields["evaluation"] = replace(config.evaluation, sample_tokens=0)
    return RunConfig(**fields)


def _sampling(config: RlConfig) -> None:
    r = config.rollout
    if r.temperature == 0:
        why = "greedy answers are all the same, and their log-probabilities are of no distribution"
        raise refuse(config, "rollout.temperature", why=why, works="rollout.temperature=1 would work")
    if r.top_p < 1 or r.top_k is not None:
        keys = [key for key, given in (("rollout.top_p", r.top_p < 1), ("rollout.top_k", r.top_k is not None)) if given]
        why = "the trainer's log-probabilities are of all tokens, so every ratio would be wrong by the mass left out"
        raise refuse(config, *keys, why=why, works="rollout.top_p=1 rollout.top_k=null would work")
    if r.staleness and r.staleness < r.updates:
        why = "a rollout drawn ahead is at least rollout.updates steps old when it is used"
        works = f"rollout.staleness={r.updates} or rollout.staleness=0 would work"
        raise refuse(config, "rollout.staleness", "rollout.updates", why=why, works=works)
    if r.device and not re.fullmatch(r"cpu|cuda:[0-9]+", r.device):
        why = "must be empty, cpu or cuda:N"
        raise refuse(config, "rollout.device", why=why, works="rollout.device=cuda:1 would work")
    if r.device and config.engine.kind is EngineKind.deepspeed:
        why = "each rank draws on its own device"
        raise refuse(config, "rollout.device", "engine.kind", why=why, works="rollout.device='' would work")
    if r.staleness and config.deterministic:
        why = "when the newest weights reach a sampler that draws ahead depends on the clock"
        raise refuse(config, "rollout.staleness", "deterministic", why=why, works="rollout.staleness=0 would work")


def _run(config: RlConfig) -> None:
    if config.precision.switch:
        why = "the sampler and the trainer keep their precision"
        raise refuse(config, "precision.switch", why=why, works="precision.switch=[] would work")
    if config.batch.warmup:
        raise refuse(config, "batch.warmup", why="a step takes whole rollouts", works="batch.warmup=[] would work")


def _context(config: RlConfig) -> None:
    longest = min(config.model.max_sequence, config.data.sequence_length + 1)
    if config.rollout.max_new_tokens >= longest:
        why = f"with a prompt, that is more than the context of {longest} tokens"
        works = f"rollout.max_new_tokens={max(1, longest // 2)} would work"
        raise refuse(
            config, "rollout.max_new_tokens", "data.sequence_length", "model.max_sequence", why=why, works=works
        )


def _task(config: RlConfig) -> None:
    t = config.task
    if t.kind is TaskKind.file and not t.path:
        works = "for example task.path=problems.jsonl"
        raise refuse(config, "task.kind", "task.path", why="this kind needs a path", works=works)
    for key, path in (("task.path", t.path), ("task.held_out_path", t.held_out_path)):
        if path and t.kind is not TaskKind.file:
            raise refuse(config, key, "task.kind", why="this kind reads no file", works="task.kind=file would work")
        if path and not Path(path).expanduser().is_file():
            works = f"give a file that exists, for example {key}=problems.jsonl"
            raise refuse(config, key, why=f"no such file below {Path.cwd()}{nearest_path(path)}", works=works)
    if t.kind is TaskKind.reasoning_gym and not t.dataset:
        works = "for example task.dataset=basic_arithmetic"
        raise refuse(config, "task.kind", "task.dataset", why="this kind needs a generator's name", works=works)
    if t.kind is TaskKind.calculator and t.turns < 2:
        why = "the calculator's answer needs another turn to be used in"
        raise refuse(config, "task.turns", "task.kind", why=why, works="task.turns=2 would work")
    if "{prompt}" not in t.template:
        why = "{prompt} must stand in it, for the problem"
        raise refuse(config, "task.template", why=why, works="task.template='{prompt}' would work")


def _groups(config: RlConfig) -> None:
    samples, sequences = config.rollout.samples, config.batch.sequences
    if samples < 2 and not config.teacher.path:
        why = "a group of one has no mean to compare with"
        raise refuse(config, "rollout.samples", why=why, works="rollout.samples=8 would work")
    if sequences % samples:
        why = "an optimizer step takes whole groups"
        works = f"batch.sequences={math.ceil(sequences / samples) * samples} would work"
        raise refuse(config, "batch.sequences", "rollout.samples", why=why, works=works)


def _algorithm(config: RlConfig) -> None:
    a = config.algorithm
    if a.dual_clip is not None and a.loss not in (Loss.clip, Loss.gspo):
        why = "this loss clips no ratio"
        raise refuse(
            config, "algorithm.dual_clip", "algorithm.loss", why=why, works="algorithm.dual_clip=null would work"
        )
    if a.reference and not a.kl:
        why = "nothing would read the reference"
        raise refuse(config, "algorithm.reference", "algorithm.kl", why=why, works="algorithm.kl=0.01 would work")
    if a.correction in (Correction.icepop, Correction.sequence) and a.band_low >= a.band_high:
        works = "algorithm.band_low=0.5 algorithm.band_high=2 would work"
        raise refuse(config, "algorithm.band_low", "algorithm.band_high", why="low must be below high", works=works)


def _folders(config: RlConfig) -> None:
    for key, path in (("algorithm.reference", config.algorithm.reference), ("teacher.path", config.teacher.path)):
        if path and not Path(path).expanduser().is_dir():
            why = f"no such folder{nearest_path(path)}"
            raise refuse(config, key, why=why, works=f"for example {key}=runs/pretrain")


def _lora(config: RlConfig) -> None:
    lora, m = config.lora, config.model
    if not lora.rank:
        if lora.also:
            why = "without adapters everything trains"
            raise refuse(config, "lora.also", "lora.rank", why=why, works="lora.rank=16 would work")
        return
    if not lora.targets:
        raise refuse(config, "lora.targets", why="no layer would learn", works="lora.targets=[all] would work")
    _lora_targets(config)
    if LoraAlso.head in lora.also and m.tied_head:
        why = "the head is the embedding"
        raise refuse(config, "lora.also", "model.tied_head", why=why, works="lora.also=[embedding] would work")
    if config.engine.kind is EngineKind.deepspeed and (config.engine.zero_stage == 3 or config.engine.expert_parallel):
        key, value = ("zero_stage", "2") if config.engine.zero_stage == 3 else ("expert_parallel", "false")
        why = "frozen weights stay whole on every rank"
        raise refuse(config, "lora.rank", f"engine.{key}", why=why, works=f"engine.{key}={value} would work")
    if config.optim.ema_decay:
        why = "a product of averages is not the average of products"
        raise refuse(config, "lora.rank", "optim.ema_decay", why=why, works="optim.ema_decay=null would work")
    for name in ("outcontrol", "oscireset", "clamp"):
        key = f"precision.stabilisers.{name}.enabled"
        if getattr(config.precision.stabilisers, name).enabled:
            why = "stabilisers look after weights that train, and these are frozen"
            raise refuse(config, "lora.rank", key, why=why, works=f"{key}=false would work")


def _experts(config: RlConfig) -> None:
    """A capacity drops tokens of the micro-batch that is trained on; a sampler has all of them."""
    if config.model.moe.experts and config.model.moe.capacity is not None:
        why = (
            "tokens would be dropped in training alone, so the trainer would compute another function than the sampler"
        )
        works = "model.moe.capacity=null would work"
        raise refuse(config, "model.moe.experts", "model.moe.capacity", why=why, works=works)


def _stabilisers(config: RlConfig) -> None:
    """Those that change what the trainer's forward computes, beside its weights, which are all that the sampler has."""
    key, s = "precision.stabilisers", config.precision.stabilisers
    for at, wanted, off in (
        (f"{key}.outcontrol.enabled", s.outcontrol.enabled, "false"),
        (f"{key}.clamp.enabled", s.clamp.enabled, "false"),
        (f"{key}.oscireset.hysteresis", s.oscireset.enabled and s.oscireset.hysteresis > 0, "0"),
    ):
        if wanted:
            why = "the trainer would compute another function than the sampler"
            raise refuse(config, at, why=why, works=f"{at}={off} would work")


def _lora_targets(config: RlConfig) -> None:
    """Layers that there are, one matrix each, not thinner than the adapters."""
    targets, m = config.lora.targets, config.model
    head_dim = head_dim_of(m)
    attention = {LoraTarget.q: m.heads * head_dim, LoraTarget.out: m.heads * head_dim}
    attention |= dict.fromkeys((LoraTarget.k, LoraTarget.v), m.kv_heads * head_dim)
    mlp = dict.fromkeys((LoraTarget.gate, LoraTarget.up, LoraTarget.down), m.mlp_width)
    everything = LoraTarget.all in targets
    if m.moe.experts and (everything or any(target in mlp for target in targets)):
        why = "experts are many matrices in one, which have no adapters"
        raise refuse(config, "lora.targets", "model.moe.experts", why=why, works="lora.targets=[q,k,v,out] would work")
    if LoraTarget.gate in targets and m.mlp is MlpKind.relu2:
        works = "lora.targets=[up,down] would work"
        raise refuse(config, "lora.targets", "model.mlp", why="this network has no gate", works=works)
    sizes = {**attention, **mlp}
    most = min(m.width, *(size for target, size in sizes.items() if everything or target in targets))
    if config.lora.rank > most:
        why = f"the narrowest of these layers is {most} wide"
        raise refuse(config, "lora.rank", "lora.targets", why=why, works=f"lora.rank={min(most, 16)} would work")


def warm_start_config(config: RlConfig) -> RlConfig:
    """The supervised run before the first rollout."""
    w, optim = config.warm_start, config.optim
    return replace(
        config,
        run_name=f"{config.run_name}/warm_start",
        max_steps=w.steps,
        max_tokens=None,
        max_minutes=None,
        resume="auto",
        data=DataConfig(tokenizer=config.data.tokenizer, sequence_length=config.data.sequence_length, sources={}),
        optim=replace(
            optim,
            lr=w.lr_scale * optim.lr,
            muon=replace(optim.muon, lr=w.lr_scale * optim.muon.lr),
            schedule=ScheduleConfig(warmup_steps=5),
        ),
        evaluation=EvalConfig(every_steps=w.check_steps, sample_tokens=0),
        checkpoint=replace(config.checkpoint, every_steps=0),
    )
