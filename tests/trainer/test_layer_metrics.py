"""Training a mixture of experts: it learns, its loads even out, its biases survive a resumption, metrics tell."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lowbit.configs.schema import GateKind, MoeConfig, OptimizerKind, Recompute, RunConfig
from lowbit.data.batch import Batch
from lowbit.models.attention import dense_mask
from lowbit.models.router import Router
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import Visibility, causal
from lowbit.trainer.distributed import ALONE
from lowbit.trainer.layer_metrics import LayerMetrics
from lowbit.trainer.loaded import load_run
from lowbit.trainer.objective import NextToken, run_objective
from lowbit.trainer.optim import build_optimizer
from lowbit.trainer.run import Pretraining, pretrain

MOE = MoeConfig(experts=4, top_k=2, expert_width=16, shared=1, first_dense=1, gate=GateKind.sigmoid, bias_rate=0.01)


@pytest.fixture
def moe_run(tiny_run: RunConfig) -> RunConfig:
    return replace(tiny_run, model=replace(tiny_run.model, moe=MOE))


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _final(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return {f"{file.stem}/{name}": t for file in newest.glob("*.safetensors") for name, t in load_file(file).items()}


def test_it_learns_resumes_bit_by_bit_and_reports(moe_run: RunConfig, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(moe_run, whole)
    pretrain(replace(moe_run, max_steps=3), parts)
    pretrain(moe_run, parts)
    a, b = _final(whole), _final(parts)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    bias = a["model/blocks.1.mlp.router.bias"]
    assert bias.any() and (bias * 100).round().allclose(bias * 100, atol=1e-4), "it moves in steps of the rate"

    rows = _rows(whole)
    assert rows[-1]["loss"] < rows[0]["loss"]
    for row in rows:
        loads = row["experts/load/blocks.1"]
        assert sum(loads) == pytest.approx(4, abs=1e-3)
        assert row["experts/load_max"] == max(loads) and row["experts/load_min"] == min(loads)
        assert 0 < row["experts/entropy"] <= 1.387 and row["experts/dropped"] == 0
    assert rows[-1]["experts/bias/blocks.1"] == pytest.approx(bias.tolist())
    assert rows[-1]["experts/bias_max"] == pytest.approx(float(bias.abs().max()))
    loaded = load_run(whole, device="cpu")
    router = loaded.model.blocks[1].mlp.router  # type: ignore[union-attr]
    assert isinstance(router, Router) and router.bias is not None and torch.equal(router.bias, bias)


def test_a_runs_dropped_share_is_what_its_loads_leave_no_room_for(moe_run: RunConfig, tmp_path: Path) -> None:
    moe = replace(MOE, first_dense=0, capacity=0.9)
    model = replace(moe_run.model, layers=1, moe=moe)
    batch = replace(moe_run.batch, sequences=4, micro_batch=4)
    logging = replace(moe_run.logging, every_steps=1)
    pretrain(replace(moe_run, max_steps=3, model=model, batch=batch, logging=logging), tmp_path / "run")
    tokens = 4 * moe_run.data.sequence_length
    rows = [row for row in _rows(tmp_path / "run") if "experts/dropped" in row]
    assert len(rows) == 3
    for row in rows:
        counts = [load * tokens * moe.top_k / moe.experts for load in row["experts/load/blocks.0"]]
        kept = sum(min(count, int(0.9 * tokens * moe.top_k / moe.experts)) for count in counts)
        assert row["experts/dropped"] == pytest.approx(1 - kept / (tokens * moe.top_k), abs=1e-4) and kept < sum(counts)


def test_recomputation_and_micro_batches_count_every_choice_once(moe_run: RunConfig, tmp_path: Path) -> None:
    run = replace(moe_run, max_steps=2)
    pretrain(run, tmp_path / "plain")
    pretrain(replace(run, engine=replace(run.engine, recompute=Recompute.full)), tmp_path / "recomputed")
    a, b = _final(tmp_path / "plain"), _final(tmp_path / "recomputed")
    assert all(torch.equal(a[name], b[name]) for name in a)


def _batch(weights: torch.Tensor) -> Batch:
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, None, int(weights.sum()))


def test_the_routers_losses_are_trained_for_and_not_reported(moe_run: RunConfig) -> None:
    model = Transformer(moe_run.model, 50)
    model.init_weights(1)
    weights = torch.ones(2, 8)
    weights[1, 4:] = 0
    batch = _batch(weights)
    plain = NextToken()(model, batch)
    auxiliary = model.take_auxiliary()
    assert auxiliary is not None
    out = run_objective(NextToken(), model, batch)
    assert torch.equal(out.nll_sum, plain.nll_sum)
    torch.testing.assert_close(out.loss_sum, plain.loss_sum + 12 * auxiliary)
    dense = Transformer(replace(moe_run.model, moe=MoeConfig()), 50)
    dense.init_weights(1)
    out = run_objective(NextToken(), dense, batch)
    assert torch.equal(out.loss_sum, out.nll_sum)


def test_logsumexps_of_a_step_are_those_of_the_written_out_logits(tiny_run: RunConfig, tmp_path: Path) -> None:
    """The mean over micro-batches and the greatest of all, of every layer, in the row of a run's first step."""
    model = replace(tiny_run.model, attention_z=1e-3, layers=2)
    run = Pretraining(replace(tiny_run, max_steps=1, model=model), tmp_path / "run")
    trainer = run.build()
    batches: list[Batch] = []
    try:
        plain = copy.deepcopy(run.model)
        forward = type(run.model).forward

        def watched(self: Transformer, tokens: torch.Tensor, visibility: Visibility | None = None) -> torch.Tensor:
            if self is run.model and torch.is_grad_enabled():
                batches.append(Batch(tokens, tokens, tokens.float(), visibility, tokens.numel()))
            return forward(self, tokens, visibility)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transformer, "forward", watched)
            trainer.train_step()
        found = trainer.layers.read()
    finally:
        run.close()
    assert len(batches) == tiny_run.batch.sequences // tiny_run.batch.micro_batch
    means, greatest = torch.zeros(2), torch.full((2,), -torch.inf)
    for batch in batches:
        rule = causal(*batch.tokens.shape) if batch.visibility is None else batch.visibility
        x, rope = plain.embed(batch.tokens), plain.rope(rule.position)
        for layer, block in enumerate(plain.blocks):
            q, k, _ = block.attention.project(block.attention_norm(x), rope)  # type: ignore[union-attr, operator]
            logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * q.shape[-1] ** -0.5
            z = logits.masked_fill(~dense_mask(rule), float("-inf")).logsumexp(-1)
            means[layer] += z.detach().mean() / len(batches)
            greatest[layer] = torch.maximum(greatest[layer], z.detach().max())
            x = block(x, dense_mask(rule), rope).x
    for layer in range(2):
        assert found[f"attention_z/mean/blocks.{layer}"] == pytest.approx(means[layer].item(), rel=1e-4)
        assert found[f"attention_z/max/blocks.{layer}"] == pytest.approx(greatest[layer].item(), rel=1e-4)
    assert found["attention_z/max"] == pytest.approx(greatest.max().item(), rel=1e-4)


