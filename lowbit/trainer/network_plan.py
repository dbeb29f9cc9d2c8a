"""What each code of gradients would cost a step between nodes, and whether 6 bits pay (`lowbit plan network= nodes=`).

Pure arithmetic over `comm.cost`. A node is one end of a link: what its ranks exchange among themselves counts as free.
Whole steps need to know how fast a node computes. That is a share of its GPUs' peak; where there is none (a CPU), only
the exchange is predicted.
"""

import math
from dataclasses import dataclass

from lowbit.comm.cost import (
    CPU_CODINGS,
    GPU_CODINGS,
    Coding,
    Comparison,
    Link,
    best,
    compare,
    hidden_from_tokens,
    parse_rate,
    weights_in_bf16,
)
from lowbit.configs.schema import CommKind, RunConfig
from lowbit.errors import ConfigError

UTILISATION = 0.40
"""Share of the peak that training is taken to reach."""
GPU_PEAK = 989.4e12
"""BF16 FLOP/s of the GPU that a plan with `--memory-gb` is for, a Hopper."""
KEYS = ("network", "nodes")


@dataclass(frozen=True)
class Network:
    """Nodes, and what connects each to the others."""

    rate: str
    nodes: int

    @property
    def link(self) -> Link:
        """One node's connection, each way."""
        return Link(parse_rate(self.rate))


def take_network(arguments: list[str]) -> tuple[Network | None, list[str]]:
    """The network that KEY=VALUE arguments describe, if any, and the other arguments. Raises ConfigError."""
    found = {key: value for key, _, value in (a.partition("=") for a in arguments) if key in KEYS}
    rest = [a for a in arguments if a.partition("=")[0] not in KEYS]
    if not found:
        return None, rest
    if len(found) < len(KEYS):
        [given], [missing] = list(found), [key for key in KEYS if key not in found]
        example = {"network": "network=25gbit", "nodes": "nodes=16"}[missing]
        raise ConfigError(f"{given}={found[given]} needs the other half of the network: add {example}")
    if not found["nodes"].isdecimal() or int(found["nodes"]) < 2:
        raise ConfigError(f"nodes={found['nodes']}: a network has two nodes or more, as in nodes=16")
    parse_rate(found["network"])
    return Network(found["network"], int(found["nodes"])), rest


def ranks_on(network: Network, ranks: int) -> int:
    """Ranks of the job, one a node where nobody says. Raises ConfigError unless all nodes have as many."""
    if ranks == 1:
        return network.nodes
    if ranks % network.nodes:
        near = max(1, round(ranks / network.nodes)) * network.nodes
        raise ConfigError(
            f"nodes={network.nodes} with --ranks {ranks}: every node runs as many ranks; --ranks {near} would work"
        )
    return ranks


@dataclass(frozen=True)
class NetworkPlan:
    """The codes beside each other."""

    network: Network
    rows: list[Comparison]
    """FP32, BF16 and the 6-bit codes, in this order."""
    computed: bool
    """Whether a step's seconds are known, not only its exchange's."""
    tokens: int
    """Of one node and step."""
    bf16_hides: float
    """Tokens of a node and step from which a BF16 exchange of gradients hides behind the backward pass."""
    six_bits_hide: float

    @property
    def auto(self) -> Comparison:
        """What comm=auto would take: the faster exchange of the two that it measures."""
        return min(self._of(CommKind.bf16), self._of(CommKind.sq48), key=lambda row: row.seconds)

    @property
    def fastest(self) -> Comparison:
        """The shortest step; of those within 3% the one with more bits."""
        return best(self.rows)

    @property
    def gain(self) -> float:
        """How many times faster a step is with Squinch than with BF16."""
        return self._of(CommKind.bf16).step_seconds / self._of(CommKind.squinch).step_seconds

    def _of(self, kind: CommKind) -> Comparison:
        return next(row for row in self.rows if row.coding.name == kind.value)


def plan_network(
    config: RunConfig,
    network: Network,
    parameters: int,
    flops_per_token: int,
    *,
    compute_bytes: int,
    on_gpu: bool,
    node_flops: float | None,
) -> NetworkPlan:
    """Predict a step's exchange in each code.

    Args:
        parameters: of the model. flops_per_token: of forward and backward pass. compute_bytes: 2 where the run computes
            in BF16. on_gpu: where gradients are coded. node_flops: FLOP/s of one node; None where not known.
    """
    tokens = config.batch.sequences * config.data.sequence_length // network.nodes
    weight_bytes = 2.0 if weights_in_bf16(config.comm.weights, compute_bytes == 2) else 4.0
    stage, link = config.engine.zero_stage, network.link
    offered: tuple[Coding, ...] = tuple(
        coding for coding in (GPU_CODINGS if on_gpu else CPU_CODINGS) if coding.name in {"fp32", *CommKind}
    )
    rows = compare(
        parameters,
        stage,
        network.nodes,
        link,
        offered,
        weight_bytes=weight_bytes,
        flops=float(tokens * flops_per_token),
        flops_per_second=node_flops or math.inf,
    )
    hides = [
        hidden_from_tokens(bits, network.nodes, link, node_flops or math.inf, 2 if stage == 0 else 1)
        for bits in (16, 6)
    ]
    return NetworkPlan(network, rows, node_flops is not None, tokens, *hides)


def describe_network(made: NetworkPlan, parameters: int) -> list[str]:
    """The lines that `lowbit plan` prints."""
    network, link = made.network, made.network.link
    lines = [
        f"network: {network.nodes} nodes on {network.rate} each way, {link.efficiency:.0%} of it reached, "
        f"{link.latency * 1e3:g} ms a hop"
        + (f"; compute at {UTILISATION:.0%} of the GPUs' peak" if made.computed else "; compute not counted")
    ]
    for row in made.rows:
        name = "none (FP32)" if row.coding.name == "fp32" else row.coding.name
        text = f"  comm={name:<12}{row.traffic.total * parameters / 1e9:10.3f} GB leave a node, {row.seconds:8.3f} s"
        lines.append(text + (f", a step {row.step_seconds:8.3f} s" if made.computed else ""))
    what = "a step" if made.computed else "the exchange"
    pays = f"Squinch pays: {what} is {made.gain:.2f} times as fast as with BF16"
    if made.gain <= 1.03:
        pays = f"Squinch does not pay: {what} is {made.gain:.2f} times as fast as with BF16"
    best_code = "none" if made.fastest.coding.name == "fp32" else made.fastest.coding.name
    lines.append(f"  {pays}; within 3% of the best: comm={best_code}; comm=auto would take {made.auto.coding.name}")
    if made.computed:
        lines.append(
            f"  BF16 gradients hide behind the backward pass from {made.bf16_hides:,.0f} tokens a node and step on, "
            f"6 bits from {made.six_bits_hide:,.0f}; this run has {made.tokens:,}"
        )
    return lines
