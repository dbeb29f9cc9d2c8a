"""LowbitLinear against FP64 autograd, and against each product composed anew from the quantisers' public calls."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.quant import spec as S
from lowbit.quant.hadamard import rotate, unrotate
from lowbit.quant.linear import linear_products
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.policy import HIGH, Alignment, LinearPolicy, Operand, ProductPolicy, Signs
from lowbit.quant.quantise import fake_quantise, quantise
from lowbit.quant.spec import QuantSpec

KEY, CLOCK = make_key(1, "blocks.0.mlp.up"), make_clock(5, 2, 1)
FIXED = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float32)


def product(left: QuantSpec | None, right: QuantSpec | None, rotation: int = 0, signs: Signs = Signs.FRESH):
    return ProductPolicy(Operand(left), Operand(right), rotation, signs)


def all_products(left: QuantSpec, right: QuantSpec, alignment: Alignment) -> LinearPolicy:
    return LinearPolicy(*[product(left, right)] * 3, alignment)


EDEN = product(S.NVFP4_POW2_EDEN, S.NVFP4_POW2_EDEN, 128)
SR16 = product(S.NVFP4_TETRAJET_SR, S.NVFP4_TETRAJET_SR, 16)
QUARTET = product(*[replace(S.NVFP4_EDEN, rounding=S.Rounding.MS_EDEN_PUBLISHED)] * 2, 128)
POLICIES = {
    "nvfp4": LinearPolicy(product(S.NVFP4_POW2_46, S.NVFP4_POW2_46), EDEN, EDEN),
    "nvfp4_original": LinearPolicy(product(S.NVFP4_POW2_46, S.NVFP4_POW2_46), EDEN, EDEN, Alignment.ORIGINAL),
    "nvfp4_nvidia": LinearPolicy(
        product(S.NVFP4, S.NVFP4_2D),
        product(S.NVFP4_SR, S.NVFP4_2D),
        product(S.NVFP4_SR, S.NVFP4, 16, Signs.FIXED),
        Alignment.ORIGINAL,
    ),
    "nvfp4_tetrajet": LinearPolicy(product(S.NVFP4_TETRAJET, S.NVFP4_TETRAJET), SR16, SR16),
    "nvfp4_quartet2": LinearPolicy(product(S.NVFP4_46, S.NVFP4_46), QUARTET, QUARTET),
    "rotated_forward": LinearPolicy(product(S.NVFP4_POW2, S.NVFP4_POW2, 128), EDEN, EDEN),
    "mxfp8": all_products(S.MXFP8, S.MXFP8, Alignment.ORIGINAL),
    "fp8_tensor": all_products(S.FP8_TENSOR, S.FP8_TENSOR, Alignment.ALIGNED),
    "fp8_row": all_products(S.FP8_ROW, S.FP8_ROW, Alignment.ALIGNED),
    "fp8_row_original": all_products(S.FP8_ROW, S.FP8_ROW, Alignment.ORIGINAL),
    "fp8_block": LinearPolicy(
        product(S.FP8_BLOCK, S.FP8_BLOCK_2D),
        product(S.FP8_BLOCK, S.FP8_BLOCK_2D),
        product(S.FP8_BLOCK, S.FP8_BLOCK),
        Alignment.ORIGINAL,
    ),
    "int8": LinearPolicy(product(S.INT8_ROW, S.INT8_ROW)),
    "weights_only": LinearPolicy(product(None, S.NVFP4_POW2_46)),
    "backward_only": LinearPolicy(HIGH, EDEN, EDEN),
    "wgrad_of_x": LinearPolicy(product(S.MXFP8, S.MXFP8), EDEN, HIGH, Alignment.ORIGINAL),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def inputs(tokens: int, width: int, out: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, width] and dy [tokens, out], BF16-valued, and an FP32 weight that is not."""
    x, dy = torch.randn(tokens, width).bfloat16(), torch.randn(tokens, out).bfloat16()
    return x.to(dtype), torch.randn(out, width) * 0.3, dy.to(dtype)


