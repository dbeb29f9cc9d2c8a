"""What each format costs in accuracy: a table for docs/numerics.md and a picture, every format's error and bias.

    python scripts/format_error.py                                     # prints the table
    python scripts/format_error.py --out docs/images/format_error.png  # and draws the picture

Error: ||q(x) - x||^2 / ||x||^2 of a 512 x 512 tensor of BF16 numbers, mean over 16 tensors: of Gaussian numbers, of
Laplace's and of Student's t with three degrees of freedom (tails as heavy as x^-4). Bias: <x, q(x)> / <x, x> - 1, mean
over the rows' groups of 128 Gaussian numbers, with its standard deviation. MS-EDEN is measured as it is used, on
rotated numbers. Everything runs on the CPU, and the seeds are fixed.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.quant.hadamard import rotate
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import quantise_values
from lowbit.quant.spec import EDEN, SPECS, QuantSpec

TENSORS, SIDE, GROUP = 16, 512, 128
DATA = ("Gaussian", "Laplace", "Student t(3)")


class Figures(NamedTuple):
    """Of one format."""

    spec: QuantSpec
    errors: dict[str, float]
    bias: float
    deviation: float


def tensors(kind: str) -> Iterator[Tensor]:
    """FP32 tensors [512, 512] whose numbers BF16 holds."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(TENSORS):
        x = torch.randn(SIDE, SIDE, generator=generator)
        if kind == "Laplace":
            u = torch.rand(SIDE, SIDE, generator=generator) - 0.5
            x = -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.4999999))
        elif kind == "Student t(3)":
            x = x / (torch.randn(3, SIDE, SIDE, generator=generator).square().sum(0) / 3).sqrt()
        yield x.bfloat16().float()


def through(x: Tensor, spec: QuantSpec, step: int) -> tuple[Tensor, Tensor]:
    """x [rows, columns] -> what the quantiser read and what it made of that, FP64, not rounded to BF16."""
    stream = Stream(make_key(1, "format_error"), make_clock(step), Product.DGRAD, Side.LEFT)
    signs = stream.signs(GROUP) if spec.rounding in EDEN else None
    read = x if signs is None else rotate(x, signs, GROUP)
    values = quantise_values(read, spec, stream)
    after = values.after()
    return read.double(), values.operand().double() * (1.0 if after is None else after.double())


def measure(spec: QuantSpec) -> Figures:
    """Errors on all data, bias on Gaussian."""
    errors, slopes = {}, []
    for kind in DATA:
        found = []
        for step, x in enumerate(tensors(kind)):
            exact, made = through(x, spec, step)
            found.append(float((made - exact).square().sum() / exact.square().sum()))
            if kind == "Gaussian":
                e, m = exact.reshape(-1, GROUP), made.reshape(-1, GROUP)
                slopes.append((e * (m - e)).sum(1) / e.square().sum(1))
        errors[kind] = sum(found) / len(found)
    slope = torch.cat(slopes)
    return Figures(spec, errors, slope.mean().item(), slope.std().item() / math.sqrt(len(slope)))


def table(rows: list[Figures]) -> list[str]:
    """Markdown."""
    lines = [f"| format | bits | {' | '.join(DATA)} | bias |", "|---|---|" + "---|" * len(DATA) + "---|"]
    for row in rows:
        errors = " | ".join(f"{1e3 * row.errors[kind]:.3g}" for kind in DATA)
        lines.append(
            f"| {row.spec.name} | {row.spec.bits:.4g} | {errors} | {1e3 * row.bias:+.2f} ± {1e3 * row.deviation:.2f} |"
        )
    return lines


def draw(rows: list[Figures], out: Path) -> None:
    """A line for each format, a mark for each kind of data; to the right the bias."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    errors, biases = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    places = range(len(rows))
    for kind, marker in zip(DATA, "osD", strict=True):
        errors.plot([row.errors[kind] for row in rows], places, marker, label=kind, markersize=5, alpha=0.8)
    errors.set_xscale("log")
    errors.set_xlabel("relative squared error")
    errors.set_yticks(places, [f"{row.spec.name}  {row.spec.bits:.4g} bits" for row in rows], fontsize=8)
    errors.legend()
    ours = ["tab:red" if abs(row.bias) > 4 * row.deviation else "tab:green" for row in rows]
    biases.barh(places, [1e3 * row.bias for row in rows], color=ours)
    biases.set_xscale("symlog", linthresh=1)
    biases.set_xlabel("bias, thousandths (green: none)")
    for axes in (errors, biases):
        axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = sorted(map(measure, SPECS.values()), key=lambda row: (-row.spec.bits, row.errors["Gaussian"]))
    print("\n".join(table(rows)))
    if out is not None:
        draw(rows, out)


if __name__ == "__main__":
    main()
