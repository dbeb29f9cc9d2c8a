"""Softmax saturation against attention weights spelled out in FP64."""

import pytest
import torch

from lowbit.configs.schema import ModelConfig
from lowbit.models import probe
from lowbit.models.attention import dense_mask
from lowbit.models.probe import softmax_saturation
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import causal, documents

CONFIG = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64, qk_norm=False)


@pytest.mark.parametrize("packed", [False, True])
def test_share_of_saturated_rows(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed:
        monkeypatch.setattr(probe, "SCORES", 4 * 24 * 7)  # seven queries at a time, three in the end
    model = Transformer(CONFIG, 50)
    model.init_weights(1)
    with torch.no_grad():  # sharpen the first layer's attention, more so in its first head
        model.blocks[0].attention.q.weight.mul_(300)
        model.blocks[0].attention.q.weight[:8].mul_(10)
    tokens = torch.randint(0, 50, (2, 24))
    rule = documents(torch.rand(2, 24) < 0.2) if packed else None
    seen = {}
    block = model.blocks[0]
    hook = block.attention.register_forward_hook(lambda _, inputs, __: seen.update(x=inputs[0], rope=inputs[2]))
    model(tokens, rule)
    hook.remove()
    q, k, _ = (t.double() for t in block.attention.project(seen["x"], seen["rope"]))
    visible = dense_mask(rule or causal(2, 24))
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) / 8**0.5
    greatest = scores.masked_fill(~visible, float("-inf")).softmax(-1).amax(-1)
    counted = (visible.sum(-1) > 1).expand(2, 4, 24)
    expected = (greatest[counted] > 0.99).double().mean()
    shares = softmax_saturation(model, tokens, rule)
    assert 0.05 < expected < 0.95
    assert shares[0] == pytest.approx(float(expected), abs=1e-6)
    assert shares[1] == 0.0
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_rows_with_one_key_do_not_count() -> None:
    model = Transformer(CONFIG, 50)
    model.init_weights(1)
    alone = documents(torch.ones(1, 8, dtype=torch.bool))
    assert softmax_saturation(model, torch.zeros(1, 8, dtype=torch.int64), alone) == [0.0, 0.0]
