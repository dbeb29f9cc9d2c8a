"""Layers that look back over a window or use another layer's keys: numbers, parameters, cache, generation, graphs."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig, Recompute
from lowbit.errors import ConfigError
from lowbit.infer.cache import PagedCache
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.kv_codec import KvCodec, KvFormat
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.attention import dense_mask
from lowbit.models.cost import attention_flops_per_token, kv_cache_bytes_per_token, parameter_parts
from lowbit.models.probe import softmax_saturation
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import Visibility, causal, documents

CONFIG = ModelConfig(layers=4, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64, init_std=0.2)
VOCAB = 50
SHARED = [0, 0, 2, 0]


def _model(dtype: torch.dtype = torch.float32, **changes: object) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, **changes), VOCAB, dtype)  # type: ignore[arg-type]
    model.init_weights(7)
    return model


def _tokens(batch: int = 2, length: int = 23) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def _reference(model: Transformer, tokens: Tensor, rule: Visibility) -> Tensor:
    """The model in FP64 from its own parts: who attends to what is spelled out, layer by layer."""
    exact = copy.deepcopy(model).double()
    rope = tuple(t.double() for t in model.rope(rule.position))
    x = exact.embedding(tokens)
    kept = []
    for layer, block in enumerate(exact.blocks):
        window = model.config.windows[layer % len(model.config.windows)] if model.config.windows else 0
        mask = dense_mask(rule)
        if window:
            distance = rule.position[:, None, :, None] - rule.position[:, None, None, :]
            mask = mask & (distance.abs() < window)
        attention = block.attention
        normed = _norm(block.attention_norm, x)
        source = model.config.kv_from[layer] if model.config.kv_from else layer

        def heads(y: Tensor, norm: torch.nn.Module | None) -> Tensor:
            y = y.view(*y.shape[:-1], -1, 8)
            if norm is not None:
                y = _norm(norm, y)
                y = y * rope[0] + y.roll(4, dims=-1) * rope[1]
            return y.transpose(1, 2)

        q = heads(normed @ attention.q.weight.t(), attention.q_norm)
        if source == layer:
            kept.append(
                (heads(normed @ attention.k.weight.t(), attention.k_norm), heads(normed @ attention.v.weight.t(), None))
            )
        else:
            assert attention.k is None and attention.v is None and attention.k_norm is None
            kept.append(kept[source])
        k, v = (t.repeat_interleave(2, dim=1) for t in kept[layer])
        logits, cap = q @ k.mT * 8**-0.5, model.config.attention_softcap
        weights = (logits if cap is None else cap * (logits / cap).tanh()).masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2) @ attention.out.weight.t()
        normed = _norm(block.mlp_norm, x)
        gate, up = normed @ block.mlp.gate.weight.t(), normed @ block.mlp.up.weight.t()
        x = x + (torch.nn.functional.silu(gate) * up) @ block.mlp.down.weight.t()
    return _norm(exact.final_norm, x)


def _norm(norm: torch.nn.Module, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight  # type: ignore[operator, no-any-return]


LAYOUTS = {
    "local and global": {"windows": [4, 4, 0]},
    "all local": {"windows": [5]},
    "shared": {"kv_from": SHARED},
    "one for an upper half": {"kv_from": [0, 1, 1, 1]},
    "both": {"kv_from": SHARED, "windows": [3, 6, 0, 2]},
    "both, capped": {"kv_from": SHARED, "windows": [3, 6, 0, 2], "attention_softcap": 0.5},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_the_spelled_out_model(layout: str, packed: bool) -> None:
    model = _model(**LAYOUTS[layout])
    rule = documents(torch.arange(46).view(2, 23) % 9 == 0) if packed else None
    ours = model(_tokens(), rule)
    expected = _reference(model, _tokens(), rule or causal(2, 23))
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


def _greedy(model: Transformer, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The likeliest tokens behind each prompt."""
    requests = [Request(tuple(prompt), key, new) for key, prompt in enumerate(prompts)]
    found = EmbeddedSampler(model, None).sample(requests, SamplingConfig(0.0), seed=0)
    return [sample.tokens for [sample] in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_is_that_of_the_whole_sequence(layout: str) -> None:
    model = _model(**LAYOUTS[layout])
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    for prompt, tokens in zip(prompts, _greedy(model, prompts, 12), strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([[*prompt, *tokens]]))[0]
        logits = hidden @ model.head_weight[:VOCAB].t()
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens


def test_costs() -> None:
    model = _model(kv_from=SHARED)
    parts = parameter_parts(model.config, VOCAB)
    count = {name: p.numel() for name, p in model.named_parameters()}
    assert parts.total == sum(count.values())
    assert parts.attention == sum(n for name, n in count.items() if ".attention." in name and "norm" not in name)
    cache = PagedCache(model.config, 3, 50, KvCodec.of(KvFormat.bf16, torch.float32), "cpu")
    assert cache.nbytes == 3 * 50 * kv_cache_bytes_per_token(model.config)
    assert 2 * kv_cache_bytes_per_token(model.config) == kv_cache_bytes_per_token(CONFIG)
    local = dataclasses.replace(CONFIG, windows=[16, 0])
    # A query of 64 sees 32 keys on average; with a window of 16 the first 16 queries 8 on average, the others 16.
    seen = (32 + (16 * 8 + 48 * 16) / 64) / 2
    assert attention_flops_per_token(local, 64) == attention_flops_per_token(CONFIG, 64) * seen / 32
    assert attention_flops_per_token(local, 8) == attention_flops_per_token(CONFIG, 8)


@pytest.mark.parametrize(
    "recompute", [pytest.param(r, marks=[pytest.mark.exhaustive] if r is not Recompute.full else []) for r in Recompute]
)
def test_gradients_and_graphs(recompute: Recompute) -> None:
    """Compiled and recomputed blocks give the plain gradients; layers of one kind share a graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    settings: dict[str, object] = {"layers": 12, "windows": [4, 0], "kv_from": [0, 1, *range(2, 10), 1, 1]}
    plain, model = _model(**settings), _model(**settings)
    model.set_recompute(recompute)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=counter)
    for either in (plain, model):
        (either(_tokens()) * torch.linspace(-1, 1, 32)).square().sum().backward()
    for (name, ours), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None:
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-4, msg=name)
    # Masked and plain causal layers; one that lends; those that borrow, masked and causal.
    assert counter.frame_count <= 5


def test_the_probe_knows_windows_and_shared_keys() -> None:
    model = _model(windows=[1, 0], kv_from=[0, 1, 1, 1])
    shares = softmax_saturation(model, _tokens(), None, threshold=0.2)
    assert shares[0] == shares[2] == 0.0 and shares[1] > 0 and shares[3] > 0  # a window of one key is no row to count
    assert softmax_saturation(_model(), _tokens()) == softmax_saturation(_model(kv_from=[0, 1, 2, 3]), _tokens())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": [4, -1]}, r"model\.windows=\[4, -1\]: a window is a number up to"),
        ({"kv_from": [0, 0]}, r"model\.kv_from=\[0, 0\] model\.layers=4: each of 4 layers"),
        ({"kv_from": [0, 2, 2, 2]}, r"kv_from=\[0, 2, 2, 2\].*earlier layer"),
        ({"kv_from": [0, 0, 1, 3]}, r"kv_from=\[0, 0, 1, 3\].*earlier layer"),
        ({"kv_from": [0, -1, 2, 3]}, r"kv_from=\[0, -1, 2, 3\].*earlier layer"),
    ],
)
def test_impossible_layouts_name_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _model(**changes)


def test_a_lender_that_is_told_to_borrow_from_itself_is_plain() -> None:
    same: Callable[..., Transformer] = _model
    assert torch.equal(same(kv_from=[0, 1, 2, 3])(_tokens()), same()(_tokens()))
