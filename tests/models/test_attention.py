"""Attention against FP64 softmax attention spelled out, and the BlockMask against the dense rule."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lowbit.errors import DataError
from lowbit.models.attention import FLEX_NARROWEST, attention, block_mask, dense_mask, flex_with_z, prepare_mask
from lowbit.models.visibility import Visibility, causal, documents, prefixes


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention in FP64, one head after the other."""
    out = torch.empty_like(q, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            shared = h * k.shape[1] // q.shape[1]
            scores = q[b, h].double() @ k[b, shared].double().t() * scale
            weights = scores.masked_fill(~visible[b, 0], float("-inf")).softmax(-1)
            out[b, h] = weights @ v[b, shared].double()
    return out


def _some_rule(batch: int, length: int, kind: str) -> Visibility:
    torch.manual_seed(length)
    if kind == "documents":
        return documents(torch.rand(batch, length) < 10 / length)
    if kind == "singles":
        return documents(torch.ones(batch, length, dtype=torch.bool))
    if kind == "prefix":  # the first 40% of a row see each other
        rule = causal(batch, length)
        rule.start[:, : 2 * length // 5] = 0
        return rule
    if kind == "bidirectional":
        rule = causal(batch, length)
        rule.start.zero_()
        return rule
    if kind == "edge":  # a span that the last query of one block shares with the keys of the next
        rule = causal(batch, length)
        rule.start[:, 127:200] = 127
        return rule
    # Any intervals around each token: what trees make, and more.
    index = torch.arange(length, dtype=torch.int32).expand(batch, length)
    start = (torch.rand(batch, length) * (index + 1)).int()
    limit = index + 1 + (torch.rand(batch, length) * (length - index)).int()
    rule = Visibility(start, limit, index.contiguous())
    rule.validate()
    return rule


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["causal", "documents", "prefix", "intervals"])
def test_matches_fp64(kv_heads: int, kind: str) -> None:
    q, k, v = torch.randn(2, 4, 37, 16), torch.randn(2, kv_heads, 37, 16), torch.randn(2, kv_heads, 37, 16)
    rule = None if kind == "causal" else _some_rule(2, 37, kind)
    out = attention(q, k, v, prepare_mask(rule, 2, 37, "cpu"))
    expected = _plain(q, k, v, dense_mask(rule or causal(2, 37)), 16**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    scaled = attention(q, k, v, prepare_mask(rule, 2, 37, "cpu"), scale=0.1)
    expected = _plain(q, k, v, dense_mask(rule or causal(2, 37)), 0.1)
    torch.testing.assert_close(scaled.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_with_shared_heads_match_fp64() -> None:
    q, k, v = torch.randn(1, 4, 19, 8), torch.randn(1, 2, 19, 8), torch.randn(1, 2, 19, 8)
    rule = _some_rule(1, 19, "documents")
    grads = []
    for function in (
        lambda a, b, c: attention(a, b, c, prepare_mask(rule, 1, 19, "cpu")),
        lambda a, b, c: torch.nn.functional.scaled_dot_product_attention(
            a.double(),
            b.double().repeat_interleave(2, 1),
            c.double().repeat_interleave(2, 1),
            attn_mask=dense_mask(rule),
        ),
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        function(*leaves).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 100, 128, 129, 384, 500])
@pytest.mark.parametrize("kind", ["causal", "documents", "singles", "prefix", "bidirectional", "edge", "intervals"])
def test_block_mask_covers_the_rule(length: int, kind: str) -> None:
    """A block not listed has no visible pair; one listed as full has no hidden pair."""
    rule = causal(2, length) if kind == "causal" else _some_rule(2, length, kind)
    mask = block_mask(rule)
    blocks = -(-length // 128)
    pairs = torch.zeros(2, blocks * 128, blocks * 128, dtype=torch.bool)
    pairs[:, :length, :length] = dense_mask(rule)[:, 0]
    by_block = pairs.unflatten(1, (blocks, 128)).unflatten(3, (blocks, 128)).transpose(2, 3).flatten(3)
    some, every = by_block.any(-1), by_block.all(-1)
    partial, full = torch.zeros(2, blocks, blocks), torch.zeros(2, blocks, blocks)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    for b in range(2):
        for row in range(blocks):
            for count, index, found in (
                (mask.kv_num_blocks, mask.kv_indices, partial),
                (mask.full_kv_num_blocks, mask.full_kv_indices, full),
            ):
                found[b, row, index[b, 0, row, : int(count[b, 0, row])].long()] += 1
    assert (partial + full).max() <= 1
    assert not bool((some & (partial + full == 0)).any()), "a visible block is skipped"
    assert not bool((~every & (full > 0)).any()), "a block with hidden pairs counts as full"
    if kind in ("causal", "documents", "singles"):  # here the interval test is exact
        assert torch.equal((partial + full) > 0, some)
        assert torch.equal(full > 0, every)


def test_block_mask_is_as_sparse_as_the_librarys() -> None:
    rule = _some_rule(2, 512, "documents")

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (rule.start[b, k] <= q) & (q < rule.limit[b, k])

    theirs = create_block_mask(visible, 2, None, 512, 512, device="cpu")
    ours = block_mask(rule)
    assert ours.shape == theirs.shape == (2, 1, 512, 512)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.q_num_blocks, theirs.q_num_blocks)


def _tree_rule(length: int) -> Visibility:
    """Branches at random: each token opens an interval inside the innermost one."""
    rule = causal(1, length)
    seed, open_limits = random.Random(length), [length]
    for token in range(length):
        while open_limits[-1] <= token:
            open_limits.pop()
        if seed.random() < 0.1:
            open_limits.append(seed.randint(token + 1, open_limits[-1]))
        rule.limit[0, token] = open_limits[-1]
    rule.validate(tree=True)
    return rule


@pytest.mark.parametrize("length", [1, 128, 129, 500])
@pytest.mark.parametrize("window", [None, 1, 30, 128, 300])
@pytest.mark.parametrize("kind", ["causal", "documents", "tree", "prefix"])
def test_block_mask_is_the_librarys(length: int, window: int | None, kind: str) -> None:
    """The same pairs, and without a window the very same blocks; with one at most blocks that hold no pair more."""
    rule = (
        _tree_rule(length) if kind == "tree" else causal(1, length) if kind == "causal" else _some_rule(1, length, kind)
    )
    position = rule.position

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (rule.start[b, k] <= q) & (q < rule.limit[b, k])
        return seen if window is None else seen & ((position[b, q] - position[b, k]).abs() < window)

    theirs = create_block_mask(visible, 1, None, length, length, device="cpu")
    ours = block_mask(rule, window)
    extra = ours.to_dense() - theirs.to_dense()
    assert extra.min() >= 0
    if window is None or kind == "causal":
        assert not extra.any()
        if length % 128 == 0:  # they count an incomplete last block as full, we never do
            for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.mask_mod is not None
    index = torch.arange(length)
    zero = torch.zeros((), dtype=torch.int64)
    pairs = ours.mask_mod(zero, zero, index[:, None], index[None])
    assert torch.equal(pairs, dense_mask(rule, window)[0, 0])
    # Blocks that are listed as full must hold visible pairs only.
    blocks = -(-length // 128)
    dense = torch.zeros(blocks * 128, blocks * 128, dtype=torch.bool)
    dense[:length, :length] = pairs
    every = dense.unflatten(0, (blocks, 128)).unflatten(2, (blocks, 128)).transpose(1, 2).flatten(2).all(-1)
    assert ours.full_kv_num_blocks is not None and ours.full_kv_indices is not None
    for row in range(blocks):
        for column in ours.full_kv_indices[0, 0, row, : int(ours.full_kv_num_blocks[0, 0, row])]:
            assert every[row, column]


@pytest.mark.parametrize("kind", ["none", "documents", "tree"])
@pytest.mark.parametrize("window", [1, 5, 20, 100])
def test_local_attention_matches_fp64(kind: str, window: int) -> None:
    """|position difference| < window, on top of what is visible; at least as long as the sequence it is global."""
    length = 37
    rule = None if kind == "none" else _tree_rule(length) if kind == "tree" else _some_rule(1, length, kind)
    q, k, v = torch.randn(1, 4, length, 16), torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16)
    mask = prepare_mask(rule, 1, length, "cpu", window)
    assert (mask is None) == (kind == "none" and window >= length)
    out = attention(q, k, v, mask)
    shown = rule or causal(1, length)
    visible = torch.zeros(1, 1, length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            near = abs(int(shown.position[0, i]) - int(shown.position[0, j])) < window
            visible[0, 0, i, j] = near and int(shown.start[0, j]) <= i < int(shown.limit[0, j])
    torch.testing.assert_close(out.double(), _plain(q, k, v, visible, 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [128, 200])
@pytest.mark.parametrize("kind", ["documents", "prefix", "bidirectional", "edge", "intervals"])
def test_flex_attention_forward_matches_fp64(length: int, kind: str) -> None:
    q, k, v = torch.randn(2, 4, length, 16), torch.randn(2, 2, length, 16), torch.randn(2, 2, length, 16)
    rule = _some_rule(2, length, kind)
    out = flex_attention(q, k, v, block_mask=block_mask(rule), enable_gqa=True)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.double(), _plain(q, k, v, dense_mask(rule), 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [4, 8])
def test_narrow_heads_are_widened_for_flex_attention(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def flex(q: Tensor, *args: Any, **options: Any) -> Any:
        widths.append(q.shape[-1])
        return flex_attention(q, *args, **options)

    monkeypatch.setattr("lowbit.models.attention.compiled_flex", lambda: flex)
    q, k, v = (torch.randn(2, heads, 200, dim) for heads in (4, 2, 2))
    rule = _some_rule(2, 200, "documents")
    out, z = flex_with_z(q, k, v, block_mask(rule), None, None)
    assert widths == [FLEX_NARROWEST]
    expected = _plain(q, k, v, dense_mask(rule), dim**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    logits = q.double() @ k.double().repeat_interleave(2, dim=1).mT * dim**-0.5
    visible = logits.masked_fill(~dense_mask(rule), float("-inf"))
    torch.testing.assert_close(z.double(), visible.logsumexp(dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_narrow_heads_on_a_gpu() -> None:
    rule = _some_rule(2, 200, "documents")
    inputs = [torch.randn(2, heads, 200, 8, device="cuda", requires_grad=True) for heads in (4, 2, 2)]
    doubles = [x.detach().double().cpu().requires_grad_() for x in inputs]
    out = attention(*inputs, block_mask(rule.to("cuda")))
    expected = _plain(*doubles, dense_mask(rule), 8**-0.5)
    found = [out, *torch.autograd.grad(out.square().sum(), inputs)]
    wanted = [expected, *torch.autograd.grad(expected.square().sum(), doubles)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-2, atol=1e-2)


def test_a_visibility_of_another_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"visibility has shape \[2, 8\], the tokens have \[2, 9\]"):
        prepare_mask(causal(2, 8), 2, 9, "cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_token_that_does_not_see_itself_is_named(device: str) -> None:
    """Its softmax would be empty, and its output NaN or, on a GPU, zero."""
    rule = documents(torch.arange(24).view(2, 12) % 5 == 0)
    rule.limit[1, 7] = 7
    with pytest.raises(DataError, match=r"visibility\.limit\[1, 7\] = 7 of token 7 in row 1"):
        prepare_mask(rule, 2, 12, device)


def test_a_rule_that_is_plain_causal_needs_no_mask() -> None:
    """Brute force over all rules of documents and prefixes of four tokens: no mask exactly where the rule is causal."""
    lower = torch.ones(4, 4).tril().bool()
    for number in range(1 << 8):
        bits = torch.tensor([number >> i & 1 for i in range(8)], dtype=torch.bool)
        rule = prefixes(bits[None, :4], bits[None, 4:])
        plain = torch.equal(dense_mask(rule)[0, 0], lower)
        assert (prepare_mask(rule, 1, 4, "cpu") is None) == plain == rule.is_causal()
    assert prepare_mask(causal(2, 9), 2, 9, "cpu", window=9) is None
    assert prepare_mask(causal(2, 9), 2, 9, "cpu", window=8) is not None
    both = documents(torch.arange(18).view(2, 9) % 12 == 0)
    assert prepare_mask(both, 2, 9, "cpu") is not None, "one row of two"
