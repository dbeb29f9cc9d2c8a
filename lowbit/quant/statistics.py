"""What quantising does to the operands of each layer: error, clipping, underflow, range, and weights about to flip.

For an operand x [rows, k] with its quantised value Q(x), element scales s and the format's largest number m:

    relative_mse      sum (Q(x) - x)^2 / sum x^2           0.009 for NVFP4 on Gaussian data, 0.0007 for MXFP8
    clipped_share     of elements with |x| > m s           more than the largest number their scale leaves room for
    underflow_share   of elements x != 0 with Q(x) = 0
    amax              max |x|
    oscillation_risk  of weights within a tenth of the way of an edge between two grid values: about 0.1, more where
                      weights gather at edges, as those do that oscillate (see `stabilisers.oscireset`)

x is the operand as its quantiser reads it: in BF16, rotated if the product is, without its mean if that is split off,
without the channels that OutControl retains. Under MS-EDEN s is the corrected scale, so that some elements count as
clipped that were not.

Weights are measured where they lie. Inputs and gradients pass by in one forward (and backward) pass on a few sequences
that is made for the purpose, uncompiled (`measuring`). Steps without it cost nothing, and nothing is added to compiled
code. Experts are not measured.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import Tensor

from lowbit.quant.bits import read_bf16
from lowbit.quant.hadamard import rotate
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.linear_products import split_mean
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.policy import Operand, ProductPolicy
from lowbit.quant.product import signs_of
from lowbit.quant.quantise import Memory, quantise_values
from lowbit.quant.spec import FOUR_OVER_SIX, QuantSpec
from lowbit.quant.stabilisers.grid import edge_nearness, forward_value
from lowbit.quant.stabilisers.masters import block_counts
from lowbit.quant.taps import listening

NAMES = ("relative_mse", "clipped_share", "underflow_share", "amax", "oscillation_risk")
AT_EDGE = 0.9
"""Distance from a grid value, of that to the bin's edge."""
ROUNDING = 1 + 2.0**-20
"""What FP32 may lose between a block's amax and m times its scale."""


def measure(
    x: Tensor,
    spec: QuantSpec,
    stream: Stream | None = None,
    memory: Memory | None = None,
    amax: Tensor | None = None,
    risk: bool = False,
) -> Tensor:
    """x [rows, k], BF16 or FP32, ready for its quantiser -> FP64 [5] in the order of `NAMES`; no `risk`: NaN.

    memory, amax: see `quantise_values`.
    """
    values = quantise_values(x, spec, stream, memory, amax)
    exact, value, scale = read_bf16(x), forward_value(values).float(), values.grid()[1]
    energy = exact.square().sum(dtype=torch.float64)
    error = (value - exact).square().sum(dtype=torch.float64) / torch.where(energy > 0, energy, 1.0)
    clipped = share(exact.abs() > spec.element.max * ROUNDING * scale)
    underflow = share((exact != 0) & (value == 0))
    at_edge = share(edge_nearness(x, values) >= AT_EDGE) if risk else torch.full_like(error, float("nan"))
    return torch.stack([error, clipped, underflow, exact.abs().amax().double(), at_edge])


def share(mask: Tensor) -> Tensor:
    """Of elements that are true, FP64 scalar."""
    return mask.sum(dtype=torch.float64) / mask.numel()


def weight_statistics(layer: LowbitLinear) -> Tensor | None:
    """Of W in the forward product; None where it is not quantised."""
    spec = layer.policy.fprop.right.spec
    weight, memory = _ordinary(layer, layer.effective().detach()), None
    if layer.choice is not None and spec is not None and spec.rounding in FOUR_OVER_SIX:
        rows, columns = block_counts(weight.shape[0], weight.shape[1], spec)
        memory = Memory(layer.choice[:rows, :columns], 1.0)
    return _measure_factor(layer, weight, Product.FPROP, Side.RIGHT, memory, risk=True)


