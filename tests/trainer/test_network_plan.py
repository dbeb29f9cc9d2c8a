"""What codes of gradients cost on a network: the published table, closed forms, and the command's own mistakes."""

from dataclasses import replace

import pytest

from lowbit.cli.plan import plan as plan_command
from lowbit.configs.schema import CommConfig, CommKind, EngineConfig, EngineKind, RunConfig
from lowbit.errors import ConfigError
from lowbit.models.cost import parameter_parts, training_memory
from lowbit.trainer.network_plan import Network, NetworkPlan, plan_network, ranks_on, take_network
from lowbit.trainer.zero_plan import zero_memory

P = 8_000_000_000
NODE = 8 * 989.4e12 * 0.40
"""FLOP/s of eight Hopper GPUs at 40% of their peak."""


def compared(rate: str, stage: int = 0, sequences: int = 256, node_flops: float | None = NODE) -> NetworkPlan:
    config = RunConfig()
    config = replace(
        config,
        engine=EngineConfig(kind=EngineKind.deepspeed, zero_stage=stage),
        data=replace(config.data, sequence_length=2048),
        batch=replace(config.batch, sequences=sequences),
    )
    return plan_network(
        config, Network(rate, 16), P, 6 * P, compute_bytes=2, on_gpu=node_flops is not None, node_flops=node_flops
    )


# Tokens a node and step below which a BF16 or 6-bit all-reduce of 16 nodes shows, at 85% of the rate
TABLE = [("10gbit", 2_792_471, 1_047_176), ("100gbit", 279_247, 104_718), ("800gbit", 34_906, 13_090)]


@pytest.mark.parametrize(("rate", "bf16", "six_bits"), TABLE)
def test_tokens_from_which_gradients_hide(rate: str, bf16: int, six_bits: int) -> None:
    made = compared(rate)
    assert made.bf16_hides == pytest.approx(bf16, rel=2e-3)
    assert made.six_bits_hide == pytest.approx(six_bits, rel=2e-3)
    assert compared(rate, stage=1).bf16_hides == pytest.approx(bf16 / 2, rel=2e-3)  # half of an all-reduce


def test_squinch_pays_below_those_tokens_and_not_above() -> None:
    """16 nodes, 25 Gbit/s: BF16 hides from 1,116,988 tokens a node on; far below, a step takes 2.67 times less."""
    few, many = compared("25gbit", sequences=16), compared("25gbit", sequences=16 * 600)
    assert few.tokens == 2048 and few.gain == pytest.approx(16 / 6, rel=0.03)
    assert few.fastest.coding.name in ("squinch", "sq48", "sq48_fast") and few.auto.coding.name == "sq48"
    assert many.tokens == 600 * 2048 > many.bf16_hides and many.gain == pytest.approx(1.0)
    assert many.fastest.coding.name in ("fp32", "bf16")


def test_bytes_that_leave_a_node() -> None:
    """Of many nodes 8, 4 and 1.5 a parameter at stage 0; 8 (as DeepSpeed does it) + 2, 2 + 2, 0.75 + 2 at stage 1."""
    for stage, wanted in ((0, [8, 4, 1.5]), (1, [10, 4, 2.75])):
        sent = [row.traffic.total * 16 / 15 for row in compared("25gbit", stage).rows[:3]]
        assert sent == pytest.approx(wanted)


def test_a_cpu_is_compared_by_its_exchange() -> None:
    """100 Mbit/s: bytes decide, 2.67 times fewer. 100 Gbit/s: coding takes longer than sending: BF16."""
    slow, fast = compared("100mbit", node_flops=None), compared("100gbit", node_flops=None)
    assert not slow.computed and slow.gain == pytest.approx(16 / 6, rel=0.02) and slow.auto.coding.name == "sq48"
    assert fast.gain < 1 and fast.auto.coding.name == "bf16"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["batch.sequences=64", "batch.micro_batch=2"]
    plan_command(["engine=deepspeed", "network=25gbit", "nodes=16", *batch], memory_gb=80, ranks=32)
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("network: 16 nodes on 25gbit"))
    assert [line.split()[0] for line in lines[begin + 1 : begin + 6]] == [
        f"comm={kind}" for kind in ("none", "bf16", "squinch", "sq48", "sq48_fast")
    ]
    assert "Squinch pays" in lines[begin + 6] and "comm=auto would take sq48" in lines[begin + 6]
    assert lines[begin + 7].endswith(f"this run has {64 * 256 // 16:,}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["network=25gbit"], "network=25gbit needs .* add nodes=16"),
        (["nodes=4", "model=tiny"], "nodes=4 needs .* add network=25gbit"),
        (["network=25gbit", "nodes=1"], "nodes=1: .* two nodes"),
        (["network=25gbit", "nodes=many"], "nodes=many"),
        (["network=25", "nodes=2"], "network='25'"),
    ],
)
def test_half_a_network_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        take_network(arguments)


def test_ranks_on_a_network() -> None:
    network, rest = take_network(["model=30m", "nodes=3", "network=1gbit", "seed=2"])
    assert network == Network("1gbit", 3) and rest == ["model=30m", "seed=2"]
    assert ranks_on(network, 1) == 3 and ranks_on(network, 12) == 12
    with pytest.raises(ConfigError, match="--ranks 9 would work"):
        ranks_on(network, 10)


def test_memory_of_error_feedback() -> None:
    """4 bytes a parameter, and at stage 0 a rank's share of sums; gradients are kept until after the backward pass."""
    base = RunConfig(engine=EngineConfig(kind=EngineKind.deepspeed))
    base = replace(base, batch=replace(base.batch, sequences=16, micro_batch=4))  # one micro-batch a rank
    parts = parameter_parts(base.model, 1024)
    alone = training_memory(base.model, 1024, 4, 256, 4, base.engine.recompute, base.optim.kind)

    def gradients(stage: int, **options: bool) -> int:
        comm = CommConfig(kind=CommKind.sq48, **options)
        config = replace(base, engine=replace(base.engine, zero_stage=stage), comm=comm)
        return zero_memory(config, parts, alone, ranks=4).gradients

    for stage, extra in ((0, 5), (1, 4), (2, 8), (3, 8)):
        assert gradients(stage, error_feedback=True) - gradients(stage) == pytest.approx(extra * parts.total, abs=4)
    assert gradients(2, stochastic_rounding=True) - gradients(2) == 4 * parts.total
