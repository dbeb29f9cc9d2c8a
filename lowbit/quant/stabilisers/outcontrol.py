"""OutControl: the few input channels with outliers stay in MXFP8.

In a trained transformer some input channels of a layer are large for nearly every token, always the same ones. Sharing
4-bit blocks with them costs their neighbours their precision. TetraJet-v2 (arXiv 2510.27527) finds them once and keeps
them in 8 bits from then on. For `steps` optimizer steps from `first_step` on every layer's inputs are measured,

    n_k = sum over micro-batches (of all ranks) of the L2 norm of X[:, k] over the micro-batch's tokens

and before the next step the `share` of channels with the largest n_k, O, is fixed for good. R are the others, in the
order of falling n_k, so that channels of like size share blocks (as in the released code). From then on

    fprop   Y = Q1(X_R) Q2(W_R)^T + M(X_O) M(W_O)^T               M: MXFP8 along the input channels, nearest
    dgrad   dX = Q3(dY H) Q4(W'^T H)^T                            as ever; W' is W_R and W_O dequantised
    wgrad   dW_R = Q5(dY^T H) Q6(X_R'^T H)^T,  dW_O = M(dY^T) M(X_O'^T)^T     no rotation, no noise for O

The published simulation takes round(share * K) channels, and so do we; the released kernels round up to a multiple of
128, which makes a quarter of 512 channels where a tenth was asked for. Emulation needs no multiple.

Layers that read one input share one set of channels and one split copy of that input. What is kept for the backward
pass is X_R in 4 bits and X_O in 8: for a tenth of the channels at most 0.36 of BF16. Indices live in buffers of fixed
size: which channels they name is data to compiled code, only the change from none to some compiles anew. Experts
quantise all of their channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.configs.schema import OutControlConfig
from lowbit.errors import ConfigError
from lowbit.quant.bits import in_type
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.linear_products import (
    Call,
    Fprop,
    KeptInput,
    dgrad,
    forward_product,
    in_threes,
    keep,
    training_forward,
    weight_factors,
    weight_gradients,
)
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.policy import HIGH, Alignment, LinearPolicy, Operand, ProductPolicy
from lowbit.quant.product import Dense, Factor
from lowbit.quant.spec import MXFP8
from lowbit.quant.stabilisers.masters import block_counts
from lowbit.quant.taps import listening

KEY = "precision.stabilisers.outcontrol"
IN_MXFP8 = ProductPolicy(Operand(MXFP8), Operand(MXFP8))
_OUTLIERS = {
    (wgrad.quantised, alignment): LinearPolicy(IN_MXFP8, HIGH, wgrad, alignment)
    for wgrad in (IN_MXFP8, HIGH)
    for alignment in Alignment
}
"""Made here because the compiler of torch 2.11 does not make a policy inside an `autograd.Function`."""


def policy_of_outliers(policy: LinearPolicy) -> LinearPolicy:
    """What the channels with outliers compute in; their dgrad is that of all channels."""
    return _OUTLIERS[policy.wgrad.quantised, policy.alignment]


def gains(policy: LinearPolicy) -> bool:
    """Whether a layer's input has elements of fewer bits than those of MXFP8, in a product of two quantised factors."""
    left, right = policy.fprop.left.spec, policy.fprop.right.spec
    return left is not None and right is not None and left.element.bits < MXFP8.element.bits


