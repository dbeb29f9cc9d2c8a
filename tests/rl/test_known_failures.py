"""What went wrong in other trainers and ended in a run that "succeeded": temperatures of one side only, lost or broken
rewards, cut answers, passes over a file, conversations mixed up, logits of a whole batch at once.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changes import changed
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.configs.schema import ScheduleConfig, ScheduleKind
from lowbit.configs.schema_rl import AlgorithmConfig, Correction, Overlong, RlConfig, RlTeacherConfig, TaskKind
from lowbit.data.tokenizer import bytes_tokenizer
from lowbit.errors import CheckpointError, LowbitError
from lowbit.infer.requests import Request, Sample
from lowbit.models.transformer import Transformer
from lowbit.rl.batches import counting, drawn_index, pack_conversations, training_batch, weigh
from lowbit.rl.objective import PolicyGradient, read_logprobs
from lowbit.rl.prompts import Prompts
from lowbit.rl.rewards import RewardPool
from lowbit.rl.rollout import Collector, Conversation
from lowbit.rl.run import train
from lowbit.rl.tasks import Example, Split, make_task
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.jsonl import read_rows

EOT = 256


@pytest.fixture(autouse=True)
def _reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lowbit_test_rewards.py").write_text(
        "import time\n"
        "def even(completion, example):\n"
        "    data = completion.encode('utf-8', 'replace')\n"
        "    return sum(b % 2 == 0 for b in data) / max(len(data), 1)\n"
        "def unwell(completion, example):\n"
        "    value = even(completion, example)\n"
        "    kind = sum(completion.encode('utf-8', 'replace')) % 8\n"
        "    if kind == 0:\n"
        "        return float('nan')\n"
        "    if kind == 1:\n"
        "        return None\n"
        "    if kind == 2:\n"
        "        return {'right': value, 'form': float('inf')}\n"
        "    if completion.encode('utf-8', 'replace')[:1] == b'7':\n"
        "        time.sleep(60)\n"
        "    return value\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def easy(config: RlConfig) -> RlConfig:
    """With rates that do not depend on the number of steps."""
    constant = ScheduleConfig(kind=ScheduleKind.constant, warmup_steps=1)
    config = replace(config, optim=replace(config.optim, schedule=constant))
    return changed(config, reward__function="lowbit_test_rewards:even")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["step"]]


# Temperature ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_reference_has_the_rollouts_temperature(easy: RlConfig, tmp_path: Path, temperature: float) -> None:
    """Before the first step the reference is the policy, so the divergence is nought; and grows when it is not."""
    train(changed(easy, algorithm__kl=0.05, rollout__temperature=temperature, max_steps=4), tmp_path / "run")
    found = [row["kl"] for row in rows(tmp_path / "run")]
    assert abs(found[0]) < 1e-10 and found[-1] > 1e-5


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_teacher_has_the_rollouts_temperature(easy: RlConfig, tmp_path: Path, temperature: float) -> None:
    """A student taught by itself has nothing to learn."""
    train(replace(easy, max_steps=1), tmp_path / "first")
    path = str(tmp_path / "first")
    config = changed(easy, init_from=path, teacher__path=path, rollout__temperature=temperature, max_steps=1)
    train(config, tmp_path / "run")
    [row] = rows(tmp_path / "run")
    assert abs(row["policy_loss"]) < 1e-5 < 0.5 < row["entropy"]
    assert row["grad_norm"] < 1e-4


def test_supervised_steps_have_no_temperature(easy: RlConfig, tmp_path: Path) -> None:
    losses = []
    for temperature in (0.5, 1.7):
        folder = tmp_path / str(temperature)
        warm = changed(easy, warm_start__steps=3, warm_start__examples=16, rollout__temperature=temperature)
        train(replace(warm, max_steps=1), folder)
        losses.append([row["loss"] for row in rows(folder / "warm_start")])
    assert losses[0] == losses[1]


# Rewards and answers --------------------------------------------------------------------------------------------------


def test_broken_rewards_cost_their_samples_and_nothing_else(easy: RlConfig, tmp_path: Path) -> None:
    """NaN, infinity, None and hangs in many answers: excluded and counted, means and weights stay finite."""
    config = changed(
        easy, reward__function="lowbit_test_rewards:unwell", reward__failure_limit=1.0, reward__seconds=1.0,
        max_steps=3, rollout__show=16,
    )  # fmt: skip
    train(config, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert all(0 < row["rewards/failed"] < 1 and 0 <= row["reward"] <= 1 for row in found)
    assert all(row["grad_norm"] > 0 and row["loss"] == row["loss"] for row in found)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    missing = [sample for sample in samples if sample["reward"] is None]
    assert missing and all(sample["advantage"] is None for sample in missing)
    model = CheckpointStore(tmp_path / "run" / "checkpoints", config.checkpoint).load("latest").model
    assert all(tensor.isfinite().all() for tensor in model.values())


def test_a_hang_does_not_hold_up_the_checks_behind_it(config: RlConfig) -> None:
    """One of twenty hangs: one deadline is waited for, the others have their rewards, and the pool goes on."""
    settings = replace(config.reward, function="lowbit_test_rewards:unwell", seconds=1.0, failure_limit=1.0)
    pool = RewardPool(config.task, settings)
    try:
        texts = ["7", *(f"{n}5" for n in range(10, 29))]
        assert sum(ord(c) for c in "7") % 8 > 2
        scored = pool.score([((text,), Example("", "")) for text in texts])
        assert scored[0].parts is None and scored[0].why
        again = pool.score([((text,), Example("", "")) for text in texts[1:]])
    finally:
        pool.close()
    assert [s.parts for s in scored[1:]] == [s.parts for s in again]
    assert sum(s.parts is not None for s in again) >= 10


def test_answers_of_one_token(easy: RlConfig, tmp_path: Path) -> None:
    """The end among them: a conversation whose only drawn token is its end is trained on like any other."""
    train(changed(easy, rollout__max_new_tokens=1, algorithm__overlong=Overlong.keep), tmp_path / "run")
    for row in rows(tmp_path / "run"):
        assert row["length"] == 1 and row["grad_norm"] > 0 and row["mismatch/abs_max"] < 2e-5


def test_only_cut_answers_are_an_error_that_says_so(easy: RlConfig, tmp_path: Path) -> None:
    config = changed(easy, rollout__max_new_tokens=1, algorithm__overlong=Overlong.mask)
    with pytest.raises(LowbitError, match=r"not one of \d+ drawn tokens counts.*rollout.max_new_tokens is too small"):
        train(config, tmp_path / "run")


def test_many_rejected_tokens_are_told(easy: RlConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = changed(
        easy, precision__sampler="nvfp4", precision__trainer="bf16", algorithm__correction=Correction.icepop,
        algorithm__band_low=0.999, algorithm__band_high=1.001,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "lowbit"):
        train(config, tmp_path / "run")
    assert rows(tmp_path / "run")[0]["correction/rejected"] > 0.2
    assert caplog.text.count("of the drawn tokens do not count") == 1, "once a run"


# Files ----------------------------------------------------------------------------------------------------------------


def problems(path: Path, count: int, answer: str = "2") -> None:
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": answer}) + "\n" for n in range(count)))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_resuming_at_and_around_the_end_of_a_pass(easy: RlConfig, tmp_path: Path, cut: int) -> None:
    """Eight problems, four a step: whole passes end at steps 2 and 4. No step is lost, and none is done twice."""
    problems(tmp_path / "train.jsonl", 8)
    problems(tmp_path / "held.jsonl", 4)
    config = changed(
        easy, task__kind=TaskKind.file, task__path=str(tmp_path / "train.jsonl"), max_steps=5, rollout__show=16,
        task__held_out_path=str(tmp_path / "held.jsonl"),
    )  # fmt: skip
    train(config, tmp_path / "whole")
    train(replace(config, max_steps=cut), tmp_path / "cut")
    train(config, tmp_path / "cut")
    one, two = ((tmp_path / name / "samples.jsonl").read_text() for name in ("whole", "cut"))
    assert one == two
    seen = [json.loads(line) for line in one.splitlines()]
    for first in (1, 3):
        asked = {sample["prompt"] for sample in seen if sample["step"] in (first, first + 1)}
        assert asked == {f"{n}+{n}=" for n in range(8)}, "every pass has each problem"


def test_a_file_that_has_changed_is_refused_on_resume(easy: RlConfig, tmp_path: Path) -> None:
    problems(tmp_path / "train.jsonl", 8)
    problems(tmp_path / "held.jsonl", 4)
    config = changed(
        easy, task__kind=TaskKind.file, task__path=str(tmp_path / "train.jsonl"), max_steps=1,
        task__held_out_path=str(tmp_path / "held.jsonl"),
    )  # fmt: skip
    train(config, tmp_path / "run")
    problems(tmp_path / "train.jsonl", 8, answer="3")
    with pytest.raises(CheckpointError, match="data"):
        train(replace(config, max_steps=2), tmp_path / "run")


# Conversations --------------------------------------------------------------------------------------------------------


class Asks:
    """Each sample asks for another sum; in its second turn it gives back what it was told."""

    version = 0

    def sample(self, requests: Sequence[Request], sampling: Any, *, seed: int, stop_ids: Sequence[int] = ()) -> Any:
        def say(text: str) -> Sample:
            ids = [*text.encode(), EOT]
            return Sample(ids, [-0.5] * len(ids), "stop", [0] * len(ids))

        answers = []
        for request in requests:
            heard = bytes(t for t in request.prompt if t != EOT).decode().split("?")[-1]
            told = heard.partition("*2")[2].rstrip(";")
            first = [say(f"?{10 * request.key + s}*2") for s in range(request.samples)]
            answers.append([say(told)] if told else first)
        return answers

    def update(self, weights: Any, version: int) -> Any: ...


def test_later_turns_belong_to_their_own_conversation(config: RlConfig) -> None:
    """Samples of equal prompts, with different tool calls: each one's reply is that to its own call."""
    config = changed(config, task__kind=TaskKind.calculator, task__size=1, task__turns=2, rollout__max_new_tokens=6)
    config = changed(config, data__sequence_length=31)
    collect = Collector(config, make_task(config.task), Prompts(bytes_tokenizer(), config.task), Asks(), None)  # type: ignore[arg-type]
    groups = collect.draw([3, 1, 2], Split.train, 4)
    for group in groups:
        for c in group:
            assert c.turns == [f"?{10 * c.number + c.sample}*2", str(2 * (10 * c.number + c.sample))]


