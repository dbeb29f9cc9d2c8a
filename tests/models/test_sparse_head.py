"""Distillation losses of the chunked head against FP64 autograd on all logits at once."""

import pytest
import torch
from test_lm_head import PADDED, TOKENS, VOCAB, WIDTH, _data, _largest_allocation
from torch import Tensor

from lowbit.configs.schema_distill import Divergence
from lowbit.errors import DataError
from lowbit.models import sparse_head
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.sparse_head import DistillTerms, SparseTargets, lm_head_distill_loss

K = 7


def teacher_targets(seed: int = 1, exact: bool = False) -> SparseTargets:
    """Random targets; with `exact` they are the likeliest tokens of a distribution with their probabilities."""
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(TOKENS, VOCAB, generator=g) * 2, dim=1)
    weights, ids = p.topk(K, dim=1)
    if not exact:
        ids = torch.rand(TOKENS, VOCAB, generator=g).topk(K, dim=1).indices
        weights = torch.rand(TOKENS, K, generator=g)
        weights /= weights.sum(dim=1, keepdim=True) * (0.8 + 0.4 * torch.rand(TOKENS, 1, generator=g))
    weights[::5, -2:] = 0.0  # empty entries
    ids[::5, -2:] = 0
    entropy = -(p * p.log()).sum(dim=1)
    return SparseTargets(ids, weights, entropy)


def oracle(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    teacher: SparseTargets,
    terms: DistillTerms,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll [N], D [N], gradient of hidden, gradient of weight), FP64, written from the definitions."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    z = h @ w[:VOCAB].t()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_s = torch.log_softmax(z / terms.temperature, dim=1)
    p = torch.zeros_like(z).scatter_add_(1, teacher.ids, teacher.weights.double())
    if terms.divergence is Divergence.forward_kl:
        # logsumexp once, whatever the weights sum to.
        d = torch.logsumexp(z / terms.temperature, 1) - (p * z).sum(1) / terms.temperature - teacher.entropy.double()
    else:
        named = p > 0
        s_all, p_all = [], []
        for i in range(TOKENS):  # a bucket for everything that is not named
            s, q = log_s[i].exp()[named[i]], p[i][named[i]]
            s_all.append(torch.cat([s, (1 - s.sum())[None]]))
            p_all.append(torch.cat([q, (1 - q.sum())[None]]))
        kl = lambda a, b: (a * (a / b).log()).sum()  # noqa: E731
        if terms.divergence is Divergence.reverse_kl:
            d = torch.stack([kl(s, q) for s, q in zip(s_all, p_all, strict=True)])
        else:
            d = torch.stack([(kl(q, (s + q) / 2) + kl(s, (s + q) / 2)) / 2 for s, q in zip(s_all, p_all, strict=True)])
    lse = torch.logsumexp(z, dim=1)
    nll = lse - z.gather(1, targets[:, None])[:, 0]
    loss = ((terms.alpha * d + (1 - terms.alpha) * nll + terms.z_loss * lse.square()) * weights.double()).sum()
    loss.backward()
    assert h.grad is not None and w.grad is not None
    return loss.detach(), nll.detach(), d.detach(), h.grad, w.grad


