"""What a step's communication costs: bytes a parameter, seconds on a link, and when few bits pay. Pure arithmetic.

N ranks (or nodes, where a node's ranks exchange over something fast). Of P parameters a rank sends, per step:

    all-reduce of b bits            2 (N - 1) / N * b / 8 bytes each     stage 0
    reduce-scatter                    (N - 1) / N * b / 8                stages 1, 2, 3, once a step
    all-gather of weights in w bytes  (N - 1) / N * w                    stages 1, 2 once, stage 3 twice

For many ranks, bytes a parameter:

| | gradients | weights | sum |
|---|---|---|---|
| stage 0, FP32 / BF16 / 6 bits | 8 / 4 / 1.5 | - | 8 / 4 / 1.5 |
| stages 1 and 2, BF16 / 6 bits, BF16 weights | 2 / 0.75 | 2 | 4 / 2.75 |
| the same as DeepSpeed does it: all-reduce, FP32 weights | 4 | 4 | 8 |
| stage 3, BF16 / 6 bits, BF16 weights | 2 / 0.75 | 4 | 6 / 4.75 |

Time. A link's share of its rate, plus a latency for every piece and hop; coding runs beside the wire, all but the first
piece's, so a reduction takes max(wire, coding) + (wire + coding) / pieces.

A training step of C FLOPs on hardware of F FLOP/s takes max(backward pass, communication) + forward pass, since
gradients travel during the backward pass (2/3 of C); FP32 at stage 0, DeepSpeed's own, after it. Communication hides
when it is shorter; with C = 6 P T for T tokens a rank, P cancels: a BF16 all-reduce hides from `hidden_from_tokens`
tokens a rank and step on.
"""

import math
import re
from dataclasses import dataclass

from lowbit.configs.schema import WeightsDtype
from lowbit.errors import ConfigError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Link:
    """What connects ranks, each way."""

    bits_per_second: float
    efficiency: float = 0.85
    """Share of the rate that large messages reach. TCP through gloo on a shaped link reaches 0.93."""
    latency: float = 1e-4
    """Seconds that one hop of one piece takes besides its bytes."""

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second * self.efficiency / 8


@dataclass(frozen=True)
class Coding:
    """How gradients travel."""

    name: str
    bits: float
    """A value."""
    encode_ns: float = 0.0
    """Nanoseconds a value. A BF16 all-reduce needs a cast each way."""
    decode_ns: float = 0.0
    two_hop: bool = True
    """Summed by its owner after decoding, rather than by the backend's own reduction."""


CPU_CODINGS = (
    Coding("fp32", 32, two_hop=False),
    Coding("bf16", 16, 0.4, 0.2, two_hop=False),
    Coding("int8", 8.016, 2.5, 1.0),
    Coding("squinch", 6, 3.0, 1.5),
    Coding("sq48", 6.002, 4.0, 1.8),
    Coding("sq48_fast", 6.002, 3.6, 1.8),
)
"""Measured on one core with AVX2, one thread."""

GPU_CODINGS = (
    Coding("fp32", 32, two_hop=False),
    Coding("bf16", 16, 0.0015, 0.0015, two_hop=False),
    Coding("squinch", 6, 0.0013, 0.0013),
    Coding("sq48", 6.002, 0.0014, 0.0014),
    Coding("sq48_fast", 6.002, 0.0012, 0.0012),
)
"""From an H200: all-reduces of 2 billion values in one piece between two GPUs on NVLink took 13.4, 14.3 and 12.6 ms
(docs/RESULTS.md), 4.4 ms of it on the wire; each value is encoded 1.5 times and decoded twice. A cast moves 6 bytes at
4 TB/s.
"""


@dataclass(frozen=True)
class Traffic:
    """Bytes a parameter that a rank sends in a step."""

    gradients: float
    weights: float

    @property
    def total(self) -> float:
        return self.gradients + self.weights


def weights_in_bf16(chosen: WeightsDtype, computes_in_bf16: bool) -> bool:
    """Whether gathered weights travel in BF16: asked for, or where the model rounds them to it anyway."""
    return chosen is WeightsDtype.bf16 or (chosen is WeightsDtype.auto and computes_in_bf16)


