"""A whole run: what it leaves, and that interruptions of every kind lose nothing and change nothing."""

import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import tiny_runs
import torch

from lowbit.configs.schema import BatchWarmupConfig, OptimizerKind, ResumeDifference, RunConfig
from lowbit.configs.stored import save_config
from lowbit.errors import CheckpointError, ConfigError, LowbitError, NonFiniteError
from lowbit.models.transformer import Transformer
from lowbit.trainer import checkpoint, loop
from lowbit.trainer.evaluate import evaluate
from lowbit.trainer.loaded import dataset_of, load_run
from lowbit.trainer.run import Pretraining, pretrain


def assert_same_end(a: Path, b: Path) -> None:
    """Both runs ended with the same bits, and logged the same losses for the same steps."""
    left, right = tiny_runs.tensors(a), tiny_runs.tensors(b)
    assert left.keys() == right.keys() and len(left) > 10
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    for key in ("step", "tokens", "loss", "grad_norm", "lr", "val_bpb", "spike_score"):
        assert [r.get(key) for r in tiny_runs.rows(a)] == [r.get(key) for r in tiny_runs.rows(b)], key


def in_process(config: RunConfig, run_dir: Path, body: str) -> forked.Process:
    """A second process that runs `body` with `config` and `run_dir` in scope; `errors` has what it prints."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    stored = run_dir.parent / f"{run_dir.name}.yaml"
    save_config(config, stored)
    code = (
        "import pathlib, torch; torch.set_num_threads(1)\n"
        "from lowbit.configs.stored import load_config\n"
        f"config, run_dir = load_config(pathlib.Path({str(stored)!r})), pathlib.Path({str(run_dir)!r})\n{body}"
    )
    script = stored.with_suffix(".py")
    script.write_text(code)
    return forked.start(
        [str(script)], run_dir.parent, os.environ, stored.with_suffix(".out"), stored.with_suffix(".err")
    )


def errors(run_dir: Path) -> str:
    """What the last process of this run printed as errors."""
    return (run_dir.parent / f"{run_dir.name}.err").read_text()


SLOW_STEPS = """
import time
from lowbit.trainer.loop import Trainer
step = Trainer.train_step
Trainer.train_step = lambda self: (time.sleep(0.2), step(self))[1]
"""

RUN = """
import sys
from lowbit.errors import LowbitError
from lowbit.trainer.run import pretrain
try:
    pretrain(config, run_dir)
except LowbitError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def wait_for_step(run_dir: Path, step: int, process: forked.Process) -> None:
    """Until the run has logged `step`."""
    for _ in range(600):
        if (run_dir / "metrics.jsonl").exists() and any(r["step"] >= step for r in tiny_runs.rows(run_dir)):
            return
        if process.poll() is not None:
            raise AssertionError(errors(run_dir))
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came")


def test_a_run_leaves_what_others_rely_on(tiny_run: RunConfig, tmp_path: Path) -> None:
    result = pretrain(tiny_run, tmp_path / "run")
    assert result.step == 6 and result.tokens == 6 * 8 * 32
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "tokenizer"} <= {p.name for p in result.run_dir.iterdir()}
    log = tiny_runs.rows(result.run_dir)
    assert [r["step"] for r in log] == [1, 2, 3, 4, 5, 6]
    assert log[-1]["tokens"] == result.tokens and log[-1]["loss"] < log[0]["loss"]
    assert [r["step"] for r in log if "val_bpb" in r] == [3, 6]
    assert log[-1]["val_bpb"] == result.val_bpb and math.isfinite(result.trigram_bpb)
    assert result.sample.startswith("doc")


def test_loaded_run_is_the_trained_model(tiny_run: RunConfig, tmp_path: Path) -> None:
    result = pretrain(tiny_run, tmp_path / "run")
    run = load_run(result.run_dir, device="cpu")
    assert run.step == 6 and run.config == tiny_run
    saved = tiny_runs.tensors(result.run_dir)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, saved[f"model/{name}"])
    hidden = run.model(torch.randint(0, 257, (1, 16)))
    assert torch.isfinite(hidden).all(), "buffers outside the checkpoint were restored too"