def test_biases_even_out_a_tilted_load(moe_run: RunConfig) -> None:
    """Nothing is trained, and one expert begins far ahead: the biases alone must even it out."""
    moe = replace(MOE, experts=8, first_dense=0, bias_rate=0.02, top_k=2)
    model = Transformer(replace(moe_run.model, layers=1, moe=moe), 50)
    model.init_weights(1)
    router = model.blocks[0].mlp.router  # type: ignore[union-attr]
    assert isinstance(router, Router)
    with torch.no_grad():
        router.weight.normal_(0.0, 0.2)
        assert router.bias is not None
        router.bias[3] = 1.0
    loads = LayerMetrics(model, ALONE)
    tokens = torch.randint(0, 50, (4, 64))
    history = []
    for _ in range(120):
        model(tokens)
        loads.end_step()
        history.append(loads.read()["experts/load_max"])
    assert history[0] == 4 and sum(history[-20:]) / 20 < 1.5  # type: ignore[operator, arg-type]


def test_what_was_measured_outside_of_training_is_forgotten(moe_run: RunConfig) -> None:
    model = Transformer(moe_run.model, 50)
    model.init_weights(1)
    loads = LayerMetrics(model, ALONE)
    model(torch.randint(0, 50, (2, 8)))
    loads.begin_step()
    loads.end_step()
    assert loads.read() == {} and not model.blocks[1].mlp.router.bias.any()  # type: ignore[union-attr, operator]


def test_muon_takes_neither_routers_nor_experts(moe_run: RunConfig) -> None:
    model = Transformer(moe_run.model, 50)
    optimizer = build_optimizer(model, replace(moe_run.optim, kind=OptimizerKind.muon))
    muon = {key.rpartition(".")[0] for key in optimizer.state_tensors() if key.endswith("momentum_buffer")}
    assert {name for name in muon if "blocks.1.mlp" in name} == {
        f"blocks.1.mlp.shared.{part}.weight" for part in ("gate", "up", "down")
    }
    assert not any("bias" in key for key in optimizer.state_tensors())
