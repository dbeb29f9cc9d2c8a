"""Random Hadamard rotation against the matrix in FP64, a scalar butterfly in numpy FP32, and its own inverse."""

import numpy as np
import pytest
import torch
from oracles import same_bits, tensor, to_bf16

from lowbit.quant.hadamard import rotate, unrotate
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key

sizes = pytest.mark.parametrize("size", [16, 128])


def signs(count: int, side: Side = Side.LEFT) -> torch.Tensor:
    return Stream(make_key(5, "layer"), make_clock(9), Product.DGRAD, side).signs(count)


def sylvester(size: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def scalar_rotation(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """One group, FP32, strides 1, 2, 4, ..."""
    y = (x * s).astype(np.float32)
    stride = 1
    while stride < len(y):
        z = y.copy()
        for i in range(len(y)):
            z[i] = y[i] + y[i + stride] if not i & stride else y[i - stride] - y[i]
        y, stride = z, stride * 2
    return to_bf16(y * np.float32(len(y) ** -0.5))


@sizes
def test_it_is_the_sylvester_matrix_times_signs(size: int) -> None:
    x, s = torch.randn(64, 512).bfloat16(), signs(size)
    matrix = sylvester(size) * s.double().numpy() / size**0.5
    want = x.double().reshape(-1, size).numpy() @ matrix.T
    got = rotate(x, s, size).double().reshape(-1, size).numpy()
    assert np.abs(got - want).max() <= np.abs(want).max() * 2.0**-8
    np.testing.assert_array_equal(np.abs(got - want) <= np.abs(want) * 2.0**-8 + 1e-5, True)


@sizes
def test_the_order_of_additions_is_the_one_written_down(size: int) -> None:
    x, s = to_bf16(np.random.default_rng(0).standard_normal((40, size)).astype(np.float32)), signs(size)
    want = np.stack([scalar_rotation(row, s.numpy()) for row in x])
    assert same_bits(rotate(tensor(x), s, size).float(), tensor(want))


@sizes
def test_the_inverse_and_signs_per_group(size: int) -> None:
    x = torch.randn(8, 4, 512).bfloat16()
    for s in (signs(size), signs(512)):
        back = unrotate(rotate(x, s, size), s, size)
        assert (back.double() - x.double()).norm() < 4e-3 * x.double().norm()
    ints = torch.randint(-4, 5, (8, 512)).bfloat16()  # sums stay exact: with 1/4 nothing is lost at all
    if size == 16:
        assert torch.equal(unrotate(rotate(ints, signs(16), 16), signs(16), 16), ints)


@sizes
def test_products_of_two_rotated_operands_are_kept_and_padding_is_exact(size: int) -> None:
    a, b = torch.randn(32, 200).bfloat16(), torch.randn(24, 200).bfloat16()
    ra, rb = rotate(a, signs(size, Side.LEFT), size), rotate(b, signs(size, Side.RIGHT), size)
    assert ra.shape == (32, -(-200 // size) * size)
    product = a.double() @ b.double().T
    assert (ra.double() @ rb.double().T - product).norm() < 6e-3 * product.norm()
    padded = torch.nn.functional.pad(a, (0, -200 % size))
    assert torch.equal(rotate(padded, signs(size), size), ra)


def test_nan_stays_in_its_group_and_other_sizes_are_refused() -> None:
    x = torch.randn(2, 256)
    x[1, 130] = float("nan")
    y = rotate(x, signs(128), 128)
    assert y[1, 128:].isnan().all() and y[1, :128].isfinite().all() and y[0].isfinite().all()
    with pytest.raises(ValueError, match="Hadamard size 32"):
        rotate(x, signs(32), 32)
