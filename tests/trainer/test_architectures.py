"""Every architecture learns under every precision: a few steps on text that repeats, whatever the layers compute in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch

from lowbit.configs.schema import (
    ComputeDtype,
    GateKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    NormPlacement,
    OptimConfig,
    OsciResetConfig,
    PrecisionConfig,
    QkNormScope,
    RunConfig,
    StabiliserConfig,
    StatisticsConfig,
)
from lowbit.data.batch import Batch
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import documents
from lowbit.quant.apply import apply_policy, candidates, clocks, set_clock
from lowbit.quant.grouped import LowbitGroupedLinear
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.presets import PRESETS
from lowbit.quant.resolve import resolve
from lowbit.trainer.objective import NextToken, run_objective
from lowbit.trainer.optim import build_optimizer
from lowbit.trainer.run import pretrain

BASE = ModelConfig(layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, max_sequence=64, init_std=0.08)
EXPERTS = MoeConfig(experts=4, top_k=2, expert_width=32)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "qwen3": {},
    "olmo2": {"qk_norm_scope": QkNormScope.layer, "norm_placement": NormPlacement.after},
    "mixtral": {"qk_norm": False, "moe": EXPERTS},
    "qwen3_moe": {"moe": replace(EXPERTS, normalise=False, first_dense=1)},
    "deepseek_like": {"moe": replace(EXPERTS, gate=GateKind.sigmoid, shared=1, bias_rate=1e-3, gate_scale=2.0)},
    "kaiju_like": {
        "layers": 3,
        "kv_heads": 1,
        "mlp": MlpKind.relu2,
        "windows": [4, 4, 0],
        "kv_from": [0, 0, 2],
        "attention_z": 1e-4,
        "attention_softcap": 20.0,
        "tied_head": True,
        "mup_base_width": 32,
    },
}
PRECISIONS = list(PRESETS)
FEW = {("nvfp4", name) for name in ARCHITECTURES} | {(name, "deepseek_like") for name in PRECISIONS}


def _cases() -> list[Any]:
    """All of them; those outside of `FEW` are for `make exhaustive`."""
    return [
        pytest.param(*case, marks=[] if case in FEW else pytest.mark.exhaustive)
        for case in ((precision, architecture) for precision in PRECISIONS for architecture in ARCHITECTURES)
    ]


@pytest.mark.parametrize(("precision", "architecture"), _cases())
def test_it_learns(precision: str, architecture: str) -> None:
    config = replace(BASE, **ARCHITECTURES[architecture])
    model = Transformer(config, 40)
    model.init_weights(1)
    apply_policy(model, resolve(PrecisionConfig(forward=precision, backward=precision)), seed=1, dtype="fp32")
    chosen = [name for name, m in candidates(model).items() if isinstance(m, (LowbitLinear, LowbitGroupedLinear))]
    assert bool(chosen) == (precision != "bf16")
    if config.moe.experts and chosen:
        assert any(".experts." in name for name in chosen) and not any("router" in name for name in chosen)
    optimizer = build_optimizer(model, OptimConfig(lr=5e-3))
    text = torch.arange(33).repeat(4, 1) * torch.tensor([[1], [3], [5], [7]]) % 40
    seen = documents((torch.arange(32) % 16 == 0).expand(4, 32))
    batch = Batch(text[:, :-1], text[:, 1:], torch.ones(4, 32), seen, 128)
    losses = []
    for step in range(8):
        for clock in clocks(model):
            set_clock(clock, step, 0, 0)
        out = run_objective(NextToken(), model, batch)
        (out.loss_sum / 128).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or bool(parameter.grad.isfinite().all()), name
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out.nll_sum) / 128)
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize("experts", [0, 4])
def test_what_leaves_experts_out_says_so_at_the_start(
    experts: int, tiny_run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stabilisers = StabiliserConfig(oscireset=OsciResetConfig(enabled=True, start=0.0))
    precision = PrecisionConfig(
        compute=ComputeDtype.fp32, forward="nvfp4", stabilisers=stabilisers, statistics=StatisticsConfig(every_steps=1)
    )
    model = replace(tiny_run.model, layers=1, moe=replace(EXPERTS, experts=experts))
    with caplog.at_level("INFO", "lowbit"):
        pretrain(replace(tiny_run, max_steps=1, model=model, precision=precision), tmp_path / "run")
    said = [record.message for record in caplog.records if "experts are left out" in record.message]
    layers = "oscireset, statistics: experts are left out (blocks.0.mlp.experts.{gate,up,down})"
    assert said == ([layers] if experts else [])
    [row] = [row for row in tiny_runs.rows(tmp_path / "run") if any(key.startswith("quant/") for key in row)]
    assert not any(".experts." in key for key in row)
