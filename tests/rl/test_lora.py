"""Runs with LoRA: the sampler has the trainer's sums, only adapters move, whatever opens a run opens these."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import forked
import pytest
import ranks
import torch
from changes import changed

from lowbit.configs.schema import PrecisionConfig, ScheduleConfig, ScheduleKind
from lowbit.configs.schema_precision import StatisticsConfig
from lowbit.configs.schema_rl import LoraAlso, LoraTarget, RlConfig
from lowbit.configs.validate_rl import validate_rl
from lowbit.errors import CheckpointError, ConfigError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.adapters import MARK, adapt, adapted, merged, merged_weights
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy
from lowbit.quant.resolve import resolve
from lowbit.rl.run import train
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.exported import export, open_weights
from lowbit.trainer.imported import begin_from
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.loaded import load_run

LORA = {"lora__rank": 4, "lora__alpha": 8.0}


@pytest.fixture
def dense(config: RlConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RlConfig:
    """Adapters, and a reward that an untrained model gets some of: the share of even bytes."""
    (tmp_path / "lowbit_lora_rewards.py").write_text(
        "def even(completion, example):\n"
        "    data = completion.encode('utf-8', 'replace')\n"
        "    return sum(b % 2 == 0 for b in data) / max(len(data), 1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return changed(config, **LORA, reward__function="lowbit_lora_rewards:even", reward__failure_limit=0.5)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["step"]]


def snapshot(folder: Path, config: RlConfig, which: str = "latest") -> Any:
    return CheckpointStore(folder / "checkpoints", config.checkpoint).load(which)


# The sampler ------------------------------------------------------------------------------------------------------


def _model(config: RlConfig, precision: str, rank: int = 4) -> Transformer:
    model = Transformer(config.model, 257)
    model.init_weights(3)
    apply_policy(model, resolve(PrecisionConfig(forward=precision, backward="bf16")), seed=1)
    if rank:
        adapt(model, rank, 8.0, ["all"], seed=1)
        with torch.no_grad():
            for layer in adapted(model).values():
                assert layer.low_rank is not None
                layer.low_rank.b.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(5))
    return model


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "nvfp4_w4a16", "fp8_row"])
def test_a_sampler_has_the_sums_from_the_start_and_after_an_update(
    config: RlConfig, precision: str, share: bool
) -> None:
    """To the bit what a sampler of the plain model of the sums draws; one with copies gets plain names."""
    policy = resolve(PrecisionConfig(sampler=precision))
    model, requests = _model(config, precision), [Request((1, 2, 3), 0, 8, 2)]
    engine = EmbeddedSampler(model, None, policy, slots=4, share=share)
    for round_ in range(2):
        plain = _model(config, precision, rank=0)
        with torch.no_grad():
            named = dict(plain.named_parameters())
            for name, tensor in merged_weights(model).items():
                named[name].copy_(tensor)
        expected = EmbeddedSampler(plain, None, policy, slots=4).sample(requests, SamplingConfig(), seed=1)
        found = engine.sample(requests, SamplingConfig(), seed=1)
        assert [(s.tokens, s.logprobs) for s in found[0]] == [(s.tokens, s.logprobs) for s in expected[0]], round_
        with torch.no_grad():
            for layer in adapted(model).values():
                assert layer.low_rank is not None
                layer.low_rank.b.mul_(-1.5)
        report = engine.update(() if share else merged_weights(model).items(), 1)
        assert report.tensors == len(list(engine.model.parameters())) and engine.version == 1
    if not share:
        assert not any(MARK in name for name, _ in engine.model.named_parameters())


# Runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_only_adapters_change_and_the_sampler_agrees(dense: RlConfig, tmp_path: Path, precision: str) -> None:
    """FP32: log-probabilities within 2e-5 at every step; NVFP4: likewise, as without adapters."""
    dense = changed(dense, precision__sampler=precision, max_steps=4, algorithm__kl=0.01, checkpoint__keep_last=9)
    train(replace(dense, max_steps=1), tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in snapshot(tmp_path / "run", dense).model.items()}
    train(dense, tmp_path / "run")
    after, found = snapshot(tmp_path / "run", dense), rows(tmp_path / "run")
    moved = {name for name, tensor in after.model.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if MARK in name} and len(moved) == 14
    assert {name.rpartition(".")[0] for name in after.optimizer} == moved, "no optimizer state for frozen weights"
    assert found[0]["kl"] == 0 and found[-1]["kl"] > 0, "the reference is the model without adapters"
    assert all(row["mismatch/abs_max"] < 2e-5 for row in found), [row["mismatch/abs_max"] for row in found]
    init = Transformer(dense.model, 257)
    init.init_weights(dense.seed)
    base = {name: tensor for name, tensor in after.model.items() if MARK not in name}
    assert all(torch.equal(tensor, base[name]) for name, tensor in init.named_parameters()), "base weights by name"


def test_a_reference_without_adapters_is_the_copy_that_there_was(dense: RlConfig, tmp_path: Path) -> None:
    """A second model of the first weights gives the same run, bit for bit."""
    from lowbit.rl import run

    dense = changed(dense, algorithm__kl=0.1)
    train(dense, tmp_path / "one")
    with pytest.MonkeyPatch.context() as patch:
        real = run.Reinforcement._reference

        def second(self: run.Reinforcement) -> Transformer | None:
            found = real(self)
            self.rl = replace(self.rl, lora=replace(self.rl.lora, also=[LoraAlso.norms]))
            copy = real(self)
            assert found is self.model and copy is not found
            self.rl = dense
            return copy

        patch.setattr(run.Reinforcement, "_reference", second)
        train(dense, tmp_path / "two")
    one, two = (snapshot(tmp_path / name, dense).model for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_cut_in_two_is_the_run_in_one_piece(dense: RlConfig, tmp_path: Path) -> None:
    constant = ScheduleConfig(kind=ScheduleKind.constant, warmup_steps=1)
    dense = replace(dense, max_steps=4, optim=replace(dense.optim, schedule=constant))
    train(dense, tmp_path / "whole")
    train(replace(dense, max_steps=2), tmp_path / "cut")
    train(dense, tmp_path / "cut")
    one, two = (snapshot(tmp_path / name, dense) for name in ("whole", "cut"))
    for a, b in ((one.model, two.model), (one.optimizer, two.optimizer)):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert (tmp_path / "whole" / "samples.jsonl").read_text() == (tmp_path / "cut" / "samples.jsonl").read_text()


def test_reward_goes_up(dense: RlConfig, tmp_path: Path) -> None:
    """After a supervised start, in which all weights train; the adapters alone then learn what is rewarded."""
    dense = changed(
        dense, max_steps=30, lora__alpha=32.0, batch__sequences=32, batch__micro_batch=16,
        warm_start__steps=30, warm_start__examples=32, warm_start__lr_scale=3.0,
    )  # fmt: skip
    dense = replace(dense, optim=replace(dense.optim, lr=3e-3))
    train(dense, tmp_path / "run")
    found = [row["reward"] for row in rows(tmp_path / "run")]
    assert sum(found[-6:]) / 6 > sum(found[:6]) / 6 + 0.1, found
    warm, after = (snapshot(tmp_path / name, dense).model for name in ("run/warm_start", "run"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in warm.items()), "what it began with is kept"


def test_a_sampler_that_draws_ahead_gets_the_sums(dense: RlConfig, tmp_path: Path) -> None:
    dense = changed(dense, rollout__staleness=1, deterministic=False, max_steps=5)
    train(dense, tmp_path / "run")
    assert max(row["stale/steps"] for row in rows(tmp_path / "run")) <= 1
    first = rows(tmp_path / "run")[0]
    assert first["mismatch/abs_max"] < 2e-5


def test_what_opens_a_run(dense: RlConfig, tmp_path: Path) -> None:
    """Generation, export and further runs get the plain model of the sums."""
    folder = tmp_path / "run"
    train(dense, folder)
    saved = snapshot(folder, dense)
    sums = merged(saved.model, 4, 8.0)
    loaded = dict(load_run(folder, device="cpu").model.named_parameters())
    assert loaded.keys() == sums.keys() and all(torch.equal(sums[name], loaded[name]) for name in sums)
    fresh = Transformer(dense.model, 257)
    begin_from(folder, fresh)
    assert all(torch.equal(sums[name], p) for name, p in fresh.named_parameters())
    export(open_weights(folder), tmp_path / "hf", "fp32")
    again = dict(load_run(tmp_path / "hf", device="cpu").model.named_parameters())
    rows_ = {name: tensor.shape[0] for name, tensor in again.items()}
    assert all(torch.equal(sums[name][: rows_[name]], tensor) for name, tensor in again.items())
    train(changed(dense, init_from=str(folder), max_steps=1, lora__rank=2), tmp_path / "next")
    base = snapshot(tmp_path / "next", dense).model
    assert all(torch.equal(sums[name], base[name]) for name in sums)


def test_another_rank_on_resume_is_refused(dense: RlConfig, tmp_path: Path) -> None:
    train(replace(dense, max_steps=1), tmp_path / "run")
    saved = snapshot(tmp_path / "run", dense)
    assert saved.meta["lora"] == asdict(dense.lora)
    for other, text in (
        ({"lora__rank": 8}, r"lora\.rank: 4 in the checkpoint, 8 now"),
        ({"lora__alpha": 16.0}, r"lora\.alpha: 8\.0 in the checkpoint, 16\.0 now"),
        ({"lora__rank": 0}, r"lora\.rank: 4 in the checkpoint, absent now"),
    ):
        with pytest.raises(CheckpointError, match=text):
            train(changed(dense, **other), tmp_path / "run")
    train(changed(dense, lora__rank=0, max_steps=1), tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"lora\.rank: absent in the checkpoint, 4 now"):
        train(dense, tmp_path / "full")


def test_norms_and_head_train_too_where_asked(dense: RlConfig, tmp_path: Path) -> None:
    dense = changed(dense, lora__also=[LoraAlso.norms, LoraAlso.head], lora__targets=[LoraTarget.q, LoraTarget.down])
    train(dense, tmp_path / "run")
    names = {name.rpartition(".")[0] for name in snapshot(tmp_path / "run", dense).optimizer}
    assert sum(MARK in name for name in names) == 4 and "head.weight" in names and "final_norm.weight" in names
    assert not any(name.startswith("embedding") or name.endswith("up.weight") for name in names)


def test_statistics_speak_of_the_sums(dense: RlConfig, tmp_path: Path) -> None:
    precision = PrecisionConfig(name="mxfp8", forward="mxfp8", trainer="mxfp8")
    precision = replace(precision, statistics=StatisticsConfig(every_steps=1, sequences=1))
    train(replace(dense, precision=precision, max_steps=1), tmp_path / "run")
    found = {k.split("/")[2] for k in rows(tmp_path / "run")[0] if k.startswith("quant/")}
    assert found == {"weight", "input", "gradient"}


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("comm", ["none", "squinch"])
def test_two_ranks_of_deepspeed(tmp_path: Path, comm: str) -> None:
    """The numbers of one process, which then goes on from what two have saved."""
    quick = ["rl=quick", "device=cpu", "logging.every_steps=1", "task.examine=16", "deterministic=true", "max_steps=3"]
    quick += ["batch.micro_batch=32", "lora.rank=4", "algorithm.kl=0.01"]
    two = ["engine=deepspeed", "engine.zero_stage=1", f"comm={comm}", "comm.exact_below=16"]
    for ended in ranks.run(2, ["-m", "lowbit", "rl", *quick, *two, "run_name=two"], tmp_path):
        assert ended.code == 0, ended.err[-3000:]
    same = ["run_name=one", "init_from=runs/two/warm_start", "warm_start.steps=0"]
    done = forked.run(["-m", "lowbit", "rl", *quick, *same], tmp_path)
    assert done.returncode == 0, done.stderr
    found = {name: rows(tmp_path / "runs" / name) for name in ("one", "two")}
    assert all(row["mismatch/abs_max"] < 2e-5 for row in found["two"])
    for key, limit in (("reward", 1e-9), ("loss", 1e-4), ("kl", 1e-6), ("grad_norm", 1e-3 if comm == "none" else 0.1)):
        assert found["two"][0][key] == pytest.approx(found["one"][0][key], rel=limit), key
    done = forked.run(["-m", "lowbit", "rl", *quick, "run_name=two", "max_steps=4"], tmp_path)
    assert done.returncode == 0 and "resumed at step 3" in done.stdout, done.stderr


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"rank": -1}, r"lora\.rank=-1: must be at least 0"),
        ({"alpha": 0.0}, r"lora\.alpha=0.0: must be greater than 0"),
        ({"rank": 17}, r"lora\.rank=17 .*: the narrowest of these layers is 16 wide; lora\.rank=16 would work"),
        ({"rank": 33, "targets": [LoraTarget.up]}, r"narrowest of these layers is 32 wide"),
        ({"targets": []}, r"lora\.targets=\[\]: no layer would learn"),
        ({"rank": 0, "also": [LoraAlso.norms]}, r"without adapters everything trains"),
    ],
)
def test_settings_that_cannot_be(config: RlConfig, keys: dict[str, Any], text: str) -> None:
    lora = {"rank": 4, **keys}
    with pytest.raises(ConfigError, match=text):
        validate_rl(changed(config, **{f"lora__{key}": value for key, value in lora.items()}))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["lora.targets=[query]"], "lora.targets"),
        (["lora.targets=[gate]", "model.mlp=relu2"], "this network has no gate; lora.targets=[up,down] would work"),
        (["model.moe.experts=4"], "experts are many matrices in one, which have no adapters"),
        (["lora.also=[head]", "model.tied_head=true"], "the head is the embedding"),
        (["engine=deepspeed", "engine.zero_stage=3"], "frozen weights stay whole on every rank"),
        (["optim.ema_decay=0.9"], "a product of averages is not the average of products"),
        (["precision=nvfp4", "precision.stabilisers.oscireset.enabled=true"], "these are frozen"),
        (["precision=nvfp4", "precision.stabilisers.outcontrol.enabled=true", "max_steps=900"], "these are frozen"),
    ],
)
def test_combinations_that_cannot_be(overrides: list[str], text: str) -> None:
    from lowbit.configs.compose import compose_for
    from lowbit.configs.overrides import RL

    with pytest.raises(ConfigError) as error:
        validate_rl(compose_for(RL, ["rl=quick", "lora.rank=4", *overrides]))
    assert text in str(error.value) and "\n" not in str(error.value)
