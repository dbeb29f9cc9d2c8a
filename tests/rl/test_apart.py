"""A sampler on a device of its own: at staleness 0 the run is, bit for bit, the one with a single device.

On a CPU the two devices are the same one, with separate copies of everything; two GPUs run the same tests (`gpu`).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changes import changed
from torch import Tensor

from lowbit.configs.schema import CompileMode, ComputeDtype, EngineConfig
from lowbit.configs.schema_rl import RlConfig
from lowbit.errors import ConfigError, LowbitError, WeightsError
from lowbit.infer.elsewhere import Elsewhere
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.rl.producer import CopyingProducer
from lowbit.rl.run import train
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.jsonl import read_rows

pytestmark = pytest.mark.usefixtures("even_reward")

TIMED = ("seconds", "per_second", "share/", "time/", "memory", "mfu")


@pytest.fixture
def easy(config: RlConfig) -> RlConfig:
    return changed(config, reward__function="lowbit_test_rewards:even", max_steps=4)


def untimed(folder: Path) -> list[dict[str, Any]]:
    """Every number of a run but what the clock says."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMED)} for row in rows]


def weights(folder: Path, config: RlConfig) -> dict[str, Tensor]:
    return CheckpointStore(folder / "checkpoints", config.checkpoint).load("latest").model


