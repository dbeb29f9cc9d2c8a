"""`lowbit rl` as typed: real processes; mistakes are one line and leave nothing; a killed run goes on to the bit."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import ranks

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import RL, groups
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.validate_rl import validate_rl
from lowbit.errors import ConfigError
from lowbit.infer.precision import check_sampler
from lowbit.quant.resolve import resolve

QUICK = ["rl=quick", "device=cpu", "logging.every_steps=1", "task.examine=16", "deterministic=true"]


def lowbit(cwd: Path, *arguments: str) -> tuple[int, str, str]:
    done = forked.run(["-m", "lowbit", *arguments], cwd)
    return done.returncode, done.stdout, done.stderr


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for line in (run / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))["step"]]


@pytest.mark.slow
def test_the_quick_run_and_what_takes_it(tmp_path: Path) -> None:
    """A warm start, rollouts, a better model; `generate` and `report` take the folder; nothing is left to do again."""
    code, out, err = lowbit(tmp_path, "rl", *QUICK, "run_name=first", "max_steps=6")
    assert code == 0, err
    for text in (
        "warm start: 40 supervised steps",
        "before: held-out greedy accuracy",
        " reward ",
        "next: lowbit generate",
    ):
        assert text in out, out
    run = tmp_path / "runs" / "first"
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert (run / "samples.jsonl").read_text().count("\n") >= 6
    code, out, err = lowbit(
        tmp_path, "generate", "runs/first", "--prompt", "312>", "--max-tokens", "4", "--device", "cpu"
    )
    assert code == 0 and out.startswith("312>"), err
    code, out, err = lowbit(tmp_path, "eval", "runs/first", "--device", "cpu")
    last = rows(run)[-1]
    assert code == 0 and f"step 6: held-out greedy accuracy {last['val_accuracy']:.1%}" in out, err
    assert f"mean reward {last['val_reward']:.3f} (16 problems" in out
    code, out, err = lowbit(tmp_path, "eval", "runs/first/warm_start", "--device", "cpu", "--problems", "8")
    assert code == 0 and "step 40: held-out greedy accuracy" in out and "(8 problems" in out, err
    code, out, err = lowbit(tmp_path, "eval", "runs/first", "--max-tokens", "100")
    assert code == 2 and "--problems would work" in err and err.count("\n") == 1
    code, out, err = lowbit(tmp_path, "report", "runs/first")
    assert code == 0 and "first" in out, err
    code, out, err = lowbit(tmp_path, "rl", *QUICK, "run_name=first", "max_steps=6")
    assert code == 0 and "this run is finished" in out and "supervised steps" not in out, err


@pytest.mark.slow
def test_killed_and_resumed_is_the_run_in_one_piece(tmp_path: Path) -> None:
    """SIGKILL in the middle, through the real command: rows and samples are then those of an undisturbed run."""
    settings = [*QUICK, "max_steps=30", "checkpoint.every_steps=5", "checkpoint.background=false"]
    code, _, err = lowbit(tmp_path, "rl", *settings, "run_name=whole")
    assert code == 0, err
    killed = tmp_path / "runs" / "killed"
    process = forked.start(
        ["-m", "lowbit", "rl", *settings, "run_name=killed"],
        tmp_path,
        os.environ,
        tmp_path / "out",
        tmp_path / "err",
        start_new_session=True,
    )
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not (killed / "checkpoints" / "step_00000010").is_dir():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(rows(killed)) < 30, "it was killed on its way"
    code, out, err = lowbit(tmp_path, "rl", *settings, "run_name=killed")
    assert code == 0 and "resumed at step" in out, err
    whole = tmp_path / "runs" / "whole"
    keys = ("step", "loss", "grad_norm", "reward", "entropy", "mismatch/k3_kl", "length", "groups/zero_variance")
    assert [[row[k] for k in keys] for row in rows(whole)] == [[row[k] for k in keys] for row in rows(killed)]
    assert (whole / "samples.jsonl").read_text() == (killed / "samples.jsonl").read_text()
    assert rows(whole)[-1]["val_accuracy"] == rows(killed)[-1]["val_accuracy"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_two_ranks_of_deepspeed(tmp_path: Path, stage: int) -> None:
    """Each rank draws half of the groups; sampler and trainer agree, and the numbers are those of one process."""
    settings = [*QUICK, "engine=deepspeed", f"engine.zero_stage={stage}", "batch.micro_batch=32", "max_steps=3"]
    for ended in ranks.run(2, ["-m", "lowbit", "rl", *settings, "run_name=two"], tmp_path):
        assert ended.code == 0, ended.err[-3000:]
    code, _, err = lowbit(tmp_path, "rl", *QUICK, "batch.micro_batch=32", "max_steps=3", "run_name=one")
    assert code == 0, err
    one, two = (rows(tmp_path / "runs" / name) for name in ("one", "two"))
    assert all(row["mismatch/abs_max"] < 2e-5 for row in two)
    assert two[0]["reward"] == pytest.approx(one[0]["reward"]), "the same prompts, noise and weights"
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-4)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_draw_ahead(tmp_path: Path, stage: int) -> None:
    """A thread on each rank draws its share of every group of prompts, within the bound; a resumed run goes on so."""
    settings = [*QUICK, "deterministic=false", "engine=deepspeed", f"engine.zero_stage={stage}", "rollout.show=32",
                "batch.micro_batch=32", "rollout.staleness=1", "run_name=two"]  # fmt: skip
    for steps in (4, 8):
        for ended in ranks.run(2, ["-m", "lowbit", "rl", *settings, f"max_steps={steps}"], tmp_path):
            assert ended.code == 0, ended.err[-3000:]
    run = tmp_path / "runs" / "two"
    found = rows(run)
    assert [row["step"] for row in found] == list(range(1, 9))
    ages = [row["stale/steps"] for row in found]
    assert ages[0] == 0 < max(ages) <= 1
    assert found[0]["mismatch/abs_max"] < 2e-5, "the first rollout is of the trainer's own weights"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert all(sample["step"] - 1 - version in (0, 1) for version in sample["versions"] if version >= 0)
    mine: dict[int, set[int]] = {}
    for sample in samples:
        mine.setdefault(sample["step"], set()).add(sample["prompt_number"])
    every = [number for numbers in mine.values() for number in numbers]
    assert len(set(every)) == len(every), "no prompt is drawn for two steps"


REFUSED = [
    (["rollout.temperature=0"], "rollout.temperature=0.0: greedy answers are all the same"),
    (["rollout.top_p=0.9"], "rollout.top_p=0.9: the trainer's log-probabilities are of all tokens"),
    (["rollout.top_k=5"], "rollout.top_k=5: the trainer's log-probabilities are of all tokens"),
    (["rollout.max_new_tokens=64"], "with a prompt, that is more than the context of 64 tokens"),
    (["rollout.samples=1"], "a group of one has no mean"),
    (["rollout.samples=7"], "an optimizer step takes whole groups; batch.sequences=259 would work"),
    (["rollout.staleness=1", "rollout.updates=2"], "at least rollout.updates steps old"),
    (["rollout.device=cuda"], "must be empty, cpu or cuda:N"),
    (["rollout.device=cpu", "engine=deepspeed"], "each rank draws on its own device"),
    (["rollout.staleness=1", "deterministic=true", "max_steps=5"], "depends on the clock"),
    (["rollout.empty_limit=0"], "must be at least 1"),
    (["task=calculator", "task.turns=1"], "needs another turn"),
    (["task=file"], "task.kind=file task.path=: this kind needs a path"),
    (["task=file", "task.path=nope.jsonl"], "no such file below"),
    (["task.path=nope.jsonl"], "this kind reads no file"),
    (["task=reasoning_gym", "task.dataset="], "needs a generator's name"),
    (["task.template=hello"], "must stand in it, for the problem"),
    (["data=python_docs"], "data=python_docs: expected"),
    (["data.sources.mine.path=x"], "there are no documents here"),
    (["data.tokenizer.kind=bpe"], "no text to train a tokenizer on"),
    (["algorithm.band_low=1", "algorithm.band_high=1", "algorithm.correction=icepop"], "low must be below high"),
    (["precision=nvfp4_leg"], "the sampler and the trainer keep their precision"),
    (["batch.warmup=[{until_tokens: 100, sequences: 64}]"], "a step takes whole rollouts"),
    (["algorithm=reinforce", "algorithm.dual_clip=3"], "this loss clips no ratio"),
    (["algorithm.reference=runs"], "nothing would read the reference"),
    (["algorithm.kl=0.1", "algorithm.reference=nope"], "algorithm.reference=nope: no such folder"),
    (["teacher.path=nope"], "teacher.path=nope: no such folder"),
    (["preset=gpu"], "lowbit rl takes rl=cpu or gpu or quick"),
    (["distill=cpu"], "belongs to another command"),
    (["algorithm=ppo"], "algorithm takes one of cispo, dapo"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_rl(compose_for(RL, overrides))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("precision", ["fp8_tensor", "nvfp4_nvidia", "nvfp4_quartet2"])
def test_samplers_whose_scale_spans_the_batch_are_refused(precision: str) -> None:
    for overrides in ([f"precision={precision}"], [f"precision.sampler={precision}"]):
        with pytest.raises(ConfigError, match="batch mates"):
            check_sampler(resolve(compose_for(RL, overrides).precision))
    check_sampler(resolve(compose_for(RL, ["precision.sampler=nvfp4"]).precision))


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g in ("rl", "task", "algorithm") for c in groups(RL)[g]])
def test_every_preset_composes(group: str, choice: str, tmp_path: Path) -> None:
    given = [f"{group}={choice}"]
    if choice == "file":
        (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}')
        given.append(f"task.path={tmp_path}/p.jsonl")
    if choice == "reasoning_gym":
        given.append("task.dataset=chain_sum")
    config = compose_for(RL, given)
    assert isinstance(config, RlConfig)
    validate_rl(config)


@pytest.mark.slow
def test_mistakes_leave_no_folder(tmp_path: Path) -> None:
    for arguments, expected in (
        (["rollout.temperature=0"], "rollout.temperature=0"),
        (["precision.sampler=fp8_tensor"], "batch mates"),
        (["reward.functon=a:b"], "nearest: reward.function"),
    ):
        code, out, err = lowbit(tmp_path, "rl", *QUICK, *arguments)
        assert code == 2 and expected in err and err.count("\n") == 1, (arguments, err, out)
    assert not (tmp_path / "runs").exists()
    code, out, err = lowbit(tmp_path, "rl", *QUICK, "--cfg", "job")
    assert code == 0 and "algorithm:" in out and "rollout:" in out
    code, out, err = lowbit(tmp_path, "rl", *QUICK, "reward.function=nope:f", "warm_start.steps=0")
    assert code == 2 and "reward.function=nope:f: cannot be imported" in err


def test_completion() -> None:
    from lowbit.cli.complete import rl_candidates

    assert {"algorithm=grpo", "algorithm=gspo"} <= set(rl_candidates("algorithm=g"))
    assert "rollout.temperature=1.0" in rl_candidates("rollout.tem")
    assert "task=add" in rl_candidates("task=a")
