"""Grouped products against one product a group, in FP64."""

import pytest
import torch

from lowbit.errors import DataError
from lowbit.models.layers import Embedding, GroupedLinear, frozen_weights


@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 0, 8], [2, 2, 2, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_meets_its_own_weight(sizes: list[int], dtype: torch.dtype) -> None:
    layer = GroupedLinear(4, 16, 24)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(8, 16).to(dtype).requires_grad_()
    offsets = torch.tensor(sizes).cumsum(0).int()
    y = layer(x, offsets)
    assert y.dtype == dtype and y.shape == (8, 24)
    seed = torch.randn_like(y)
    y.backward(seed)

    wide, weight = x.detach().double().requires_grad_(), layer.weight.detach().to(dtype).double().requires_grad_()
    expected = torch.cat([rows @ weight[e].t() for e, rows in enumerate(wide.split(sizes))])
    expected.backward(seed.double())
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    for ours, reference in ((x.grad, wide.grad), (layer.weight.grad, weight.grad)):
        assert ours is not None and reference is not None
        torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=tolerance)
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
    with torch.no_grad(), frozen_weights(layer, dtype):
        assert torch.equal(layer(x, offsets), y)
        if dtype is torch.bfloat16:  # in FP32 there is nothing to round, hence no copy
            layer.weight.zero_()
            assert torch.equal(layer(x, offsets), y)
    assert layer.frozen is None


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[0, -1]]), r"tokens lie in -1\.\.0, not in 0\.\.6"),
        (torch.tensor([[0, 7]]), r"tokens lie in 0\.\.7, not in 0\.\.6"),
        (torch.zeros(1, 3), r"tokens are torch\.float32 \[1, 3\]: they must be int64"),
        (torch.zeros(1, 0, dtype=torch.int64), r"tokens are torch\.int64 \[1, 0\]: .* at least one"),
    ],
)
def test_tokens_that_are_none_are_one_line(tokens: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Embedding(7, 4)(tokens)
    assert Embedding(7, 4)(torch.tensor([[0, 6]], dtype=torch.int32)).shape == (1, 2, 4)
