"""The cost model against the tables that it is to reproduce, and its own limits."""

import math

import pytest

from lowbit.comm.cost import (
    CPU_CODINGS,
    Coding,
    Link,
    best,
    compare,
    hidden_from_tokens,
    parse_rate,
    reduction_seconds,
    step_seconds,
    traffic,
)
from lowbit.errors import ConfigError

MANY = 10**9


@pytest.mark.parametrize(
    ("stage", "bits", "options", "expected"),
    [
        (0, 32, {}, 8.0),
        (0, 16, {}, 4.0),
        (0, 6, {}, 1.5),
        (1, 16, {}, 4.0),
        (1, 6, {}, 2.75),
        (2, 6, {}, 2.75),
        (2, 6, {"weight_bytes": 1.03}, 1.78),
        (1, 16, {"all_reduce_buckets": True}, 6.0),
        (1, 16, {"all_reduce_buckets": True, "weight_bytes": 4.0}, 8.0),
        (2, 6, {"micro_batches": 2}, 3.5),
        (3, 16, {}, 6.0),
        (3, 6, {}, 4.75),
    ],
)
def test_bytes_a_parameter(stage: int, bits: float, options: dict[str, float], expected: float) -> None:
    assert traffic(stage, bits, MANY, **options).total == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]


def test_bytes_for_few_ranks() -> None:
    """A ring or two hops: 2 (N - 1) / N; nothing for one rank."""
    assert traffic(0, 16, 1).total == 0
    assert traffic(0, 16, 2).total == 2
    assert traffic(0, 6, 4).total == pytest.approx(1.125)


# Tokens a node and step below which a BF16 or 6-bit all-reduce shows: 16 nodes of 3.16 PFLOP/s, 85% of the rate
TOKENS = [("10gbit", 2_792_471, 1_047_176), ("100gbit", 279_247, 104_718), ("800gbit", 34_906, 13_090)]


@pytest.mark.parametrize(("rate", "bf16", "six_bits"), TOKENS)
def test_tokens_from_which_communication_hides(rate: str, bf16: int, six_bits: int) -> None:
    link, flops = Link(parse_rate(rate)), 8 * 989e12 * 0.40
    assert hidden_from_tokens(16, 16, link, flops) == pytest.approx(bf16, rel=2e-3)
    assert hidden_from_tokens(6, 16, link, flops) == pytest.approx(six_bits, rel=2e-3)


def test_that_is_where_the_step_stops_growing() -> None:
    """At the number of tokens given, the all-reduce takes as long as the backward pass."""
    link, flops_per_second, parameters = Link(25e9, latency=0), 3e15, 10**9
    tokens = hidden_from_tokens(16, 16, link, flops_per_second)
    wire = reduction_seconds(parameters, 16, Coding("bf16", 16, two_hop=False), link)
    flops = 6 * parameters * tokens
    assert wire == pytest.approx(flops / flops_per_second * 2 / 3)
    assert step_seconds(flops, flops_per_second, wire) == pytest.approx(flops / flops_per_second)
    assert step_seconds(flops / 2, flops_per_second, wire) > flops / 2 / flops_per_second * 1.3


def test_slow_links_favour_few_bits_and_fast_links_do_not() -> None:
    parameters = 25_000_000
    slow = compare(parameters, 0, 4, Link(100e6))
    assert best(slow).coding.name == "squinch"
    seconds = {row.coding.name: row.seconds for row in slow}
    assert seconds["bf16"] / seconds["squinch"] > 2.4
    fast = compare(parameters, 0, 4, Link(100e9))
    assert best(fast).coding.name in ("fp32", "bf16")
    sharded = {row.coding.name: row.seconds for row in compare(parameters, 1, 4, Link(100e6))}
    assert 1.35 < sharded["bf16"] / sharded["squinch"] < 4 / 2.75


def test_where_coding_is_quick_the_gain_is_that_of_the_bytes() -> None:
    codings = (Coding("bf16", 16, 0.002, 0.002, two_hop=False), Coding("squinch", 6, 0.003, 0.003))
    rows = {row.coding.name: row.seconds for row in compare(8 * 10**9, 0, 16, Link(25e9), codings)}
    assert rows["bf16"] / rows["squinch"] == pytest.approx(16 / 6, rel=0.03)


def test_codec_bound_reductions_cost_the_codec() -> None:
    coding = Coding("slow", 6, encode_ns=1000, decode_ns=500)
    seconds = reduction_seconds(10**6, 4, coding, Link(1e15, latency=0))
    assert seconds == pytest.approx(1e6 * 1e-9 * (1000 * 1.25 + 500 * 2), rel=1e-3)
    assert reduction_seconds(10**6, 1, coding, Link(1e9)) == 0


def test_compute_bound_steps_tie_and_take_the_plain_way() -> None:
    rows = compare(10**6, 0, 4, Link(1e12), flops=1e15, flops_per_second=1e12)
    assert best(rows) is rows[0]
    assert [row.coding for row in rows] == list(CPU_CODINGS)
    assert all(math.isfinite(row.step_seconds) for row in rows)


def test_fp32_at_stage_0_waits_for_the_backward_pass() -> None:
    """A second of computing, and a link on which each code takes a fraction of one."""
    fp32, bf16, *_ = compare(10**7, 0, 4, Link(10e9), flops=1e12, flops_per_second=1e12)
    assert 0.01 < bf16.seconds < fp32.seconds < 0.2
    assert fp32.step_seconds == pytest.approx(1 + fp32.seconds) and bf16.step_seconds == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "rate"), [("25gbit", 25e9), ("100Mbit/s", 1e8), ("1.6tbit", 1.6e12), (" 400 Gbit ", 4e11), ("9bit", 9.0)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "25", "gbit", "-1gbit", "0gbit", "25gbyte"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="25gbit"):
        parse_rate(text)
