"""Bits per byte against closed forms."""

import math

import numpy as np
import pytest
import torch

from lowbit.configs.schema import ModelConfig
from lowbit.data.batch import Batch
from lowbit.models.transformer import Transformer
from lowbit.trainer.evaluate import evaluate

CONFIG = ModelConfig(layers=1, width=16, heads=2, kv_heads=2, mlp_width=24, max_sequence=32)


def test_a_uniform_model_needs_log2_vocab_bits_a_token() -> None:
    vocab = 40
    model = Transformer(CONFIG, vocab)
    model.init_weights(0)
    torch.nn.init.zeros_(model.head_weight)
    token_bytes = np.arange(vocab, dtype=np.int32)  # token 0 is a separator: no bytes
    tokens = torch.randint(0, vocab, (3, 16))
    weights = torch.ones(3, 16)
    weights[2, 10:] = 0
    batch = Batch(tokens, tokens, weights, None, int(weights.sum()))
    result = evaluate(model, [batch, batch], token_bytes)
    counted = tokens[weights > 0]
    text = counted[counted > 0]
    assert result.tokens == 2 * counted.numel()
    assert result.text_bytes == 2 * int(text.sum())
    assert result.loss == pytest.approx(math.log(vocab), rel=1e-6)
    assert result.bpb == pytest.approx(math.log2(vocab) * text.numel() / int(text.sum()), rel=1e-6)


def test_bits_per_byte_is_the_sum_over_single_tokens() -> None:
    model = Transformer(CONFIG, 30)
    model.init_weights(1)
    tokens = torch.randint(1, 30, (2, 12))
    targets = torch.randint(1, 30, (2, 12))
    logits = (model(tokens).double() @ model.head_weight[:30].double().T).log_softmax(-1)
    nll = -logits.gather(-1, targets[..., None]).sum().item()
    batch = Batch(tokens, targets, torch.ones(2, 12), None, 24)
    result = evaluate(model, [batch], np.full(30, 3, dtype=np.int32))
    assert result.bpb == pytest.approx(nll / math.log(2) / (24 * 3), rel=1e-6)