@pytest.mark.parametrize("change", ["plain", "muon_ema_warmup_tied"])
def test_resuming_changes_no_bit(tiny_run: RunConfig, tmp_path: Path, change: str) -> None:
    if change != "plain":
        optim = replace(tiny_run.optim, kind=OptimizerKind.muon, ema_decay=0.9, z_loss=1e-4)
        batch = replace(tiny_run.batch, warmup=[BatchWarmupConfig(until_tokens=256, sequences=4)])
        tiny_run = replace(tiny_run, optim=optim, batch=batch, model=replace(tiny_run.model, tied_head=True))
    pretrain(tiny_run, tmp_path / "whole")
    # The schedule is a function of max_steps, so an early end is an interruption, never a smaller max_steps.
    process = in_process(
        tiny_run,
        tmp_path / "parts",
        "import os\nfrom lowbit.trainer.run import Pretraining\n"
        "save = Pretraining._save\n"
        "def die(self, position):\n"
        "    save(self, position); self.store.wait()\n"
        "    if position.step == 4: os.kill(os.getpid(), 9)\n"
        "Pretraining._save = die\n" + RUN,
    )
    assert process.wait() == -signal.SIGKILL
    pretrain(tiny_run, tmp_path / "parts")
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_kill_at_any_moment_loses_at_most_since_the_last_checkpoint(tiny_run: RunConfig, tmp_path: Path) -> None:
    tiny_run = replace(tiny_run, max_steps=9)
    pretrain(tiny_run, tmp_path / "whole")
    for delay in (0.0, 0.07, 0.31):
        process = in_process(tiny_run, tmp_path / "parts", SLOW_STEPS + RUN)
        wait_for_step(tmp_path / "parts", 1, process)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    pretrain(tiny_run, tmp_path / "parts")
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_130(tiny_run: RunConfig, tmp_path: Path, number: signal.Signals) -> None:
    tiny_run = replace(tiny_run, checkpoint=replace(tiny_run.checkpoint, every_steps=0))
    pretrain(tiny_run, tmp_path / "whole")
    process = in_process(tiny_run, tmp_path / "parts", SLOW_STEPS + RUN)
    wait_for_step(tmp_path / "parts", 2, process)
    os.kill(process.pid, number)
    assert process.wait() == 130
    saved = sorted((tmp_path / "parts" / "checkpoints").iterdir())[-1].name
    step = int(saved.removeprefix("step_"))
    last = errors(tmp_path / "parts").splitlines()[-1]
    assert last == f"interrupted by {number.name}: saved at step {step} in parts"
    pretrain(tiny_run, tmp_path / "parts")
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_two_runs_in_one_folder(tiny_run: RunConfig, tmp_path: Path) -> None:
    process = in_process(tiny_run, tmp_path / "run", SLOW_STEPS + RUN)
    wait_for_step(tmp_path / "run", 1, process)
    with pytest.raises(LowbitError, match=str(process.pid)):
        pretrain(tiny_run, tmp_path / "run")
    assert process.wait() == 0


def test_non_finite_stops_before_the_step_and_saves_nothing(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Transformer.forward

    def poison(self: Transformer, *args: Any, **kwargs: Any) -> torch.Tensor:
        poison.calls += 1  # type: ignore[attr-defined]
        if poison.calls == 8:  # type: ignore[attr-defined]  # two forwards a step: somewhere in step 4
            with torch.no_grad():
                self.blocks[1].mlp.down.weight[0, 0] = math.nan
        return forward(self, *args, **kwargs)

    poison.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(Transformer, "forward", poison)
    write = checkpoint.write_snapshot
    monkeypatch.setattr(checkpoint, "write_snapshot", lambda *arguments: (time.sleep(1), write(*arguments)))
    tiny_run = replace(tiny_run, evaluation=replace(tiny_run.evaluation, every_steps=0))
    with pytest.raises(NonFiniteError, match=r"step 4: .*blocks\.1\.mlp\.down"):
        pretrain(tiny_run, tmp_path / "run")
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate()), "the folder is let go, not written"
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").glob("step_*"))] == ["step_00000002"]
    for name, tensor in tiny_runs.tensors(tmp_path / "run").items():
        assert torch.isfinite(tensor).all(), name


