"""Where a tensor lies on its quantiser's grid: what the forward pass computes with, and distances to bin edges."""

import torch
from torch import Tensor

from lowbit.quant.bits import MAGNITUDE, MANTISSA, pattern, power_of_two
from lowbit.quant.formats import ElementFormat
from lowbit.quant.product import Factor
from lowbit.quant.quantised import Values


def forward_value(values: Factor) -> Tensor:
    """What a product computes with, of the tensor's shape: the operand, times what comes after the product.

    BF16 where nothing comes after, FP32 otherwise.
    """
    operand, after = values.operand(), values.after()
    return operand if after is None else operand.float() * after


def gaps(grid: Tensor, fmt: ElementFormat) -> tuple[Tensor, Tensor]:
    """Distances of a grid value's magnitude from the next larger and the next smaller one, FP32, same shape.

    Beyond the largest value, and around zero, the step goes on as it is.
    """
    magnitude = pattern(grid) & MAGNITUDE
    least = 128 - fmt.bias  # exponent field of the smallest normal number
    field = (magnitude >> 23).clamp(min=least)
    step = power_of_two(field - (127 + fmt.mantissa_bits))
    first_of_binade = ((magnitude & MANTISSA) == 0) & (field > least)
    return step, torch.where(first_of_binade, 0.5 * step, step)


def bin_width(grid: Tensor, fmt: ElementFormat) -> Tensor:
    """The width of the bin that rounds to a grid value, FP32, same shape.

    E2M1: 0.5 for magnitudes 0, 0.5, 1 and 1.5, then 0.75 for 2, 1 for 3, 1.5 for 4 and 2 for 6.
    """
    outward, inward = gaps(grid, fmt)
    return 0.5 * (outward + inward)


def off_centre(x: Tensor, values: Values) -> Tensor:
    """|x/s - q| / bin_width(q), FP32 of the shape of x; 0 in blocks whose scale is 0.

    TetraJet-v2's measure. Bins of 2 and 4 are not symmetric: their edges lie at 1/3 and 2/3, the others' at 1/2.
    """
    grid, scale = values.grid()
    distance = (x.float() - grid * scale).abs() / (scale * bin_width(grid, values.spec.element))
    return torch.where(scale > 0, distance, 0.0)


def edge_nearness(x: Tensor, values: Values) -> Tensor:
    """How far x lies from its grid value towards the bin's edge on its side, FP32: 0 in the middle, 1 at the edge.

    0 where there is no edge: beyond the largest value, and in blocks whose scale is 0.
    """
    fmt = values.spec.element
    grid, scale = values.grid()
    off = x.float() - grid * scale
    larger = torch.where(grid == 0, True, (off > 0) == (grid > 0))
    outward, inward = gaps(grid, fmt)
    distance = off.abs() / (scale * 0.5 * torch.where(larger, outward, inward))
    return torch.where((scale > 0) & ~(larger & (grid.abs() == fmt.max)), distance, 0.0)
