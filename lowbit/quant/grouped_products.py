"""fprop, dgrad and wgrad of all experts of a layer, as two operators.

How many rows an expert has is known on the device only, so the loop over experts is inside an operator, opaque to the
compiler, whose results have sizes that do not depend on it: what is kept for the backward pass lies expert after expert
in flat buffers long enough for the worst case (`_capacity`). On a GPU the loop waits for the offsets once a pass.
Where a policy's fprop and dgrad have a backend (`backends.fp8_grouped`), they are one product of all experts each, and
the loop is left with what wgrad needs; a pass that wgrad needs nothing of then neither waits nor checks the offsets.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lowbit.quant.backends.fp8_grouped import multiply_rows
from lowbit.quant.kernels.ops import code_shapes, spec_of, spec_text
from lowbit.quant.linear_products import KeptInput, input_gradient, keep, keep_input, training_forward, weight_gradients
from lowbit.quant.policy import EMULATED, Alignment, Kept, LinearPolicy, Operand, ProductPolicy, Signs


def grouped_products(
    x: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: LinearPolicy,
) -> tuple[Tensor, ...]:
    """x [rows, in] BF16 or FP32, weights [experts, out, in] FP32, keys [experts, 2] each -> each [rows, out]."""
    weight_grad = any(w.requires_grad for w in weights)
    if not torch.is_grad_enabled() or not (weight_grad or x.requires_grad):
        made: list[Tensor] = grouped_forward(x, offsets, weights, keys, clock, policy_text(policy), False)
        return tuple(made[: len(weights)])
    outputs: tuple[Tensor, ...]
    flags = x.requires_grad, weight_grad
    outputs = GroupedProducts.apply(x, offsets, clock, policy, *flags, *weights, *keys)  # type: ignore[no-untyped-call]
    return outputs


class GroupedProducts(torch.autograd.Function):
    """fprop forward, dgrad and wgrad backward, for one or several weights of the same rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        offsets: Tensor,
        clock: Tensor,
        policy: LinearPolicy,
        input_grad: bool,
        weight_grad: bool,
        *weights_and_keys: Tensor,
    ) -> tuple[Tensor, ...]:
        count = len(weights_and_keys) // 2
        weights, keys = list(weights_and_keys[:count]), list(weights_and_keys[count:])
        made = grouped_forward(x, offsets, weights, keys, clock, policy_text(policy), weight_grad)
        kept = made[count:]
        if weight_grad and policy.kept is Kept.INPUT:
            kept = [x, *kept[1:]]
        ctx.settings = policy, input_grad, weight_grad, x.dtype
        ctx.save_for_backward(offsets, clock, *kept, *weights_and_keys)
        return tuple(made[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        policy, input_grad, weight_grad, dtype = ctx.settings
        offsets, clock, *rest = ctx.saved_tensors
        kept, rest = list(rest[:4]), rest[4:]
        count = len(rest) // 2
        weights, keys = list(rest[:count]), list(rest[count:])
        grads_in = [grad.contiguous() for grad in grads]
        text = policy_text(policy)
        made = grouped_backward(grads_in, kept, offsets, weights, keys, clock, text, dtype, input_grad, weight_grad)
        dx = made[0] if input_grad else None
        dws = made[1:] if weight_grad else [None] * count
        return dx, None, None, None, None, None, *dws, *(None,) * count


# The operators ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("lowbit::grouped_forward", mutates_args=())
def grouped_forward(
    x: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: str,
    keeping: bool,
) -> list[Tensor]:
    """Outputs [rows, out], one a weight; then what is kept: flat data, scales and outer scales, means [experts, in]."""
    found = policy_of(policy)
    packing = keeping and found.kept is not Kept.INPUT
    native = found.fprop.backend != EMULATED
    if native:
        outputs = [y.to(x.dtype) for y in multiply_rows(x, weights, offsets, fast=True)]
    else:
        outputs = [x.new_empty(x.shape[0], w.shape[1]) for w in weights]
    kept = _allocate_kept(x, weights, found, keeping)
    if native and not packing:
        return outputs + kept
    buffers = [_Buffer(flat) for flat in kept[:3]]
    nothing: list[Tensor | None] = [None] * len(weights)
    for e, rows in groups_of(offsets, weights[0].shape[0], x.shape[0]):
        own_keys = [k[e] for k in keys]
        if native:
            of_expert = keep_input(x[rows], own_keys[0], clock, found)
        else:
            made = training_forward(x[rows], [w[e] for w in weights], own_keys, nothing, clock, found, None, keeping)
            for out, y in zip(outputs, made.outputs, strict=True):
                out[rows] = y
            if not packing:
                continue
            of_expert = keep(x[rows], made, own_keys[0], clock, found)
        for buffer, tensor in zip(buffers, of_expert.tensors[:3], strict=True):
            buffer.put(tensor)
        if of_expert.mean is not None:
            kept[3][e] = of_expert.mean[0]
    return outputs + kept


@grouped_forward.register_fake
def _(
    x: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: str,
    keeping: bool,
) -> list[Tensor]:
    outputs = [x.new_empty(x.shape[0], w.shape[1]) for w in weights]
    return outputs + _allocate_kept(x, weights, policy_of(policy), keeping)


@torch.library.custom_op("lowbit::grouped_backward", mutates_args=())
def grouped_backward(
    grads: Sequence[Tensor],
    kept: Sequence[Tensor],
    offsets: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: str,
    dtype: torch.dtype,
    input_grad: bool,
    weight_grad: bool,
) -> list[Tensor]:
    """[dX, dW of each weight]; those not wanted have no elements."""
    found = policy_of(policy)
    width = weights[0].shape[2]
    dx, *dws = _allocate_gradients(grads, weights, dtype, input_grad, weight_grad)
    if input_grad and found.dgrad.backend != EMULATED:
        # each W_e^T in BF16, which is how a quantiser reads it anyway: half of what a transposed FP32 copy would take
        turned = [w.transpose(1, 2).to(torch.bfloat16, memory_format=torch.contiguous_format) for w in weights]
        parts = [multiply_rows(g, [w], offsets)[0].to(dtype) for g, w in zip(grads, turned, strict=True)]
        dx, input_grad = sum(parts[1:], parts[0]), False
        if not weight_grad:
            return [dx, *dws]
    buffers = [_Buffer(flat) for flat in kept[:3]]
    nothing: list[Tensor | None] = [None] * len(weights)
    for e, rows in groups_of(offsets, weights[0].shape[0], grads[0].shape[0]):
        own_grads, own_keys = [g[rows] for g in grads], [k[e] for k in keys]
        if input_grad:
            own_weights = [w[e] for w in weights]
            dx[rows] = input_gradient(own_grads, own_weights, own_keys, nothing, clock, found, dtype)
        if weight_grad:
            of_expert = _kept_of_expert(kept, buffers, rows, e, width, found)
            made = weight_gradients(own_grads, of_expert, width, own_keys, clock, found, dtype)
            for dw, gradient in zip(dws, made, strict=True):
                dw[e] = gradient
    return [dx, *dws]


@grouped_backward.register_fake
def _(
    grads: Sequence[Tensor],
    kept: Sequence[Tensor],
    offsets: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    clock: Tensor,
    policy: str,
    dtype: torch.dtype,
    input_grad: bool,
    weight_grad: bool,
) -> list[Tensor]:
    return _allocate_gradients(grads, weights, dtype, input_grad, weight_grad)


def groups_of(offsets: Tensor, experts: int, rows: int) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and their rows.

    Raises: ValueError unless offsets rise from 0 to `rows`, one an expert.
    """
    ends = offsets.tolist()
    if len(ends) != experts or [0, *ends] != sorted([0, *ends]) or ends[-1] != rows:
        raise ValueError(f"offsets {ends} do not share {rows} rows out among {experts} experts")
    for e, (begin, end) in enumerate(pairwise([0, *ends])):
        if end > begin:
            yield e, slice(begin, end)


class _Buffer:
    """A flat buffer that tensors are put into, or taken out of, one after the other."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.at = flat, 0

    def put(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.flat[self.at : self.at + tensor.numel()] = tensor.reshape(-1)
            self.at += tensor.numel()

    def take(self, shape: Sequence[int]) -> Tensor:
        count = torch.Size(shape).numel()
        self.at += count
        return self.flat[self.at - count : self.at].view(*shape)


def _allocate_kept(x: Tensor, weights: Sequence[Tensor], policy: LinearPolicy, keeping: bool) -> list[Tensor]:
    """Uninitialised: what is kept."""
    if not keeping or policy.kept is Kept.INPUT:
        return [x.new_empty(0) for _ in range(4)]
    experts, width = weights[0].shape[0], x.shape[1]
    one, two = (_kept_shapes(_step(policy) * n, width, policy)[1] for n in (1, 2))
    kept = [
        x.new_empty(_capacity(a, b, x.shape[0], experts, _step(policy)), dtype=dtype)
        for (a, dtype), (b, _) in zip(one, two, strict=True)
    ]
    kept.append(x.new_zeros((experts, width) if policy.mean_split else 0, dtype=torch.float32))
    return kept


def _step(policy: LinearPolicy) -> int:
    """Tokens by which what is kept of an expert grows."""
    spec = policy.kept_operand.spec
    assert spec is not None
    if policy.kept is Kept.FORWARD:
        return spec.block[0] or 1
    return max(spec.column_multiple, policy.wgrad.rotation)


def _capacity(one: Sequence[int], two: Sequence[int], rows: int, experts: int, step: int) -> int:
    """Numbers that all experts keep at most: a constant each, and an amount each `step` tokens, begun or full.

    one, two: the shape for one step of tokens and for two.
    """
    amount = torch.Size(two).numel() - torch.Size(one).numel()
    constant = torch.Size(one).numel() - amount
    return constant * experts + amount * ((rows + experts * (step - 1)) // step)


Shapes = list[tuple[tuple[int, ...], torch.dtype]]


def _kept_shapes(tokens: int, width: int, policy: LinearPolicy) -> tuple[tuple[int, int], Shapes]:
    """Of one expert's kept factor: its own shape, and those of data, scales and outer scales."""
    spec = policy.kept_operand.spec
    assert spec is not None
    forward = policy.kept is Kept.FORWARD
    rows, columns = (tokens, width) if forward else (width, tokens)
    rotation = policy.fprop.rotation if forward else policy.wgrad.rotation
    columns = -(-columns // rotation) * rotation if rotation else columns
    shapes = [
        (shape if isinstance(shape, tuple) else (shape,), kind) for shape, kind in code_shapes(rows, columns, spec)
    ]
    return (rows, columns), shapes


def _kept_of_expert(
    kept: Sequence[Tensor], buffers: Sequence[_Buffer], rows: slice, expert: int, width: int, policy: LinearPolicy
) -> KeptInput:
    if policy.kept is Kept.INPUT:
        return KeptInput(kept[0][rows])
    shape, shapes = _kept_shapes(rows.stop - rows.start, width, policy)
    data, scales, outer = (buffer.take(part) for buffer, (part, _) in zip(buffers, shapes, strict=True))
    mean = kept[3][expert : expert + 1] if policy.mean_split else None
    scale_shape = scales.shape[0], scales.shape[1]
    return KeptInput(data, scales, outer if outer.numel() else None, mean, shape, scale_shape)


def _allocate_gradients(
    grads: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype, input_grad: bool, weight_grad: bool
) -> list[Tensor]:
    rows, width = grads[0].shape[0], weights[0].shape[2]
    dx = grads[0].new_empty((rows, width) if input_grad else 0, dtype=dtype)
    return [dx, *(w.new_zeros(w.shape if weight_grad else 0) for w in weights)]


# Policies as text, which is what an operator takes ------------------------------------------------------------------


def policy_text(policy: LinearPolicy) -> str:
    """A policy in one line."""
    products = "|".join([_product_text(policy.fprop), _product_text(policy.dgrad), _product_text(policy.wgrad)])
    return f"{products}|{policy.alignment.value}|{int(policy.mean_split)}"


def _product_text(product: ProductPolicy) -> str:
    parts = spec_text(product.left.spec), spec_text(product.right.spec), product.rotation, product.signs.value
    return ";".join(map(str, (*parts, product.backend)))


@cache
def policy_of(text: str) -> LinearPolicy:
    """The inverse of `policy_text`; whether a bias is allowed was asked when the policy was made."""
    *products, alignment, mean_split = text.split("|")
    fprop, dgrad, wgrad = map(_product_of, products)
    return LinearPolicy(fprop, dgrad, wgrad, Alignment(alignment), bool(int(mean_split)), allow_bias=True)


def _product_of(text: str) -> ProductPolicy:
    left, right, rotation, signs, backend = text.split(";")
    operands = Operand(spec_of(left), backend), Operand(spec_of(right), backend)
    return ProductPolicy(*operands, int(rotation), Signs(signs))