# Memory ---------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers in the largest tensor that anything makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return made


def test_logits_of_all_tokens_never_exist_at_once(config: RlConfig) -> None:
    """The shipped objective, forward and backward, and the reading of teachers: no tensor of tokens x vocabulary."""
    vocab, length = 30_000, 24
    model = Transformer(config.model, vocab)
    model.init_weights(1)
    ids, q, none = list(range(length)), [-9.0] * 20, Example("", "")
    conversations = [Conversation(n, 0, none, 4, ids, q, [0] * 20, "stop", [""], {"r": 1.0}, 0.5) for n in range(64)]
    algorithm = AlgorithmConfig()
    counts = [counting(c, algorithm, RlTeacherConfig()) for c in conversations]
    weights = weigh(counts, algorithm, 20, (64.0 * 20, 64.0))
    [packed] = pack_conversations(conversations, length, 64, EOT, full=False)
    batch = training_batch(packed, conversations, counts, weights, 0)
    assert batch.index is not None and len(batch.index) == 64 * 20, "prompts pass no head"
    with Largest() as seen:  # type: ignore[no-untyped-call]
        PolicyGradient(algorithm, 0.7)(model, batch).loss_sum.backward()  # type: ignore[no-untyped-call]
        found = read_logprobs(model, packed.batch, drawn_index(packed, conversations), 0.7)
    assert not found.requires_grad, "reading keeps nothing for a backward pass"
    assert seen.most < 64 * 20 * vocab // 4
    assert seen.most >= model.embedding.weight.numel(), "and it does look"
