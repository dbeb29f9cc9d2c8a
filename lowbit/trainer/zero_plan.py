"""What ZeRO changes in a plan: memory of a rank, and the bytes that it sends in a step. Pure arithmetic.

With P parameters on N ranks, bytes a parameter of a rank's memory (FP32 throughout):

    stage    weights                      gradients                                   AdamW
    0        4                            4, and copies of buckets                    8
    1        4 whole, 4/N masters         4                                           8/N
    2        4 whole, 4/N masters         4/N, and 4 while micro-batches add up       8/N
    3        4/N twice; embedding,        4/N, and 4 while micro-batches add up       8/N
             head and one block whole

"While micro-batches add up": a step of several micro-batches keeps their sum on the rank, in FP32, and reduces it once,
during the last backward pass; a step of one reduces each gradient as it comes and keeps no more than a bucket or two.

At stage 0 a bucket travels as a copy of its gradients: one at a time, but two where they are coded, which leave during
the backward pass. The largest table, which is not cut, may be more than a bucket of `engine.bucket_mib`.

Error feedback keeps 4 bytes more, of what a rank's own rounding lost, and at stage 0 4/N of what that of sums lost.
With it, or stochastic rounding, gradients travel after the backward pass at stages 1 to 3, so that all of them are kept
until then.
"""

from dataclasses import replace

from lowbit.comm.cost import Traffic, traffic, weights_in_bf16
from lowbit.comm.whole import AHEAD
from lowbit.configs.schema import SIX_BITS, CommKind, EngineKind, RunConfig
from lowbit.models.cost import ParameterCount, TrainingMemory

MIB = 1 << 20
GRADIENT_BITS = {CommKind.none: 32, CommKind.bf16: 16} | dict.fromkeys(SIX_BITS, 6)
"""On the wire; `auto` is bf16 or sq48."""


def micro_batches(config: RunConfig, ranks: int) -> int:
    """Micro-batches that a rank takes in a full step."""
    return max(1, config.batch.sequences // (config.batch.micro_batch * ranks))


def zero_memory(config: RunConfig, parts: ParameterCount, memory: TrainingMemory, ranks: int) -> TrainingMemory:
    """The memory of one of `ranks` ranks, given that of a single process."""
    stage = config.engine.zero_stage
    if config.engine.kind is EngineKind.local:
        return memory
    whole, share = 4 * parts.total, 4 * -(-parts.total // ranks)
    left = whole if config.comm.error_feedback and ranks > 1 else 0
    bucket = config.engine.bucket_mib * MIB
    if stage == 0:
        copies = 0 if ranks == 1 else 1 if config.comm.kind is CommKind.none else AHEAD
        copied = min(whole, copies * max(bucket, 4 * parts.embedding))
        return replace(memory, gradients=memory.gradients + copied + left + (share if left else 0))
    bucket = 2 * min(whole, bucket)
    remembers = config.comm.error_feedback or config.comm.stochastic_rounding
    held = whole if stage == 1 or remembers or micro_batches(config, ranks) > 1 else 0
    weights = whole + share
    if stage == 3:
        block = (parts.total - parts.embedding - parts.head) // config.model.layers
        weights = 2 * share + 4 * (parts.embedding + parts.head + block)
    optimizer, windows = (-(-part // ranks) for part in (memory.optimizer, memory.windows))
    held += share + bucket + left
    return replace(memory, parameters=weights, gradients=held, optimizer=optimizer, windows=windows)


def wire(config: RunConfig, compute_bytes: int, ranks: int) -> Traffic | None:
    """Bytes a parameter that a rank sends in a step; None where a measurement at the start decides."""
    if config.comm.kind is CommKind.auto:
        return None
    rounded = weights_in_bf16(config.comm.weights, compute_bytes == 2)
    return traffic(
        config.engine.zero_stage,
        GRADIENT_BITS[config.comm.kind],
        ranks,
        weight_bytes=2.0 if rounded else 4.0,
        all_reduce_buckets=config.comm.kind is CommKind.none,
    )


def describe_wire(config: RunConfig, compute_bytes: int, ranks: int) -> str:
    """The line that `lowbit plan` prints for several ranks."""
    head = f"{ranks} ranks under ZeRO {config.engine.zero_stage}"
    sent = wire(config, compute_bytes, ranks)
    if sent is None:
        return f"{head}: comm=auto measures BF16 and sq48 on the links at the start"
    each = f"{sent.gradients:.3g} bytes of gradients ({config.comm.kind})"
    gathered = f" and {sent.weights:.3g} of weights" if sent.weights else ""
    return f"{head}: each sends {each}{gathered} a parameter and step"