class RetainedChannels(nn.Module):
    """Which input channels of a layer, or of siblings, are retained in MXFP8: the first `count` of `order`."""

    order: Tensor
    """int64 [in]: all channels, by falling norm."""
    place: Tensor
    """int64 [in]: where each channel stands in `order`."""

    def __init__(self, order: Tensor, count: int) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("place", order.argsort(), persistent=False)

    def applies(self, policy: LinearPolicy) -> bool:
        """See `linear.Retained`: to a forward product whose input takes fewer bits than MXFP8."""
        return gains(policy)

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, in] -> the ordinary channels [rows, in - count], and those retained [rows, count]."""
        return matrix.index_select(1, self.ordinary), matrix.index_select(1, self.order[: self.count])

    @property
    def ordinary(self) -> Tensor:
        """See `linear.Retained`."""
        return self.order[self.count :]

    def join(self, ordinary: Tensor, retained: Tensor) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([retained, ordinary], dim=1).index_select(1, self.place)

    def products(self, x: Tensor, layers: Sequence[LowbitLinear]) -> tuple[Tensor, ...]:
        """See `linear.Retained`: x [tokens, in] -> [tokens, out] each."""
        if x.shape[0] == 0:
            return tuple(F.linear(x, layer.weight.to(x.dtype)).to(x.dtype) for layer in layers)
        if layers[0].frozen is not None:
            return self._frozen_products(x, layers)
        clock, policy = layers[0].clock, layers[0].policy
        weights, keys, choices = zip(*((w.weight, w.key, self._choice(w)) for w in layers), strict=True)
        weight_grad = any(w.requires_grad for w in weights)
        if not torch.is_grad_enabled() or not (weight_grad or x.requires_grad):
            return _sums(*_forward(self, x, weights, keys, choices, clock, policy), x.dtype)
        call = Call(policy, len(layers), x.requires_grad, weight_grad)
        outputs: tuple[Tensor, ...]
        outputs = _Products.apply(x, clock, self, call, *weights, *keys, *choices)  # type: ignore[no-untyped-call]
        return outputs

    def _choice(self, layer: LowbitLinear) -> Tensor | None:
        """The part of the layer's choices that belongs to the ordinary channels."""
        spec = layer.policy.fprop.right.spec
        if layer.choice is None or spec is None:
            return None
        rows, columns = block_counts(layer.out_features, layer.in_features - self.count, spec)
        return layer.choice[:rows, :columns]

    @torch.no_grad()
    def freeze(self, layer: LowbitLinear, dtype: torch.dtype) -> None:
        """Hold both weight factors; see `LowbitLinear.freeze`."""
        parts = zip(self.split(layer.weight), (self._choice(layer), None), self._policies(layer.policy), strict=True)
        ordinary, retained = (
            weight_factors([w], [layer.key], [choice], layer.clock, policy, dtype)[0] for w, choice, policy in parts
        )
        layer.frozen, layer.frozen_scale = ordinary.operand().to(dtype), ordinary.after()
        layer.frozen_retained = retained.operand().to(dtype)

    @staticmethod
    def _policies(policy: LinearPolicy) -> tuple[LinearPolicy, LinearPolicy]:
        return policy, policy_of_outliers(policy)

    @torch.no_grad()
    def _frozen_products(self, x: Tensor, layers: Sequence[LowbitLinear]) -> tuple[Tensor, ...]:
        first = layers[0]
        ordinary: list[Factor] = []
        retained: list[Factor] = []
        for layer in layers:
            assert layer.frozen is not None and layer.frozen_retained is not None
            ordinary.append(Dense(layer.frozen, layer.frozen_scale))
            retained.append(Dense(layer.frozen_retained))
        weights = [self.split(layer.weight)[0] for layer in layers] if first.policy.mean_split else []
        stream = Stream(first.key, first.clock, Product.FPROP, Side.LEFT)
        inputs, policies = self.split(x), self._policies(first.policy)
        return _sums(
            forward_product(inputs[0], weights, ordinary, stream, None, policies[0]),
            forward_product(inputs[1], [], retained, stream, None, policies[1]),
            x.dtype,
        )

    def extra_repr(self) -> str:
        return f"{self.count} of {self.order.shape[0]} channels in {MXFP8.name}"


def _forward(
    channels: RetainedChannels,
    x: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    choices: Sequence[Tensor | None],
    clock: Tensor,
    policy: LinearPolicy,
) -> tuple[Fprop, Fprop]:
    """fprop of the ordinary and of the retained channels."""
    inputs = channels.split(x)
    ordinary, retained = zip(*(channels.split(weight) for weight in weights), strict=True)
    return (
        training_forward(inputs[0], ordinary, keys, choices, clock, policy),
        training_forward(inputs[1], retained, keys, [None] * len(weights), clock, policy_of_outliers(policy)),
    )


