"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its stretchings beyond the trained context.

A head's D numbers are D/2 pairs (x[i], x[i + D/2]); a token at position p turns pair i by the angle p * f_i with
f_i = theta^(-2i/D). The product of a turned query and a turned key then depends only on the distance of the two tokens.

Scalings, for a context longer by `factor` than the `original_sequence` the frequencies were trained for:
  linear  f_i / factor (arXiv 2306.15595)
  ntk     theta * factor^(D/(D-2)): the slowest pair slows down by `factor`, the fastest stays ("NTK-aware" scaling)
  llama3  by wavelength 2 pi / f_i: unchanged when short, f_i / factor when long, a linear blend between
          (Llama 3.1; bounds original_sequence / high_freq_factor and original_sequence / low_freq_factor)
  yarn    blend by the number of turns within original_sequence, between beta_fast and beta_slow, and cos and sin
          times 0.1 ln(factor) + 1, the attention temperature (arXiv 2309.00071)
"""

import math

import torch
from torch import Tensor

from lowbit.configs.schema import RopeConfig, RopeScaling

Rope = tuple[Tensor, Tensor]
"""cos and sin, FP32 [B or 1, T, 1, D]: see `rope_tables`."""


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[list[float], float]:
    """Angle a position for each of the D/2 pairs [radians], and the factor on cos and sin (1 but for yarn)."""
    theta = config.theta
    if config.scaling is RopeScaling.ntk:
        theta *= config.factor ** (head_dim / (head_dim - 2))
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if config.scaling is RopeScaling.linear:
        return [f / config.factor for f in plain], 1.0
    if config.scaling is RopeScaling.llama3:
        return [_llama3(f, config) for f in plain], 1.0
    if config.scaling is RopeScaling.yarn:
        return _yarn(plain, config, head_dim), 0.1 * math.log(config.factor) + 1.0
    return plain, 1.0


def _llama3(frequency: float, config: RopeConfig) -> float:
    turns = config.original_sequence * frequency / (2 * math.pi)
    share = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    share = min(max(share, 0.0), 1.0)
    return share * frequency + (1 - share) * frequency / config.factor


def _yarn(plain: list[float], config: RopeConfig, head_dim: int) -> list[float]:
    def pair_with_turns(turns: float) -> float:
        """Pair (as a real number) that turns so often within the original context."""
        return head_dim * math.log(config.original_sequence / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(pair_with_turns(config.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(config.beta_slow)), head_dim - 1)
    span = max(high - low, 0.001)
    blended = []
    for i, frequency in enumerate(plain):
        stretch = min(max((i - low) / span, 0.0), 1.0)
        blended.append(stretch * frequency / config.factor + (1 - stretch) * frequency)
    return blended


def rope_tables(position: Tensor, frequencies: Tensor, factor: float) -> Rope:
    """cos and sin of every angle as `apply_rope` wants them, FP32.

    Args:
        position: integers [B or 1, T]. frequencies: FP32 [D/2]. factor: on both tables.

    Returns:
        (cos, sin), each [B or 1, T, 1, D]: one table for all heads and layers; sin is negative in its first half.
    """
    angle = position.float()[:, :, None, None] * frequencies
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of x [B, T, H, D] (FP32 inside, result in the type of x).

    Written with a roll by D/2, which brings each number its partner, and not with two halves put together again: the
    compiler makes of a roll a second load from the same row, of a concatenation two masked ones for every number.
    """
    wide = x.float()
    return (wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)
