"""Capped attention logits against FP64 written out head by head, finite differences, and the whole model."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lowbit.configs.schema import ModelConfig
from lowbit.models import capped
from lowbit.models.attention import attention, block_mask, dense_mask, flex_with_z, prepare_mask
from lowbit.models.attention_z import attention_with_z
from lowbit.models.capped import written_out
from lowbit.models.probe import softmax_saturation
from lowbit.models.transformer import Transformer
from lowbit.models.trees import Node, flatten, visibility_of
from lowbit.models.visibility import Visibility, causal, documents

CAP = 1.5


def _rule(kind: str, length: int) -> Visibility | None:
    if kind == "causal":
        return None
    if kind == "documents":
        return documents(torch.arange(2 * length).view(2, length) % 11 == 0)
    tree = flatten(Node([1] * 8, 1.0, [Node([1] * 5), Node([1] * 4, 1.0, [Node([1] * 3), Node([1] * 2)])]), 0)
    return visibility_of([[tree] * (length // len(tree)), []], length)


def _exact(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """Output and logsumexp in FP64, one head and one query after the other."""
    share = q.shape[1] // k.shape[1]
    rows, sums = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = visible[b, 0, i].nonzero().flatten()
                logits = cap * ((k[b, h // share, seen] @ q[b, h, i]) * scale / cap).tanh()
                weights = logits.exp() / logits.exp().sum()
                rows.append(weights @ v[b, h // share, seen])
                sums.append(logits.exp().sum().log())
    return torch.stack(rows).view(q.shape), torch.stack(sums).view(q.shape[:3])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["causal", "documents", "tree"])
def test_output_logsumexp_and_gradients_match_fp64(
    kind: str, window: int | None, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kv_heads == 2:
        monkeypatch.setattr(capped, "LOGITS", 2 * 4 * 25 * 7)  # seven queries at a time, four in the end
    length = 25
    leaves = [(2 * torch.randn(2, heads, length, 8)).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    rule = _rule(kind, length)
    mask = prepare_mask(rule, 2, length, "cpu", window, flex=True)
    out, z = attention_with_z(*leaves, mask, softcap=CAP)
    assert z.dtype is torch.float32
    assert torch.equal(attention(*leaves, mask, softcap=CAP), out)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    visible = dense_mask(rule or causal(2, length), window)
    expected, expected_z = _exact(*exact, visible, 8**-0.5, CAP)
    seed, seed_z = torch.randn_like(out), torch.randn_like(z)
    (out * seed).sum().add((z * seed_z).sum()).backward()
    (expected * seed.double()).sum().add((expected_z * seed_z.double()).sum()).backward()
    pairs = [(out, expected), (z, expected_z), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for ours, reference in pairs:
        assert ours is not None and reference is not None
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=1e-5)
    scaled, _ = attention_with_z(*leaves, mask, 0.1, CAP)
    torch.testing.assert_close(scaled.double(), _exact(*exact, visible, 0.1, CAP)[0], rtol=1e-5, atol=1e-5)


def test_gradients_match_finite_differences() -> None:
    leaves = [torch.randn(1, heads, 7, 4, dtype=torch.float64).requires_grad_() for heads in (2, 1, 1)]
    visible = dense_mask(documents(torch.arange(7)[None] % 4 == 0))
    assert torch.autograd.gradcheck(lambda q, k, v: written_out(q, k, v, visible, 0.5, 0.8), leaves)  # type: ignore[no-untyped-call]


def test_a_high_cap_is_none_and_a_low_one_holds() -> None:
    q, k, v = (100 * torch.randn(1, 2, 12, 8) for _ in range(3))
    _, z = attention_with_z(q, k, v, None, softcap=2.0)
    assert float(z.max()) <= 2 + torch.tensor(12.0).log()
    torch.testing.assert_close(attention(q / 100, k / 100, v, None, softcap=1e4), attention(q / 100, k / 100, v, None))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", ["causal", "documents", "tree"])
def test_flex_attention_gives_the_same(kind: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass, which runs on a CPU as written; gradients need a GPU."""
    monkeypatch.setattr("lowbit.models.attention.compiled_flex", lambda: flex_attention)
    q, k, v = 2 * torch.randn(2, 4, 150, 16), torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    rule = _rule(kind, 150) or causal(2, 150)
    with torch.no_grad():
        out, z = flex_with_z(q, k, v, block_mask(rule, window), None, CAP)
        expected, expected_z = written_out(q, k, v, dense_mask(rule, window), 0.25, CAP)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(z, expected_z, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dim", "window"),
    [("causal", 64, None), ("documents", 64, None), ("tree", 64, 100), ("documents", 128, 100)],
)
def test_on_a_gpu(kind: str, dim: int, window: int | None) -> None:
    """FlexAttention's output, logsumexp and gradients in BF16 against FP64."""
    torch._dynamo.reset()
    length = 500
    leaves = [torch.randn(2, h, length, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2)]
    rule = _rule(kind, length)
    out, z = attention_with_z(*leaves, prepare_mask(rule, 2, length, "cuda", window, flex=True), softcap=CAP)
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    mask = dense_mask(rule or causal(2, length), window)
    expected, expected_z = written_out(*exact, mask, dim**-0.5, CAP)
    seed, seed_z = torch.randn_like(out), torch.randn_like(z)
    (out * seed).sum().add((z * seed_z).sum()).backward()
    (expected * seed.cpu().double()).sum().add((expected_z * seed_z.cpu().double()).sum()).backward()
    pairs = [(out, expected), (z, expected_z), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for ours, reference in pairs:
        assert ours is not None and reference is not None
        assert float((ours.double().cpu() - reference).norm() / reference.norm()) < 0.02
    with torch.no_grad():  # generation's prompts on a GPU have no block mask
        prompt = attention(*leaves, None if window is None and rule is None else mask.cuda(), softcap=CAP)
    assert float((prompt.double().cpu() - expected).norm() / expected.norm()) < 0.02


def test_the_probe_caps_too() -> None:
    config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64, qk_norm=False)
    tokens = torch.randint(0, 50, (2, 24))
    shares = []
    for cap in (None, 1.0):
        model = Transformer(dataclasses.replace(config, attention_softcap=cap), 50)
        model.init_weights(1)
        with torch.no_grad():
            model.blocks[0].attention.q.weight.mul_(3000)  # type: ignore[union-attr, operator]
        shares.append(softmax_saturation(model, tokens)[0])
    assert shares[0] > 0.2 and shares[1] == 0, "with logits in [-1, 1] no weight comes near 0.99"
