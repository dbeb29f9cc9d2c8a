"""The dense model against an independent implementation, and what it promises about names, bits and compilation."""

import copy
import dataclasses
import hashlib
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from llama_names import llama_name
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.configs.schema import MlpKind, ModelConfig, Recompute, RopeConfig
from lowbit.errors import ConfigError, DataError
from lowbit.infer.cache import PagedCache, View
from lowbit.infer.kv_codec import KvCodec, KvFormat
from lowbit.models.layers import Linear, RMSNorm, frozen_weights
from lowbit.models.lm_head import lm_head_logits
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import causal, documents

CONFIG = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64, qk_norm=False)
VOCAB = 50


def _model(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(config, VOCAB, dtype)
    model.init_weights(7)
    return model


def _tokens(batch: int = 2, length: int = 23) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_logits_are_those_of_transformers(tied: bool, qk_norm: bool) -> None:
    """Llama, and Qwen3 for QK-norm, with our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = dataclasses.replace(CONFIG, tied_head=tied, qk_norm=qk_norm, init_std=0.1)
    model = _model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    settings = {
        "vocab_size": model.padded_vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    }
    theirs = Qwen3ForCausalLM(Qwen3Config(**settings)) if qk_norm else LlamaForCausalLM(LlamaConfig(**settings))
    state = {}
    for name, tensor in model.state_dict().items():
        name = llama_name(name)
        state[name] = tensor
    if tied:
        state["lm_head.weight"] = model.head_weight.detach()
    theirs.load_state_dict(state, strict=True)
    tokens = _tokens()
    with torch.no_grad():
        logits = lm_head_logits(model(tokens), model.head_weight, vocab_size=VOCAB)
        expected = theirs(tokens).logits[..., :VOCAB]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert logits.std() > 0.1


def test_squared_relu_mlp() -> None:
    model = _model(dataclasses.replace(CONFIG, mlp=MlpKind.relu2))
    mlp, x = model.blocks[0].mlp, torch.randn(3, 32)
    expected = F.linear(F.linear(x, mlp.up.weight).clamp(min=0) ** 2, mlp.down.weight)
    torch.testing.assert_close(mlp(x), expected)
    assert not any("gate" in name for name, _ in model.named_parameters())


def test_rms_norm_has_fp32_statistics() -> None:
    norm = RMSNorm(64, 1e-6)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(5, 64) * 30
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-6, atol=1e-6)
    low = norm(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, norm(x.bfloat16().float()).bfloat16())


def test_bf16_products_of_fp32_parameters() -> None:
    model = _model(dtype=torch.bfloat16)
    hidden = model(_tokens())
    assert hidden.dtype == torch.bfloat16
    hidden.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if name != "head.weight":
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
    difference = (hidden.float() - _model()(_tokens())).norm() / hidden.float().norm()
    assert 0 < difference < 0.02


def test_names_are_the_agreed_ones() -> None:
    model = Transformer(dataclasses.replace(CONFIG, qk_norm=True, layers=1), VOCAB)
    names = [name for name, _ in model.named_parameters()]
    assert names == [
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        *(f"blocks.0.attention.{part}.weight" for part in ("q", "k", "v", "out", "q_norm", "k_norm")),
        "blocks.0.mlp_norm.weight",
        *(f"blocks.0.mlp.{part}.weight" for part in ("gate", "up", "down")),
        "final_norm.weight",
        "head.weight",
    ]


def test_initialisation_is_the_stated_one() -> None:
    config = ModelConfig(layers=8, width=128, heads=4, kv_heads=4, mlp_width=256, init_std=0.03, qk_norm=True)
    model = Transformer(config, 1000)
    model.init_weights(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        std = 0.03 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.03
        # The standard error of a standard deviation is std / sqrt(2 n); of a mean, std / sqrt(n).
        assert abs(parameter.std() / std - 1) < 5 / (2 * parameter.numel()) ** 0.5, name
        assert abs(parameter.mean()) < 5 * std / parameter.numel() ** 0.5, name


def _digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state.update(name.encode() + parameter.detach().numpy().tobytes())
    return state.hexdigest()


def test_initialisation_depends_on_seed_and_name_alone() -> None:
    ours = _digest(_model())
    torch.manual_seed(99)
    meta = Transformer(CONFIG, VOCAB).to("meta").to_empty(device="cpu")
    meta.init_weights(7)
    assert _digest(meta) == ours
    meta.init_weights(8)
    assert _digest(meta) != ours
    deeper = _model(dataclasses.replace(CONFIG, layers=3))
    assert torch.equal(deeper.blocks[1].mlp.up.weight, _model().blocks[1].mlp.up.weight)
    script = f"""
import hashlib
from lowbit.configs.schema import ModelConfig
from lowbit.models.transformer import Transformer
config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64, qk_norm=False)
model, state = Transformer(config, {VOCAB}), hashlib.sha256()
model.init_weights(7)
for name, parameter in model.named_parameters():
    state.update(name.encode() + parameter.detach().numpy().tobytes())