def _sums(ordinary: Fprop, retained: Fprop, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(in_type(a.float() + b.float(), dtype) for a, b in zip(ordinary.outputs, retained.outputs, strict=True))


class _Products(torch.autograd.Function):
    """`linear_products.LinearProducts` with two kinds of input channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, clock: Tensor, channels: RetainedChannels, call: Call, *of_weights: Any
    ) -> tuple[Tensor, ...]:
        weights, keys, choices = in_threes(of_weights)
        ordinary, retained = _forward(channels, x, weights, keys, choices, clock, call.policy)
        kept = (KeptInput(None), KeptInput(None))
        if call.weight_grad:
            inputs = channels.split(x)
            kept = (
                keep(inputs[0], ordinary, keys[0], clock, call.policy),
                keep(inputs[1], retained, keys[0], clock, policy_of_outliers(call.policy)),
            )
        ctx.channels, ctx.call, ctx.dtype, ctx.shapes = channels, call, x.dtype, [k.shapes for k in kept]
        ctx.save_for_backward(clock, *kept[0].tensors, *kept[1].tensors, *of_weights)
        return _sums(ordinary, retained, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channels: RetainedChannels = ctx.channels
        call: Call = ctx.call
        clock, *rest = ctx.saved_tensors
        weights, keys, choices = in_threes(rest[8:])
        dx = None
        if call.input_grad:
            sources = _sources(channels, weights, keys, choices, clock, call.policy, ctx.dtype)
            dx = dgrad(grads, sources, keys, clock, call.policy, ctx.dtype)
        dws: tuple[Tensor | None, ...] = (None,) * call.count
        if call.weight_grad:
            kept = KeptInput(*rest[:4], *ctx.shapes[0]), KeptInput(*rest[4:8], *ctx.shapes[1])
            width, policy = weights[0].shape[1] - channels.count, call.policy
            ordinary = weight_gradients(grads, kept[0], width, keys, clock, policy, ctx.dtype)
            policy = policy_of_outliers(policy)
            retained = weight_gradients(grads, kept[1], channels.count, keys, clock, policy, ctx.dtype)
            dws = tuple(channels.join(a, b) for a, b in zip(ordinary, retained, strict=True))
        return dx, None, None, None, *dws, *(None,) * (2 * call.count)


def _sources(
    channels: RetainedChannels,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    choices: Sequence[Tensor | None],
    clock: Tensor,
    policy: LinearPolicy,
    dtype: torch.dtype,
) -> list[tuple[Tensor, None]]:
    """What dgrad quantises for each W^T: W itself, or, aligned, both kinds of channels as fprop read them."""
    if policy.alignment is Alignment.ORIGINAL:
        return [(weight, None) for weight in weights]
    ordinary, retained = zip(*(channels.split(weight) for weight in weights), strict=True)
    none = [None] * len(weights)
    parts = (
        weight_factors(ordinary, keys, choices, clock, policy, dtype, again=True),
        weight_factors(retained, keys, none, clock, policy_of_outliers(policy), dtype, again=True),
    )
    return [(channels.join(_dequantised(a), _dequantised(b)), None) for a, b in zip(*parts, strict=True)]


def _dequantised(factor: Factor) -> Tensor:
    assert not isinstance(factor, Dense)
    return factor.dequantise()


# Choosing them -----------------------------------------------------------------------------------------------------


class OutControl:
    """Measures the layers' inputs, then fixes their channels."""

    def __init__(
        self,
        config: OutControlConfig,
        layers: Mapping[str, LowbitLinear],
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """`layers` by full name.

        Raises ConfigError when none of them has anything to gain in any phase of the run, or one is rotated then.
        """
        self.config = config
        self._layers = {name: layer for name, layer in layers.items() if any(map(gains, layer.phases))}
        if not self._layers:
            raise ConfigError(
                f"{KEY}.enabled=true: no layer's forward product has an input of fewer than 8 bits: "
                f"precision=nvfp4 would work"
            )
        for name, layer in self._layers.items():
            if any(policy.fprop.rotation and gains(policy) for policy in layer.phases):
                raise ConfigError(f"{name}: {KEY} and a rotated forward product both deal with outliers: choose one")
        self._sum = sum_over_ranks
        self._norms: dict[str, Tensor] = {}
        self._measured = 0
        self._fixed = False

    def count(self, channels: int) -> int:
        """How many of so many channels are retained."""
        return min(max(1, round(self.config.share * channels)), channels - 1)

    def measures(self, step: int) -> bool:
        """Whether optimizer step `step` (from 1) is one whose inputs are measured."""
        return not self._fixed and step >= self.config.first_step and self._measured < self.config.steps

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The layers' inputs inside count; one step's micro-batches."""
        with listening(self._layers, self._on_input):
            yield
        self._measured += 1

    def _on_input(self, names: list[str], x: Tensor) -> None:
        norm = torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]).float(), dim=0)
        total = self._norms[names[0]] + norm if names[0] in self._norms else norm
        self._norms |= dict.fromkeys(names, total)

    def begin_step(self, step: int) -> list[str]:
        """Before optimizer step `step`: once all is measured, fix the channels; lines that say so, or none."""
        if self._fixed or self._measured < self.config.steps:
            return []
        self._retain(
            {name: self._sum(norm).argsort(descending=True, stable=True) for name, norm in self._norms.items()}
        )
        self._fixed = True
        self._norms = {}
        sizes = sorted({layer.in_features for layer in self._layers.values()})
        shares = ", ".join(f"{self.count(k)} of {k} ({self.count(k) / k:.2%})" for k in sizes)
        return [f"OutControl: from step {step} on input channels in {MXFP8.name}: {shares}"]

    def _retain(self, orders: Mapping[str, Tensor]) -> None:
        """Give the layers their channels; those of one parent with the very same order are siblings and share them."""
        shared: dict[tuple[str, bytes], RetainedChannels] = {}
        for name, order in orders.items():
            layer = self._layers[name]
            key = name.rpartition(".")[0], order.numpy(force=True).tobytes()
            if key not in shared:
                shared[key] = RetainedChannels(order.to(layer.weight.device), self.count(order.shape[0]))
            layer.retained = shared[key]
            if layer.choice is not None:
                layer.choice.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """Norms so far, of all ranks, or the channels once they are fixed."""
        state = {"measured": torch.tensor(self._measured), "fixed": torch.tensor(self._fixed)}
        state |= {f"{name}.norms": self._sum(norm) for name, norm in self._norms.items()}
        for name, layer in self._layers.items():
            if isinstance(layer.retained, RetainedChannels):
                state[f"{name}.order"] = layer.retained.order
        return state

    def load_state_tensors(self, state: Mapping[str, Tensor], first: bool = True) -> None:
        """Go on from a saved state. Of several ranks only the `first` takes the norms, which are sums over all."""
        self._measured, self._fixed = int(state["measured"]), bool(state["fixed"])
        self._norms, orders = {}, {}
        for name, layer in self._layers.items():
            if (norm := state.get(f"{name}.norms")) is not None:
                self._norms[name] = norm.to(layer.weight.device, copy=True) * float(first)
            if (order := state.get(f"{name}.order")) is not None:
                orders[name] = order
        self._retain(orders)
