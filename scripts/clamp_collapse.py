"""The collapse that dynamic clamping is there to prevent: a table, and a picture for docs/models.md.

    python scripts/clamp_collapse.py [--steps 300] [--out docs/images/clamp_collapse.png]

A squared-ReLU network, down(relu(up(x))^2), learns in INT8 what another one of the same shape computes, from inputs of
unit RMS. Both begin with weights `up` of the same scale: 1 gives up(x) a standard deviation of 1, and a fixed bound,
4, is made for that. The other bound follows the weights (`quant/stabilisers/clamp.py`). For each scale: the share of
positive activations whose square rounds to zero at the start, and the error after training, ||y - t||^2 / ||t||^2 on
inputs not seen before, beside the same network in FP32.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from measure import write
from torch import Tensor
from torch.nn import functional as F

from lowbit.configs.schema import ClampConfig
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.presets import PRESETS
from lowbit.quant.stabilisers.clamp import Clamp, install

WIDTH, HIDDEN, BATCH = 64, 256, 256
TUNED = 4.0
SCALES = (1.0, 0.5, 0.25, 0.125, 0.0625)
WAYS = ("fixed", "dynamic", "FP32")


class Figures(NamedTuple):
    """Of one network."""

    zeros: float
    """Share of positive activations whose square is zero, before training."""
    error: float
    """After training."""


def weights(scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """up [HIDDEN, WIDTH] and down [WIDTH, HIDDEN] for outputs about as large at every scale."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(HIDDEN, WIDTH, generator=generator) * scale * WIDTH**-0.5
    return up, torch.randn(WIDTH, HIDDEN, generator=generator) * HIDDEN**-0.5 / scale**2


def learn(way: str, scale: float, steps: int, lr: float = 0.01) -> Figures:
    """Train one network; `lr` is relative to the size of the weights, for AdamW's steps do not know it."""
    target_up, target_down = weights(scale, 1)
    layers = [
        LowbitLinear(d_in, d_out, PRESETS["int8"], make_key(1, name), make_clock())
        for d_in, d_out, name in ((WIDTH, HIDDEN, "up"), (HIDDEN, WIDTH, "down"))
    ]
    with torch.no_grad():
        for layer, start in zip(layers, weights(scale, 2), strict=True):
            layer.weight.copy_(start)
    up, down = layers
    site = install("mlp", up, torch.ones(WIDTH), down)
    clamp = Clamp(ClampConfig(enabled=True), [site])
    site.square.bound.fill_(TUNED)
    down.fix_input_amax(site.square.bound * site.square.bound)
    sizes = [float(layer.weight.detach().square().mean().sqrt()) for layer in layers]
    groups = [{"params": [layer.weight], "lr": lr * size} for layer, size in zip(layers, sizes, strict=True)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    generator = torch.Generator().manual_seed(3)

    def inputs() -> Tensor:
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def through(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """up(x), its square, y."""
        if way == "FP32":
            h = F.linear(x, up.weight)
            square = h.relu().square()
            return h, square, F.linear(square, down.weight)
        h = up(x)
        square = site.square(h)
        return h, square, down(square)

    def positive_zeros(x: Tensor) -> float:
        h, square, _ = through(x)
        return float((square[h > 0] == 0).float().mean())

    def error(x: Tensor) -> Tensor:
        y = through(x)[-1]
        target = F.linear(F.linear(x, target_up).relu().square(), target_down)
        return (y - target).square().sum() / target.square().sum()

    zeros = float("nan")
    for step in range(steps):
        if way == "dynamic":
            clamp.update()
        x = inputs()
        if step == 0:
            with torch.no_grad():
                zeros = positive_zeros(x)
        optimizer.zero_grad()
        error(x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if way == "dynamic":
        clamp.update()
    with torch.no_grad():
        return Figures(zeros, sum(float(error(inputs())) for _ in range(4)) / 4)


def draw(found: dict[str, dict[float, Figures]], out: Path) -> None:
    """Two panels against the scale of the weights: zeros before training, error after it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4))
    for way, by_scale in found.items():
        scales = sorted(by_scale)
        for panel, values in zip(axes, zip(*(by_scale[scale] for scale in scales), strict=True), strict=True):
            panel.plot(scales, values, marker="o", label=way)
    for panel, label in zip(axes, ("positive activations that round to zero", "error after training"), strict=True):
        panel.set(xlabel="standard deviation of up(x) at the start", ylabel=label, xscale="log", ylim=(0, 1.1))
        panel.set_xticks(SCALES, [f"1/{round(1 / scale)}" if scale < 1 else "1" for scale in SCALES])
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes[0].legend(title="bound")
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[float, Figures]]:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description="INT8 squared-ReLU networks with fixed and with dynamic bounds.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scales", type=float, nargs="+", default=list(SCALES))
    parser.add_argument("--out", type=Path, default=Path("clamp_collapse.png"))
    args = parser.parse_args(arguments)
    found: dict[str, dict[float, Figures]] = {way: {} for way in WAYS}
    for way, by_scale in found.items():
        for scale in args.scales:
            by_scale[scale] = learn(way, scale, args.steps)
            print(f"{way:<8} scale {scale:<7} zeros {by_scale[scale].zeros:6.1%}  error {by_scale[scale].error:.4f}")
    rows = [{"bound": way, "scale": s, **f._asdict()} for way, by_scale in found.items() for s, f in by_scale.items()]
    write(args.out.with_suffix(".json"), {"rows": rows})
    draw(found, args.out)
    print(f"picture: {args.out}")
    return found


if __name__ == "__main__":
    main()
