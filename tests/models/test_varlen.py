"""Packed documents by the kernel for sequences of varying length: boundaries by brute force, numbers against FP64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.configs.schema import Z_COLUMNS, AttentionKernel, EngineConfig, ModelConfig, Recompute, RunConfig
from lowbit.models import varlen, visibility
from lowbit.models.attention import attention, dense_mask, prepare_mask
from lowbit.models.attention_z import attention_with_z
from lowbit.models.transformer import Transformer
from lowbit.models.varlen import Varlen
from lowbit.models.visibility import Visibility, causal, documents, prefixes, without_padding
from lowbit.trainer.announce import introduce

CONFIG = ModelConfig(layers=3, width=64, heads=4, kv_heads=2, mlp_width=96, max_sequence=512, init_std=0.1)
VOCAB = 60


def _by_force(rule: Visibility) -> list[int] | None:
    """Where documents begin, if some cut of the tokens into documents gives exactly the rule and its positions."""
    rows, length = rule.start.shape
    seen, begins = dense_mask(rule)[:, 0], []
    for row in range(rows):
        cuts = [0, *(j for j in range(1, length) if not seen[row, j:, :j].any())]
        for begin, end in zip(cuts, [*cuts[1:], length], strict=True):
            if not torch.equal(seen[row, begin:end, begin:end], torch.ones(end - begin, end - begin).tril().bool()):
                return None
            if rule.position[row, begin:end].diff().ne(1).any():
                return None
            begins.append(row * length + begin)
    return begins


@st.composite
def _rules(draw: st.DrawFn) -> Visibility:
    """Documents, prefixes, padding, intervals of any kind; at most 32 tokens, so that none is too many."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    bits = st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows)
    first, more = torch.tensor(draw(bits)), torch.tensor(draw(bits))
    kind = draw(st.sampled_from(["documents", "prefixes", "padding", "limits", "positions"]))
    rule = documents(first)
    if kind == "prefixes":
        return prefixes(first, more)
    if kind == "padding":
        return without_padding(rule, torch.arange(length) < draw(st.integers(1, length)) + torch.zeros(rows, 1))
    if kind == "limits":
        index = torch.arange(length, dtype=torch.int32)
        return dataclasses.replace(rule, limit=torch.where(more, index + 1, rule.limit))
    return dataclasses.replace(rule, position=rule.position + more.int()) if kind == "positions" else rule


@settings(max_examples=400, deadline=None)
@given(_rules())
def test_ends_are_those_of_brute_force(rule: Visibility) -> None:
    found, expected = rule.with_ends(), _by_force(rule)
    if expected is None:
        assert found.ends is None and found.sizes is None
        return
    tokens = rule.start.numel()
    assert found.ends is not None and found.sizes is not None
    assert found.ends.tolist() == expected + [tokens] * (tokens + 1 - len(expected)) and found.ends.dtype is torch.int32
    count, longest = found.sizes.tolist()
    lengths = torch.tensor([*expected, tokens]).diff()
    assert len(expected) <= count <= tokens and int(lengths.max()) <= longest <= rule.start.shape[1]


def test_sizes_are_round_and_few() -> None:
    sizes = [visibility._rounded_up(number, 16) for number in range(1, 5000)]
    assert all(number <= size <= max(16, number * 1.25 + 16) for number, size in enumerate(sizes, 1))
    assert sorted(set(sizes))[:12] == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256] and len(set(sizes)) < 30


def test_ends_travel_with_the_rule_and_sizes_stay_on_the_host() -> None:
    rule = documents(torch.arange(60).view(2, 30) % 7 == 0).with_ends()
    moved = rule.to("meta")
    assert moved.ends is not None and moved.ends.device.type == "meta" and moved.sizes is rule.sizes
    copy = rule.clone()
    assert copy.ends is not rule.ends and copy.ends is not None and torch.equal(copy.ends, rule.ends)
    assert rule.rows(1).ends is None, "they would be others"


def test_a_batch_for_which_the_kernel_would_idle_has_no_ends() -> None:
    """One long document and thousands of one token: the kernel would look at as many blocks for each of them."""
    first = torch.ones(4, 2048, dtype=torch.bool)
    assert documents(first).with_ends().sizes is None
    first[:, 1:2030] = False
    assert documents(first).with_ends().sizes is not None
    first[0, 1:] = True
    assert documents(first).with_ends().sizes is None
    assert causal(2, 64).with_ends().sizes is not None


