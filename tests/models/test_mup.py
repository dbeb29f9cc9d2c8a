"""muP: what it scales, and that activations keep their size over the width (coordinate check)."""

import dataclasses
from pathlib import Path

import pytest
import torch
from mup_check import draw, sizes

from lowbit.configs.schema import ModelConfig, MoeConfig, OptimConfig, OptimizerKind
from lowbit.models.hf.load import load_model
from lowbit.models.hf.save import save_model
from lowbit.models.lm_head import lm_head_logits
from lowbit.models.transformer import Transformer
from lowbit.trainer.optim import build_optimizer

CONFIG = ModelConfig(layers=8, width=128, heads=4, kv_heads=4, mlp_width=256, init_std=0.03, mup_base_width=32)


def test_initialisation_and_output() -> None:
    model, plain = Transformer(CONFIG, 500), Transformer(dataclasses.replace(CONFIG, mup_base_width=None), 500)
    model.init_weights(3)
    plain.init_weights(3)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        factor = 0.5 if name.startswith("blocks.") and ours.dim() > 1 else 1.0
        torch.testing.assert_close(ours, theirs * factor, msg=name)
    tokens = torch.randint(0, 500, (1, 9))
    with torch.no_grad():
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            theirs.copy_(ours)
        torch.testing.assert_close(model(tokens), plain(tokens) / 4)


def test_learning_rates() -> None:
    config = dataclasses.replace(CONFIG, moe=MoeConfig(experts=4, expert_width=32, first_dense=4))
    rows = {row.group: row.lr for row in build_optimizer(Transformer(config, 500), OptimConfig(lr=0.01)).groups()}
    assert rows == {"hidden matrices": 0.0025, "head": 0.01, "embedding": 0.01, "norms": 0.01}
    muon = build_optimizer(Transformer(CONFIG, 500), OptimConfig(lr=0.01, kind=OptimizerKind.muon))
    assert [row.lr for row in muon.groups()] == [0.02, 0.01, 0.01, 0.01]  # Muon's steps do not grow with the width
    muon.set_lr_scale(0.5)
    optimizer = build_optimizer(Transformer(config, 500), OptimConfig(lr=0.01))
    optimizer.set_lr_scale(0.5)
    assert [entry["lr"] for _, entry in optimizer.parts] == [0.00125, 0.005, 0.005, 0.005]


def test_coordinate_check(tmp_path: Path) -> None:
    """Four times the width after a few steps: the same size with muP, far larger without."""
    results = {
        title: {width: sizes(width, mup=title == "muP", steps=4, lr=0.01, layers=2) for width in (64, 256)}
        for title in ("standard", "muP")
    }
    for place in ("block 0", "block 1"):
        growth = {title: by_width[256][place] / by_width[64][place] for title, by_width in results.items()}
        assert growth["standard"] > 10 and 0.3 < growth["muP"] < 2, (place, growth)
    assert results["standard"][256]["logits"] > 2 * results["standard"][64]["logits"]
    assert results["muP"][256]["logits"] < 1.2 * results["muP"][64]["logits"]
    draw(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_an_export_carries_the_factor(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, layers=2)
    model = Transformer(config, 500)
    model.init_weights(3)
    save_model(tmp_path / "hf", config, dict(model.named_parameters()), 500, dtype="fp32")
    again = load_model(tmp_path / "hf", 500, torch.float32)
    assert again.config.mup_base_width is None
    tokens = torch.randint(0, 500, (1, 9))
    ours, theirs = (lm_head_logits(m(tokens), m.head_weight, vocab_size=500) for m in (model, again))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ours.std().item() == pytest.approx(0.03 * 128**0.5 / 4, rel=0.3)
