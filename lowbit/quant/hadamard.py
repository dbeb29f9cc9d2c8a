"""Random Hadamard rotation: spreads an outlier over its group, and makes rounding errors of a group random.

In groups of n = 16 or 128 along the last dimension, y = H diag(s) x / sqrt(n), with H the Sylvester Hadamard matrix
(entries +1, -1; H H = n) and random signs s. The matrix is orthogonal, so two operands rotated along the dimension
that their product sums over give the same product: (A R)(B R)^T = A B^T. R differs every step, its signs coming from
the counter-based generator, so what a rotation does to one step's error it does not do to the next.

Order of the arithmetic (the same everywhere): multiply by the signs, FP32 butterflies (a, b) -> (a + b, a - b) at
strides 1, 2, 4, ..., n/2, multiply by FP32(n**-0.5), round to BF16.

Sources: P. Suresh et al., "Distributed Mean Estimation with Limited Communication" (2017); A. Tseng et al., "Training
LLMs with MXFP4" (2025); the NVFP4 recipe of arXiv 2509.25149 (16) and Quartet II of arXiv 2601.22813 (128).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.quant.bits import f32, read_bf16, round_to_bf16

SIZES = (16, 128)


def rotate(x: Tensor, signs: Tensor, size: int) -> Tensor:
    """x [..., k] BF16 or FP32 (read as BF16) -> rotated BF16 [..., k padded with zeros to a multiple of `size`].

    `signs`: FP32 of +1 and -1, [size] for all groups or [padded k].

    Raises: ValueError for another size than 16 and 128; TypeError for types other than BF16, FP32.
    """
    groups = _groups(x, size)
    return _finish(_butterfly(groups * signs.reshape(-1, size), size), size, x.shape)


def unrotate(y: Tensor, signs: Tensor, size: int) -> Tensor:
    """The inverse, diag(s) H y / sqrt(n), up to both BF16 roundings. y [..., multiple of size] -> BF16, same shape.

    Raises: as `rotate`.
    """
    return _finish(_butterfly(_groups(y, size), size) * signs.reshape(-1, size), size, y.shape)


def _groups(x: Tensor, size: int) -> Tensor:
    if size not in SIZES:
        raise ValueError(f"Hadamard size {size}: choose one of {SIZES}")
    values = read_bf16(x)
    return _split(F.pad(values, (0, -x.shape[-1] % size)), -1, size)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension in several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _butterfly(x: Tensor, size: int) -> Tensor:
    """x [..., size] -> H x, unscaled."""
    stride = 1
    while stride < size:
        pairs = _split(x, size // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return x


def _finish(x: Tensor, size: int, shape: torch.Size) -> Tensor:
    return round_to_bf16((x * f32(size**-0.5)).flatten(-2)).to(torch.bfloat16)
