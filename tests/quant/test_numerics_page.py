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
    [("FP8_BLOCK", "MXFP8"), ("MXFP8_FLOOR", "MXFP8"), ("MXFP4_FLOOR", "MXFP4"), ("NVFP4_TETRAJET", "NVFP4")],
)
def test_what_the_page_leaves_out_has_the_numbers_of_its_neighbour(name: str, neighbour: str) -> None:
    x = block()
    assert torch.equal(fake_quantise(x, SPECS[name])[0, :16], fake_quantise(x, SPECS[neighbour])[0, :16])


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
