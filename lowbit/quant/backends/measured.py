"""Where FP8 is worth it: a linear layer's forward and backward against BF16, as measured.

Quantising costs time that grows with the matrices' areas, multiplying saves time that grows with their volumes: small
layers lose. A layer stays in BF16 if some measured layer that is at least as large both ways, on the same kind of
device with the same kind of scales, was slower in FP8. What is neither measured nor smaller than something measured
is taken to gain.

`TABLE` is empty, so no layer stays in BF16 yet. These kernels were measured at two sizes (docs/RESULTS.md; one H200,
16384 tokens, scales of a tensor, rows, 128-wide blocks, over our own BF16 layer): 1.68, 1.53 and 1.38 at 4096 x 14336,
but 0.96, 0.97 and 0.98 at 2048 x 8192. That loss is no row here, because it is the host's: products take half of the
time there, the rest is Python that launches kernels for one layer alone, which a whole step may hide behind other work.
`python scripts/bench_quant.py fp8 --table` measures and prints rows.
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
