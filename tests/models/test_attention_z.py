"""Attention with its logsumexp against FP64, Z-Reg against finite differences, and what it does to a training."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lowbit.configs.schema import Z_COLUMNS, ModelConfig, Recompute
from lowbit.models import attention_z
from lowbit.models.attention import block_mask, dense_mask, flex_with_z, prepare_mask
from lowbit.models.attention_z import attention_with_z
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import causal, documents

CONFIG = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64, init_std=0.3)
VOCAB = 50


def _inputs(device: str = "cpu", dtype: torch.dtype = torch.float32, length: int = 37, dim: int = 16) -> list[Tensor]:
    shapes = [(2, heads, length, dim) for heads in (4, 2, 2)]
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def _check(
    device: str, dtype: torch.dtype, length: int, dim: int, packed: bool, tolerance: float, flex: bool = False
) -> None:
    q, k, v = leaves = _inputs(device, dtype, length, dim)
    rule = documents(torch.rand(2, length) < 0.1) if packed else None
    out, z = attention_with_z(q, k, v, prepare_mask(rule, 2, length, device, flex=flex))
    seed, seed_z = torch.randn_like(out), torch.randn_like(z)
    assert z.dtype is torch.float32 and z.shape == (2, 4, length)
    (out * seed).sum().add((z * seed_z).sum()).backward()
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    wide_k, wide_v = (t.repeat_interleave(2, dim=1) for t in exact[1:])
    scores = (exact[0] @ wide_k.mT * dim**-0.5).masked_fill(~dense_mask(rule or causal(2, length)), float("-inf"))
    expected, expected_z = scores.softmax(-1) @ wide_v, scores.logsumexp(-1)
    (expected * seed.cpu().double()).sum().add((expected_z * seed_z.cpu().double()).sum()).backward()
    pairs = [(out, expected), (z, expected_z), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for ours, reference in pairs:
        assert ours is not None and reference is not None
        assert (ours.double().cpu() - reference).norm() < tolerance * reference.norm()


@pytest.mark.parametrize("packed", [False, True])
def test_output_logsumexp_and_their_gradients_match_fp64(packed: bool) -> None:
    _check("cpu", torch.float32, 37, 16, packed, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_same_on_a_gpu(packed: bool, dim: int) -> None:
    """cuDNN (64), flash (128) and FlexAttention, forward and backward."""
    _check("cuda", torch.bfloat16, 512, dim, packed, 0.02)


@pytest.mark.gpu
def test_what_other_kernels_do_not_take_on_a_gpu() -> None:
    _check("cuda", torch.float32, 300, 64, False, 0.01, flex=True)


@pytest.mark.parametrize(
    ("dim", "dtype", "weight", "flex"),
    [
        (64, torch.bfloat16, 1.0, False),
        (248, torch.bfloat16, 1.0, False),
        (256, torch.bfloat16, 1.0, True),
        (256, torch.bfloat16, 0.0, False),
        (20, torch.bfloat16, 1.0, True),
        (64, torch.float32, 1.0, True),
        (64, torch.float32, 0.0, False),
    ],
)
def test_who_has_its_logsumexp_from_flex_attention(dim: int, dtype: torch.dtype, weight: float, flex: bool) -> None:
    """On a GPU: others want 16 bits, and with the added columns at most 256 of a multiple of eight."""
    config = dataclasses.replace(CONFIG, head_dim=dim, attention_z=weight)
    assert Transformer(config, VOCAB, dtype).needs_flex is flex
    assert Transformer(dataclasses.replace(config, attention_softcap=9.0), VOCAB, dtype).needs_flex


def test_flex_attention_has_the_same_logsumexp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.models.attention.compiled_flex", lambda: flex_attention)
    q, k, v = (t.detach() for t in _inputs(length=256))
    rule = documents(torch.rand(2, 256) < 0.02)
    with torch.no_grad():
        out, z = attention_with_z(q, k, v, prepare_mask(rule, 2, 256, "cpu"))
        flex_out, flex_z = flex_with_z(q, k, v, block_mask(rule), None, None)
    torch.testing.assert_close(flex_out, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flex_z, z, rtol=1e-4, atol=1e-5)  # natural logarithm


def _model(z: float, **changes: object) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, attention_z=z, **changes), VOCAB)  # type: ignore[arg-type]
    model.init_weights(3)
    return model


def _tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(2))


def test_the_gradient_of_z_squared_matches_finite_differences() -> None:
    q, k, v = _inputs(length=11, dim=8)
    _, z = attention_with_z(q, k, v, None)
    z.square().sum().div(2).backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None and not v.grad.any()

    def term(q: Tensor, k: Tensor) -> float:
        scores = (q @ k.repeat_interleave(2, dim=1).mT * 8**-0.5).masked_fill(~dense_mask(causal(2, 11)), float("-inf"))
        return float(scores.logsumexp(-1).square().sum() / 2)

    exact = [t.detach().double() for t in (q, k)]
    for which, grad in enumerate((q.grad, k.grad)):
        for place in [(0, 0, 0, 0), (1, 1, 5, 3), (0, 1, 10, 7)]:
            values = []
            for step in (1e-5, -1e-5):
                moved = [t.clone() for t in exact]
                moved[which][place] += step
                values.append(term(*moved))
            slope = (values[0] - values[1]) / 2e-5
            assert float(grad[place]) == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_model_gets_the_gradient_of_the_stated_term(softcap: float | None) -> None:
    """lambda / (2 H L) * mean over tokens of the sum over heads and layers of z^2, with logits written out."""
    weight = 0.7
    model, written = _model(weight, attention_softcap=softcap), _model(0.0, attention_softcap=softcap)
    model(_tokens())
    auxiliary, measured = model.take_auxiliary(), model.take_measured()
    assert auxiliary is not None and measured is not None and measured.z is not None
    auxiliary.backward()
    total = torch.zeros(())
    x, rope = written.embed(_tokens()), written.rope(torch.arange(19)[None])
    for layer, block in enumerate(written.blocks):
        q, k, _ = block.attention.project(block.attention_norm(x), rope)  # type: ignore[union-attr, operator]
        scores = q @ k.repeat_interleave(2, dim=1).mT * 8**-0.5
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        z = scores.masked_fill(~dense_mask(causal(2, 19)), float("-inf")).logsumexp(-1)
        total = total + z.square().sum(1).mean()
        torch.testing.assert_close(measured.z[layer], torch.stack((z.mean(), z.max())).detach(), rtol=1e-4, atol=0)
        x = block(x, None, rope).x
    (weight / (2 * 4 * 2) * total).backward()
    assert float(auxiliary.detach()) == pytest.approx(weight / 16 * float(total.detach()), rel=1e-5)
    for (name, ours), reference in zip(model.named_parameters(), written.parameters(), strict=True):
        if reference.grad is not None:
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("recompute", list(Recompute))
def test_it_changes_neither_output_nor_what_recomputation_gives(recompute: Recompute) -> None:
    plain, model = _model(0.0), _model(0.5)
    model.set_recompute(recompute)
    hidden = model(_tokens())
    torch.testing.assert_close(hidden, plain(_tokens()), rtol=1e-4, atol=1e-5)
    auxiliary, measured = model.take_auxiliary(), model.take_measured()
    assert auxiliary is not None and measured is not None and measured.z is not None
    assert measured.z.shape == (2, 2) and (measured.z[:, 1] >= measured.z[:, 0]).all()
    ((hidden * torch.linspace(-1, 1, 32)).square().sum() + auxiliary).backward()
    again = _model(0.5)
    hidden = again(_tokens())
    auxiliary = again.take_auxiliary()
    assert auxiliary is not None
    ((hidden * torch.linspace(-1, 1, 32)).square().sum() + auxiliary).backward()
    for ours, reference in zip(model.parameters(), again.parameters(), strict=True):
        if reference.grad is not None:
            torch.testing.assert_close(ours.grad, reference.grad)
    with torch.no_grad():
        model(_tokens())
    assert model.take_auxiliary() is None and model.take_measured() is None


def test_logits_grow_without_it_and_stay_bounded_with_it() -> None:
    """A copying task at far too high a learning rate, without QK-norm: the greatest logsumexp tells."""
    greatest = {}
    tokens = torch.randint(0, VOCAB, (8, 33), generator=torch.Generator().manual_seed(1))
    tokens[:, 17:] = tokens[:, :16]
    targets, weights = tokens[:, 1:].flatten(), torch.ones(8 * 32)
    for weight in (0.0, 1e-4, 1e-2):
        model = _model(weight or 1e-12, qk_norm=False, init_std=0.05)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95))
        for _ in range(100):
            hidden = model(tokens[:, :-1]).flatten(0, 1)
            loss = lm_head_loss(hidden, model.head_weight, targets, weights, vocab_size=VOCAB).loss_sum / len(targets)
            auxiliary, measured = model.take_auxiliary(), model.take_measured()
            assert auxiliary is not None and measured is not None and measured.z is not None
            (loss + auxiliary).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        greatest[weight] = float(measured.z[:, 1].max())
    assert greatest[0.0] > 200, greatest  # measured: 731, 115, 4.8
    assert greatest[1e-4] < greatest[0.0] / 3 and greatest[1e-2] < 15, greatest


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("packed", [False, True])
def test_it_compiles_whole(packed: bool, softcap: float | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain, model = (_model(0.5, layers=10, attention_softcap=softcap) for _ in range(2))
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=counter)
    rule = documents(torch.arange(38).view(2, 19) % 7 == 0) if packed else None
    for either in (plain, model):
        hidden = either(_tokens(), rule)
        auxiliary = either.take_auxiliary()
        assert auxiliary is not None
        ((hidden * torch.linspace(-1, 1, 32)).square().sum() + auxiliary).backward()
    for (name, ours), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None:
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dim", [64, 128])
def test_the_gpus_kernels_are_called_as_they_want(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their schemas and shapes, on the meta device; numbers need a GPU. 64 is cuDNN's, 128, made wider, flash's."""
    called = []
    for name in ("cudnn", "flash"):
        backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward")

        def watched(*arguments: object, name: str = name, real: object = backward, **more: object) -> object:
            called.append((name, arguments[0].shape[-1]))  # type: ignore[attr-defined]
            return real(*arguments, **more)  # type: ignore[operator]

        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward", watched)
    monkeypatch.setattr(attention_z, "_on_gpu", lambda q: True)
    leaves = [torch.randn(2, h, 40, dim, device="meta", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2)]
    out, z = attention_with_z(*leaves, None)
    assert out.shape == leaves[0].shape and z.shape == (2, 4, 40) and z.dtype is torch.float32
    (out.float().sum() + z.sum()).backward()
    assert called == [("cudnn" if dim == 64 else "flash", dim + Z_COLUMNS)]
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
