"""Whole runs: what they leave, what they log, and that a run cut in two is the run in one piece."""

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from changes import changed

from lowbit.configs.schema import PrecisionConfig, PrecisionRule, ScheduleConfig, ScheduleKind
from lowbit.configs.schema_precision import StatisticsConfig
from lowbit.configs.schema_rl import CacheFormat, Correction, Loss, RlConfig, TaskKind
from lowbit.errors import CheckpointError, LowbitError
from lowbit.rl.producer import AheadProducer, Drawing
from lowbit.rl.rollout import Rollout
from lowbit.rl.run import train
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.distributed import ALONE
from lowbit.trainer.jsonl import read_rows

EASY = {"reward__function": "lowbit_test_rewards:by_length", "reward__failure_limit": 0.5}
NO_SAMPLER = SimpleNamespace(sampler=SimpleNamespace(version=0, update=lambda weights, version: None))
"""A collector whose sampler takes any weights and draws nothing."""


@pytest.fixture(autouse=True)
def _reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that an untrained model gets some of: the share of even bytes."""
    (tmp_path / "lowbit_test_rewards.py").write_text(
        "import time\n"
        "def by_length(completion, example):\n"
        "    data = completion.encode('utf-8', 'replace')\n"
        "    return sum(b % 2 == 0 for b in data) / max(len(data), 1)\n"
        "def never(completion, example):\n"
        "    return 0.0\n"
        "def slow(completion, example):\n"
        "    time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["step"]]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Everything but what the clock says, and evaluations, which a run that ends has more of."""
    timed = ("seconds", "per_second", "share/", "time/", "memory", "mfu", "val_")
    keys = {k for k in a.keys() | b.keys() if not any(word in k for word in timed)}
    return {k: a.get(k) for k in keys} == {k: b.get(k) for k in keys}


def weights(folder: Path, config: RlConfig) -> dict[str, torch.Tensor]:
    return CheckpointStore(folder / "checkpoints", config.checkpoint).load("latest").model


def test_statistics_of_a_rollouts_batch(config: RlConfig, tmp_path: Path) -> None:
    precision = PrecisionConfig(name="mxfp8", forward="mxfp8", statistics=StatisticsConfig(every_steps=1, sequences=1))
    train(changed(config, **EASY, precision=precision, max_steps=1), tmp_path / "run")
    found = {k.split("/")[2] for k in rows(tmp_path / "run")[0] if k.startswith("quant/")}
    assert found == {"weight", "input"}, "the trainer's backward pass is not quantised"
    trainer, sampler = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert [{row["format"] for row in got["rows"] if row["product"] == "dgrad"} for got in (trainer, sampler)] == [
        {"FP32"}, set(),
    ]  # fmt: skip
    assert sampler["when"] == "the sampler" and {row["format"] for row in sampler["rows"]} == {"MXFP8"}


