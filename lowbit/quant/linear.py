"""The low-bit linear layer: `models.layers.Linear` to everyone else, its products following a `LinearPolicy`.

The products themselves are in `linear_products`. Here is what belongs to a layer: its weight and policy, the key and
clock of its noise, the input it shares with siblings, the copy of its weight that passes without gradients use, and
what the stabilisers may give it.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from lowbit.errors import ConfigError
from lowbit.models.layers import Linear
from lowbit.quant.bits import check_readable
from lowbit.quant.formats import INT8
from lowbit.quant.linear_products import forward_product, linear_products, remembered, rotation_signs
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.product import Dense, Factor, factor

FEATURE_MULTIPLE = 8


def check_shape(name: str, in_features: int, out_features: int, policy: LinearPolicy) -> None:
    """Raise ConfigError, naming layer and product, when the policy cannot work for these sizes."""
    sums = {"fprop": ("in_features", in_features), "dgrad": ("out_features", out_features)}
    for product, (what, size) in sums.items():
        if getattr(policy, product).quantised and (size < FEATURE_MULTIPLE or size % FEATURE_MULTIPLE):
            raise ConfigError(
                f"{name}: {product} sums over {what}={size}, which is not a multiple of {FEATURE_MULTIPLE}: "
                f"change the size, leave this layer in BF16 with precision.rules=[{{match: {name}, policy: bf16}}], or "
                "quantise nothing with precision=auto"
            )


def check_input(x: Tensor, in_features: int) -> None:
    """Refuse what is not x [..., in_features] in BF16 or FP32: padding would hide another width.

    Raises: ValueError, TypeError.
    """
    if x.shape[-1] != in_features:
        raise ValueError(f"an input of {x.shape[-1]} features for a layer that reads {in_features}")
    check_readable(x.dtype)


class Retained(Protocol):
    """Some input channels in another format than the others (`stabilisers.outcontrol`)."""

    @property
    def ordinary(self) -> Tensor:
        """int64: the channels that the policy speaks of, in the order in which they are quantised."""
        ...

    def applies(self, policy: LinearPolicy) -> bool:
        """Whether it changes what this policy computes."""
        ...

    def products(self, x: Tensor, layers: "Sequence[LowbitLinear]") -> tuple[Tensor, ...]:
        """x [tokens, in] -> each layer's output [tokens, out]."""
        ...

    def freeze(self, layer: "LowbitLinear", dtype: torch.dtype) -> None:
        """Do what `LowbitLinear.freeze` does, with `frozen_retained` beside `frozen`."""
        ...


def multiplies_int8(policy: LinearPolicy) -> bool:
    """Whether a layer's input is quantised to INT8 in the forward product."""
    spec = policy.fprop.left.spec
    return spec is not None and spec.element is INT8


