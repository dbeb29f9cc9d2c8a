"""Products whose last part is left to whoever reads them.

A product may be there as several sums that are still to be added, and with a scale that is still to be multiplied by.
Where the next kernel reads it once, that one does both, and a launch is saved; `written_out` is what it computes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Unfinished(NamedTuple):
    """`parts.sum(0) * after`, rounded to `dtype`."""

    parts: Tensor
    """[parts, rows, columns], added in their order: FP32, or a single one in `dtype`. Any stride but of columns."""
    after: Tensor | None
    """FP32 [1, 1] or [columns, 1]; None: 1."""
    dtype: torch.dtype

    @classmethod
    def of(cls, whole: Tensor) -> "Unfinished":
        """[rows, columns] of which nothing is left."""
        return cls(whole[None], None, whole.dtype)

    @property
    def kind(self) -> int:
        """Of `after`: 0 none, 1 one number, 2 one a column."""
        return 0 if self.after is None else 1 if self.after.numel() == 1 else 2

    @property
    def finished(self) -> bool:
        """Whether nothing is left."""
        return self.after is None and len(self.parts) == 1

    def split(self, sizes: Sequence[int]) -> "tuple[Unfinished, ...]":
        """By columns."""
        many = list(sizes)
        afters = [self.after] * len(many) if self.after is None or self.kind == 1 else torch.split(self.after, many)
        parts = torch.split(self.parts, many, dim=-1)
        return tuple(Unfinished(part, after, self.dtype) for part, after in zip(parts, afters, strict=True))

    def written_out(self) -> Tensor:
        """[rows, columns]."""
        total = self.parts[0]
        for part in self.parts[1:]:
            total = total + part
        if self.after is not None:
            total = total.float() * self.after.t()
        return total.to(self.dtype)
