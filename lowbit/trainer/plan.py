"""What a run will take, computed from its configuration alone: size, work, memory, length.

Pure arithmetic over `models.cost`; nothing is loaded, and the model exists without memory at most, so that an
8-billion-parameter run can be planned on a laptop. Memory is an estimate of the peak on one device: `RESERVE` stands
for what PyTorch and the driver hold themselves, and fragmentation takes a share more.
"""

from dataclasses import dataclass

import torch

from lowbit.configs.schema import Recompute, RunConfig, TokenizerKind
from lowbit.configs.validate_data import BYTE_VOCABULARY
from lowbit.data.tokenizer import load_tokenizer
from lowbit.models.cost import (
    LowBit,
    ParameterCount,
    TrainingMemory,
    flops_per_token,
    kv_cache_bytes_per_token,
    largest_micro_batch,
    parameter_parts,
    training_memory,
)
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import assign, candidates
from lowbit.quant.memory import low_bit_memory
from lowbit.quant.resolve import resolve
from lowbit.trainer.zero_plan import zero_memory

RESERVE = 1_000_000_000
"""Bytes the libraries and the driver take for themselves."""
FRAGMENTATION = 0.05
"""Share of a device's memory that the allocator cannot hand out."""


@dataclass(frozen=True)
class Length:
    """How long a run is. None where the clock decides (`max_minutes`)."""

    steps: int | None
    tokens: int | None
    """Tokens of whole sequences, as the steps take them."""


@dataclass(frozen=True)
class Plan:
    """Everything `lowbit plan` prints."""

    parameters: ParameterCount
    flops_per_token: int
    """Forward and backward, in the convention of models/cost.py."""
    tokens_per_step: int
    """Of the full batch, after any batch warm-up."""
    length: Length
    memory: TrainingMemory
    """Bytes on one device at the configured micro-batch, in whichever of the run's precisions takes most."""
    usable_bytes: int | None
    """What of the device's memory training can use; None when no memory was given."""
    largest_micro_batch: dict[str, int]
    """For each kind of activation checkpointing, the most sequences that fit; empty without a memory."""
    kv_cache_bytes_per_token: int
    """Keys and values a token of one sequence in generation."""

    @property
    def fits(self) -> bool | None:
        """Whether the configured micro-batch fits; None when no memory was given."""
        return None if self.usable_bytes is None else self.memory.total <= self.usable_bytes

    @property
    def total_flops(self) -> int | None:
        """Work of the whole run; None where the clock decides."""
        return None if self.length.tokens is None else self.length.tokens * self.flops_per_token


def plan(
    config: RunConfig, vocab_size: int, *, compute_bytes: int = 2, memory_bytes: int | None = None, ranks: int = 1
) -> Plan:
    """Plan a run.

    Args:
        vocab_size: tokens of the tokenizer. compute_bytes: 2 for BF16, 4 for FP32. memory_bytes: of one device.
        ranks: processes that share it, each on its own device.
    """
    length = config.data.sequence_length
    shape = (config.model, vocab_size)
    parts = parameter_parts(*shape)
    usable = None if memory_bytes is None else max(0, int(memory_bytes * (1 - FRAGMENTATION)) - RESERVE)
    rest = (length, compute_bytes)
    low = low_bit_phases(config)
    alone = max(
        (
            training_memory(*shape, config.batch.micro_batch, *rest, config.engine.recompute, config.optim.kind, phase)
            for phase in low
        ),
        key=lambda memory: memory.total,
    )
    memory = zero_memory(config, parts, alone, ranks)
    shared = alone.total - memory.total  # what other ranks keep
    fitting = {
        kind.value: min(
            largest_micro_batch(usable + shared, *shape, *rest, kind, config.optim.kind, phase) for phase in low
        )
        for kind in (Recompute if usable is not None else ())
        if usable is not None
    }
    return Plan(
        parameters=parts,
        flops_per_token=flops_per_token(*shape, length),
        tokens_per_step=config.batch.sequences * length,
        length=run_length(config),
        memory=memory,
        usable_bytes=usable,
        largest_micro_batch=fitting,
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(config.model, compute_bytes),
    )


def planned_vocabulary(config: RunConfig) -> int:
    """Tokens of the run's tokenizer; a BPE that is yet to be trained has the size asked for."""
    tokenizer = config.data.tokenizer
    if tokenizer.kind is TokenizerKind.bytes:
        return BYTE_VOCABULARY
    if tokenizer.kind is TokenizerKind.bpe:
        return tokenizer.vocab_size
    return load_tokenizer(tokenizer.path, tokenizer.eot).vocab_size


def low_bit_phases(config: RunConfig) -> list[LowBit]:
    """What low-bit layers change in memory, in each precision that the run's switches can come to."""
    policy = resolve(config.precision)
    phases = policy.phases()
    if not any(phase.quantised for phase in phases):
        return [LowBit()]
    with torch.device("meta"):
        layers = candidates(Transformer(config.model, 1))
    stabilisers = config.precision.stabilisers
    return list(
        dict.fromkeys(low_bit_memory(config.model, layers, assign(phase, layers), stabilisers) for phase in phases)
    )


def run_length(config: RunConfig) -> Length:
    """Steps and tokens until `max_steps` or `max_tokens`, whichever comes first, through the batch warm-up's stages.

    A stage lasts while the position is below its `until_tokens`, and the run while it is below `max_tokens`; a step
    that crosses a border is taken whole, so each stage of tokens n and step size b takes ceil(n / b) steps.
    """
    if config.max_steps is None and config.max_tokens is None:
        return Length(None, None)
    steps, tokens = 0, 0
    stages = [(s.until_tokens, s.sequences) for s in config.batch.warmup]
    for until, sequences in [*stages, (None, config.batch.sequences)]:
        per_step = sequences * config.data.sequence_length
        ends = [e for e in (until, config.max_tokens) if e is not None]
        wanted = max(0, -(-(min(ends) - tokens) // per_step)) if ends else None
        left = None if config.max_steps is None else config.max_steps - steps
        taken = min(n for n in (wanted, left) if n is not None)
        steps, tokens = steps + taken, tokens + taken * per_step
    return Length(steps, tokens)
