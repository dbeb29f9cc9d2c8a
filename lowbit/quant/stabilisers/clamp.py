"""Dynamic clamping: INT8 training of squared-ReLU networks whose ranges follow from the weights.

    y = down(relu(up(x))^2)

In INT8 a fixed clamp limit tuned for one scale of the weights fails on another: at an eighth of the scale it was made
for, almost every activation rounds to zero, and the layer is dead. A limit taken from the data costs a reduction a
token, and one outlier stretches it. Character.AI's pre-training post (2025) takes it from the input projection's
weights, and propagates it to the square. Formulas and constants are ours. With x of unit mean square (it is
RMS-normalised; the norm's gain g belongs to the weight W [f, d] of `up`), isotropic x gives up(x) a standard deviation

    sigma = sqrt(sum_ij (W_ij g_j)^2 / f)            c = deviations * sigma        (4: least error on Gaussian data)

    h = clip(up(x), 0, c)      n1 = round(127 h / c)           0..127              the clamped activation, in INT8
    a = n2 c^2 / 127           n2 = round(n1^2 / 127)          0..127              its square, in INT8

n2 is what `down` multiplies: the static scale c^2 / 127, known before the data, replaces the token's amax
(`LowbitLinear.input_amax` = c^2). No two integers lie equally near to n1^2 / 127, so no rule for ties is needed.

Straight through: da/dup = 2 h where up(x) <= c and 0 beyond, with h as rounded; nothing flows into c. What is kept for
the backward pass is one byte an element. NaN and infinite activations become NaN.

c changes once an optimizer step, since the weights do, and is the same on every rank and in every micro-batch. It is
saved with a checkpoint and taken from there, not computed anew, by whatever opens it: weights that were rounded on the
way to where they serve meet the ranges they were trained with. While a switch, or an evaluation in high precision, has
put `down` into another format, the network is a plain squared ReLU.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.configs.schema import ClampConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import Linear
from lowbit.quant.bits import divide, in_type
from lowbit.quant.linear import LowbitLinear, multiplies_int8

KEY = "precision.stabilisers.clamp.enabled=true"
LEVELS = 127
CLIPPED = 128
"""The byte kept for an element beyond the bound, whose gradient is zero."""


class ClampedSquare(nn.Module):
    """relu(up)^2 through two INT8 grids that `bound` fixes, for the layer `down`."""

    bound: Tensor

    def __init__(self, down: LowbitLinear) -> None:
        super().__init__()
        self._down = (down,)  # in a tuple, where nn.Module does not see a second parent
        bound = torch.ones((), dtype=torch.float32, device=down.weight.device)
        self.register_buffer("bound", bound, persistent=False)

    def forward(self, up: Tensor) -> Tensor:
        """[..., f] BF16 or FP32 -> multiples of bound^2 / 127, same shape and type."""
        if not multiplies_int8(self._down[0].policy):
            return F.relu(up).square()
        result: Tensor = _Square.apply(up, self.bound)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return "INT8, bound from the weights"


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, bound: Tensor) -> Tensor:
        first = first_level(up, bound)
        codes = torch.where(up.float() > bound, CLIPPED, first.nan_to_num(0.0)).to(torch.uint8)
        ctx.save_for_backward(codes, bound)
        return in_type(second_level(first) * divide(bound * bound, float(LEVELS)), up.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        codes, bound = ctx.saved_tensors
        inside = torch.where(codes == CLIPPED, 0, codes).float()
        return (grad.float() * (inside * divide(2.0 * bound, float(LEVELS)))).to(grad.dtype), None


def first_level(up: Tensor, bound: Tensor) -> Tensor:
    """n1, FP32 integers 0..127 of the shape of `up`; NaN where it is not finite. All 0 under a bound of 0."""
    up = up.float()
    ratio = torch.where(bound == 0, 0.0, divide(float(LEVELS), bound))
    scaled = (up * ratio).clamp(0.0, float(LEVELS)).round()
    return torch.where(up.isfinite(), scaled, float("nan"))


def second_level(first: Tensor) -> Tensor:
    """n2, FP32 integers 0..127."""
    return (first * first / LEVELS).round()


class Site(NamedTuple):
    """One squared-ReLU network."""

    name: str
    up: Linear
    gain: Tensor
    """[d]: the weight of the norm before it."""
    square: ClampedSquare
    down: LowbitLinear


def install(name: str, up: Linear, gain: Tensor, down: Linear) -> Site:
    """A site with its square; raises ConfigError when `down` multiplies in INT8 in no phase of the run."""
    if not isinstance(down, LowbitLinear) or not any(map(multiplies_int8, down.phases)):
        word = down.policy.fprop.left.name if isinstance(down, LowbitLinear) else "BF16"
        raise ConfigError(
            f"{KEY}: {name}.down multiplies {word}, and the bound is that of an INT8 grid: precision=int8 would work"
        )
    return Site(name, up, gain, ClampedSquare(down), down)


class Clamp:
    """Keeps every network's bound in step with its weights."""

    def __init__(self, config: ClampConfig, sites: Sequence[Site]) -> None:
        """Raises ConfigError when there is nothing to clamp."""
        if not sites:
            raise ConfigError(f"{KEY}: the model has no squared-ReLU network: model.mlp=relu2 would work")
        self._deviations = config.deviations
        self._sites = sites

    @torch.no_grad()
    def update(self) -> None:
        """Set every bound from the weights as they are now. Raises ConfigError where they are sharded."""
        for site in self._sites:
            if site.up.weight.shape != (site.up.out_features, site.up.in_features):
                raise ConfigError(
                    f"{site.name}.up: the bound needs the whole weight, and this process holds a shard: "
                    "engine.zero_stage=2 would work"
                )
            self._set(site, self._deviations * activation_deviation(site.up.weight, site.gain))

    def _set(self, site: Site, bound: Tensor) -> None:
        site.square.bound.copy_(bound)
        site.down.fix_input_amax(site.square.bound * site.square.bound)

    def state_tensors(self) -> dict[str, Tensor]:
        """The bounds, by name."""
        return {f"{site.name}.bound": site.square.bound for site in self._sites}

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Bounds as they were saved, to the bit."""
        for site in self._sites:
            self._set(site, state[f"{site.name}.bound"].to(site.square.bound.device))


def activation_deviation(weight: Tensor, gain: Tensor) -> Tensor:
    """Standard deviation of W (g * x) over its outputs, for x of independent elements of unit mean square; FP32 scalar.

    weight [f, d], gain [d]. Sums over rows in FP32, over columns in FP64.
    """
    columns = torch.linalg.vector_norm(weight.float(), dim=0).double()
    variance: Tensor = (columns * gain.double()).square().sum() / weight.shape[0]
    return variance.sqrt().float()