CASES = [
    DistillTerms(),
    DistillTerms(alpha=0.7),
    DistillTerms(alpha=0.0),
    DistillTerms(temperature=2.0),
    DistillTerms(alpha=0.4, temperature=0.5, z_loss=0.01),
    DistillTerms(Divergence.reverse_kl),
    DistillTerms(Divergence.reverse_kl, alpha=0.6, temperature=1.7),
    DistillTerms(Divergence.jsd, z_loss=0.01),
    DistillTerms(Divergence.jsd, alpha=0.5, temperature=3.0),
]


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("terms", CASES, ids=str)
def test_loss_and_gradients(terms: DistillTerms, softcap: float | None, chunk: int | None) -> None:
    hidden, weight, targets, weights = _data()
    teacher = teacher_targets(exact=terms.divergence is not Divergence.forward_kl)
    out = lm_head_distill_loss(
        hidden, weight, targets, weights, teacher, terms, vocab_size=VOCAB, softcap=softcap, chunk_tokens=chunk
    )
    (out.loss_sum * 0.37).backward()
    loss, nll, d, grad_hidden, grad_weight = oracle(hidden, weight, targets, weights, teacher, terms, softcap)
    w = weights.double()
    for got, expected in (
        (out.loss_sum, loss),
        (out.nll_sum, (w * nll).sum()),
        (out.divergence_sum, (w * d).sum()),
        (out.divergence_square_sum, (w * d.square()).sum()),
    ):
        torch.testing.assert_close(got.detach().double(), expected, rtol=2e-5, atol=1e-5)
    assert not out.nll_sum.requires_grad and not out.divergence_sum.requires_grad
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), grad_hidden * 0.37, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), grad_weight * 0.37, rtol=1e-4, atol=1e-5)
    assert torch.equal(weight.grad[VOCAB:], torch.zeros(PADDED - VOCAB, WIDTH)), "padded rows learn nothing"
    assert torch.equal(hidden.grad[::7], torch.zeros_like(hidden.grad[::7])), "weight 0 learns nothing"
    if terms.divergence is not Divergence.forward_kl:
        assert float(d.min()) >= -1e-12


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("terms", CASES, ids=str)
def test_the_gpus_formulas_agree(terms: DistillTerms, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU compiles, run as written, padded columns included; repeated ids (two teachers) add up."""
    monkeypatch.setattr(sparse_head, "compiled", lambda function: function)
    hidden, weight, targets, weights = _data()
    teacher = teacher_targets(exact=terms.divergence is not Divergence.forward_kl)
    if terms.divergence is Divergence.forward_kl:
        second = teacher_targets(2)
        teacher = SparseTargets(
            torch.cat([teacher.ids, second.ids, targets[:, None]], dim=1),
            torch.cat([teacher.weights / 2, second.weights / 2, torch.full((TOKENS, 1), 0.01)], dim=1),
            (teacher.entropy + second.entropy) / 2,
        )
    settings = sparse_head._Settings(VOCAB, softcap, TOKENS, True, True)
    logits = (hidden @ weight.t()).detach()  # padding included
    ids = torch.cat([teacher.ids, targets[:, None]], dim=1)
    part = SparseTargets(ids, teacher.weights, teacher.entropy)
    slopes, grad, factor = sparse_head._chunk_on_gpu(logits.clone(), part, weights, terms, settings, True)
    _, nll, d, grad_hidden, _ = oracle(hidden, weight, targets, weights, teacher, terms, softcap)
    torch.testing.assert_close(slopes.nll.double(), nll, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(slopes.divergence.double(), d, rtol=2e-5, atol=2e-5)
    assert grad is not None and factor is None
    torch.testing.assert_close((grad @ weight.detach()).double(), grad_hidden, rtol=1e-4, atol=2e-5)
    _, grad_cpu, factor_cpu = sparse_head._chunk_on_cpu(logits[:, :VOCAB].clone(), part, weights, terms, settings, True)
    assert grad_cpu is not None and factor_cpu is not None
    torch.testing.assert_close(grad[:, :VOCAB], grad_cpu * factor_cpu, rtol=1e-4, atol=1e-6)
    assert not grad[:, VOCAB:].any()


def test_the_gradient_is_softmax_minus_weights() -> None:
    """In the logits themselves: an identity for a head makes them the hidden states."""
    teacher = teacher_targets()
    hidden = torch.randn(TOKENS, VOCAB, requires_grad=True)
    lm_head_distill_loss(
        hidden, torch.eye(VOCAB), torch.zeros(TOKENS, dtype=torch.int64), torch.ones(TOKENS), teacher, DistillTerms(),
        vocab_size=VOCAB,
    ).loss_sum.backward()  # fmt: skip
    dense = torch.zeros(TOKENS, VOCAB, dtype=torch.float64).scatter_add_(1, teacher.ids, teacher.weights.double())
    assert hidden.grad is not None
    expected = torch.softmax(hidden.detach().double(), dim=1) - dense
    torch.testing.assert_close(hidden.grad.double(), expected, rtol=0, atol=3e-7)


def test_one_hot_targets_are_cross_entropy() -> None:
    hidden, weight, targets, weights = _data()
    plain = lm_head_loss(hidden, weight, targets, weights, vocab_size=VOCAB, z_loss=0.01)
    plain.loss_sum.backward()
    assert hidden.grad is not None and weight.grad is not None
    expected = hidden.grad.clone(), weight.grad.clone()
    one_hot = SparseTargets(targets[:, None], torch.ones(TOKENS, 1), torch.zeros(TOKENS))
    for alpha in (1.0, 0.3, 0.0):
        hidden.grad = weight.grad = None
        terms = DistillTerms(alpha=alpha, z_loss=0.01)
        out = lm_head_distill_loss(hidden, weight, targets, weights, one_hot, terms, vocab_size=VOCAB)
        out.loss_sum.backward()
        torch.testing.assert_close(out.loss_sum, plain.loss_sum)
        torch.testing.assert_close(out.nll_sum, out.divergence_sum)
        assert hidden.grad is not None and weight.grad is not None
        torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weight.grad, expected[1], rtol=1e-5, atol=1e-6)


def test_bf16_gradients_have_bf16_errors() -> None:
    hidden, weight, targets, weights = _data(torch.bfloat16)
    teacher, terms = teacher_targets(), DistillTerms(alpha=0.8)
    lm_head_distill_loss(hidden, weight, targets, weights, teacher, terms, vocab_size=VOCAB).loss_sum.backward()
    *_, grad_hidden, grad_weight = oracle(hidden, weight, targets, weights, teacher, terms, None)
    assert hidden.grad is not None and weight.grad is not None
    for ours, expected in ((hidden.grad, grad_hidden), (weight.grad, grad_weight)):
        assert (ours.double() - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("kind", [Divergence.reverse_kl, Divergence.jsd])
def test_probabilities_at_their_floor_stay_finite(kind: Divergence) -> None:
    """A student that is certain, a teacher whose stored tokens hold everything: no infinity, and no phantom slope."""
    log_s = torch.tensor([[0.0, -60.0], [-60.0, -60.0], [-0.5, -2.0]])
    p = torch.tensor([[0.6, 0.4], [1.0, 0.0], [0.75, 0.25]])
    value, slope = sparse_head._bucketed(log_s, p, kind)
    assert torch.isfinite(value).all() and torch.isfinite(slope).all() and (value > -1e-6).all()
    step = 1e-3
    for k in range(2):
        moved = log_s.clone()
        moved[2, k] += step
        numeric = (sparse_head._bucketed(moved, p, kind)[0][2] - value[2]) / step
        assert float(slope[2, k]) == pytest.approx(float(numeric), rel=0.02, abs=2e-3)
    assert float(slope[1].abs().max()) < 1e-20, "below the floor nothing pulls"


def test_memory_is_a_chunks() -> None:
    hidden, weight, targets, weights = _data()
    teacher = teacher_targets()

    def run() -> None:
        lm_head_distill_loss(
            hidden, weight, targets, weights, teacher, DistillTerms(alpha=0.5, temperature=2.0),
            vocab_size=VOCAB, chunk_tokens=8,
        ).loss_sum.backward()  # fmt: skip

    assert _largest_allocation(run) == PADDED * WIDTH < TOKENS * VOCAB


@pytest.mark.parametrize("chunk", [64, 192])
@pytest.mark.parametrize("terms", [DistillTerms(alpha=0.5), DistillTerms(Divergence.jsd)], ids=str)
def test_memory_follows_the_chunk_in_a_students_whole_loss(terms: DistillTerms, chunk: int) -> None:
    """Of 128k tokens of vocabulary, loss and gradients: nothing is larger than a chunk's logits."""
    vocab, width, tokens = 128_256, 4, 450
    assert chunk * vocab > vocab * width, "a chunk's logits are larger than the head's gradient"
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = torch.randn(vocab, width).requires_grad_()
    teacher = SparseTargets(torch.randint(vocab, (tokens, 16)), torch.full((tokens, 16), 1 / 17), torch.ones(tokens))

    def run() -> None:
        lm_head_distill_loss(
            hidden, weight, torch.randint(vocab, (tokens,)), torch.ones(tokens), teacher, terms,
            vocab_size=vocab, chunk_tokens=chunk,
        ).loss_sum.backward()  # fmt: skip

    assert _largest_allocation(run) == chunk * vocab


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, targets, weights = _data()
    teacher = teacher_targets()
    expected = lm_head_distill_loss(hidden, weight, targets, weights, teacher, DistillTerms(), vocab_size=VOCAB)
    with torch.no_grad():
        out = lm_head_distill_loss(hidden, weight, targets, weights, teacher, DistillTerms(), vocab_size=VOCAB)
    assert not out.loss_sum.requires_grad
    torch.testing.assert_close(out.loss_sum, expected.loss_sum.detach())


def test_errors_say_what_is_wrong() -> None:
    hidden, weight, targets, weights = _data()
    teacher = teacher_targets()

    def run(teacher: SparseTargets) -> None:
        lm_head_distill_loss(hidden, weight, targets, weights, teacher, DistillTerms(), vocab_size=VOCAB)

    with pytest.raises(DataError, match=r"ids \[52, 7\] and weights \[53, 7\] must be \[53, K\]"):
        run(SparseTargets(teacher.ids[1:], teacher.weights, teacher.entropy))
    teacher.ids[3, 2] = VOCAB
    with pytest.raises(DataError, match=f"id {VOCAB} lies outside the vocabulary of {VOCAB}"):
        run(teacher)


@pytest.mark.exhaustive
def test_the_compiled_kernels_are_what_was_tested() -> None:
    """On this CPU's compiler: the same graph that a GPU compiles, fullgraph, for two sizes of the chunk."""
    hidden, weight, targets, weights = _data()
    teacher, terms = teacher_targets(), DistillTerms(alpha=0.7, temperature=2.0)
    settings = sparse_head._Settings(VOCAB, None, TOKENS, True, True)
    logits = (hidden @ weight.t()).detach()
    ids = torch.cat([teacher.ids, targets[:, None]], dim=1)
    for rows in (slice(0, TOKENS), slice(0, 20)):
        part = SparseTargets(ids[rows], teacher.weights[rows], teacher.entropy[rows])
        given = logits[rows], part, weights[rows], terms, settings, True
        slopes, grad, _ = sparse_head._chunk_on_gpu(*given)
        expected, grad_cpu, factor = sparse_head._chunk_on_cpu(logits[rows, :VOCAB].clone(), *given[1:])
        assert grad is not None and grad_cpu is not None and factor is not None
        torch.testing.assert_close(slopes.loss, expected.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad[:, :VOCAB], grad_cpu * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", CASES, ids=str)
def test_on_a_gpu_against_the_oracle(terms: DistillTerms) -> None:
    hidden, weight, targets, weights = _data()
    teacher = teacher_targets(exact=terms.divergence is not Divergence.forward_kl)
    loss, _, _, grad_hidden, grad_weight = oracle(hidden, weight, targets, weights, teacher, terms, None)
    h, w = hidden.detach().cuda().requires_grad_(), weight.detach().cuda().requires_grad_()
    moved = SparseTargets(*(t.cuda() for t in teacher))
    out = lm_head_distill_loss(h, w, targets.cuda(), weights.cuda(), moved, terms, vocab_size=VOCAB, chunk_tokens=16)
    out.loss_sum.backward()
    assert h.grad is not None and w.grad is not None
    torch.testing.assert_close(out.loss_sum.detach().cpu().double(), loss, rtol=1e-3, atol=1e-3)
    for ours, expected in ((h.grad, grad_hidden), (w.grad, grad_weight)):  # TF32 is off, FP32 products
        assert (ours.cpu().double() - expected).norm() / expected.norm() < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [256, 512, 1024])
def test_on_a_gpu_memory_is_a_chunks(chunk: int) -> None:
    """128k tokens of vocabulary, BF16: the loss and its gradients take the chunk's logits and little more."""
    vocab, width, tokens = 128_256, 256, 8192
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, width, device="cuda") * 0.05).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    teacher = SparseTargets(
        torch.randint(0, vocab, (tokens, 16), device="cuda"),
        torch.full((tokens, 16), 1 / 16, device="cuda"),
        torch.ones(tokens, device="cuda"),
    )

    def run() -> None:
        weight.grad = hidden.grad = None
        lm_head_distill_loss(
            hidden, weight, targets, torch.ones(tokens, device="cuda"), teacher, DistillTerms(),
            vocab_size=vocab, chunk_tokens=chunk,
        ).loss_sum.backward()  # fmt: skip

    run()
    weight.grad = hidden.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    taken = torch.cuda.max_memory_allocated() - before
    logits = 2 * chunk * vocab
    head = weight.nbytes * 3 + weight.nbytes // 2 + 2 * hidden.nbytes  # sum, scaled sum, their product; BF16 weight
    assert taken < 3 * logits + head < 2 * tokens * vocab
