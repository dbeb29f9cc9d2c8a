"""Low-bit products of experts: a `LowbitLinear` for each group of rows, as one layer.

Expert e has the rows [offsets[e - 1], offsets[e]) of x and its own matrix W_e. What each of its three products computes
is what `LowbitLinear` computes from the same rows and weight under the key of expert e: blocks along the tokens (wgrad)
never hold rows of two experts, padding is each expert's own, a scale of the whole tensor is of an expert's rows. An
expert without rows has no output and a gradient of zeros. Emulated, it is that bit for bit; where fprop and dgrad have
a backend (`backends.fp8_grouped`), codes and scales are the same and their sums are in another order. The products:
`grouped_products`.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from lowbit.errors import ConfigError
from lowbit.models.layers import GroupedLinear
from lowbit.quant.backends.base import bind
from lowbit.quant.grouped_products import grouped_products, groups_of
from lowbit.quant.linear import check_input, check_shape
from lowbit.quant.linear_products import forward_product, rotation_signs
from lowbit.quant.philox import Product, Side, Stream, make_key
from lowbit.quant.policy import EMULATED, LinearPolicy
from lowbit.quant.product import Dense, factor


def expert_name(layer: str, expert: int) -> str:
    """What the noise of one expert of a layer is keyed by."""
    return f"{layer}.{expert}"


def keys_of(seed: int, layer: str, experts: int) -> Tensor:
    """int64 [experts, 2]: `philox.make_key` of each expert."""
    return torch.stack([make_key(seed, expert_name(layer, e)) for e in range(experts)])


class LowbitGroupedLinear(GroupedLinear):
    """`models.layers.GroupedLinear` whose products follow a `LinearPolicy`.

    The copy that passes without gradients use (`freeze`) is multiplied by the emulation, whatever the policy's backend.
    """

    keys: Tensor
    """int64 [experts, 2]."""
    clock: Tensor
    policy: LinearPolicy
    frozen_scale: Tensor | None
    """Of the factors `frozen`: FP32 [experts, 1 or out, 1]."""
    frozen_signs: Tensor | None
    """FP32 [experts, rotation]."""

    @classmethod
    def of(
        cls, linear: GroupedLinear, policy: LinearPolicy, keys: Tensor, clock: Tensor, name: str = "grouped layer"
    ) -> Self:
        """The low-bit layer with the very parameter of `linear`.

        Args:
            keys: int64 [experts, 2], `keys_of(seed, name, experts)`. Others: see `LowbitLinear.of`.

        Raises:
            ConfigError: a shape that the policy cannot quantise; not one key an expert.
        """
        check_shape(name, linear.in_features, linear.out_features, policy)
        if keys.shape != (linear.experts, 2):
            raise ConfigError(f"{name}: keys {list(keys.shape)} must be [{linear.experts}, 2], one an expert")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.experts, layer.in_features, layer.out_features = linear.experts, linear.in_features, linear.out_features
        layer.weight = linear.weight
        layer.frozen = None
        layer.train(linear.training)
        layer.policy = policy
        layer.frozen_scale = None
        layer.frozen_signs = None
        layer.register_buffer("keys", keys, persistent=False)
        layer.register_buffer("clock", clock, persistent=False)
        return layer

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [rows, in], offsets int32 [experts], the last one equal to rows -> [rows, out]."""
        return self.project_together(x, offsets, ())[0]

    def project_together(self, x: Tensor, offsets: Tensor, others: Sequence[GroupedLinear]) -> tuple[Tensor, ...]:
        """Outputs of layers that read the same rows; see `LowbitLinear.project_together`."""
        layers = [self, *(o for o in others if isinstance(o, LowbitGroupedLinear) and o.policy == self.policy)]
        if len(layers) <= len(others):
            return tuple(linear(x, offsets) for linear in (self, *others))
        if not self.policy.quantised:
            return tuple(GroupedLinear.forward(layer, x, offsets) for layer in layers)
        for layer in layers:
            check_input(x, layer.in_features)
        if self.frozen is not None:
            return tuple(layer._frozen_product(x, offsets) for layer in layers)
        weights, keys = [layer.weight for layer in layers], [layer.keys for layer in layers]
        return grouped_products(x, offsets, weights, keys, self.clock, self.policy)

    @torch.no_grad()
    def freeze(self, dtype: torch.dtype) -> None:
        """See `LowbitLinear.freeze`."""
        if not self.policy.quantised:
            super().freeze(dtype)
            return
        made, signs = [], []
        emulated = bind(self.policy, EMULATED, EMULATED, EMULATED)
        for weight, key in zip(self.weight, self.keys, strict=True):
            stream = Stream(key, self.clock, Product.FPROP, Side.RIGHT)
            signs.append(rotation_signs(self.policy.fprop, stream))
            made.append(factor(weight, emulated.fprop.right, stream, signs[-1], dtype))
        self.frozen = torch.stack([right.operand().to(dtype) for right in made])
        scales, turns = [a for r in made if (a := r.after()) is not None], [s for s in signs if s is not None]
        self.frozen_scale = torch.stack(scales) if scales else None
        self.frozen_signs = torch.stack(turns) if turns else None

    @torch.no_grad()
    def _frozen_product(self, x: Tensor, offsets: Tensor) -> Tensor:
        """fprop with the factors that `freeze` made."""
        assert self.frozen is not None
        out, emulated = x.new_empty(x.shape[0], self.out_features), bind(self.policy, EMULATED, EMULATED, EMULATED)
        for e, rows in groups_of(offsets, self.experts, x.shape[0]):
            right = Dense(self.frozen[e], None if self.frozen_scale is None else self.frozen_scale[e])
            signs = None if self.frozen_signs is None else self.frozen_signs[e]
            stream = Stream(self.keys[e], self.clock, Product.FPROP, Side.LEFT)
            made = forward_product(x[rows], [self.weight[e]], [right], stream, signs, emulated)
            out[rows] = made.outputs[0]
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.policy.summary}"
