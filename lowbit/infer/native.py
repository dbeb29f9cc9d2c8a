"""Low-bit products on tensor cores while sampling: FP8 activations times FP8 weights, which are held as codes.

`LowbitLinear` freezes its weight as the BF16 numbers of the emulation. Where the device multiplies the format itself
(`quant/backends`), a sampler keeps the codes and scales in their place: half the bytes of BF16 to read at few rows,
and twice its speed at many.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.models.layers import Linear
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import candidates
from lowbit.quant.backends.base import Native
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.linear_products import forward_product
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.policy import EMULATED
from lowbit.quant.product import factor


class NativeLinear(LowbitLinear):
    """A `LowbitLinear` for sampling whose frozen weight is what its backend multiplies."""

    @torch.no_grad()
    def freeze(self, dtype: torch.dtype) -> None:
        """Make and use codes and scales as they stand for the weight now."""
        stream = Stream(self.key, self.clock, Product.FPROP, Side.RIGHT)
        made = factor(self.effective(), self.policy.fprop.right, stream, None, dtype)
        assert isinstance(made, Native)
        self.frozen, self.frozen_scale = made.codes, made.scales

    def native(self) -> Native:
        """The weight as a factor."""
        right = self.policy.fprop.right
        assert self.frozen is not None and self.frozen_scale is not None and right.spec is not None
        shape = (self.out_features, self.in_features)
        return Native(self.frozen, self.frozen_scale, None, shape, right.spec, right.backend)

    @torch.no_grad()
    def project_together(self, x: Tensor, others: Sequence[Linear]) -> tuple[Tensor, ...]:
        """See `LowbitLinear.project_together`."""
        layers = [self, *(o for o in others if isinstance(o, NativeLinear) and self.computes_as(o))]
        if len(layers) <= len(others):
            return tuple(linear(x) for linear in (self, *others))
        return self.multiply(x, [layer.native() for layer in layers])

    def multiply(self, x: Tensor, weights: Sequence[Native]) -> tuple[Tensor, ...]:
        """x [..., in] times each of these."""
        rows = x.reshape(-1, x.shape[-1])
        stream = Stream(self.key, self.clock, Product.FPROP, Side.LEFT)
        # no mean is split off here: nothing else of the weights is read
        outputs = forward_product(rows, [], weights, stream, None, self.policy).outputs
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in outputs)


def nativise(model: Transformer) -> int:
    """Exchange the layers of a sampler's model whose policy names a backend; how many."""
    exchanged = 0
    for name, layer in candidates(model).items():
        if not isinstance(layer, LowbitLinear) or layer.policy.fprop.backend == EMULATED:
            continue
        if layer.policy.fprop.rotation or layer.policy.mean_split:
            continue
        native = NativeLinear.of(layer, layer.policy, layer.key, layer.clock, name)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, native)
        exchanged += 1
    return exchanged
