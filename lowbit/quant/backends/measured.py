"""Where FP8 is worth it: a linear layer's forward and backward against BF16, as measured.

Quantising costs time that grows with the matrices' areas, multiplying saves time that grows with their volumes: small
layers lose. A layer stays in BF16 if some measured layer that is at least as large both ways, on the same kind of
device with the same kind of scales, was slower in FP8. What is neither measured nor smaller than something measured
is taken to gain.

`python scripts/bench_quant.py fp8` measures and prints rows for `TABLE`. It is empty so far: what was measured here
before are Transformer Engine's layers (16384 tokens, H200, over BF16: 1.70x and 1.40x at 4096 x 14336 for current and
block scaling, 1.09x and 1.08x at 2048 x 8192), which are not these kernels.
"""

import re
from dataclasses import dataclass

from lowbit.quant.backends.base import Device, Sizes


@dataclass(frozen=True)
class Measured:
    """One layer, forward and backward, with `tokens` rows."""

    device: str
    """Regular expression, searched for in the device's name."""
    scales: str
    """tensor, row or block."""
    in_features: int
    out_features: int
    tokens: int
    speedup: float
    """Time in BF16 over time in FP8."""


TABLE: tuple[Measured, ...] = ()


def loses(device: Device, scales: str, sizes: Sizes, table: tuple[Measured, ...] = TABLE) -> Measured | None:
    """The measurement that says a layer of these sizes should stay in BF16; None if there is none."""
    small, large = sorted((sizes.in_features, sizes.out_features))
    for row in table:
        row_small, row_large = sorted((row.in_features, row.out_features))
        covers = row_small >= small and row_large >= large
        if row.speedup < 1 and covers and row.scales == scales and re.search(row.device, device.name):
            return row
    return None
