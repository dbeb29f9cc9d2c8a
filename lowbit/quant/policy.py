"""What a linear layer computes in: `LinearPolicy`, one description for its three products and six quantisers.

    fprop   Y  [tokens, out] = X  [tokens, in]  W   [out, in]^T        sums over in
    dgrad   dX [tokens, in]  = dY [tokens, out] W^T [in, out]^T        sums over out
    wgrad   dW [out, in]     = dY^T [out, tokens] X^T [in, tokens]^T   sums over tokens

Each product has a left operand (X, dY, dY^T) and a right one (W, W^T, X^T), each read along the dimension that the
product sums over. An `Operand` without a spec stays BF16. A rotation (see `hadamard`) turns both operands of a product
along that dimension by the same random signs, so it cancels in the product and spreads outliers in the operands.

**Alignment.** The backward pass multiplies by W^T and X^T again, in blocks along another dimension. `aligned`
(TetraJet, arXiv 2510.27527) quantises the dequantised forward operands: the expected gradient is that of the function
that was computed. `original` (NVIDIA, arXiv 2509.25149) quantises W and X themselves.

**Bias.** A rounding error of a gradient averages out over tokens and steps only if its expectation is zero. Four over
six picks a scale by looking at the rounded values, which is biased; it is refused in dgrad and wgrad unless
`allow_bias` says that this is wanted. Other roundings with a bias (to nearest, the published stochastic ones) are what
published recipes have there, and are accepted.
"""

from dataclasses import dataclass
from enum import Enum

from lowbit.errors import ConfigError
from lowbit.quant.spec import EDEN, FOUR_OVER_SIX, OUTER_BLOCK, QuantSpec

EMULATED = "emulated"
"""The backend that runs everywhere: an ordinary product of BF16 numbers."""


class Alignment(Enum):
    """What the backward pass quantises for its W^T and X^T."""

    ALIGNED = "aligned"
    """The dequantised forward operands."""
    ORIGINAL = "original"
    """W and X."""


class Signs(Enum):
    """Signs of a rotation."""

    FRESH = "fresh"
    """Drawn anew every micro-batch, from the counter-based stream that both operands share."""
    FIXED = "fixed"
    """Transformer Engine's one vector of 16 for the whole run."""


class Kept(Enum):
    """What a layer keeps of its input for wgrad; one copy for all layers that read the same input."""

    INPUT = "X"
    """X itself: wgrad reads it unquantised. Other layers may keep the same tensor, so that it may cost nothing."""
    FORWARD = "Q(X)"
    """The packed forward operand."""
    TRANSPOSED = "Q(X^T)"
    """The packed wgrad operand, made in the forward pass."""


@dataclass(frozen=True)
class Operand:
    """One factor of a product."""

    spec: QuantSpec | None = None
    """None: BF16."""
    backend: str = EMULATED
    """Which of `backends` quantises and multiplies it; not the user's choice but the device's, made when a policy is
    applied. The numbers are those of `spec` whichever it is."""

    @property
    def name(self) -> str:
        return "BF16" if self.spec is None else self.spec.name

    @property
    def bits(self) -> float:
        """Bits an element."""
        return 16.0 if self.spec is None else self.spec.bits


BF16 = Operand()


@dataclass(frozen=True)
class ProductPolicy:
    """One of the three products."""

    left: Operand = BF16
    """X, dY or dY^T."""
    right: Operand = BF16
    """W, W^T or X^T."""
    rotation: int = 0
    """Hadamard size over the dimension the product sums over: 0 (none), 16 or 128."""
    signs: Signs = Signs.FRESH

    def __post_init__(self) -> None:
        if self.rotation not in (0, 16, 128):
            raise ConfigError(f"rotation={self.rotation}: choose 0, 16 or 128")
        if self.signs is Signs.FIXED and self.rotation != 16:
            raise ConfigError(f"fixed signs are a vector of 16, and rotation={self.rotation}")
        for operand in (self.left, self.right):
            eden = operand.spec is not None and operand.spec.rounding in EDEN
            if eden and (self.rotation != OUTER_BLOCK or self.signs is not Signs.FRESH):
                raise ConfigError(f"{operand.name}: MS-EDEN is unbiased only under rotation=128 with fresh signs")

        if self.rotation and not self.quantised:
            raise ConfigError(f"rotation={self.rotation} of a product without a quantised operand changes nothing")

    @property
    def summary(self) -> str:
        """`BF16`, or `LEFT x RIGHT` with the rotation."""
        if not self.quantised:
            return "BF16"
        turned = f" rotated {self.rotation}" if self.rotation else ""
        return f"{self.left.name} x {self.right.name}{turned}"

    @property
    def quantised(self) -> bool:
        """Whether any operand is."""
        return self.left.spec is not None or self.right.spec is not None

    @property
    def backend(self) -> str:
        """What multiplies it."""
        return self.left.backend


HIGH = ProductPolicy()
"""A BF16 product."""


@dataclass(frozen=True)
class LinearPolicy:
    """What one linear layer computes in. Hashable; a constant of compiled code.

    Raises ConfigError for a combination that cannot be right.
    """

    fprop: ProductPolicy = HIGH
    dgrad: ProductPolicy = HIGH
    wgrad: ProductPolicy = HIGH
    alignment: Alignment = Alignment.ALIGNED
    mean_split: bool = False
    """Averis (arXiv 2603.10444): X = 1 mu^T + X_r with mu the mean over tokens; only X_r is quantised."""
    allow_bias: bool = False
    """Accept four over six in dgrad or wgrad."""

    def __post_init__(self) -> None:
        for product in ("dgrad", "wgrad"):
            policy: ProductPolicy = getattr(self, product)
            for operand in (policy.left, policy.right):
                if operand.spec is not None and operand.spec.rounding in FOUR_OVER_SIX and not self.allow_bias:
                    raise ConfigError(
                        f"{product}: {operand.name} chooses its scale after rounding, which biases gradients; "
                        "use a stochastic or MS-EDEN format there, or set allow_bias=true"
                    )
        if self.mean_split and not self.reads_low_bit_input:
            raise ConfigError(
                "mean_split=true takes the mean out of X before it is quantised, and neither fprop nor wgrad quantises "
                "it: set mean_split=false"
            )

    @property
    def reads_low_bit_input(self) -> bool:
        """Whether X is quantised, in fprop or, as X^T, in wgrad."""
        return self.fprop.left.spec is not None or self.wgrad.right.spec is not None

    @property
    def kept(self) -> Kept:
        """What of its input the layer keeps for wgrad."""
        if self.alignment is Alignment.ORIGINAL or self.fprop.left.spec is None:
            return Kept.INPUT if self.wgrad.right.spec is None else Kept.TRANSPOSED
        return Kept.FORWARD

    @property
    def kept_operand(self) -> Operand:
        """Its format: `.name` and `.bits` an element are what a report shows. BF16: nothing is saved but X itself."""
        return {Kept.INPUT: BF16, Kept.FORWARD: self.fprop.left, Kept.TRANSPOSED: self.wgrad.right}[self.kept]

    @property
    def quantised(self) -> bool:
        """Whether any product is."""
        return self.fprop.quantised or self.dgrad.quantised or self.wgrad.quantised

    @property
    def summary(self) -> str:
        """One line."""
        return f"fprop {self.fprop.summary}, dgrad {self.dgrad.summary}, wgrad {self.wgrad.summary}"
