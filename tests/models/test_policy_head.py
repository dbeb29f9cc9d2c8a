"""Log-probability and entropy of the policy head against autograd of the dense computation in FP64."""

import pytest
import torch
from torch import Tensor

from lowbit.errors import DataError
from lowbit.models.lm_head import lm_head_nll
from lowbit.models.policy_head import lm_head_policy


def dense(
    h: Tensor, w: Tensor, targets: Tensor, vocab: int, temperature: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    z = h @ w[:vocab].t()
    z = z if cap is None else cap * torch.tanh(z / cap)
    logp = (z / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_values_and_gradients(temperature: float, cap: float | None) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(50, 12, requires_grad=True), torch.randn(32, 12, requires_grad=True)
    targets = torch.randint(0, 29, (50,))
    a, b = torch.randn(50), torch.randn(50)
    out = lm_head_policy(hidden, weight, targets, vocab_size=29, temperature=temperature, softcap=cap, chunk_tokens=16)
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    lp, entropy = dense(h, w, targets, 29, temperature, cap)
    torch.testing.assert_close(out.logprob.double(), lp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    for mine, theirs in (
        (a @ out.logprob, a.double() @ lp),
        (a @ out.logprob + b @ out.entropy, a.double() @ lp + b.double() @ entropy),
        (b @ out.entropy, b.double() @ entropy),
    ):
        found = torch.autograd.grad(mine, [hidden, weight], retain_graph=True)
        wanted = torch.autograd.grad(theirs, [h, w], retain_graph=True)
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)
    assert not torch.autograd.grad(out.logprob.sum(), weight)[0][29:].any(), "padding has no gradient"


def test_it_is_the_cross_entropy_of_the_other_head() -> None:
    torch.manual_seed(2)
    hidden, weight, targets = torch.randn(9, 8), torch.randn(20, 8), torch.randint(0, 20, (9,))
    out = lm_head_policy(hidden, weight, targets, vocab_size=20)
    torch.testing.assert_close(-out.logprob, lm_head_nll(hidden, weight, targets, vocab_size=20))


def test_a_large_vocabulary_costs_no_digits() -> None:
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(151_936, 8, generator=torch.Generator().manual_seed(2))
    targets = torch.tensor([0, 77_000, 151_935])
    logprob = lm_head_policy(hidden, weight, targets, vocab_size=151_936).logprob
    exact = (hidden.double() @ weight.double().t()).log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert (logprob.double() - exact).abs().max() < 1e-5


def test_no_tokens_still_reach_every_parameter() -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    out = lm_head_policy(hidden, weight, torch.zeros(0, dtype=torch.int64), vocab_size=20)
    out.logprob.sum().backward()
    assert weight.grad is not None and not weight.grad.any() and hidden.grad is not None


def test_a_peaked_distribution_has_no_nan() -> None:
    hidden = torch.full((1, 4), 200.0, requires_grad=True)
    weight = torch.eye(6, 4) * torch.tensor([1.0, -1, 1, 1, 1, 1])[:, None]
    out = lm_head_policy(hidden, weight, torch.tensor([1]), vocab_size=6, temperature=0.1)
    (out.logprob + out.entropy).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and out.entropy.isfinite().all()


def test_mistakes_are_named() -> None:
    with pytest.raises(DataError, match="outside the vocabulary of 5"):
        lm_head_policy(torch.zeros(1, 4), torch.zeros(6, 4), torch.tensor([5]), vocab_size=5)
    with pytest.raises(DataError, match=r"targets \[2\]"):
        lm_head_policy(torch.zeros(1, 4), torch.zeros(6, 4), torch.tensor([0, 1]), vocab_size=6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """The compiled kernels, with padded rows in the product and logits that are not rounded to BF16."""
    torch.manual_seed(1)
    hidden = torch.randn(300, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(1024, 64, device="cuda", requires_grad=True)
    targets = torch.randint(0, 1000, (300,), device="cuda")
    a, b = torch.randn(300, device="cuda"), torch.randn(300, device="cuda")
    out = lm_head_policy(hidden, weight, targets, vocab_size=1000, temperature=0.8, chunk_tokens=128)
    h = hidden.detach().double().requires_grad_()
    w = weight.detach().to(dtype).double().requires_grad_()
    lp, entropy = dense(h, w, targets, 1000, 0.8, None)
    torch.testing.assert_close(out.logprob.double(), lp, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(a @ out.logprob + b @ out.entropy, [hidden, weight])
    wanted = torch.autograd.grad(a.double() @ lp + b.double() @ entropy, [h, w])
    for x, y in zip(found, wanted, strict=True):
        error = (x.double() - y).norm() / y.norm()
        assert error < (1e-4 if dtype is torch.float32 else 1e-2)