def input_statistics(layer: LowbitLinear, x: Tensor) -> Tensor | None:
    """Of X [..., in] in the forward product; None where it is not quantised."""
    rows = _ordinary(layer, x.detach().reshape(-1, x.shape[-1]))
    rows = split_mean(rows)[1] if layer.policy.mean_split else rows
    return _measure_factor(layer, rows, Product.FPROP, Side.LEFT, amax=layer.input_range)


def gradient_statistics(layer: LowbitLinear, grad: Tensor) -> Tensor | None:
    """Of dY [..., out] in dgrad, or of dY^T in wgrad where dgrad is not quantised; None where neither is."""
    rows = grad.detach().reshape(-1, grad.shape[-1])
    if layer.policy.dgrad.left.spec is None:
        return _measure_factor(layer, rows.t().contiguous(), Product.WGRAD, Side.LEFT)
    return _measure_factor(layer, rows, Product.DGRAD, Side.LEFT)


def _ordinary(layer: LowbitLinear, matrix: Tensor) -> Tensor:
    """[rows, in] without the channels that OutControl retains."""
    if layer.retained is None or not layer.retained.applies(layer.policy):
        return matrix
    return matrix.index_select(1, layer.retained.ordinary)


def _measure_factor(
    layer: LowbitLinear,
    x: Tensor,
    product: Product,
    side: Side,
    memory: Memory | None = None,
    amax: Tensor | None = None,
    risk: bool = False,
) -> Tensor | None:
    """A factor as the layer makes it: rotated, with its own noise."""
    policy: ProductPolicy = getattr(layer.policy, product.name.lower())
    operand: Operand = policy.left if side is Side.LEFT else policy.right
    if operand.spec is None or x.numel() == 0:
        return None
    stream = Stream(layer.key, layer.clock, product, side)
    signs = signs_of(stream, policy.rotation, policy.signs)
    if signs is not None:
        x = rotate(x, signs, policy.rotation)
    return measure(x, operand.spec, stream, memory, amax, risk)


@contextmanager
def measuring(layers: Mapping[str, LowbitLinear]) -> Iterator[dict[str, Tensor]]:
    """Measures what passes through the layers (by name) inside: `<layer>/input`, `<layer>/gradient` -> statistics.

    Layers that read one input together have its statistics under the first one's name.
    """
    found: dict[str, Tensor] = {}

    def note(name: str, statistics: Tensor | None) -> None:
        if statistics is not None:
            found[name] = statistics

    def on_input(names: list[str], x: Tensor) -> None:
        note(f"{names[0]}/input", input_statistics(layers[names[0]], x))

    def on_gradient(name: str, grad: Tensor) -> None:
        note(f"{name}/gradient", gradient_statistics(layers[name], grad))

    with listening(layers, on_input, on_gradient):
        yield found


def as_row(found: Mapping[str, Tensor]) -> dict[str, float]:
    """`<layer>/<operand>` -> statistics, as metrics `quant/<layer>/<operand>/<statistic>`; one look at the device."""
    if not found:
        return {}
    table: list[list[float]] = torch.stack(list(found.values())).tolist()
    return {
        f"quant/{name}/{statistic}": value
        for name, values in zip(found, table, strict=True)
        for statistic, value in zip(NAMES, values, strict=True)
        if statistic != NAMES[-1] or name.endswith("/weight")
    }


def means(row: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Operand -> statistic -> the mean over layers (the largest for amax)."""
    collected: dict[str, dict[str, list[float]]] = {}
    for key, value in row.items():
        path, _, statistic = key.rpartition("/")
        if statistic in NAMES:
            operand = path.rpartition("/")[2]
            collected.setdefault(operand, {}).setdefault(statistic, []).append(value)
    return {
        operand: {name: max(values) if name == "amax" else fmean(values) for name, values in by_name.items()}
        for operand, by_name in collected.items()
    }