@pytest.mark.parametrize(
    "keys",
    [{}, {"precision__sampler": "nvfp4"}, {"precision__sampler": "nvfp4_w4a16"}, {"lora__rank": 4},
     {"rollout__updates": 2, "max_steps": 6}],
    ids=lambda keys: " ".join(keys) or "plain",
)  # fmt: skip
def test_the_run_is_that_of_one_device_bit_for_bit(easy: RlConfig, tmp_path: Path, keys: dict[str, Any]) -> None:
    one = changed(easy, **keys)
    two = changed(one, rollout__device="cpu")
    train(one, tmp_path / "one")
    train(two, tmp_path / "two")
    assert untimed(tmp_path / "one") == untimed(tmp_path / "two")
    assert (tmp_path / "one" / "samples.jsonl").read_text() == (tmp_path / "two" / "samples.jsonl").read_text()
    first, second = weights(tmp_path / "one", one), weights(tmp_path / "two", two)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_without_the_copy_it_would_not_be(easy: RlConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler holds weights of its own: when none are sent, its log-probabilities are of the old ones."""

    def publish(producer: CopyingProducer, version: int) -> None:
        producer.sampler.version = producer.sampler.inner.version = version  # type: ignore[attr-defined]

    monkeypatch.setattr(CopyingProducer, "publish", publish)
    train(changed(easy, rollout__device="cpu"), tmp_path / "run")
    differences = [row["mismatch/abs_max"] for row in untimed(tmp_path / "run") if row["step"]]
    assert differences[0] < 2e-5 < 1e-2 < differences[-1]


def test_a_sampler_that_keeps_its_version_is_an_error(
    easy: RlConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not an endless search for a fresh rollout."""
    monkeypatch.setattr(CopyingProducer, "publish", lambda self, version: None)
    with pytest.raises(LowbitError, match=r"weights of version 0, and the trainer's are of version 1"):
        train(changed(easy, rollout__device="cpu"), tmp_path / "run")


def test_a_run_cut_in_two_is_the_run_in_one_piece(easy: RlConfig, tmp_path: Path) -> None:
    apart = changed(easy, rollout__device="cpu")
    train(apart, tmp_path / "whole")
    train(replace(apart, max_steps=2), tmp_path / "cut")
    train(apart, tmp_path / "cut")
    whole, cut = (weights(tmp_path / name, apart) for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_drawing_ahead_is_bounded_and_its_time_is_told(easy: RlConfig, tmp_path: Path) -> None:
    train(
        changed(easy, rollout__device="cpu", rollout__staleness=1, deterministic=False, max_steps=8), tmp_path / "run"
    )
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert max(row["stale/steps"] for row in rows) == 1
    assert all(0 <= row["share/wait"] <= 1 and row["share/train"] <= 1 for row in rows)
    assert sum(row["share/wait"] for row in rows[1:]) < sum(row["share/rollout"] for row in rows[1:])
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["step"] - 1 - version <= 1 for sample in samples for version in sample["versions"])


def test_a_device_that_is_not_there_is_told_first(easy: RlConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device=cuda:71"):
        train(changed(easy, rollout__device="cuda:71"), tmp_path / "run")


class Recorder:
    """A sampler that notes on which device it is called."""

    version = 0

    def __init__(self, current: list[str]) -> None:
        self.current, self.seen = current, [current[-1]]

    def sample(self, requests: Any, sampling: Any, *, seed: int, stop_ids: Any = ()) -> list[Any]:
        self.seen.append(self.current[-1])
        raise WeightsError("stale")

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Any:
        self.seen.append(self.current[-1])
        self.version = version


def test_every_call_is_made_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(str(wanted))
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    sampler = Elsewhere(lambda: Recorder(current), torch.device("cuda:1"))
    sampler.update([], 7)
    with pytest.raises(WeightsError):
        sampler.sample([], SamplingConfig(), seed=1)
    assert sampler.version == 7 and sampler.inner.seen == ["cuda:1"] * 3  # type: ignore[attr-defined]
    assert current == ["cuda:0"], "afterwards the caller's device is what it was, also after an error"


# Two GPUs -------------------------------------------------------------------------------------------------------------


def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_on_the_other_gpu_draws_the_same(graphs: bool) -> None:
    from lowbit.configs.schema import ModelConfig
    from lowbit.models.layers import weights_and_state
    from lowbit.models.transformer import Transformer

    two_gpus()
    settings = ModelConfig(layers=2, width=128, heads=4, kv_heads=2, mlp_width=256, max_sequence=128, init_std=0.1)

    def model(seed: int) -> Transformer:
        made = Transformer(settings, 96, compute_dtype=torch.bfloat16).to("cuda:0")
        made.init_weights(seed)
        return made

    torch.cuda.set_device(0)
    requests = [Request((1, 2, 3), key, 40, 4) for key in range(4)]
    here = EmbeddedSampler(model(1), None, slots=16, graphs=graphs, deterministic=True)
    other = torch.device("cuda:1")
    there = Elsewhere(
        lambda: EmbeddedSampler(model(1), None, slots=16, graphs=graphs, deterministic=True, device=other), other
    )
    new = list(weights_and_state(model(2)).items())
    for version in (0, 1):
        if version:
            here.update(new, version)
            there.update(new, version)
        expected = here.sample(requests, SamplingConfig(), seed=1)
        found = there.sample(requests, SamplingConfig(), seed=1)
        assert [s.tokens for g in found for s in g] == [s.tokens for g in expected for s in g]
        assert [s.logprobs for g in found for s in g] == [s.logprobs for g in expected for s in g]
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "sampler"), [(0, None), (0, "nvfp4_w4a16"), (1, None), (2, "fp8_row")])
def test_a_run_on_two_gpus(easy: RlConfig, tmp_path: Path, staleness: int, sampler: str | None) -> None:
    two_gpus()
    config = replace(easy, device="cuda:0", deterministic=False, engine=EngineConfig(compile=CompileMode.on))
    config = changed(
        config, precision__compute=ComputeDtype.bf16, precision__sampler=sampler, rollout__device="cuda:1",
        rollout__staleness=staleness, max_steps=8,
    )  # fmt: skip
    train(config, tmp_path / "run")
    rows = [row for row in untimed(tmp_path / "run") if row["step"]]
    assert len(rows) == 8 and max(row["stale/steps"] for row in rows) <= staleness
    if not staleness:
        assert max(row["mismatch/k3_kl"] for row in rows) < 1e-3