print(state.hexdigest())
"""
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == ours


def test_meta_model_built_directly() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG, VOCAB)
    model.to_empty(device="cpu")
    model.init_weights(7)
    assert torch.equal(model(_tokens()), _model()(_tokens()))


def test_explicit_causal_visibility_changes_nothing() -> None:
    model = _model()
    torch.testing.assert_close(model(_tokens(), causal(2, 23)), model(_tokens()), rtol=1e-5, atol=1e-6)


def test_packed_documents_equal_documents_alone() -> None:
    model, tokens = _model(), _tokens(1, 30)
    cuts = [0, 4, 5, 17, 30]
    first = torch.zeros(1, 30, dtype=torch.bool)
    first[0, cuts[:-1]] = True
    packed = model(tokens, documents(first))
    for begin, end in pairwise(cuts):
        torch.testing.assert_close(packed[:, begin:end], model(tokens[:, begin:end]), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed[:, 5:], model(tokens)[:, 5:], atol=1e-3)


def _gradients(model: Transformer, packed: bool = True) -> list[Tensor]:
    rule = documents(torch.arange(46).view(2, 23) % 9 == 0) if packed else None
    model.zero_grad(set_to_none=True)
    hidden = model(_tokens(), rule)
    hidden.square().sum().backward()
    return [hidden.detach(), *(p.grad.clone() for n, p in model.named_parameters() if p.grad is not None)]


@pytest.mark.parametrize("recompute", [Recompute.full, Recompute.selective])
@pytest.mark.parametrize("packed", [False, True])
def test_recomputation_is_bitwise_the_same(recompute: Recompute, packed: bool) -> None:
    model = _model(dataclasses.replace(CONFIG, qk_norm=True))
    expected = _gradients(model, packed)
    model.set_recompute(recompute)
    for ours, plain in zip(_gradients(model, packed), expected, strict=True):
        assert torch.equal(ours, plain)


def test_recomputation_runs_what_it_says() -> None:
    """Matrix products in forward plus backward: none 3 a layer's weight, full 4, selective 3 again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {}
    for recompute in Recompute:
        model = _model()
        model.set_recompute(recompute)

        class Count(TorchDispatchMode):
            products = norms = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                self.products += func is torch.ops.aten.mm.default
                self.norms += func in (torch.ops.aten.rsqrt.default, torch.ops.aten._fused_rms_norm.default)
                return func(*args, **(kwargs or {}))

        with Count() as count:
            _gradients(model)
        counts[recompute] = (count.products, count.norms)
    weights = 7 * 2
    assert counts[Recompute.none][0] == counts[Recompute.selective][0] == 3 * weights
    # The last product of a block, mlp.down, is not needed again: recomputation may stop before it.
    assert counts[Recompute.full][0] in (4 * weights - 2, 4 * weights)
    assert counts[Recompute.selective][1] > counts[Recompute.none][1]