class LowbitLinear(Linear):
    """`models.layers.Linear` whose products follow a `LinearPolicy`. A policy of BF16 alone is exactly that Linear."""

    key: Tensor
    clock: Tensor
    choice: Tensor | None
    """Four over six of W: each block's 4 or 6, where somebody keeps it (`remember_choice`)."""
    input_amax: Tensor | None
    """FP32 scalar: the static range of X in INT8, where somebody fixes it (`fix_input_amax`)."""
    retained: "Retained | None"
    """The split between formats of its input channels, where there is one (`stabilisers.outcontrol`)."""

    def __init__(self, in_features: int, out_features: int, policy: LinearPolicy, key: Tensor, clock: Tensor) -> None:
        super().__init__(in_features, out_features)
        self._attach(policy, key, clock)

    @classmethod
    def of(cls, linear: Linear, policy: LinearPolicy, key: Tensor, clock: Tensor, name: str = "linear layer") -> Self:
        """The low-bit layer with the very parameter of `linear`.

        Args:
            key: int64 [2], `philox.make_key(seed, name)`, on the weight's device.
            clock: int64 [3], `philox.make_clock()`, the one tensor that all layers of a model share; whoever trains
                updates it in place before each micro-batch. Moving the model to another device would copy it for each
                layer: attach layers afterwards.
            name: for the ConfigError of an impossible shape.
        """
        check_shape(name, linear.in_features, linear.out_features, policy)
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.low_rank = linear.weight, linear.low_rank
        layer.frozen = None
        layer.train(linear.training)
        layer._attach(policy, key, clock)
        return layer

    def _attach(self, policy: LinearPolicy, key: Tensor, clock: Tensor) -> None:
        self.policy = policy
        self.phases: tuple[LinearPolicy, ...] = (policy,)
        """Every policy that its run may give it, the present one among them."""
        self.frozen_scale: Tensor | None = None
        """Of the factor `frozen`: FP32 [1, 1] or [out, 1]."""
        self.frozen_signs: Tensor | None = None
        self.frozen_retained: Tensor | None = None
        self.register_buffer("key", key, persistent=False)
        self.register_buffer("clock", clock, persistent=False)
        self.register_buffer("choice", None, persistent=False)
        self.register_buffer("input_amax", None, persistent=False)
        self.retained = None

    def remember_choice(self, row_blocks: int, column_blocks: int) -> None:
        """From now on W's blocks take the 4 or 6 that `choice` says (0: whichever is better).

        Whoever asks for it renews `choice`, int8 [row blocks, column blocks], after each optimizer step.
        """
        zeros = torch.zeros(row_blocks, column_blocks, dtype=torch.int8, device=self.weight.device)
        self.register_buffer("choice", zeros, persistent=False)

    def fix_input_amax(self, amax: Tensor | None) -> None:
        """From now on X, where it is quantised to INT8, is so as if its largest magnitude were `amax`, FP32 scalar.

        None: its own. What lies beyond is clipped; the gradient does not know it. Other formats, into which a switch
        may put the layer, have scales of their own.
        """
        if self.input_amax is None or amax is None:
            self.register_buffer("input_amax", None if amax is None else amax.clone(), persistent=False)
        else:
            self.input_amax.copy_(amax)

    @property
    def input_range(self) -> Tensor | None:
        """`input_amax` while it applies."""
        return self.input_amax if multiplies_int8(self.policy) else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] BF16 or FP32 -> [..., out] in its type."""
        return self.project_together(x, ())[0]

    def project_together(self, x: Tensor, others: Sequence[Linear]) -> tuple[Tensor, ...]:
        """This layer's output and those of `others`, which read the same x: x is quantised and kept once.

        Layers whose policies differ are called one by one; so are, without gradients, layers that hooks watch.
        """
        layers = [self, *(o for o in others if isinstance(o, LowbitLinear) and self.computes_as(o))]
        watched = len(others) > 0 and not torch.is_grad_enabled() and any(o._forward_hooks for o in (self, *others))
        if watched or len(layers) <= len(others):
            return tuple(linear(x) for linear in (self, *others))
        if not self.policy.quantised:
            return tuple(Linear.forward(layer, x) for layer in layers)
        for layer in layers:
            check_input(x, layer.in_features)
        rows = x.reshape(-1, x.shape[-1])
        if self.retained is not None and self.retained.applies(self.policy):
            outputs = self.retained.products(rows, layers)
        elif self.frozen is None:
            weights, keys = [layer.weight for layer in layers], [layer.key for layer in layers]
            choices, low_ranks = [layer.choice for layer in layers], [layer.low_rank for layer in layers]
            amax = self.input_range
            outputs = linear_products(rows, weights, keys, self.clock, self.policy, choices, amax, low_ranks)
        else:
            alone = self.policy.fprop.rotation != 0  # each copy has its own layer's rotation
            groups = [[layer] for layer in layers] if alone else [layers]
            outputs = tuple(y for group in groups for y in _frozen_products(rows, group))
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in outputs)

    def computes_as(self, other: "LowbitLinear") -> bool:
        """Whether both do the same to their common input."""
        return other.policy == self.policy and other.retained is self.retained and other.input_amax is self.input_amax

    @torch.no_grad()
    def freeze(self, dtype: torch.dtype) -> None:
        """Hold fprop's right factor, and its rotation, as the clock stands now, for passes without gradients."""
        if not self.policy.quantised:
            super().freeze(dtype)
            return
        if self.retained is not None and self.retained.applies(self.policy):
            self.retained.freeze(self, dtype)
            return
        stream = Stream(self.key, self.clock, Product.FPROP, Side.RIGHT)
        self.frozen_signs = rotation_signs(self.policy.fprop, stream)
        memory = remembered(self.choice)
        right = factor(self.effective(), self.policy.fprop.right, stream, self.frozen_signs, dtype, memory)
        self.frozen, self.frozen_scale = right.operand().to(dtype), right.after()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.policy.summary}"


@torch.no_grad()
def _frozen_products(x: Tensor, layers: Sequence[LowbitLinear]) -> tuple[Tensor, ...]:
    """fprop with the factors that `freeze` made; x [tokens, in] -> [tokens, out] each."""
    rights: list[Factor] = []
    for layer in layers:
        assert layer.frozen is not None
        rights.append(Dense(layer.frozen, layer.frozen_scale))
    first = layers[0]
    stream = Stream(first.key, first.clock, Product.FPROP, Side.LEFT)
    weights = [layer.effective() for layer in layers] if first.policy.mean_split else []
    amax = first.input_range
    return forward_product(x, weights, rights, stream, first.frozen_signs, first.policy, amax).outputs
