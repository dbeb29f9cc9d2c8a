"""Adapters of one layer and of a model: gradients against FP64, bits against a plain model of the sums."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lowbit.configs.schema import MlpKind, ModelConfig, PrecisionConfig, Recompute
from lowbit.errors import ConfigError
from lowbit.models.adapters import adapt, adapted, merge, merged, merged_weights, without_adapters
from lowbit.models.layers import Linear, frozen_weights, weights_and_state
from lowbit.models.low_rank import LowRank, low_rank_sum
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.resolve import resolve

TINY = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, mlp_width=48, max_sequence=32)
TOKENS = torch.arange(24).view(2, 12) % 17


def model_of(precision: str = "bf16", dtype: torch.dtype = torch.float32, backward: str = "bf16") -> Transformer:
    model = Transformer(TINY, 17, dtype)
    model.init_weights(3)
    policy = resolve(PrecisionConfig(forward=precision, backward=backward))
    apply_policy(model, policy, seed=1)
    return model


def learned(model: Transformer, seed: int = 5) -> Transformer:
    """Adapters as after some training: neither matrix is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted(model).values():
            assert layer.low_rank is not None
            layer.low_rank.b.copy_(torch.empty(layer.low_rank.b.shape).normal_(0.0, 0.02, generator=generator))
    return model


def layer_of(rank: int = 3, alpha: float = 5.0) -> tuple[Linear, LowRank, Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = Linear(10, 7)
    made = LowRank(7, 10, rank, alpha, torch.device("cpu"))
    with torch.no_grad():
        for parameter in (layer.weight, made.a, made.b):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    layer.weight.requires_grad_(False)
    layer.low_rank = made
    return layer, made, torch.randn(6, 10, generator=generator)


def test_output_and_gradients_are_those_of_the_sum_in_fp64() -> None:
    layer, made, x = layer_of()
    x.requires_grad_(True)
    y = layer(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(upstream)
    assert made.a.grad is not None and made.b.grad is not None and x.grad is not None and layer.weight.grad is None

    w, a, b, x64, g = (t.detach().double() for t in (layer.weight, made.a, made.b, x, upstream))
    s = 5.0 / 3
    total = w + s * b @ a
    dw = g.t() @ x64
    expected = {"y": x64 @ total.t(), "dx": g @ total, "da": s * b.t() @ dw, "db": s * dw @ a.t()}
    for name, found in {"y": y, "dx": x.grad, "da": made.a.grad, "db": made.b.grad}.items():
        assert torch.allclose(found.double(), expected[name], rtol=1e-5, atol=1e-5), name


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    w, a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((4, 5), (2, 5), (4, 2)))
    inputs = [t.requires_grad_(True) for t in (w, a, b)]
    scale = torch.tensor(0.7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w, a, b: low_rank_sum(w, a, b, scale), inputs)
    torch.library.opcheck(low_rank_sum, (*(t.detach() for t in inputs), scale))


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "nvfp4_w4a16", "mxfp8", "fp8_row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_are_those_of_the_plain_model_of_the_sums(precision: str, dtype: torch.dtype) -> None:
    """To the bit: hidden states, gradients of the activations, and dA, dB are those of the plain dW."""
    model = model_of(precision, dtype)
    names = adapt(model, 4, 8.0, ["all"], seed=1)
    learned(model)
    plain = model_of(precision, dtype)
    with torch.no_grad():
        for name, tensor in merged_weights(model).items():
            weights_and_state(plain)[name].copy_(tensor)
    outputs = [m(TOKENS) for m in (model, plain)]
    assert torch.equal(*outputs)
    for out in outputs:
        out.float().square().sum().backward()
    for name in names:
        layer, other = (m.get_submodule(name) for m in (model, plain))
        assert isinstance(layer, Linear) and isinstance(other, Linear) and layer.low_rank is not None
        dw, s = other.weight.grad, 8.0 / 4
        assert dw is not None and layer.low_rank.a.grad is not None and layer.low_rank.b.grad is not None
        assert torch.equal(layer.low_rank.a.grad, (layer.low_rank.b.detach().t() @ dw) * s)
        assert torch.equal(layer.low_rank.b.grad, (dw @ layer.low_rank.a.detach().t()) * s)
    assert all(p.grad is None for name, p in model.named_parameters() if "low_rank" not in name)


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "fp8_row"])
def test_adapters_whose_product_is_a_given_change(precision: str) -> None:
    """W + delta written down, without our sum: one entry a row and column, so that it is exact in FP32."""
    model, plain = model_of(precision), model_of(precision)
    adapt(model, 2, 2.0, ["down", "q"], seed=1)
    with torch.no_grad():
        for name, layer in adapted(model).items():
            assert layer.low_rank is not None
            layer.low_rank.a.zero_()
            layer.low_rank.a[0, 3], layer.low_rank.a[1, 7] = 0.5, -0.25
            layer.low_rank.b[2, 0], layer.low_rank.b[5, 1] = 1.0, 3.0
            other = plain.get_submodule(name)
            assert isinstance(other, Linear)
            other.weight[2, 3] += 0.5
            other.weight[5, 7] -= 0.75
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert not torch.equal(model(TOKENS), model_of(precision)(TOKENS))


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "mxfp8"])
def test_frozen_copies_have_the_sums(precision: str) -> None:
    model = model_of(precision)
    adapt(model, 4, 8.0, ["all"], seed=1)
    learned(model)
    with torch.no_grad():
        before = model(TOKENS)
        with frozen_weights(model, torch.float32):
            assert torch.equal(model(TOKENS), before)
        with without_adapters(model):
            assert torch.equal(model(TOKENS), model_of(precision)(TOKENS))
        assert torch.equal(model(TOKENS), before)
        merge(model)
        assert torch.equal(model(TOKENS), before) and not adapted(model)
    assert not any("low_rank" in name for name, _ in model.named_parameters())


