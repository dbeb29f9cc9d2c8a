"""Compiled blocks round where the model as written does: the same bits, forward and backward, in BF16."""

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig, PrecisionConfig
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy
from lowbit.quant.resolve import Role, resolve

SHAPE = ModelConfig(layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, max_sequence=64, qk_norm=True, init_std=0.1)


def passes(precision: str | None, device: str, compiled: bool) -> dict[str, Tensor]:
    """Final hidden states, and gradients of all matrices."""
    model = Transformer(SHAPE, 100, torch.bfloat16)
    model.init_weights(1)
    model.to(device)
    if precision is not None:
        apply_policy(model, resolve(PrecisionConfig(forward=precision)), seed=1, role=Role.training)
    if compiled:
        model.compile_blocks()
    tokens = torch.randint(0, 100, (2, 64), generator=torch.Generator().manual_seed(2)).to(device)
    hidden = model(tokens)
    hidden.float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.dim() > 1 and p.grad is not None}
    return {"hidden": hidden.detach()} | gradients


def check(precision: str | None, device: str) -> None:
    expected, found = (passes(precision, device, compiled) for compiled in (False, True))
    assert expected.keys() == found.keys() and len(found) > 14
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.exhaustive
def test_in_bf16() -> None:
    """Norms' gradients are sums over all tokens, which a compiler may add in another order; all else is equal."""
    check(None, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "nvfp4", "mxfp8", "fp8_row"])
def test_on_a_gpu(precision: str | None) -> None:
    """Hidden states; gradients are sums over tokens, which two attention kernels' order tells apart."""
    expected, found = (passes(precision, "cuda", compiled)["hidden"] for compiled in (False, True))
    assert torch.equal(expected, found)
