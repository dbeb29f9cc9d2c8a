"""The three products of a linear layer, each of two factors in the format that its policy names.

    fprop   Y  [tokens, out] = Q1(X)      Q2(W)^T
    dgrad   dX [tokens, in]  = Q3(dY R)   Q4(W'^T R)^T
    wgrad   dW [out, in]     = Q5(dY^T R) Q6(X'^T R)^T

R is a random rotation over the dimension that the product sums over, or none; it cancels in the product. W' and X' are
the dequantised Q2(W) and Q1(X) when the policy is `aligned`, so that the expected gradient is that of the function
which was computed, and W and X themselves when it is `original`.

**What is kept** for the backward pass is one low-bit copy of X, packed (`LinearPolicy.kept`): Q1(X), from which Q6 is
made when its time comes, or Q6(X^T) itself. Siblings, which read the same input (q, k, v; gate, up), share it and every
quantisation of X (`project_together`). Q2(W) and Q4(W^T) are made anew in the backward pass: a weight is
read where it lives, and no quantised copy of it waits in memory.

**Precision.** Factors are BF16 numbers, the product sums in FP32. dW leaves its product in FP32, the type of the master
weight. With FP32 activations (CPU) the products of the same BF16 factors stay in FP32 throughout.

**Scales outside the sum.** A factor's scale of the whole tensor follows it into the backward pass as a number applied
after the product. Scales of rows lie inside the backward's sums: they are multiplied in, rounded to BF16.

**Mean split** (Averis, arXiv 2603.10444): X = 1 mu^T + X_r with mu the mean over the tokens of the micro-batch. Only
X_r is quantised: Y = Q1(X_r) Q2(W)^T + 1 (mu W^T), dW = Q5(dY^T) Q6(X_r'^T)^T + (dY^T 1) mu^T, both second terms in
high precision; dX as without.

**Noise** is keyed by (seed, layer, step, micro-batch, rank): see `philox`. Siblings draw what belongs to X, and the
rotation signs of fprop and wgrad, from the first one's key. The clock may only move on when no backward pass is
pending, for the backward draws from it too; autograd raises an error if it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.models.low_rank import LowRank, added_gradients, parts_of, sums
from lowbit.quant.backends.base import Native
from lowbit.quant.bits import in_type, round_to_bf16
from lowbit.quant.hadamard import unrotate
from lowbit.quant.kernels import ops
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.policy import EMULATED, Alignment, Kept, LinearPolicy, Operand, ProductPolicy
from lowbit.quant.product import (
    Dense,
    Factor,
    Fused,
    Pair,
    Wanted,
    bf16_valued,
    factor,
    factor_pair,
    multiply,
    pack,
    signs_of,
)
from lowbit.quant.quantise import Memory
from lowbit.quant.quantised import Packed, crop
from lowbit.quant.spec import Outer


def linear_products(
    x: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: LinearPolicy,
    choices: Sequence[Tensor | None] | None = None,
    amax: Tensor | None = None,
    low_ranks: Sequence[LowRank | None] = (),
) -> tuple[Tensor, ...]:
    """x [tokens, in] BF16 or FP32, weights [out, in] FP32 -> each x W^T [tokens, out] in the type of x.

    keys: int64 [2] each. clock: int64 [3]. choices, amax: see `LowbitLinear.choice` and `.input_amax`. low_ranks: what
    is added to each weight, if anything.
    """
    choices = choices or [None] * len(weights)
    added = parts_of(low_ranks)
    if x.shape[0] == 0:  # nothing to quantise: gradients are zeros
        return tuple(F.linear(x, w.to(x.dtype)).to(x.dtype) for w in sums(weights, added))
    weight_grad = any(t is not None and t.requires_grad for t in (*weights, *added))
    if not torch.is_grad_enabled() or not (weight_grad or x.requires_grad):
        return training_forward(x, sums(weights, added), keys, choices, clock, policy, amax, keeping=False).outputs
    spec = Call(policy, len(weights), x.requires_grad, weight_grad)
    outputs: tuple[Tensor, ...]
    outputs = LinearProducts.apply(x, clock, amax, spec, *weights, *keys, *choices, *added)  # type: ignore[no-untyped-call]
    return outputs


@dataclass(frozen=True)
class Call:
    """The constants of one call."""

    policy: LinearPolicy
    count: int
    """Of weights."""
    input_grad: bool
    weight_grad: bool


class LinearProducts(torch.autograd.Function):
    """fprop forward, dgrad and wgrad backward, for one or several weights of the same input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, clock: Tensor, amax: Tensor | None, call: Call, *of_weights: Any
    ) -> tuple[Tensor, ...]:
        (weights, keys, choices), added = in_threes(of_weights[: 3 * call.count]), of_weights[3 * call.count :]
        used = sums(weights, added)
        result = training_forward(x, used, keys, choices, clock, call.policy, amax, call.weight_grad)
        kept = keep(x, result, keys[0], clock, call.policy) if call.weight_grad else KeptInput(None)
        ctx.call, ctx.dtype, ctx.shapes = call, x.dtype, kept.shapes
        ctx.save_for_backward(clock, *kept.tensors, *of_weights)
        return result.outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        clock, data, scales, outer, mean, *of_weights = ctx.saved_tensors
        (weights, keys, choices), added = in_threes(of_weights[: 3 * call.count]), of_weights[3 * call.count :]
        dx = None
        pairs = _left_pairs(grads, call)
        if call.input_grad:
            lefts = [left for left, _ in pairs]
            used = sums(weights, added, again=True)
            dx = input_gradient(grads, used, keys, choices, clock, call.policy, ctx.dtype, lefts)
        dws: tuple[Tensor | None, ...] = (None,) * call.count
        if call.weight_grad:
            kept = KeptInput(data, scales, outer, mean, *ctx.shapes)
            lefts = [left for _, left in pairs]
            found = weight_gradients(grads, kept, weights[0].shape[1], keys, clock, call.policy, ctx.dtype, lefts)
            dws = tuple(dw.to(w.dtype) for dw, w in zip(found, weights, strict=True))
        return dx, None, None, None, *dws, *(None,) * (2 * call.count), *added_gradients(added, dws)


