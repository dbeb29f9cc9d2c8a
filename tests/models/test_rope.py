"""Rotary embedding against Hugging Face transformers' frequencies and rotation, and its defining property."""

import math

import pytest
import torch

from lowbit.configs.schema import RopeConfig, RopeScaling
from lowbit.models.rope import apply_rope, rope_frequencies, rope_tables

HEAD_DIM = 32


def _reference(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """(frequencies, factor) of transformers for the same settings."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original, factor = config.original_sequence, config.factor
    kind = {"ntk": "dynamic"}.get(config.scaling, str(config.scaling))
    parameters = {"rope_type": kind, "rope_theta": config.theta, "factor": factor}
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = original
    if kind == "llama3":
        parameters |= {"low_freq_factor": config.low_freq_factor, "high_freq_factor": config.high_freq_factor}
    if kind == "yarn":
        parameters |= {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow}
    model = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=original,
        rope_parameters=parameters,
    )
    # Its dynamic NTK has base * (f s/m - (f - 1))^(D/(D-2)): at s/m = (2f - 1)/f that is ours, base * f^(D/(D-2)).
    seen = round(original * (2 * factor - 1) / factor) if kind == "dynamic" else None
    frequencies, attention = ROPE_INIT_FUNCTIONS[kind](model, torch.device("cpu"), seq_len=seen)
    return frequencies, attention


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig(scaling=RopeScaling.linear, factor=4.0),
        RopeConfig(scaling=RopeScaling.ntk, factor=2.0),
        RopeConfig(scaling=RopeScaling.ntk, factor=8.0, theta=500000.0),
        RopeConfig(scaling=RopeScaling.llama3, factor=8.0, theta=500000.0, original_sequence=8192),
        RopeConfig(scaling=RopeScaling.llama3, factor=32.0, low_freq_factor=2.0, high_freq_factor=8.0),
        RopeConfig(scaling=RopeScaling.yarn, factor=4.0),
        RopeConfig(scaling=RopeScaling.yarn, factor=40.0, original_sequence=4096, beta_fast=16.0, beta_slow=2.0),
        RopeConfig(scaling=RopeScaling.yarn, factor=4.0, original_sequence=64),
    ],
    ids=lambda config: f"{config.scaling}-{config.factor}",
)
def test_frequencies_are_those_of_transformers(config: RopeConfig) -> None:
    frequencies, factor = rope_frequencies(config, HEAD_DIM)
    expected, expected_factor = _reference(config)
    torch.testing.assert_close(torch.tensor(frequencies), expected, rtol=1e-5, atol=0)
    assert math.isclose(factor, expected_factor, rel_tol=1e-6)


def test_rotation_is_that_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM)
    q, k = torch.randn(2, 11, 4, HEAD_DIM), torch.randn(2, 11, 2, HEAD_DIM)
    position = torch.randint(0, 2000, (2, 11))
    cos, sin = LlamaRotaryEmbedding(config)(q, position)
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    frequencies, factor = rope_frequencies(RopeConfig(), HEAD_DIM)
    tables = rope_tables(position, torch.tensor(frequencies), factor)
    torch.testing.assert_close(apply_rope(q, *tables).transpose(1, 2), expected_q, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(apply_rope(k, *tables).transpose(1, 2), expected_k, rtol=1e-3, atol=1e-3)


def test_products_depend_on_distance_alone() -> None:
    frequencies, factor = rope_frequencies(RopeConfig(), HEAD_DIM)
    tables = rope_tables(torch.arange(600)[None], torch.tensor(frequencies), factor)
    q = apply_rope(torch.randn(HEAD_DIM).expand(1, 600, 1, HEAD_DIM), *tables)[0, :, 0].double()
    k = apply_rope(torch.randn(HEAD_DIM).expand(1, 600, 1, HEAD_DIM), *tables)[0, :, 0].double()
    for distance in (0, 1, 17, 300):
        products = (q[distance:] * k[: 600 - distance]).sum(-1)
        torch.testing.assert_close(products, products[:1].expand_as(products), rtol=0, atol=2e-3)
    assert abs(float((q[0] * k[0]).sum() - (q[50] * k[0]).sum())) > 0.1
