"""A score for loss spikes."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Self


class SpikeScore:
    """How many standard deviations the latest loss lies above the mean of the last 128 before it.

    A healthy run stays within a few; 6 and more is a spike. The score is None until 16 losses are known, and so is
    that of a loss that is not finite, which is not remembered either.
    """

    WINDOW = 128
    ENOUGH = 16

    def __init__(self, losses: list[float] | None = None) -> None:
        self._losses: deque[float] = deque(losses or [], maxlen=self.WINDOW)

    def update(self, loss: float) -> float | None:
        """Score `loss` against those before it, then remember it."""
        if not math.isfinite(loss):
            return None
        score = self._score(loss) if len(self._losses) >= self.ENOUGH else None
        self._losses.append(loss)
        return score

    def _score(self, loss: float) -> float:
        count = len(self._losses)
        mean = math.fsum(self._losses) / count
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in self._losses) / count)
        if loss == mean:
            return 0.0
        return (loss - mean) / max(deviation, 1e-12 * max(abs(mean), 1e-300))  # all alike: any change stands out

    def as_dict(self) -> dict[str, list[float]]:
        """State for a checkpoint, plain JSON."""
        return {"losses": list(self._losses)}

    @classmethod
    def from_dict(cls, state: Mapping[str, list[float]]) -> Self:
        """The score as it was when `as_dict` was called."""
        return cls(list(state["losses"]))