@pytest.mark.parametrize("recompute", list(Recompute))
def test_one_graph_serves_all_blocks(recompute: Recompute) -> None:
    """Compiled blocks give the plain ones' numbers, with one graph for causal batches and one for masked ones."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = _model(dataclasses.replace(CONFIG, layers=12))
    model = copy.deepcopy(plain)
    model.set_recompute(recompute)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=counter)
    for packed in (False, True, False, True):
        for ours, expected in zip(_gradients(model, packed), _gradients(plain, packed), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_a_block_mask_compiles_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path, traced on the CPU without gradients: new documents, same graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from lowbit.models import attention

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = _model(dataclasses.replace(CONFIG, layers=12, max_sequence=300))
    model = copy.deepcopy(plain)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=counter)
    for seed in range(3):
        torch.manual_seed(seed)
        tokens, rule = torch.randint(0, VOCAB, (2, 300)), documents(torch.rand(2, 300) < 0.02)
        with torch.no_grad():
            expected = plain(tokens, rule)
            with monkeypatch.context() as patch:
                patch.setattr(attention, "dense_mask", attention.block_mask)
                ours = model(tokens, rule)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_frozen_weights_hold_rounded_copies_until_the_end() -> None:
    model = _model(dtype=torch.bfloat16)
    expected = model(_tokens())
    with frozen_weights(model, torch.bfloat16):
        assert torch.equal(model(_tokens()), expected)
        with torch.no_grad():
            for parameter in model.blocks.parameters():
                parameter.add_(1.0)
        # Norms see the change, the products do not.
        up = model.blocks[0].mlp.up
        assert torch.equal(up(torch.eye(32).bfloat16()).t(), _model().blocks[0].mlp.up.weight.bfloat16())
    assert all(module.frozen is None for module in model.modules() if isinstance(module, Linear))
    assert not torch.equal(model(_tokens()), expected)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"heads": 5}, "model.width=32 model.heads=5: heads must divide the width"),
        ({"kv_heads": 3}, "model.heads=4 model.kv_heads=3: kv_heads must divide heads"),
        ({"heads": 32, "kv_heads": 32}, "a head of width 1 has no pairs to rotate"),
        ({"head_dim": 7}, "model.head_dim=7"),
        ({"head_dim": 0}, "model.head_dim=0"),
        ({"layers": 0}, "model.layers=0"),
        ({"width": -4}, "model.width=-4"),
        ({"mlp_width": 0}, "model.mlp_width=0"),
        ({"max_sequence": 0}, "model.max_sequence=0"),
        ({"vocab_multiple": 0}, "model.vocab_multiple=0"),
        ({"logit_softcap": 0.0}, "model.logit_softcap=0"),
        ({"attention_softcap": 0.0}, "model.attention_softcap=0"),
        ({"init_std": 0.0}, "model.init_std=0.0"),
        ({"rope": RopeConfig(theta=0.5)}, "model.rope.theta=0.5"),
    ],
)
def test_impossible_models_name_the_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Transformer(dataclasses.replace(CONFIG, **change), VOCAB)  # type: ignore[arg-type]
    assert key in str(error.value)


def test_refused_inputs() -> None:
    model = _model()
    with pytest.raises(ConfigError, match="the vocabulary has 0 tokens"):
        Transformer(CONFIG, 0)
    with pytest.raises(ConfigError, match=r"65 tokens exceeds model\.max_sequence=64"):
        model(_tokens(1, 65))
    with pytest.raises(DataError, match="visibility has shape"):
        model(_tokens(), causal(2, 22))
    with pytest.raises(DataError, match="not both"):
        cache = PagedCache(CONFIG, 9, 16, KvCodec.of(KvFormat.auto, torch.float32), "cpu")
        model(_tokens(), causal(2, 23), View(cache, torch.ones(2, 4, dtype=torch.int64), torch.zeros(2).long()))