def parse_rate(text: str) -> float:
    """'25gbit', '100Mbit/s', '1.6tbit' -> bits a second. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)bit(/s|ps)?\s*", text.lower())
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"network={text!r}: give a link's rate like 100mbit, 25gbit or 1.6tbit")
    return float(match[1]) * _UNITS[match[2]]


def traffic(
    stage: int,
    gradient_bits: float,
    ranks: int,
    *,
    weight_bytes: float = 2.0,
    micro_batches: int = 1,
    all_reduce_buckets: bool = False,
) -> Traffic:
    """Bytes a parameter of one optimizer step.

    Args:
        stage: ZeRO stage 0 to 3.
        gradient_bits: bits of a gradient value on the wire.
        micro_batches: how often gradients travel in a step: 1, or every micro-batch where a stage reduces at once.
        all_reduce_buckets: gradients of stages 1 and 2 are all-reduced, as DeepSpeed does by default.
    """
    if stage not in (0, 1, 2, 3) or ranks < 1 or micro_batches < 1:
        raise ValueError(f"stage={stage}, ranks={ranks}, micro_batches={micro_batches}")
    others = (ranks - 1) / ranks
    hops = 2 if stage == 0 or (all_reduce_buckets and stage < 3) else 1
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * micro_batches}[stage]
    return Traffic(hops * others * gradient_bits / 8 * micro_batches, gathers * others * weight_bytes)


def reduction_seconds(
    values: int, ranks: int, coding: Coding, link: Link, *, scatter: bool = False, pieces: int = 4
) -> float:
    """Predicted time of one reduction of `values`, nothing else going on."""
    if ranks == 1:
        return 0.0
    hops = 1 if scatter else 2
    wire = hops * (ranks - 1) / ranks * values * coding.bits / 8 / link.bytes_per_second
    latency = hops * link.latency * (pieces if coding.two_hop else 2 * (ranks - 1))
    encodings = 1 + (1 / ranks if coding.two_hop and not scatter else 0)
    codec = values * 1e-9 * (coding.encode_ns * encodings + coding.decode_ns * hops)
    if not coding.two_hop:  # a cast before and after
        return wire + latency + codec
    return max(wire, codec) + (wire + codec - max(wire, codec)) / pieces + latency


def gather_seconds(values: int, ranks: int, weight_bytes: float, link: Link) -> float:
    """Predicted time of gathering weights, of which every rank has an equal part."""
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * values * weight_bytes / link.bytes_per_second + (ranks - 1) * link.latency


def step_seconds(flops: float, flops_per_second: float, communication: float, after: float = 0.0) -> float:
    """A step whose gradients travel during the backward pass, two thirds of its FLOPs; `after`: what cannot overlap."""
    compute = flops / flops_per_second
    return compute / 3 + max(compute * 2 / 3, communication) + after


def hidden_from_tokens(bits: float, ranks: int, link: Link, flops_per_second: float, hops: int = 2) -> float:
    """Tokens a rank and step from which a reduction of `bits` hides behind the backward pass (4 P T FLOPs).

    hops: 2 of an all-reduce, 1 of a reduce-scatter.
    """
    return hops * (ranks - 1) / ranks * bits / 8 / link.bytes_per_second * flops_per_second / 4


@dataclass(frozen=True)
class Comparison:
    """One way of sending gradients, beside the others."""

    coding: Coding
    traffic: Traffic
    seconds: float
    """Communication of a step."""
    step_seconds: float


def compare(
    parameters: int,
    stage: int,
    ranks: int,
    link: Link,
    codings: tuple[Coding, ...] = CPU_CODINGS,
    *,
    weight_bytes: float = 2.0,
    flops: float = 0.0,
    flops_per_second: float = math.inf,
) -> list[Comparison]:
    """Every coding's bytes and predicted seconds, in the order given.

    FP32 is DeepSpeed's own reduction, which all-reduces buckets at stages 1 and 2, and at stage 0 after the backward
    pass.
    """
    rows = []
    for coding in codings:
        buckets = coding.bits == 32
        scatter = stage > 0 and not (buckets and stage < 3)
        reduce = reduction_seconds(parameters, ranks, coding, link, scatter=scatter)
        gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
        gather = gathers * gather_seconds(parameters, ranks, weight_bytes, link)
        during, after = (0.0, reduce + gather) if buckets and stage == 0 else (reduce, gather)
        step = step_seconds(flops, flops_per_second, during, after)
        sent = traffic(stage, coding.bits, ranks, weight_bytes=weight_bytes, all_reduce_buckets=buckets)
        rows.append(Comparison(coding, sent, reduce + gather, step))
    return rows


def best(rows: list[Comparison]) -> Comparison:
    """The row with the shortest step; the earlier one of those that take at most 3% more."""
    shortest = min(row.step_seconds for row in rows)
    return next(row for row in rows if row.step_seconds <= 1.03 * shortest)