def test_a_fresh_adapter_changes_nothing_and_follows_seed_and_name() -> None:
    made = []
    for seed in (1, 1, 2):
        model = model_of()
        adapt(model, 4, 8.0, ["all"], seed=seed)
        assert torch.equal(model(TOKENS), model_of()(TOKENS))
        made.append({name: layer.low_rank for name, layer in adapted(model).items()})
    a = [layer.a.detach() for layers in made for layer in layers.values() if layer is not None]
    assert len(a) == 3 * 14
    assert all(torch.equal(x, y) for x, y in zip(a[:14], a[14:28], strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a[:14], a[28:], strict=True))
    assert len({float(x.sum()) for x in a[:14]}) == 14, "every layer has noise of its own"
    deviation = torch.cat([x.flatten() * x.shape[1] ** 0.5 for x in a[:14]]).std()
    assert 0.9 < float(deviation) < 1.1


def test_what_trains() -> None:
    model = model_of()
    assert len(adapt(model, 2, 1.0, ["q", "down"], seed=1, also=["norms", "head"])) == 4
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    adapters = {
        f"blocks.{i}.{layer}.low_rank.{m}" for i in (0, 1) for layer in ("attention.q", "mlp.down") for m in "ab"
    }
    assert adapters <= trains and {"head.weight", "final_norm.weight", "blocks.0.attention_norm.weight"} <= trains
    assert not any(name.startswith(("embedding", "blocks.0.mlp.up")) for name in trains)
    assert all(p.ndim < 2 or name == "head.weight" for name, p in model.named_parameters() if name in trains - adapters)


def test_a_checkpoints_tensors_merge_to_the_live_models() -> None:
    model = model_of()
    adapt(model, 4, 6.0, ["all"], seed=1)
    learned(model)
    tensors = merged(weights_and_state(model), 4, 6.0)
    live = merged_weights(model)
    assert tensors.keys() == live.keys() == weights_and_state(model_of()).keys()
    assert all(torch.equal(tensors[name], live[name]) for name in live)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank=17: blocks\.0\.attention\.k is 16 x 32"):
        adapt(model_of(), 17, 1.0, ["all"], seed=1)
    model = Transformer(replace(TINY, mlp=MlpKind.relu2), 17)
    with pytest.raises(ConfigError, match="no linear layer of the model has such a name"):
        adapt(model, 2, 1.0, ["gate"], seed=1)


def test_siblings_with_and_without_adapters() -> None:
    """q and v learn, k does not: they still read one quantised input, and k's weight gets no gradient."""
    model = model_of("nvfp4", backward="nvfp4")
    adapt(model, 4, 8.0, ["q", "v"], seed=1)
    learned(model)
    model(TOKENS).square().sum().backward()
    q, k = (model.get_submodule(f"blocks.0.attention.{name}") for name in "qk")
    assert isinstance(q, LowbitLinear) and q.low_rank is not None and isinstance(k, LowbitLinear)
    assert q.low_rank.a.grad is not None and k.weight.grad is None


def kept_bytes(model: Transformer) -> int:
    """What autograd keeps of a forward pass beside the parameters, in bytes."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(TOKENS[:, :1])
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp8"])
def test_sums_are_not_kept_for_the_backward_pass(precision: str) -> None:
    """Low-bit layers make them anew: with adapters nothing is kept that is as large as the weights."""
    plain, model = model_of(precision), model_of(precision)
    adapt(model, 4, 8.0, ["all"], seed=1)
    weights = 4 * sum(layer.weight.numel() for layer in adapted(model).values())
    assert weights > 2 * kept_bytes(plain)
    assert kept_bytes(model) < kept_bytes(plain) + weights / 8


@pytest.mark.parametrize("recompute", [Recompute.none, pytest.param(Recompute.full, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.exhaustive), "nvfp4"])
def test_a_compiled_block_has_eagers_bits(precision: str, recompute: Recompute) -> None:
    """Forward, dA and dB. Two graphs, since the first block's input needs no gradient, and none for the reference."""
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = model_of(precision, torch.bfloat16)
        adapt(model, 4, 8.0, ["all"], seed=1)
        learned(model).set_recompute(recompute)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        counters.clear()
        y = model(TOKENS)
        y.float().square().sum().backward()
        graphs = counters["stats"]["unique_graphs"]
        with without_adapters(model):
            base = model(TOKENS)
        assert counters["stats"]["unique_graphs"] == graphs == 2 * compiled
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([y.detach(), base.detach(), *gradients])
    assert len(found[0]) == 2 + 28
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