def test_a_run_and_its_metrics(config: RlConfig, tmp_path: Path) -> None:
    config = changed(config, **EASY, algorithm__kl=0.01, algorithm__entropy=0.001)
    result = train(config, tmp_path / "run")
    assert result.step == 3
    assert {"config.yaml", "rl.yaml", "metrics.jsonl", "samples.jsonl", "checkpoints", "tokenizer"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        assert row["mismatch/abs_max"] < 2e-5, "same precision on both sides, FP32"
        assert row["mismatch/k3_kl"] < 1e-9 and row["mismatch/mult_prob_error"] == pytest.approx(1, abs=1e-5)
        assert 0 < row["reward"] < 1 and row["reward"] == pytest.approx(row["reward/reward"])
        shares = [row[f"share/{part}"] for part in ("rollout", "reward", "score", "sync", "train")]
        assert all(share >= 0 for share in shares) and sum(shares) < 1.1
        for key in ("entropy", "clip/low", "clip/high", "correction/truncated", "correction/rejected", "kl", "length",
                    "groups/zero_variance", "finish/length", "rollout_tokens_per_second", "train_tokens_per_second",
                    "rewards/failed", "ratio", "stale/steps"):  # fmt: skip
            assert key in row, key
    assert found[0]["kl"] == 0 and found[2]["kl"] > 0, "the reference is what the run began with"
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["step"] == 1 and sample["prompt"] and len(sample["logprobs"]) == len(sample["versions"])
    assert sample["tokens"][sample["prompt_tokens"] :] and set(sample["versions"]) == {0}


@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_cut_in_two_is_the_run_in_one_piece(config: RlConfig, tmp_path: Path, updates: int) -> None:
    """At staleness 0 to the bit: weights, metrics, samples; with two updates the cut is inside a rollout."""
    config = changed(config, **EASY, rollout__updates=updates, max_steps=5)
    constant = ScheduleConfig(kind=ScheduleKind.constant, warmup_steps=1)  # else the rates follow max_steps
    config = replace(config, optim=replace(config.optim, schedule=constant))
    train(config, tmp_path / "whole")
    train(replace(config, max_steps=3), tmp_path / "cut")
    train(config, tmp_path / "cut")
    one, two = (weights(tmp_path / name, config) for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(same(a, b) for a, b in zip(rows(tmp_path / "whole"), rows(tmp_path / "cut"), strict=True))
    assert (tmp_path / "whole" / "samples.jsonl").read_text() == (tmp_path / "cut" / "samples.jsonl").read_text()


def test_the_seed_changes_rollouts_and_nothing_else_does(config: RlConfig, tmp_path: Path) -> None:
    config = changed(config, **EASY, max_steps=1)
    train(config, tmp_path / "a")
    train(config, tmp_path / "b")
    train(replace(config, seed=2), tmp_path / "c")
    a, b, c = ((tmp_path / name / "samples.jsonl").read_text() for name in "abc")
    assert a == b != c


def test_another_task_on_resume_is_refused(config: RlConfig, tmp_path: Path) -> None:
    config = changed(config, **EASY, max_steps=1)
    train(config, tmp_path / "run")
    with pytest.raises(CheckpointError, match="data"):
        train(changed(config, task__kind=TaskKind.sort, max_steps=2), tmp_path / "run")


def test_more_updates_are_clipped(config: RlConfig, tmp_path: Path) -> None:
    """The second step on a rollout compares with the first: ratios leave 1, and are those of the proximal policy."""
    config = changed(config, **EASY, rollout__updates=2, max_steps=4)
    config = replace(config, optim=replace(config.optim, lr=0.1))
    train(config, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert found[0]["ratio"] == pytest.approx(1, abs=1e-6) and abs(found[1]["ratio"] - 1) > 1e-4
    assert found[1]["mismatch/abs_max"] < 2e-5, "the mismatch is between sampler and proximal policy, not drift"
    assert found[1]["clip/low"] + found[1]["clip/high"] > 0


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("correction", [Correction.icepop, Correction.sequence])
def test_every_loss_and_correction_runs(config: RlConfig, tmp_path: Path, loss: Loss, correction: Correction) -> None:
    config = changed(config, **EASY, algorithm__loss=loss, algorithm__correction=correction, max_steps=1)
    train(config, tmp_path / "run")
    assert rows(tmp_path / "run")[0]["correction/rejected"] == 0.0


@pytest.mark.parametrize("sampler", ["nvfp4", "mxfp8", "nvfp4_w4a16"])
def test_the_trainer_computes_what_was_sampled(config: RlConfig, tmp_path: Path, sampler: str) -> None:
    """The default trainer of a low-bit sampler agrees with it; a BF16 (here FP32) trainer does not."""
    config = changed(config, **EASY, precision__sampler=sampler, max_steps=1)
    train(config, tmp_path / "same")
    train(changed(config, precision__trainer="bf16"), tmp_path / "other")
    same_, other = rows(tmp_path / "same")[0], rows(tmp_path / "other")[0]
    assert same_["mismatch/k3_kl"] < 1e-7 and other["mismatch/k3_kl"] > 20 * same_["mismatch/k3_kl"]


def test_keys_and_values_in_eight_bits_show_in_the_mismatch(config: RlConfig, tmp_path: Path) -> None:
    train(changed(config, **EASY, rollout__cache=CacheFormat.int8, max_steps=1), tmp_path / "run")
    assert 1e-12 < rows(tmp_path / "run")[0]["mismatch/k3_kl"] < 1e-3


def test_a_warm_start_ends_where_enough_answers_are_right(config: RlConfig, tmp_path: Path) -> None:
    """And stays ended when the run is killed right after it."""
    config = changed(config, warm_start__steps=5, warm_start__check_steps=2, warm_start__examples=16, max_steps=1)
    for accuracy, last in ((0.0, 2), (1.0, 5)):
        folder = tmp_path / f"{accuracy}"
        one = changed(config, **EASY, warm_start__accuracy=accuracy, rollout__empty_limit=50)
        train(one, folder)
        assert rows(folder / "warm_start")[-1]["step"] == last
        shutil.rmtree(folder / "checkpoints")
        train(one, folder)
        assert rows(folder / "warm_start")[-1]["step"] == last


def test_a_warm_start_and_several_turns(config: RlConfig, tmp_path: Path) -> None:
    """Supervised steps on tool use are a run of their own; reinforcement goes on from its weights."""
    config = changed(
        config, task__kind=TaskKind.calculator, task__size=1, task__turns=2, rollout__max_new_tokens=6,
        warm_start__steps=40, warm_start__examples=32, warm_start__lr_scale=1.0, rollout__empty_limit=50, max_steps=2,
    )  # fmt: skip
    train(config, tmp_path / "run")
    before = weights(tmp_path / "run" / "warm_start", config)
    losses = [row["loss"] for row in rows(tmp_path / "run" / "warm_start")]
    assert losses[-1] < 0.6 * losses[0]
    after = weights(tmp_path / "run", config)
    assert before.keys() == after.keys() and any(not torch.equal(before[n], after[n]) for n in before)
    assert any(row["turns"] > 1 for row in rows(tmp_path / "run"))
    train(replace(config, max_steps=3), tmp_path / "run")  # the warm start is not done again


def test_a_teacher_teaches(config: RlConfig, tmp_path: Path) -> None:
    """On-policy distillation: the divergence from a teacher shrinks, without any reward."""
    teacher = replace(config, warm_start=replace(config.warm_start, steps=60, examples=32), max_steps=1)
    train(changed(teacher, **EASY), tmp_path / "teacher")
    student = changed(
        config, teacher__path=str(tmp_path / "teacher" / "warm_start"), max_steps=40, batch__sequences=32,
        reward__function="lowbit_test_rewards:never", warm_start__steps=15, warm_start__examples=32,
    )  # fmt: skip
    train(student, tmp_path / "run")
    found = [row["policy_loss"] for row in rows(tmp_path / "run")]  # at ratio 1: log student - log teacher
    assert sum(found[-5:]) < 0.6 * sum(found[:5]), found


def test_nothing_to_learn_ends_the_run(config: RlConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = changed(config, reward__function="lowbit_test_rewards:never", rollout__empty_limit=3)
    with pytest.raises(LowbitError, match=r"all groups have equal rewards .mean 0.*as in the 2 before"):
        train(config, tmp_path / "run")
    assert "so nothing can be learned; drawing the next" in caplog.text, "told before it is an error"


def test_dynamic_sampling_replaces_groups_that_teach_nothing(config: RlConfig, tmp_path: Path) -> None:
    """Prompts used are those of all rounds; the step still has its conversations where it could find some."""
    config = changed(config, algorithm__refill=2, max_steps=2, rollout__empty_limit=100, **EASY)
    train(config, tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["train_tokens_per_second"] > 0


# Ahead of the trainer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [1, 2])
def test_drawing_ahead_is_bounded(config: RlConfig, tmp_path: Path, staleness: int) -> None:
    config = changed(config, **EASY, rollout__staleness=staleness, deterministic=False, max_steps=8)
    train(config, tmp_path / "run")
    ages = [row["stale/steps"] for row in rows(tmp_path / "run")]
    assert max(ages) <= staleness and max(ages) > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert all(sample["step"] - 1 - version <= staleness for version in sample["versions"] if version >= 0)
    train(replace(config, max_steps=10), tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 11))


def test_a_sampler_that_never_answers_is_named() -> None:
    class Stuck:
        config = None
        ranks = ALONE
        doing = "waiting for the rewards of 4 prompts from 0 on, 4 conversations each"

        collector = NO_SAMPLER

        def draw(self, position: Any, version: int) -> Rollout:
            time.sleep(1.0)
            raise RuntimeError("too late")

    producer = AheadProducer(Stuck(), lambda: [], 1, 0.2, torch.device("cpu"))  # type: ignore[arg-type]
    producer.publish(0)
    with pytest.raises(LowbitError, match=r"no conversations came within rollout.seconds=0.2: rollout 0 is missing"):
        producer.take()
    producer.close()
    assert not any(thread.name == "lowbit-rollouts" and thread.is_alive() for thread in threading.enumerate())


def test_steps_are_recorded_only_while_the_trainer_waits() -> None:
    """CUDA lets nobody wait for a whole GPU while a stream of it is recorded, and a trainer may at any time."""
    lock, training = threading.RLock(), threading.Event()
    during: list[bool] = []

    class Recording:
        config = None
        ranks = ALONE
        doing = "recording"

        collector = NO_SAMPLER

        def draw(self, position: Any, version: int) -> Rollout:
            position.index += 1
            for _ in range(3):
                with lock:
                    during.append(training.is_set())
                    time.sleep(0.01)
                    during.append(training.is_set())
            return Rollout(position.index, version, [])

    producer = AheadProducer(Recording(), lambda: [], 2, 20.0, torch.device("cpu"), lock)  # type: ignore[arg-type]
    for step in range(4):
        producer.publish(step)
        training.clear()
        producer.take()
        training.set()
        time.sleep(0.05)
    training.clear()
    producer.close()
    assert len(during) >= 4 * 6 and not any(during)


def test_the_lock_of_recording_is_the_samplers(
    config: RlConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the trainer's own device, what draws ahead and what evaluates record under the lock that the trainer has."""
    made: list[AheadProducer] = []
    make = AheadProducer.__init__

    def noted(self: AheadProducer, *arguments: Any) -> None:
        make(self, *arguments)
        made.append(self)

    monkeypatch.setattr(AheadProducer, "__init__", noted)
    train(changed(config, **EASY, rollout__staleness=1, max_steps=1), tmp_path / "run")
    [producer] = made
    sampler: Any = producer.sampler
    assert producer._recording is sampler.inner._recording
    assert producer._holder is None, "let go at the end"


def test_a_recording_that_never_ends_is_told() -> None:
    """`rollout.seconds` bounds that wait, too; and closing before anything was published is no error."""
    lock = threading.RLock()

    class Drawn:
        ranks, config, doing = ALONE, None, "recording"
        collector = NO_SAMPLER

        def draw(self, position: Any, version: int) -> Rollout:
            position.index += 1
            self.doing = "recording"
            lock.acquire()  # and never lets go
            return Rollout(position.index, version, [])

    AheadProducer(Drawn(), lambda: [], 1, 0.3, torch.device("cpu"), lock).close()  # type: ignore[arg-type]
    producer = AheadProducer(Drawn(), lambda: [], 1, 0.3, torch.device("cpu"), lock)  # type: ignore[arg-type]
    producer.publish(0)
    with pytest.raises(
        LowbitError, match=r"recording a step for longer than rollout.seconds=0.3: its thread is recording"
    ):
        producer.take()
    producer.close()


def test_what_a_thread_raises_is_raised_here() -> None:
    class Broken(Drawing):
        def __init__(self) -> None:
            self.ranks = ALONE
            self.collector = NO_SAMPLER  # type: ignore[assignment]
            self.doing = ""

        def draw(self, position: Any, version: int) -> Rollout:
            raise LowbitError("the sampler broke")

    producer = AheadProducer(Broken(), lambda: [], 1, 5.0, torch.device("cpu"))
    producer.publish(0)
    with pytest.raises(LowbitError, match="the sampler broke"):
        producer.take()
    producer.close()


def test_layers_that_stay_in_high_precision_do_so_on_both_sides(config: RlConfig, tmp_path: Path) -> None:
    """A trainer that quantised what the sampler leaves alone, or the reverse, would disagree with it."""
    rules = [PrecisionRule(".*attention.*", "bf16")]
    config = changed(config, **EASY, precision__sampler="nvfp4", max_steps=1)
    train(changed(config, precision__rules=rules), tmp_path / "rules")
    train(changed(config, precision__rules=rules, precision__trainer="bf16"), tmp_path / "other")
    train(config, tmp_path / "everything")
    k3 = {name: rows(tmp_path / name)[0]["mismatch/k3_kl"] for name in ("rules", "other", "everything")}
    assert max(k3["rules"], k3["everything"]) < 1e-7 and k3["other"] > 20 * k3["rules"]
    assert rows(tmp_path / "rules")[0]["entropy"] != rows(tmp_path / "everything")[0]["entropy"]


def test_precision_of_the_trainer_by_default() -> None:
    from lowbit.quant.resolve import Role, resolve
    from lowbit.rl.precision import trainer_precision

    given = PrecisionConfig(forward="mxfp8", backward="mxfp8", sampler="nvfp4")
    made = resolve(trainer_precision(given)).training().default
    assert made == resolve(given).phases(Role.trainer)[0].default
    assert made.fprop.quantised and not made.dgrad.quantised and not made.wgrad.quantised
