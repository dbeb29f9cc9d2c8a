"""The report: patterns that a shell expands to the names, and rows that say what the policy says."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.quant.backends.base import bind
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.report import collapse, report

LAYERS = [f"blocks.{i}.{part}" for i in range(4) for part in ("attention.q", "attention.k", "attention.out", "mlp.up")]


def expanded(pattern: str) -> list[str]:
    """What bash makes of a pattern: the oracle."""
    return subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["blocks.0.mlp.up"], "blocks.0.mlp.up"),
        (["blocks.0.mlp.up", "blocks.1.mlp.up"], "blocks.{0,1}.mlp.up"),
        (LAYERS, "blocks.{0..3}.{attention.{q,k,out},mlp.up}"),
        ([f"blocks.{i}.mlp.up" for i in (0, 1, 2, 3, 7, 9, 10)], "blocks.{{0..3},7,9,10}.mlp.up"),
        (LAYERS[:-1], "blocks.{{0..2}.{attention.{q,k,out},mlp.up},3.attention.{q,k,out}}"),
    ],
)
def test_patterns(names: list[str], pattern: str) -> None:
    assert collapse(names) == pattern
    assert sorted(expanded(pattern)) == sorted(names)


@settings(max_examples=25, deadline=None)
@given(
    st.sets(
        st.sampled_from([f"blocks.{i}.{p}" for i in range(12) for p in ("a.q", "a.k", "m.up", "m.down")]), min_size=1
    )
)
def test_a_shell_expands_every_pattern_to_the_names(names: set[str]) -> None:
    assert sorted(expanded(collapse(sorted(names)))) == sorted(names)


def test_rows_of_nvfp4() -> None:
    made = report(dict.fromkeys(LAYERS, PRESETS["nvfp4"]), "bf16", "some device")
    assert [(r.product, r.operand, r.format, r.bits, r.runs) for r in made.rows] == [
        ("fprop", "X", "NVFP4_POW2_46", 4.75, "emulated"),
        ("fprop", "W", "NVFP4_POW2_46", 4.75, "emulated"),
        ("dgrad", "dY", "NVFP4_POW2_EDEN", 4.75, "emulated"),
        ("dgrad", "W^T", "NVFP4_POW2_EDEN", 4.75, "emulated"),
        ("wgrad", "dY^T", "NVFP4_POW2_EDEN", 4.75, "emulated"),
        ("wgrad", "X^T", "NVFP4_POW2_EDEN", 4.75, "emulated"),
    ]
    assert {r.count for r in made.rows} == {16} and made.runs == "emulated" and made.quantised
    assert [r.note for r in made.rows] == [
        *("", "", "rotation 128, fresh signs", "rotation 128, fresh signs, of the dequantised W"),
        *("rotation 128, fresh signs", "rotation 128, fresh signs, of the dequantised X"),
    ]
    text = made.table()
    assert "blocks.{0..3}.{attention.{q,k,out},mlp.up} (16 layers)" in text
    assert "kept for the backward pass: Q(X) in NVFP4_POW2_46, 4.75 bits an element" in text
    assert made.as_dict()["rows"][0]["format"] == "NVFP4_POW2_46"


def test_what_stays_high_is_named_as_it_computes() -> None:
    policies = dict.fromkeys(LAYERS[:12], PRESETS["nvfp4_w4a16"]) | dict.fromkeys(LAYERS[12:], LinearPolicy())
    made = report(policies, "fp32", "a CPU")
    rows = [(r.layers, r.operand, r.format, r.bits, r.runs) for r in made.rows]
    assert rows[0][1:] == ("X", "FP32", 32.0, "emulated") and rows[1][1:] == ("W", "NVFP4_46", 4.5, "emulated")
    assert rows[2][1:] == ("dY", "FP32", 32.0, "native")
    assert rows[6] == ("blocks.3.{attention.{q,k,out},mlp.up}", "X", "FP32", 32.0, "native")
    assert "FP32 in all three products, native" in made.table()


def test_a_backend_is_said() -> None:
    policy = bind(PRESETS["fp8_row"], "fp8", "fp8", "fp8")
    made = report({"blocks.0.mlp.up": policy}, "bf16", "a GPU")
    text = made.table().partition("\nembeddings")[0]
    assert made.runs == "native" and "emulated" not in text and text.count("native (fp8)") == 6
    mixed = report({"blocks.0.mlp.up": bind(policy, "fp8", "fp8", "emulated")}, "bf16", "a GPU")
    assert (
        mixed.runs == "native and emulated" and [r.how for r in mixed.rows] == ["native (fp8)"] * 4 + ["emulated"] * 2
    )


def test_remarks_are_said_of_their_layers_and_part_groups() -> None:
    policies = dict.fromkeys(LAYERS[:8], PRESETS["fp8_row"])
    made = report(policies, "bf16", "a GPU", remarks={LAYERS[0]: ["because"]})
    assert made.remarks == (("blocks.0.attention.q", "because"),) and len(made.kept) == 2
    lines = made.table().splitlines()
    assert lines[0].startswith("blocks.0.attention.q (1 layers)") and lines.index("  because") < 10
    assert made.as_dict()["remarks"] == [["blocks.0.attention.q", "because"]]


def test_nothing_quantised() -> None:
    made = report(dict.fromkeys(LAYERS, LinearPolicy()), "bf16", "a GPU")
    assert not made.quantised and made.runs == "native"
    assert made.table().splitlines()[-1] == "embeddings, norms, attention, LM head: BF16"
