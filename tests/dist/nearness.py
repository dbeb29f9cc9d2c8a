"""Whether two trainings that add up the same numbers in another order ended at the same place."""

from typing import Any

import torch
from torch import Tensor

from lowbit.trainer import client_optimizer, muon

STEP = 1e-3
"""About what a step of these tests moves a weight by."""


def exact_muon() -> None:
    """Muon's products in FP32 from here on: in BF16 a last bit of a gradient becomes 0.4% of a direction."""
    for module in (muon, client_optimizer):
        vars(module)["product_dtype"] = in_fp32


def in_fp32(device: torch.device) -> torch.dtype:
    """In place of `muon.product_dtype`."""
    return torch.float32


def assert_near(
    found: dict[str, Tensor], wanted: dict[str, Tensor], backend: str, weight: float, state: float, what: object = ""
) -> None:
    """The same names, and nearly the same numbers.

    On a CPU (gloo) no weight is off by more than `weight`, no optimizer state by more than `state` of its largest
    number. On a GPU another number of rows takes another order of sums in every product, and Adam makes a whole step
    of a gradient that is rounding error: there the root mean square of a tensor's difference stays under 3% of a step,
    or of the state's own. A gradient that is summed or weighted wrongly moves both by tens of percent.
    """
    assert found.keys() == wanted.keys(), what
    far: dict[str, tuple[float, float]] = {}
    for key, tensor in wanted.items():
        difference = (found[key] - tensor).double()
        is_weight = not key.startswith("optimizer/")  # or its moving average
        if backend == "nccl":
            allowed = 0.03 * (STEP if is_weight else float(tensor.double().square().mean().sqrt()))
            off = float(difference.square().mean().sqrt())
        else:
            allowed = weight if is_weight else state * float(tensor.abs().max())
            off = float(difference.abs().max())
        if not off <= allowed:  # also where it is NaN
            far[key] = off, allowed
    worst = sorted(far, key=lambda key: -far[key][0] / max(far[key][1], 1e-30))[:4]
    assert not far, (what, f"{len(far)} of {len(wanted)} tensors", {key: far[key] for key in worst})


def assert_same_rows(found: list[Any], wanted: list[Any], backend: str, what: object = "") -> None:
    """Losses and gradient norms of each step: to 1e-5 of themselves, on a GPU to 1e-4, for the order of its sums."""
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    off = ((a - b) / b).abs()
    assert bool((off <= (1e-4 if backend == "nccl" else 1e-5)).all()), (what, off.tolist(), found, wanted)
