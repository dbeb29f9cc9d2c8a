"""Settings of the execution: what runs a step, on how many processes, and how they communicate."""

from dataclasses import dataclass
from enum import StrEnum


class EngineKind(StrEnum):
    """What runs forward, backward and the optimizer step."""

    local = "local"
    """One process, plain PyTorch."""
    deepspeed = "deepspeed"
    """Any number of processes, started by torchrun, on DeepSpeed's ZeRO."""


class Recompute(StrEnum):
    """Activation checkpointing."""

    none = "none"
    full = "full"
    """Keep each block's input; recompute the block in the backward pass."""
    selective = "selective"
    """Keep matrix products and attention outputs; recompute the element-wise rest."""


class CompileMode(StrEnum):
    """Whether blocks go through `torch.compile`."""

    auto = "auto"
    """On a GPU, yes; on a CPU, no: it costs 20 s or more at the start and needs a C++ compiler."""
    on = "on"
    off = "off"


class AttentionKernel(StrEnum):
    """What computes attention inside packed documents on a GPU."""

    auto = "auto"
    """flex."""
    flex = "flex"
    """FlexAttention under a block mask, as for any visibility."""
    varlen = "varlen"
    """Flash attention's kernel for sequences of varying length, in BF16, where logits are not capped and the rule is
    packed documents and nothing else; FlexAttention otherwise."""


VARLEN_WIDEST = 256
"""Widest head that the kernel for sequences of varying length takes."""
Z_COLUMNS = 8
"""Columns that Attention Z-Reg adds to heads in a kernel's backward call: one would do, kernels want multiples of 8."""


@dataclass(frozen=True)
class EngineConfig:
    """Execution."""

    kind: EngineKind = EngineKind.local
    processes: int = 1
    """deepspeed: ranks on this machine that the command starts itself, with torchrun, each job of a sweep anew. 1: the
    command is started by a launcher, or runs alone."""
    compile: CompileMode = CompileMode.auto
    recompute: Recompute = Recompute.none
    attention: AttentionKernel = AttentionKernel.auto
    cuda_graphs: bool = False
    """local, on a GPU, without experts: replay each micro-batch as a CUDA graph. For small models, which otherwise wait
    for the host; activations stay allocated between steps, and evaluations need room of their own."""
    zero_stage: int = 1
    """deepspeed: what ranks share instead of each keeping all of it: 0 nothing, 1 optimizer states and master weights,
    2 gradients too, 3 weights too (gathered layer by layer in each pass)."""
    bucket_mib: int = 200
    """deepspeed: gradients are reduced in buckets of about so many MiB (of FP32), while the backward pass goes on. All
    in one bucket cannot leave before its end: on a slow link take less for a model that is not many times as large."""
    expert_parallel: bool = False
    """deepspeed, ZeRO 1 and 2: every rank keeps its share of each layer's experts, and tokens travel to them."""
    rank_timeout_seconds: float = 600.0
    """deepspeed: when no rank moves on for so long, the job ends with an error that names the one that hangs."""


class CommKind(StrEnum):
    """What gradients are while they travel between ranks; sums are FP32 in all of them but bf16."""

    none = "none"
    """FP32, as they are."""
    bf16 = "bf16"
    """Rounded to BF16, and summed in it."""
    squinch = "squinch"
    """6 bits a value: 8 values in 48 bits, as published by Character.AI."""
    sq48 = "sq48"
    """6 bits a value: the same size with finer scales and a search, 2 dB less error."""
    sq48_fast = "sq48_fast"
    """sq48 without the search: 0.3 dB more error, for links so fast that encoding shows: three tenths less time on a
    GPU, one tenth on a CPU."""
    auto = "auto"
    """bf16 or sq48, whichever a measurement of the link at the start says is faster."""


class WeightsDtype(StrEnum):
    """What weights are while they travel between ranks (ZeRO 1, 2 and 3); masters stay FP32."""

    auto = "auto"
    """bf16 where the run computes in BF16, which rounds every weight to it anyway; otherwise fp32."""
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(frozen=True)
class CommConfig:
    """Communication between ranks."""

    kind: CommKind = CommKind.none
    weights: WeightsDtype = WeightsDtype.auto
    exact_below: int = 65_536
    """Gradients of fewer numbers than this, and all vectors (norms), travel as FP32 whatever `kind` says."""
    error_feedback: bool = False
    """Add what rounding took from a gradient to the next step's. Keeps a whole FP32 gradient a rank, also in
    checkpoints; in simulations 6 bits and nearest rounding did not need it. Not with machines of several ranks."""
    stochastic_rounding: bool = False
    """Round the 6-bit codes up or down at random, right on average: 3 to 4 dB more error a step, and slow on a CPU,
    for ranks whose gradients are nearly the same."""


SIX_BITS = (CommKind.squinch, CommKind.sq48, CommKind.sq48_fast)
"""Codes of gradients in 6 bits."""
