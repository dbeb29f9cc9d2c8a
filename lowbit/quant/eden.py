"""MS-EDEN: round to nearest, then correct each rotation group's length through its scale bytes.

Rounding a rotated vector x to nearest gives v with <x, v> a little off <x, x>. Over random rotations the error v - x
has a component along x and, by symmetry, nothing else in expectation. EDEN (S. Vargaftik et al., 2022) removes that
component by scaling v with c = <x, x> / <x, v>: then <x, c v> = <x, x> for every draw, and E[c v] = x. No element is
rounded at random, so the error is about half of stochastic rounding's (relative MSE 9.7e-3 against 21e-3 on Gaussian
data).

The factor must live in the block scales, which are E4M3: each scale of the group becomes SR(scale * c), rounded
stochastically, hence unbiased (arXiv 2601.22813, Quartet II).

Which inner product? x is the rotated group of 128, in real units. Quartet II's reference code takes the dot products of
y = x / scale, which weighs each 16-block by 1 / scale**2: blocks with small maxima count for too much, <x, c v> is no
longer <x, x>, and a bias of -5.7e-4 remains. `Rounding.MS_EDEN` uses x and v themselves, at the same error: what is
left is at most -3.1e-5 +- 2.1e-5 on a trained model's numbers and 1.2e-4 +- 0.6e-4 on Gaussian ones, within two
deviations of nothing (docs/RESULTS.md, docs/numerics.md). The published weighting is kept, for comparison, as
`Rounding.MS_EDEN_PUBLISHED`.

Order: under a power-of-two outer scale x / outer has 8 significant bits and v = q * scale has 6, so every product of
the dots is exact in FP32; they are added by halving. Under an FP32 outer scale the dots are FP64, for range.
"""

import torch
from torch import Tensor

from lowbit.quant.bits import divide, tree_sum
from lowbit.quant.formats import E4M3
from lowbit.quant.rounding import round_stochastic
from lowbit.quant.spec import OUTER_BLOCK


def corrected_scale(scale: Tensor, correction: Tensor, noise: Tensor) -> Tensor:
    """SR(scale * correction) on the E4M3 grid.

    scale [rows, 1, blocks, 1] and noise of that shape; correction [rows, groups, 1].
    """
    per_block = correction.expand(-1, -1, scale.shape[2] // correction.shape[1]).reshape(scale.shape)
    return round_stochastic(scale * per_block, E4M3, noise)


def correction(x: Tensor, v: Tensor) -> Tensor:
    """c = <x, x> / <x, v> of each group of 128, FP32 [rows, groups, 1]; 1 where <x, v> is 0.

    x and v [rows, 1, blocks, 16] in the same units, both FP32 or both FP64.
    """
    x = x.reshape(x.shape[0], -1, OUTER_BLOCK)
    v = v.reshape(x.shape)
    top, bottom = tree_sum(x * x), tree_sum(x * v)
    return torch.where(bottom == 0, 1.0, divide(top, torch.where(bottom == 0, 1.0, bottom)))
