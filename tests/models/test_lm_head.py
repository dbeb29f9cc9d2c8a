"""The chunked head against autograd through FP64 F.cross_entropy on all logits at once."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.errors import DataError
from lowbit.models import lm_head
from lowbit.models.lm_head import HeadOutput, default_chunk, lm_head_logits, lm_head_loss, lm_head_nll

TOKENS, WIDTH, VOCAB, PADDED = 53, 24, 90, 128


def _data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(PADDED, WIDTH) * 0.5).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,))
    weights = torch.rand(TOKENS)
    weights[::7] = 0.0
    return hidden, weight, targets, weights


def _oracle(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll sum, gradient of hidden, gradient of weight), all FP64."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = h @ w[:VOCAB].t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nll = (F.cross_entropy(logits, targets, reduction="none") * weights.double()).sum()
    loss = nll + z_loss * (logits.logsumexp(-1).square() * weights.double()).sum()
    loss.backward()
    assert h.grad is not None and w.grad is not None
    return loss.detach(), nll.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [None, 1, 16, 53, 64])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_loss_and_gradients(chunk: int | None, z_loss: float, softcap: float | None) -> None:
    hidden, weight, targets, weights = _data()
    out = lm_head_loss(
        hidden, weight, targets, weights, vocab_size=VOCAB, z_loss=z_loss, softcap=softcap, chunk_tokens=chunk
    )
    (out.loss_sum * 0.37).backward()
    loss, nll, grad_hidden, grad_weight = _oracle(hidden, weight, targets, weights, z_loss, softcap)
    torch.testing.assert_close(out.loss_sum.double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.nll_sum.double(), nll, rtol=1e-5, atol=1e-5)
    assert out.loss_sum.dtype == out.nll_sum.dtype == torch.float32 and not out.nll_sum.requires_grad
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), grad_hidden * 0.37, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), grad_weight * 0.37, rtol=1e-4, atol=1e-5)
    assert torch.equal(weight.grad[VOCAB:], torch.zeros(PADDED - VOCAB, WIDTH))
    assert torch.equal(hidden.grad[::7], torch.zeros_like(hidden.grad[::7]))


def test_the_scale_of_the_loss_is_not_rounded_to_the_compute_type() -> None:
    gradients = []
    for scale in (1.0, 1 / 24576):
        hidden, weight, targets, weights = _data(torch.bfloat16)
        (lm_head_loss(hidden, weight, targets, weights, vocab_size=VOCAB).loss_sum * scale).backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    assert torch.equal(gradients[1], (gradients[0].float() * (1 / 24576)).bfloat16())


def test_bf16_gradients_have_bf16_errors() -> None:
    hidden, weight, targets, weights = _data(torch.bfloat16)
    lm_head_loss(hidden, weight, targets, weights, vocab_size=VOCAB, chunk_tokens=16).loss_sum.backward()
    _, _, grad_hidden, grad_weight = _oracle(hidden, weight, targets, weights, 0.0, None)
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    for ours, expected in ((hidden.grad, grad_hidden), (weight.grad, grad_weight)):
        error = (ours.double() - expected).norm() / expected.norm()
        assert error < 0.02


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_compiled_formula_agrees_with_autograd(z_loss: float, softcap: float | None) -> None:
    """The element-wise part that a GPU compiles, run as written: padded columns, weights and NaNs included."""
    _, weight, targets, weights = _data()
    logits = (torch.randn(TOKENS, WIDTH) @ weight.detach().t()).double().requires_grad_()
    z = logits[:, :VOCAB]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    nll = F.cross_entropy(z, targets, reduction="none")
    ((nll + z_loss * z.logsumexp(-1).square()) * weights).sum().backward()
    assert logits.grad is not None
    given = logits.detach().float()
    given[0] = float("nan")
    assert weights[0] == 0
    got, lse, grad = lm_head._fused_grad(given, targets, weights, VOCAB, z_loss, softcap)
    torch.testing.assert_close(got[1:].double(), nll[1:].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), logits.grad, rtol=1e-4, atol=1e-6)
    again, lse_again = lm_head._fused_nll(given, targets, VOCAB, softcap)
    assert torch.equal(again[1:], got[1:]) and torch.equal(lse[1:], lse_again[1:])


def test_nll_and_logits() -> None:
    hidden, weight, targets, _ = _data()
    for softcap in (None, 3.0):
        logits = hidden.detach().double() @ weight.detach()[:VOCAB].double().t()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        nll = lm_head_nll(hidden, weight, targets, vocab_size=VOCAB, softcap=softcap)
        assert nll.dtype == torch.float32 and not nll.requires_grad
        torch.testing.assert_close(
            nll.double(), F.cross_entropy(logits, targets, reduction="none"), rtol=1e-5, atol=1e-5
        )
        got = lm_head_logits(hidden.detach()[None], weight, vocab_size=VOCAB, softcap=softcap)
        assert got.shape == (1, TOKENS, VOCAB) and got.dtype == torch.float32
        torch.testing.assert_close(got[0].double(), logits, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets, weights = _data()
    out = lm_head_loss(hidden * 1e4, weight, targets, weights, vocab_size=VOCAB)
    out.loss_sum.backward()
    loss, _, grad_hidden, _ = _oracle(hidden.detach() * 1e4, weight, targets, weights, 0.0, None)
    torch.testing.assert_close(out.loss_sum.double(), loss, rtol=1e-5, atol=0)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), grad_hidden * 1e4, rtol=1e-3, atol=1.0)


def test_all_tokens_ignored_costs_nothing_and_moves_nothing() -> None:
    hidden, weight, _, _ = _data()
    out = lm_head_loss(hidden, weight, torch.full((TOKENS,), -100), torch.zeros(TOKENS), vocab_size=VOCAB)
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == 0.0 and float(out.nll_sum) == 0.0
    assert weight.grad is not None and not bool(weight.grad.any())


def _largest_allocation(run: object) -> int:
    """Numbers in the largest tensor any operation returned while `run` ran."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        run()  # type: ignore[operator]
    return largest


