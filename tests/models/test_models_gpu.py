"""The GPU's kernels against FP32 SDPA with the dense mask, the compiled model and head against plain arithmetic.

What does not need a GPU in substance runs on the CPU too, with the CPU's own code behind the same functions: fewer
sizes, and no compilation.
"""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.configs.schema import MlpKind, ModelConfig, Recompute
from lowbit.models.attention import attention, dense_mask, prepare_mask
from lowbit.models.lm_head import lm_head_loss, lm_head_nll
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import Visibility, causal, documents

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def _relative(ours: Tensor, expected: Tensor) -> float:
    ours, expected = ours.detach().double().cpu(), expected.detach().double().cpu()
    return float((ours - expected).norm() / expected.norm())


def _rule(kind: str, batch: int, length: int) -> Visibility | None:
    torch.manual_seed(length)
    if kind == "causal":
        return None
    if kind == "documents":
        return documents(torch.rand(batch, length) < 4 / length)
    rule = causal(batch, length)
    rule.start[:, : length // 3] = 0
    return rule


@pytest.mark.parametrize(
    ("device", "length"),
    [("cpu", 64), ("cpu", 333), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (64, 333, 1024, 1337))],
)
@pytest.mark.parametrize("kind", ["causal", "documents", "prefix"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_forward_and_backward(device: str, length: int, kind: str, kv_heads: int) -> None:
    leaves = [
        torch.randn(2, length, heads, 64, device=device, dtype=torch.bfloat16).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    rule = _rule(kind, 2, length)
    mask = prepare_mask(rule, 2, length, device)
    out = attention(*(leaf.transpose(1, 2) for leaf in leaves), mask)
    seed = torch.randn_like(out)
    out.backward(seed)
    plain = [leaf.detach().float().requires_grad_() for leaf in leaves]
    q, k, v = (leaf.transpose(1, 2) for leaf in plain)
    share = 4 // kv_heads
    visible = dense_mask((rule or causal(2, length)).to(device))
    expected = F.scaled_dot_product_attention(
        q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), attn_mask=visible
    )
    expected.backward(seed.float())
    assert _relative(out, expected) < 0.01
    for leaf, reference in zip(leaves, plain, strict=True):
        assert leaf.grad is not None and reference.grad is not None
        assert _relative(leaf.grad, reference.grad) < 0.02


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("kind", ["causal", "documents"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_bf16_model_equals_the_fp32_one(device: str, recompute: Recompute, kind: str) -> None:
    """On a GPU compiled, twelve layers and changing documents in one graph, against plain FP32 on the CPU."""
    torch._dynamo.reset()
    layers = 12 if device == "cuda" else 2
    config = ModelConfig(layers=layers, width=256, heads=4, kv_heads=2, mlp=MlpKind.relu2, mlp_width=512, init_std=0.05)
    plain = Transformer(config, 512)
    plain.init_weights(1)
    model = copy.deepcopy(plain).to(device)
    model.compute_dtype = torch.bfloat16
    model.set_recompute(recompute)
    if device == "cuda":
        model.compile_blocks()
    for seed in range(3 if device == "cuda" else 1):
        torch.manual_seed(seed)
        tokens = torch.randint(0, 512, (2, 300))
        rule = None if kind == "causal" else documents(torch.rand(2, 300) < 0.02)
        for either in (plain, model):
            either.zero_grad(set_to_none=True)
        out = model(tokens.to(device), rule)
        expected = plain(tokens, rule)
        scale = torch.randn_like(expected)
        out.backward(scale.to(device).bfloat16())
        expected.backward(scale)
        assert _relative(out, expected) < 0.03
        for (name, ours), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            if reference.grad is not None:
                assert ours.grad is not None
                assert _relative(ours.grad, reference.grad) < 0.1, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_head_equals_plain_fp64_arithmetic(device: str, dtype: torch.dtype, softcap: float | None) -> None:
    vocab, padded, z_loss = 1000, 1024, 1e-3
    hidden, weight = torch.randn(333, 64).to(dtype), torch.randn(padded, 64) * 0.3
    targets, weights = torch.randint(0, vocab, (333,)), torch.rand(333)
    weights[::5] = 0

    h, w = hidden.to(device, copy=True).requires_grad_(), weight.to(device, copy=True).requires_grad_()
    where = targets.to(device)
    out = lm_head_loss(
        h, w, where, weights.to(device), vocab_size=vocab, z_loss=z_loss, softcap=softcap, chunk_tokens=128
    )
    out.loss_sum.backward()
    nll = lm_head_nll(h, w, where, vocab_size=vocab, softcap=softcap)

    exact_h, exact_w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = exact_h @ exact_w[:vocab].t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    exact_nll = F.cross_entropy(logits, targets, reduction="none")
    exact_sum = (weights * exact_nll).sum()
    exact_loss = exact_sum + z_loss * (weights * logits.logsumexp(1).square()).sum()
    exact_loss.backward()

    assert h.grad is not None and w.grad is not None and h.grad.dtype == dtype
    assert not w.grad[vocab:].any()
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    ours = (out.loss_sum, out.nll_sum, nll, h.grad, w.grad)
    for value, expected in zip(ours, (exact_loss, exact_sum, exact_nll, exact_h.grad, exact_w.grad), strict=True):
        assert expected is not None
        assert _relative(value, expected) < tolerance


@pytest.mark.gpu
def test_building_a_mask_and_a_step_wait_for_nothing() -> None:
    config = ModelConfig(layers=2, width=128, heads=2, kv_heads=2, mlp_width=256)
    model = Transformer(config, 512, torch.bfloat16).cuda()
    model.init_weights(1)
    model.compile_blocks()
    tokens = torch.randint(0, 512, (2, 512), device="cuda")
    rule = documents(torch.rand(2, 512) < 0.01).to("cuda")
    weights = torch.ones(1024, device="cuda")

    def step() -> None:
        hidden = model(tokens, rule).flatten(0, 1)
        lm_head_loss(hidden, model.head_weight, tokens.flatten(), weights, vocab_size=512).loss_sum.backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