def in_threes(of_weights: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Weights, keys and choices, one after the other in one sequence."""
    count = len(of_weights) // 3
    return of_weights[:count], of_weights[count : 2 * count], of_weights[2 * count :]


def remembered(choice: Tensor | None) -> Memory | None:
    """Four over six as `choice` says."""
    return None if choice is None else Memory(choice, 1.0)


@dataclass(frozen=True)
class Fprop:
    """What fprop made."""

    outputs: tuple[Tensor, ...]
    left: Factor
    x: Tensor
    """[tokens, in]: what was quantised, X or X_r."""
    mean: Tensor | None
    """[1, in], FP32, if it was split off."""
    right_of_wgrad: Factor | None = None
    """Q6(X^T), where a backend made it along with `left`."""


@dataclass(frozen=True)
class KeptInput:
    """What wgrad needs of the input."""

    data: Tensor | None
    """X, or packed codes."""
    scales: Tensor | None = None
    outer: Tensor | None = None
    mean: Tensor | None = None
    shape: tuple[int, ...] = ()
    scale_shape: tuple[int, int] = (0, 0)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.data, self.scales, self.outer, self.mean

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        return self.shape, self.scale_shape

    def unpack(self, operand: Operand, dtype: torch.dtype) -> Factor:
        """The factor that was packed."""
        assert self.data is not None and self.scales is not None and operand.spec is not None
        packed = Packed(self.data, self.scales, self.outer, self.shape, operand.spec, self.scale_shape, False)
        if operand.backend != EMULATED:
            return Native.of(packed.unpack(), operand.backend)
        return Fused.unpack(packed, dtype) if ops.takes(self.data, packed.spec) else packed.unpack()


def forward_product(
    x: Tensor,
    weights: Sequence[Tensor],
    rights: Sequence[Factor],
    stream: Stream,
    signs: Tensor | None,
    policy: LinearPolicy,
    amax: Tensor | None = None,
    keeping: bool = False,
) -> Fprop:
    """fprop, with the weights' factors at hand; `stream` is x's. `keeping`: `keep` will follow."""
    dtype, mean = x.dtype, None
    if policy.mean_split:
        mean, x = split_mean(x)
    left, transposed = None, None
    if keeping and policy.kept is Kept.TRANSPOSED and not (policy.fprop.rotation or policy.wgrad.rotation):
        left, transposed = factor_pair(x, policy.fprop.left, policy.wgrad.right) if amax is None else (None, None)
    if left is None:
        wanted = Wanted.BOTH if keeping and policy.kept is Kept.FORWARD else Wanted.OPERAND
        left = factor(x, policy.fprop.left, stream, signs, dtype, amax=amax, wanted=wanted)
    if mean is None:
        outputs = [multiply(left, right, dtype, fast=True) for right in rights]
    else:
        rows = [Dense(bf16_valued(weight, torch.float32)) for weight in weights]
        constants = [multiply(Dense(mean), row, torch.float32) for row in rows]  # [1, out]
        sums = [multiply(left, right, dtype, torch.float32, fast=True) for right in rights]
        outputs = [in_type(y + constant, dtype) for y, constant in zip(sums, constants, strict=True)]
    return Fprop(tuple(outputs), left, x, mean, transposed)


def training_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    choices: Sequence[Tensor | None],
    clock: Tensor,
    policy: LinearPolicy,
    amax: Tensor | None = None,
    keeping: bool = True,
) -> Fprop:
    """fprop as training computes it. `keeping`: `keep` may follow."""
    stream = Stream(keys[0], clock, Product.FPROP, Side.LEFT)
    rights = weight_factors(weights, keys, choices, clock, policy, x.dtype)
    signs = rotation_signs(policy.fprop, stream)
    return forward_product(x, weights, rights, stream, signs, policy, amax, keeping)


def weight_factors(
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    choices: Sequence[Tensor | None],
    clock: Tensor,
    policy: LinearPolicy,
    dtype: torch.dtype,
    again: bool = False,
) -> list[Factor]:
    """Q2(W) of siblings, rotated by the first one's signs, since their input is rotated once.

    again: in a backward pass.
    """
    streams = [Stream(key, clock, Product.FPROP, Side.RIGHT) for key in keys]
    signs, right = rotation_signs(policy.fprop, streams[0]), policy.fprop.right
    parts = zip(weights, streams, choices, strict=True)
    return [factor(w, right, stream, signs, dtype, remembered(choice), again=again) for w, stream, choice in parts]


def split_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [tokens, in] -> its mean over the tokens, FP32 [1, in], and the rest; both rounded to BF16, held in FP32.

    Summed in FP64, where the order of the sum, which strides and devices choose, does not show in BF16.
    """
    mean = round_to_bf16((x.sum(0, keepdim=True, dtype=torch.float64) / max(x.shape[0], 1)).float())
    return mean, round_to_bf16(bf16_valued(x, torch.float32) - mean)


def keep(x: Tensor, forward: Fprop, key: Tensor, clock: Tensor, policy: LinearPolicy) -> KeptInput:
    """What the policy says to keep, packed."""
    if policy.kept is Kept.INPUT:
        return KeptInput(x)
    if policy.kept is Kept.TRANSPOSED and forward.right_of_wgrad is None:
        return keep_input(forward.x, key, clock, policy, forward.mean)
    return _packed(forward.right_of_wgrad or forward.left, forward.mean)


def keep_input(x: Tensor, key: Tensor, clock: Tensor, policy: LinearPolicy, mean: Tensor | None = None) -> KeptInput:
    """Q6(X^T), packed: what is kept where wgrad takes the original of X (`Kept.TRANSPOSED`)."""
    return _packed(_wgrad_right(x, key, clock, policy, x.dtype, Wanted.CODES), mean)


def _packed(made: Factor, mean: Tensor | None) -> KeptInput:
    packed = pack(made)
    return KeptInput(packed.data, packed.scales, packed.outer, mean, packed.shape, packed.scale_shape)


def _wgrad_right(
    x: Tensor,
    key: Tensor,
    clock: Tensor,
    policy: LinearPolicy,
    dtype: torch.dtype,
    wanted: Wanted = Wanted.OPERAND,
) -> Factor:
    """Q6(X^T R) [in, tokens]."""
    stream = Stream(key, clock, Product.WGRAD, Side.RIGHT)
    return factor(x.t(), policy.wgrad.right, stream, rotation_signs(policy.wgrad, stream), dtype, wanted=wanted)


def _left_pairs(grads: Sequence[Tensor], call: Call) -> list[Pair]:
    """Q3(dY) and Q5(dY^T) of each sibling, where a backend makes both from one reading."""
    dgrad, wgrad = call.policy.dgrad, call.policy.wgrad
    if not (call.input_grad and call.weight_grad) or dgrad.rotation or wgrad.rotation:
        return [(None, None)] * len(grads)
    return [factor_pair(grad, dgrad.left, wgrad.left) for grad in grads]


def input_gradient(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    choices: Sequence[Tensor | None],
    clock: Tensor,
    policy: LinearPolicy,
    dtype: torch.dtype,
    lefts: Sequence[Factor | None] | None = None,
) -> Tensor:
    """dgrad: dX [tokens, in], the sum over siblings. lefts: Q3(dY), what there is of them."""
    sources: list[tuple[Tensor, Tensor | None]] = [(weight, None) for weight in weights]
    if policy.alignment is Alignment.ALIGNED and policy.fprop.right.spec is not None:
        forward_signs = rotation_signs(policy.fprop, Stream(keys[0], clock, Product.FPROP, Side.RIGHT))
        factors = weight_factors(weights, keys, choices, clock, policy, dtype, again=True)
        sources = [_dequantised(f, forward_signs, w.shape[1]) for f, w in zip(factors, weights, strict=True)]
    return dgrad(grads, sources, keys, clock, policy, dtype, lefts)


def dgrad(
    grads: Sequence[Tensor],
    sources: Sequence[tuple[Tensor, Tensor | None]],
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: LinearPolicy,
    dtype: torch.dtype,
    lefts: Sequence[Factor | None] | None = None,
) -> Tensor:
    """dX from what stands for each W [out, in], and the scale that follows it. lefts: Q3(dY), what there is of them."""
    total = None
    lefts = lefts or [None] * len(grads)
    for grad, (source, after), key, left in zip(grads, sources, keys, lefts, strict=True):
        left_stream = Stream(key, clock, Product.DGRAD, Side.LEFT)
        signs = rotation_signs(policy.dgrad, left_stream)
        left = left or factor(grad, policy.dgrad.left, left_stream, signs, dtype)
        right_stream = Stream(key, clock, Product.DGRAD, Side.RIGHT)
        right = factor(source.t(), policy.dgrad.right, right_stream, signs, dtype)
        part = multiply(left, right, dtype, after=after)
        total = part if total is None else total + part
    assert total is not None
    return total


def weight_gradients(
    grads: Sequence[Tensor],
    kept: KeptInput,
    width: int,
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: LinearPolicy,
    dtype: torch.dtype,
    lefts: Sequence[Factor | None] | None = None,
) -> tuple[Tensor, ...]:
    """wgrad: one dW [out, width], FP32, a sibling. lefts: Q5(dY^T), what there is of them.

    Their rotation signs are the first one's, since X^T is rotated once.
    """
    after = None
    right: Factor
    if policy.kept is Kept.TRANSPOSED:
        right = kept.unpack(policy.wgrad.right, dtype)
    elif policy.kept is Kept.INPUT:
        assert kept.data is not None
        right = _wgrad_right(kept.data, keys[0], clock, policy, dtype)
    else:
        forward_signs = rotation_signs(policy.fprop, Stream(keys[0], clock, Product.FPROP, Side.LEFT))
        source, after = _dequantised(kept.unpack(policy.fprop.left, dtype), forward_signs, width)
        right = _wgrad_right(source, keys[0], clock, policy, dtype)
    signs = rotation_signs(policy.wgrad, Stream(keys[0], clock, Product.WGRAD, Side.RIGHT))
    gradients = []
    for grad, key, left in zip(grads, keys, lefts or [None] * len(grads), strict=True):
        stream = Stream(key, clock, Product.WGRAD, Side.LEFT)
        left = left or factor(grad.t(), policy.wgrad.left, stream, signs, dtype)
        dw = multiply(left, right, dtype, torch.float32, after)
        if kept.mean is not None:
            total = bf16_valued(grad, torch.float32).sum(0, dtype=torch.float64)  # see `split_mean`
            dw = dw + total.float()[:, None] * kept.mean
        gradients.append(dw)
    return tuple(gradients)


def rotation_signs(product: ProductPolicy, stream: Stream) -> Tensor | None:
    return signs_of(stream, product.rotation, product.signs)


def _dequantised(forward: Factor, signs: Tensor | None, width: int) -> tuple[Tensor, Tensor | None]:
    """A forward factor -> the matrix [rows, width] that it stands for, BF16, and the scale that follows it, [1, 1].

    A whole tensor's scale need not go through BF16; those of rows must, because the backward sums over rows.
    """
    after = None
    assert not isinstance(forward, Dense)
    if forward.spec.after is Outer.TENSOR:
        matrix, after = forward.operand(), forward.after()
    else:
        matrix = forward.dequantise()
    if signs is not None:
        matrix = unrotate(matrix, signs, signs.shape[0])
        if matrix.shape[1] != width:
            matrix = crop(matrix, matrix.shape[0], width)
    return matrix, after