def _plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """FP64 attention with logits written out."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    logits = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def _layout(kind: str, length: int) -> Visibility:
    first = torch.zeros(2, length, dtype=torch.bool)
    if kind == "singles":
        first[0, length // 2 : length // 2 + 20] = True  # twenty documents of one token between two others
    elif kind == "blocks":
        first[:, ::128] = True
    elif kind == "mixed":
        first = torch.rand(2, length, generator=torch.Generator().manual_seed(length)) < 12 / length
    return documents(first)


def _check(
    device: str, dtype: torch.dtype, kind: str, length: int, heads: tuple[int, int], dim: int, window: int | None,
    tolerance: float,
) -> None:  # fmt: skip
    shapes = [(2, length, h, dim) for h in (heads[0], heads[1], heads[1])]
    leaves = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    rule = _layout(kind, length).with_ends()
    mask = prepare_mask(rule.to(device), 2, length, device, window, varlen=True)
    assert rule.ends is not None and rule.sizes is not None
    if kind == "one" and device == "cpu" and window is None:
        assert mask is None, "what can be read, and is plain causal, is no mask"
        mask = Varlen(rule.ends, rule.sizes, 0)
    assert isinstance(mask, Varlen), "not this path"
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    a, b, c = (leaf.transpose(1, 2) for leaf in exact)
    expected, expected_z = _plain(a, b, c, dense_mask(rule.to(device), window), dim**-0.5)
    seed, seed_z = torch.randn_like(q), torch.randn(expected_z.shape, device=device)
    wanted = torch.autograd.grad((expected * seed.double()).sum(), exact, retain_graph=True)
    wanted_z = torch.autograd.grad((expected * seed.double()).sum() + (expected_z * seed_z.double()).sum(), exact)
    out = attention(q, k, v, mask)
    found = torch.autograd.grad((out * seed).sum(), leaves)
    out_z, z = attention_with_z(q, k, v, mask)
    assert torch.equal(out, out_z) and z.dtype is torch.float32
    found_z = torch.autograd.grad((out_z * seed).sum() + (z * seed_z).sum(), leaves)
    for ours, reference in zip((out, z, *found, *found_z), (expected, expected_z, *wanted, *wanted_z), strict=True):
        reference = reference.detach()
        scale = float(reference.norm()) + 0.1 * float(seed.double().norm())  # a window of 1 has no gradient of q
        assert float((ours.detach().double() - reference).norm()) < tolerance * scale


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("kind", ["one", "singles", "mixed"])
def test_it_matches_fp64(kind: str, heads: tuple[int, int], window: int | None) -> None:
    """The operator's arithmetic on a CPU: boundaries, gradients, the added column."""
    _check("cpu", torch.float32, kind, 60, heads, 8, window, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [384, 1000])
@pytest.mark.parametrize("kind", ["one", "singles", "blocks", "mixed"])
def test_on_a_gpu(kind: str, length: int, dim: int, heads: tuple[int, int], window: int | None) -> None:
    """Flash attention's kernel in BF16; Z-Reg's column makes heads of 72 and 136."""
    _check("cuda", torch.bfloat16, kind, length, heads, dim, window, 0.02)


@pytest.mark.parametrize("dim", [64, 128 + Z_COLUMNS])
@pytest.mark.parametrize("window", [0, 100])
def test_the_gpus_kernel_is_called_as_it_wants(window: int, dim: int) -> None:
    """Schema and shapes, on the meta device; numbers need a GPU."""
    q, k, v = (torch.empty(600, h, dim, device="meta", dtype=torch.bfloat16) for h in (8, 2, 2))
    ends, sizes = torch.empty(601, device="meta", dtype=torch.int32), torch.tensor([16, 384])
    out, z = varlen._forward_on_gpu(q, k, v, ends, sizes, window, 0.1)
    assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
    assert z.shape == (8, 600) and z.dtype is torch.float32
    grads = varlen._backward_on_gpu(torch.empty_like(out), q, k, v, out, z, ends, sizes, window, 0.1)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert varlen.takes(torch.bfloat16, dim) and not varlen.takes(torch.float32, dim)
    assert not varlen.takes(torch.bfloat16, 20) and not varlen.takes(torch.bfloat16, 264)


def test_the_operators_are_sound() -> None:
    """PyTorch's own checks of an operator: schema, fake results, autograd, tracing with changing shapes."""
    rule = _layout("mixed", 20).with_ends()
    q, k, v = (torch.randn(40, h, 8, requires_grad=True) for h in (4, 2, 2))
    torch.library.opcheck(varlen.forward, (q, k, v, rule.ends, rule.sizes, 5, 0.3))


LAYOUTS: dict[str, dict[str, object]] = {
    "plain": {},
    "local and shared": {"windows": [20, 0, 0], "kv_from": [0, 1, 1]},
    "Z-Reg": {"attention_z": 0.5},
}


def _rules_of_steps(length: int) -> list[Visibility]:
    return [_layout(kind, length) for kind in ("mixed", "singles", "one")]


