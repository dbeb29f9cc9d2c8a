"""The numbers of docs/numerics.md are what the quantisers make of its block."""

import re
from pathlib import Path

import pytest
import torch
from format_error import measure

from lowbit.quant.quantise import fake_quantise
from lowbit.quant.spec import SPECS

PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\w+) \| ([\d.]+) \| [^|]+ \| ([-\d. ]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)


def block() -> torch.Tensor:
    """The page's row of 128."""
    [line] = re.findall(r"^    ([-\d. ]+)$", PAGE, re.MULTILINE)
    return torch.cat([torch.tensor([float(x) for x in line.split()]), torch.linspace(-1, 1, 112)])[None]


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) == 10
    assert block().shape == (1, 128)


@pytest.mark.parametrize("name, bits, values, error", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_what_the_quantiser_makes(name: str, bits: str, values: str, error: str) -> None:
    spec, x = SPECS[name], block()
    made = fake_quantise(x, spec)[0, :16].float()
    assert [float(v) for v in values.split()] == pytest.approx(made.tolist(), abs=6e-5)
    assert float(error) == pytest.approx(((made - x[0, :16].bfloat16().float()) ** 2).sum().item(), abs=6e-5)
    assert float(bits) == spec.bits


@pytest.mark.parametrize(
    ("name", "neighbour"),
    [
        ("FP8_BLOCK", "MXFP8"),
        ("FP8_BLOCK_2D", "FP8_BLOCK"),
        ("FP8_TENSOR", "FP8_ROW"),
        ("NVFP4_TETRAJET", "NVFP4"),
        ("NVFP4_ROW", "NVFP4"),
        ("NVFP4_2D", "NVFP4"),
        *((name, name.removesuffix("_FLOOR")) for name in SPECS if name.endswith("_FLOOR")),
    ],
)
def test_what_the_page_leaves_out_has_the_numbers_of_its_neighbour(name: str, neighbour: str) -> None:
    x = block()
    assert torch.equal(fake_quantise(x, SPECS[name])[0, :16], fake_quantise(x, SPECS[neighbour])[0, :16])


def test_every_format_is_in_the_example_or_among_what_it_leaves_out() -> None:
    [left_out] = re.findall(r"^Not in the table, because(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    known = {row[0] for row in ROWS} | set(re.findall(r"\w+", left_out))
    ends = tuple(re.findall(r"`(_\w+)`", left_out))
    random = {name for name, spec in SPECS.items() if spec.stochastic}
    assert ends == ("_FLOOR", "_SR", "_EDEN")
    assert [name for name in SPECS if name not in known and not name.removesuffix("_PUBLISHED").endswith(ends)] == []
    assert {name for name in SPECS if name.removesuffix("_PUBLISHED").endswith(ends[1:])} == random
    [error] = re.findall(r"NVFP4_46\s+is [^(]+\(error ([\d.]+)\)", left_out)
    x = block()
    made = fake_quantise(x, SPECS["NVFP4_46"]).float()
    assert float(error) == pytest.approx(((made - x.bfloat16().float()) ** 2)[0, :16].sum().item(), abs=6e-5)


def test_what_heavy_tails_cost() -> None:
    """The ratios that the page names."""
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| ", PAGE, re.MULTILINE)
    grows = {name: float(tails) / float(gaussian) for name, gaussian, tails in rows}
    order = sorted(grows, key=lambda name: -grows[name])
    assert order[:3] == ["INT8_ROW", "NVFP4_2D", "MXFP4"]
    assert [round(grows[name], 1) for name in order[:3]] == [9.0, 2.6, 1.7]
    assert all(grows[name] < 1.07 for name in grows if name.startswith(("NVFP4", "FP8_")) and name != "NVFP4_2D")


@pytest.mark.parametrize("name", ["NVFP4_POW2_46", "NVFP4_POW2_EDEN", "MXFP8"])
def test_the_table_of_errors_is_what_its_script_measures(name: str) -> None:
    found = re.findall(
        rf"^\| {name} \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([-+\d.]+) ± ", PAGE, re.MULTILINE
    )
    [row] = [[float(number) for number in numbers] for numbers in found]
    made = measure(SPECS[name])
    assert row[:3] == pytest.approx([1e3 * error for error in made.errors.values()], rel=0.01)
    assert row[3] == pytest.approx(1e3 * made.bias, abs=0.01)


def test_every_format_is_in_the_table_of_errors() -> None:
    assert set(re.findall(r"^\| (\w+) \|.* ± ", PAGE, re.MULTILINE)) == set(SPECS)