def run(policy: LinearPolicy, x: Tensor, weight: Tensor, dy: Tensor, clock: Tensor = CLOCK) -> tuple[Tensor, ...]:
    """(Y, dX, dW)."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (y,) = linear_products(x, [weight], [KEY], clock, policy)
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def stream(product: Product, side: Side) -> Stream:
    return Stream(KEY, CLOCK, product, side)


class Composition:
    """The three products in FP64, from the issue's description; every factor made with the quantisers' public calls."""

    def __init__(self, policy: LinearPolicy, x: Tensor, weight: Tensor, dy: Tensor) -> None:
        self.policy = policy
        x, weight, dy = x.bfloat16(), weight.bfloat16(), dy.bfloat16()
        aligned = policy.alignment is Alignment.ALIGNED
        self.y = self.times(Product.FPROP, x, weight)
        seen_x, scale_x = self.seen(x, policy.fprop.left, Side.LEFT) if aligned else (x, 1.0)
        seen_w, scale_w = self.seen(weight, policy.fprop.right, Side.RIGHT) if aligned else (weight, 1.0)
        self.dx = self.times(Product.DGRAD, dy, seen_w.t()) * scale_w
        self.dw = self.times(Product.WGRAD, dy.t(), seen_x.t()) * scale_x

    def times(self, which: Product, left: Tensor, right: Tensor) -> Tensor:
        policy: ProductPolicy = getattr(self.policy, which.name.lower())
        factors = []
        for side, operand, x in ((Side.LEFT, policy.left, left), (Side.RIGHT, policy.right, right)):
            if policy.rotation:
                x = rotate(x.contiguous(), self.signs(which), policy.rotation)
            if operand.spec is None:
                factors.append(x.double())
                continue
            q = quantise(x.contiguous(), operand.spec, stream(which, side))
            after = q.after()
            factors.append(q.operand().double() * (1.0 if after is None else after.double()))
        return factors[0] @ factors[1].t()

    def signs(self, which: Product) -> Tensor:
        policy: ProductPolicy = getattr(self.policy, which.name.lower())
        fixed = policy.signs is Signs.FIXED
        return FIXED if fixed else stream(which, Side.SHARED).signs(policy.rotation)

    def seen(self, x: Tensor, operand: Operand, side: Side) -> tuple[Tensor, Tensor | float]:
        """The dequantised forward operand; a whole tensor's scale apart, so that BF16 does not round it."""
        if operand.spec is None:
            return x, 1.0
        width, rotation = x.shape[1], self.policy.fprop.rotation
        if rotation:
            x = rotate(x, self.signs(Product.FPROP), rotation)
        q = quantise(x, operand.spec, stream(Product.FPROP, side))
        after, scale = q.after(), 1.0
        if after is None or after.numel() > 1:
            value = fake_quantise(x, operand.spec, stream(Product.FPROP, side))
        else:
            value, scale = q.operand(), after.double()
        if rotation:
            value = unrotate(value, self.signs(Product.FPROP), rotation)[:, :width]
        return value, scale


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@each_policy
@pytest.mark.parametrize("shape", [(128, 128, 256), (17, 72, 136)], ids=str)
def test_each_product_is_the_one_composed_from_quantisers(policy: LinearPolicy, shape: tuple[int, int, int]) -> None:
    x, weight, dy = inputs(*shape)
    want = Composition(policy, x, weight, dy)
    for got, expected in zip(run(policy, x, weight, dy), (want.y, want.dx, want.dw), strict=True):
        assert got.dtype == torch.float32
        assert error(got, expected) < 1e-6
    got = run(policy, x.bfloat16(), weight, dy.bfloat16())
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for g, expected, bound in zip(got, (want.y, want.dx, want.dw), (4e-3, 4e-3, 1e-6), strict=True):
        assert error(g, expected) < bound