def _gradients(model: Transformer, rule: Visibility, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    hidden = model(tokens, rule)
    auxiliary = model.take_auxiliary()
    loss = (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)).square().mean()
    loss = loss if auxiliary is None else loss + auxiliary
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.selective])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_models_loss_and_gradients_in_one_graph(
    layout: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's dense mask against the operator, compiled: batches of other documents need no other graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    dense = Transformer(dataclasses.replace(CONFIG, **LAYOUTS[layout]), VOCAB)  # type: ignore[arg-type]
    dense.init_weights(3)
    by_length = Transformer(dense.config, VOCAB)
    by_length.load_state_dict(dense.state_dict())
    by_length.set_recompute(recompute)
    for block in by_length.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=counter)
    graphs = []
    for rule in _rules_of_steps(50)[:2]:
        tokens = torch.randint(0, VOCAB, (2, 50))
        loss, gradients = _gradients(dense, rule, tokens)
        with monkeypatch.context() as patch:
            patch.setattr(Transformer, "uses_varlen", True)
            ours, found = _gradients(by_length, rule, tokens)
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] <= 3


@pytest.mark.parametrize(
    ("kernel", "changes", "dtype"),
    [
        (AttentionKernel.auto, {}, torch.bfloat16),
        (AttentionKernel.flex, {}, torch.bfloat16),
        (AttentionKernel.varlen, {}, torch.float32),
        (AttentionKernel.varlen, {"attention_softcap": 5.0}, torch.bfloat16),
        (AttentionKernel.varlen, {"head_dim": 12}, torch.bfloat16),
        (AttentionKernel.varlen, {"head_dim": 256, "attention_z": 1.0}, torch.bfloat16),
        (AttentionKernel.varlen, {}, torch.bfloat16),  # this one is a CPU's
    ],
)
def test_who_does_not_use_it(kernel: AttentionKernel, changes: dict[str, object], dtype: torch.dtype) -> None:
    model = Transformer(dataclasses.replace(CONFIG, **changes), VOCAB, dtype)  # type: ignore[arg-type]
    model.attention_kernel = kernel
    assert not model.uses_varlen


def test_a_run_says_where_there_is_no_such_kernel(caplog: pytest.LogCaptureFixture) -> None:
    model = Transformer(CONFIG, VOCAB)
    for kernel in AttentionKernel:
        model.attention_kernel = kernel
        config = RunConfig(model=CONFIG, engine=EngineConfig(attention=kernel))
        with caplog.at_level("WARNING", "lowbit"):
            introduce(config, model, [], 1)
    assert [record.message for record in caplog.records] == [
        "engine.attention=varlen: no such kernel on cpu in float32, documents are masked"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "layout", "compiled"),
    [*((64, layout, True) for layout in LAYOUTS), (128, "Z-Reg", True), (64, "plain", False), (128, "Z-Reg", False)],
)
def test_a_models_loss_and_gradients_on_a_gpu(dim: int, layout: str, compiled: bool) -> None:
    """Against FlexAttention in the same BF16 model, and both against FP32 on the CPU; one graph for all batches."""
    torch._dynamo.reset()
    config = dataclasses.replace(CONFIG, head_dim=dim, **LAYOUTS[layout])  # type: ignore[arg-type]
    exact = Transformer(config, VOCAB)
    exact.init_weights(3)
    models = {}
    for kernel in (AttentionKernel.flex, AttentionKernel.varlen):
        model = Transformer(config, VOCAB, torch.bfloat16)
        model.load_state_dict(exact.state_dict())
        model.cuda().attention_kernel = kernel
        if compiled:
            model.compile_blocks()
        models[kernel] = model
    assert models[AttentionKernel.varlen].uses_varlen and not models[AttentionKernel.flex].uses_varlen
    for rule in _rules_of_steps(400):
        tokens = torch.randint(0, VOCAB, (2, 400))
        loss, gradients = _gradients(exact, rule, tokens)
        assert rule.with_ends().ends is not None
        for model in models.values():
            ours, found = _gradients(model, rule.with_ends().to("cuda"), tokens.cuda())
            assert float(ours) == pytest.approx(float(loss), rel=0.02)
            for name, gradient in gradients.items():
                apart = (found[name].double().cpu() - gradient.double()).norm() / gradient.double().norm()
                assert float(apart) < 0.1, name


@pytest.mark.gpu
def test_a_step_waits_for_nothing() -> None:
    torch._dynamo.reset()
    model = Transformer(dataclasses.replace(CONFIG, windows=[64, 0], attention_z=0.1), VOCAB, torch.bfloat16).cuda()
    model.init_weights(1)
    model.attention_kernel = AttentionKernel.varlen
    model.compile_blocks()
    tokens = torch.randint(0, VOCAB, (2, 400), device="cuda")
    rules = [rule.with_ends().to("cuda") for rule in _rules_of_steps(400)]
    for rule in rules:
        _gradients(model, rule, tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rule in rules:
            _gradients(model, rule, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