def test_a_non_finite_step_is_no_lack_of_memory(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for the layer runs the forward pass uncompiled, which may not fit: the message stays the right one."""
    init = Transformer.init_weights

    def broken(self: Transformer, seed: int) -> None:
        init(self, seed)
        with torch.no_grad():
            self.final_norm.weight[0] = math.nan

    def too_large(model: torch.nn.Module, run_forward: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Transformer, "init_weights", broken)
    monkeypatch.setattr(loop, "first_bad", too_large)
    with pytest.raises(NonFiniteError, match=r"step 1: .*lack of memory"):
        pretrain(tiny_run, tmp_path / "run")


def test_bad_resumes(tiny_run: RunConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    pretrain(tiny_run, run_dir)
    longer = replace(tiny_run, max_steps=8)
    wider = replace(longer, model=replace(longer.model, mlp_width=64))
    with pytest.raises(CheckpointError, match=r"mlp_width.* other shapes: start anew"):
        pretrain(wider, run_dir)
    with pytest.raises(CheckpointError, match=r"theta.*resume_allow=\[model\]"):
        pretrain(replace(longer, model=replace(longer.model, rope=replace(longer.model.rope, theta=5e5))), run_dir)
    other_text = replace(longer, data=replace(longer.data, held_out=0.3))
    with pytest.raises(CheckpointError, match=r"resume_allow"):
        pretrain(other_text, run_dir)
    assert pretrain(replace(other_text, resume_allow=[ResumeDifference.data]), run_dir).step == 8
    with pytest.raises(CheckpointError, match="resume=none"):
        pretrain(replace(longer, resume="none"), run_dir)
    with pytest.raises(CheckpointError, match="nowhere"):
        pretrain(replace(longer, resume=str(tmp_path / "nowhere")), tmp_path / "other")


def test_another_seed_in_a_resumed_run_is_said(
    tiny_run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pretrain(tiny_run, tmp_path / "run")
    with caplog.at_level("WARNING", "lowbit"):
        pretrain(replace(tiny_run, max_steps=7), tmp_path / "run")
        assert "orders the data" not in caplog.text
        pretrain(replace(tiny_run, max_steps=8, seed=2), tmp_path / "run")
    assert "seed=2 orders the data; so far it was 1" in caplog.text


def test_damaged_checkpoint_falls_back_to_the_last_good_one(
    tiny_run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pretrain(tiny_run, tmp_path / "whole")
    pretrain(tiny_run, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "step_00000006" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with caplog.at_level("WARNING", "lowbit"):
        pretrain(tiny_run, tmp_path / "run")
    assert "step_00000006" in caplog.text
    assert_same_end(tmp_path / "whole", tmp_path / "run")


def test_a_finished_run_says_so_and_stays_as_it_is(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_run = replace(tiny_run, evaluation=replace(tiny_run.evaluation, max_tokens=64))
    first = pretrain(tiny_run, tmp_path / "run")
    left = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "run.log"}
    monkeypatch.setattr(Pretraining, "_evaluate", None)  # the checkpoint remembers what the last evaluation measured
    monkeypatch.chdir(tmp_path)
    caplog.clear()
    with caplog.at_level("INFO", "lowbit"):
        assert pretrain(tiny_run, tmp_path / "run") == first
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "run.log"} == left
    assert "finished (max_steps=6) at step 6" in caplog.text and "as in max_steps=12" in caplog.text
    assert "lowbit eval run\n" in caplog.text, "the folder is printed as one would type it here"
    assert str(tmp_path) not in caplog.text.partition("run folder")[2]


def test_a_run_that_ends_by_a_lowered_limit_is_measured(tiny_run: RunConfig, tmp_path: Path) -> None:
    """An earlier evaluation, of other weights or of fewer tokens, does not stand for the last one."""
    evaluation = replace(tiny_run.evaluation, max_tokens=64)
    tiny_run = replace(
        tiny_run, evaluation=evaluation, max_steps=60, checkpoint=replace(tiny_run.checkpoint, every_steps=0)
    )
    process = in_process(tiny_run, tmp_path / "run", SLOW_STEPS + RUN)
    wait_for_step(tmp_path / "run", 4, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    lower = replace(tiny_run, max_steps=3)
    result = pretrain(lower, tmp_path / "run")
    assert 3 < result.step < 60
    last = tiny_runs.rows(tmp_path / "run")[-1]
    assert (last["step"], last["val_bpb"]) == (result.step, result.val_bpb)
    run = load_run(tmp_path / "run", device="cpu")
    data = dataset_of(run)
    measured = evaluate(run.model, data.validation_batches(4, 512), data.tokenizer.token_bytes())
    assert result.val_bpb == pytest.approx(measured.bpb, rel=1e-6) and measured.tokens > 64
    before = len(tiny_runs.rows(tmp_path / "run"))
    assert pretrain(lower, tmp_path / "run") == result
    assert tiny_runs.rows(tmp_path / "run")[-1] == last and len(tiny_runs.rows(tmp_path / "run")) == before


def test_an_average_that_begins_with_a_resume_starts_at_the_trained_weights(
    tiny_run: RunConfig, tmp_path: Path
) -> None:
    pretrain(tiny_run, tmp_path / "run")
    trained = tiny_runs.tensors(tmp_path / "run")
    optim = replace(tiny_run.optim, ema_decay=0.999)
    pretrain(replace(tiny_run, max_steps=7, optim=optim), tmp_path / "run")
    for name, tensor in tiny_runs.tensors(tmp_path / "run").items():
        if name.startswith("ema/"):
            now = tiny_runs.tensors(tmp_path / "run")[name.replace("ema/", "model/")]
            expected = 0.999 * trained[name.replace("ema/", "model/")] + 0.001 * now
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)


def test_another_run_from_a_finished_one_can_be_used(tiny_run: RunConfig, tmp_path: Path) -> None:
    first = pretrain(tiny_run, tmp_path / "run")
    result = pretrain(replace(tiny_run, resume=str(first.run_dir)), tmp_path / "copy")
    assert result == replace(first, run_dir=tmp_path / "copy")
    assert load_run(tmp_path / "copy", device="cpu").step == 6


def test_no_cuda(tiny_run: RunConfig, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="device=cpu"):
        pretrain(replace(tiny_run, device="cuda"), tmp_path / "run")


@pytest.mark.parametrize("file", ["metrics.jsonl", "run.log"])
def test_a_disk_that_is_full_for_a_small_file(
    tiny_run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """/dev/full takes no byte. Without metrics a run cannot go on; without its log it does."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / file).symlink_to("/dev/full")
    if file == "metrics.jsonl":
        with pytest.raises(LowbitError, match=r"cannot be written \(No space left on device\).*free some space"):
            pretrain(tiny_run, run_dir)
        (run_dir / file).unlink()
    assert pretrain(tiny_run, run_dir).step == 6
    assert capsys.readouterr().err.count("run.log cannot be written") == (file == "run.log")