def test_the_batch_of_logits_never_exists() -> None:
    hidden, weight, targets, weights = _data()

    def loss() -> HeadOutput:
        return lm_head_loss(hidden, weight, targets, weights, vocab_size=VOCAB, chunk_tokens=8)

    assert _largest_allocation(lambda: loss().loss_sum.backward()) == PADDED * WIDTH < TOKENS * VOCAB


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, weights = _data()
    expected = lm_head_loss(hidden, weight, targets, weights, vocab_size=VOCAB)
    monkeypatch.setattr(lm_head, "_eager_grad", lambda *_: pytest.fail("computed a gradient"))
    with torch.no_grad():
        out = lm_head_loss(hidden, weight, targets, weights, vocab_size=VOCAB)
    assert not out.loss_sum.requires_grad
    torch.testing.assert_close(out.loss_sum, expected.loss_sum)
    monkeypatch.undo()
    monkeypatch.setattr(lm_head, "_accumulate", lambda *_: pytest.fail("computed the weight's gradient"))
    lm_head_loss(hidden, weight.detach(), targets, weights, vocab_size=VOCAB).loss_sum.backward()
    assert hidden.grad is not None


def test_errors_say_what_is_wrong() -> None:
    hidden, weight, targets, weights = _data()
    targets[4] = VOCAB
    with pytest.raises(DataError, match=f"target {VOCAB} of token 4 lies outside the vocabulary of {VOCAB}"):
        lm_head_loss(hidden, weight, targets, weights, vocab_size=VOCAB)
    with pytest.raises(DataError, match="token 4"):
        lm_head_nll(hidden, weight, targets, vocab_size=VOCAB)
    targets[4] = 0
    with pytest.raises(DataError, match="targets"):
        lm_head_loss(hidden, weight, targets[1:], weights[1:], vocab_size=VOCAB)
    with pytest.raises(DataError, match="weights"):
        lm_head_loss(hidden, weight, targets, weights[1:], vocab_size=VOCAB)
    with pytest.raises(DataError, match="vocab_size=129"):
        lm_head_loss(hidden, weight, targets, weights, vocab_size=PADDED + 1)
    with pytest.raises(DataError, match="hidden must be"):
        lm_head_loss(hidden[:, 1:], weight, targets, weights, vocab_size=VOCAB)


def test_chunks_shrink_as_vocabularies_grow() -> None:
    for device in ("cpu", "cuda"):
        sizes = [default_chunk(device, vocab) for vocab in (257, 4096, 32768, 151_936, 10_000_000)]
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] >= 64 and all(size % 64 == 0 for size in sizes)
