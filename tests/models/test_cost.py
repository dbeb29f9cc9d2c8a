"""Costs against a real model: parameters on the meta device, FLOPs by torch's counter, memory by saved tensors."""

import dataclasses

import pytest
import torch

from lowbit.configs.schema import MlpKind, ModelConfig, OptimizerKind, Recompute
from lowbit.infer.cache import PagedCache
from lowbit.infer.kv_codec import KvCodec, KvFormat
from lowbit.models.cost import (
    flops_per_token,
    kv_cache_bytes_per_token,
    largest_micro_batch,
    parameter_parts,
    training_memory,
)
from lowbit.models.transformer import Transformer

TINY = ModelConfig(layers=3, width=64, heads=4, kv_heads=2, mlp_width=96, max_sequence=256)


def _shape(
    layers: int, width: int, heads: int, mlp_width: int, kv_heads: int | None = None, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads or heads, mlp_width=mlp_width, tied_head=tied
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("mlp", list(MlpKind))
@pytest.mark.parametrize("vocab", [257, 4096])
def test_parameters_of_a_real_model(tied: bool, qk_norm: bool, mlp: MlpKind, vocab: int) -> None:
    config = dataclasses.replace(TINY, tied_head=tied, qk_norm=qk_norm, mlp=mlp, head_dim=20)
    with torch.device("meta"):
        model = Transformer(config, vocab)
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parts = parameter_parts(config, vocab)
    assert parts.total == sum(count.values())
    for part in ("attention", "mlp"):
        real = sum(n for name, n in count.items() if f".{part}." in name and "norm" not in name)
        assert getattr(parts, part) == real
    assert parts.norms == sum(n for name, n in count.items() if "norm" in name)
    assert parts.without_embedding == parts.total - (0 if tied else count["embedding.weight"])


@pytest.mark.parametrize(
    ("config", "vocab", "millions"),
    [
        (_shape(10, 384, 6, 1024), 32768, 30.3),
        (_shape(8, 512, 8, 1024), 100_352, 72),
        (_shape(12, 768, 12, 1536), 100_352, 148),
        (_shape(16, 1024, 16, 4096), 100_352, 371),
    ],
    ids=["30m", "70m", "150m", "370m"],
)
def test_presets_without_input_embedding_match_their_names(config: ModelConfig, vocab: int, millions: float) -> None:
    assert parameter_parts(config, vocab).without_embedding / 1e6 == pytest.approx(millions, rel=0.01)


def test_large_presets_match_their_names() -> None:
    # Llama 3.2 1B and Llama 3.1 8B have 1,235,814,400 and 8,030,261,248 parameters, without our QK-norms.
    one = dataclasses.replace(_shape(16, 2048, 32, 8192, kv_heads=8, tied=True), qk_norm=False)
    eight = dataclasses.replace(_shape(32, 4096, 32, 14336, kv_heads=8), qk_norm=False)
    assert parameter_parts(one, 128_256).total == 1_235_814_400
    assert parameter_parts(eight, 128_256).total == 8_030_261_248


@pytest.mark.parametrize("mlp", list(MlpKind))
@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_real_forward_and_backward(mlp: MlpKind, tied: bool) -> None:
    """torch's counter sees the products and all of the attention matrix.

    It has 12 * layers * heads * head_dim * T a token for attention where the convention counts the causal half, 6,
    and in a backward pass through SDPA's fused kernel it counts the recomputed scores too; plain products avoid that.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config, vocab, batch, length = dataclasses.replace(TINY, mlp=mlp, tied_head=tied, kv_heads=4), 128, 2, 48
    model = Transformer(config, vocab)
    model.init_weights(1)
    tokens = torch.randint(0, vocab, (batch, length))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden = model(tokens)
        (hidden @ model.head_weight.t()).square().sum().backward()
    half = 6 * config.layers * config.width * length
    assert counter.get_total_flops() == batch * length * (flops_per_token(config, vocab, length) + half)


def test_flops_by_hand() -> None:
    # The benchmark's shape: 20 layers of 12 * 1280^2 weights and a head, 6 each; attention 6 * 20 * 1280 * 2048.
    config = ModelConfig(layers=20, width=1280, heads=10, kv_heads=10, mlp=MlpKind.relu2, mlp_width=5120)
    expected = 6 * (20 * 12 * 1280**2 + 32768 * 1280) + 6 * 20 * 1280 * 2048
    assert flops_per_token(config, 32768, 2048) == expected == 2_925_527_040


def test_a_cap_is_no_work() -> None:
    """Element-wise, as the softmax is: products are counted."""
    plain = ModelConfig()
    capped = dataclasses.replace(plain, attention_softcap=50.0)
    assert flops_per_token(capped, 1000, 512) == flops_per_token(plain, 1000, 512)
    assert kv_cache_bytes_per_token(capped) == kv_cache_bytes_per_token(plain)


def test_kv_cache_bytes_of_a_real_cache() -> None:
    cache = PagedCache(TINY, 3, 50, KvCodec.of(KvFormat.bf16, torch.float32), "cpu")
    assert cache.nbytes == 3 * 50 * kv_cache_bytes_per_token(TINY)
    assert kv_cache_bytes_per_token(TINY, 4) == 2 * kv_cache_bytes_per_token(TINY)


def _saved_bytes(model: Transformer, tokens: torch.Tensor) -> int:
    """Bytes of distinct storages, the parameters' apart, that autograd keeps for the blocks' backward pass."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    return sum(kept.values())


@pytest.mark.parametrize("mlp", list(MlpKind))
def test_activations_of_a_real_forward(mlp: MlpKind) -> None:
    """Growth with depth, so that what does not belong to blocks cancels; compiled blocks keep less than eager ones."""
    config = dataclasses.replace(TINY, mlp=mlp, width=128, mlp_width=320, heads=2, kv_heads=2)
    tokens = torch.randint(0, 64, (2, 128))
    real, estimate = [], []
    for layers in (2, 6):
        deeper = dataclasses.replace(config, layers=layers)
        model = Transformer(deeper, 64)
        model.init_weights(1)
        real.append(_saved_bytes(model, tokens))
        memory = training_memory(deeper, 64, 2, 128, 4, Recompute.none, OptimizerKind.adamw)
        estimate.append(memory.activations)
    assert estimate[1] - estimate[0] == pytest.approx(real[1] - real[0], rel=0.3)


def test_memory_parts() -> None:
    config, vocab = TINY, 512
    parts = parameter_parts(config, vocab)
    adamw = training_memory(config, vocab, 4, 128, 2, Recompute.none, OptimizerKind.adamw)
    muon = training_memory(config, vocab, 4, 128, 2, Recompute.none, OptimizerKind.muon)
    assert adamw.parameters == adamw.gradients == 4 * parts.total
    assert adamw.optimizer == 8 * parts.total
    assert adamw.optimizer - muon.optimizer == 4 * parts.hidden_matrices
    assert adamw.total == sum(dataclasses.astuple(adamw))
    deep = dataclasses.replace(config, layers=24)
    by_mode = [
        training_memory(deep, vocab, 4, 128, 2, mode, OptimizerKind.adamw).activations
        for mode in (Recompute.none, Recompute.selective, Recompute.full)
    ]
    assert by_mode == sorted(by_mode, reverse=True) and by_mode[2] < by_mode[0] / 4


def test_largest_micro_batch_is_the_last_that_fits() -> None:
    def total(batch: int) -> int:
        return training_memory(TINY, 512, batch, 128, 2, Recompute.none, OptimizerKind.adamw).total

    def largest(free: int) -> int:
        return largest_micro_batch(free, TINY, 512, 128, 2, Recompute.none, OptimizerKind.adamw)

    for batch in (1, 2, 3, 17, 64):
        assert largest(total(batch)) == batch
        assert largest(total(batch) - 1) == batch - 1
