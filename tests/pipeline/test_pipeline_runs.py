"""Whole pipelines. Oracle: the commands of the stages, typed one after the other, leave the same files to the bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import SETTINGS, contents, environment, lowbit, place

from lowbit.cli.start import with_start
from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import DISTILL, PIPELINE, PRETRAIN, RL
from lowbit.configs.schema import RunConfig
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.validate_pipeline import validate_pipeline
from lowbit.distill.making import CacheMaker
from lowbit.distill.run import everything
from lowbit.errors import CheckpointError, ConfigError, DataError, Interrupted, LowbitError
from lowbit.pipeline import manifest as store
from lowbit.pipeline import plan as planning
from lowbit.pipeline.manifest import State
from lowbit.pipeline.run import run
from lowbit.rl.run import train
from lowbit.trainer.loop import Trainer
from lowbit.trainer.run import pretrain


def composed(*overrides: str) -> PipelineConfig:
    config: PipelineConfig = compose_for(PIPELINE, [*SETTINGS, *overrides])
    validate_pipeline(config)
    return config


@pytest.fixture
def here(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the same documents."""
    monkeypatch.chdir(place(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_what_it_says_and_leaves(whole: Path) -> None:
    """A table with every stage, its precision, what it reached and where it is; the stages began from each other."""
    lines = (whole / "out.txt").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("stage  "))
    assert lines[start].split() == ["stage", "took", "tokens", "precision", "reached", "files"]
    pretrain, distill, rl = lines[start + 1 : start + 4]
    assert "forward fp32, backward fp32; from 90% nvfp4" in pretrain and "bits per byte" in pretrain
    assert "KL to the teacher" in distill and distill.endswith("runs/pipeline/distill")
    assert "sampler nvfp4_w4a16; trainer nvfp4_w4a16 forward, fp32 backward" in rl and "held-out accuracy" in rl
    assert lines[start + 4].startswith("next: lowbit generate runs/pipeline/rl --prompt ")
    assert f"the run begins with the weights of {whole / 'runs' / 'pipeline' / 'distill'}, step 5" in "\n".join(lines)
    manifest = store.read(whole / "runs" / "pipeline")
    assert [manifest.stages[stage].state for stage in Stage] == [State.done] * 3
    assert manifest.stages[Stage.distill].inputs["weights"] == manifest.stages[Stage.pretrain].outputs["weights"]
    assert manifest.stages[Stage.rl].inputs["weights"] == manifest.stages[Stage.distill].outputs["weights"]


SHARED = [
    "device=cpu", "deterministic=true", "engine.compile=off", "checkpoint.every_steps=2", "logging.every_steps=1",
    "logging.softmax_saturation=false", "optim=adamw",
]  # fmt: skip
DOCUMENTS = [
    "data=files", "data.sources.files.path=corpus", "data.pack_workers=1", "data.sequence_length=32",
    "data.held_out=0.1", "data.tokenizer.kind=bytes", "precision=stages", "batch.sequences=8", "batch.micro_batch=8",
    "max_steps=5", "evaluation.every_steps=0", "evaluation.final_tokens=4096", "evaluation.sample_tokens=0",
]  # fmt: skip
MODEL = ["model=quick", "model.layers=1", "model.width=64", "model.mlp_width=128"]
COMMANDS = {
    Stage.pretrain: ["~preset", *SHARED, *DOCUMENTS, *MODEL],
    Stage.distill: [
        "~distill", *SHARED, *DOCUMENTS, *MODEL, "teacher.path=runs/pipeline/pretrain", "cache.shard_tokens=512",
    ],
    Stage.rl: [
        "~rl", *SHARED, "init_from=runs/pipeline/distill", "precision.sampler=nvfp4_w4a16", "precision.name=stages",
        "task=sort", "task.size=2", "task.examine=8", "algorithm=grpo", "max_steps=3", "data.sequence_length=32",
        "batch.sequences=64", "batch.micro_batch=64", "optim.lr=3e-4", "warm_start.steps=40",
        "warm_start.examples=64", "warm_start.lr_scale=15", "rollout.samples=8", "rollout.max_new_tokens=6",
        "evaluation.every_steps=0",
    ],
}  # fmt: skip
"""What a user would type in place of SETTINGS and the preset `pipeline=quick`."""


def same(one: Path, other: Path) -> None:
    """Two folders hold the same weights, optimizer states and caches, bit for bit."""
    first, second = contents(one), contents(other)
    assert first.keys() == second.keys() and len(first) >= 4
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.slow
def test_the_stages_own_commands_leave_the_same(whole: Path, here: Path) -> None:
    """Each command's settings composed as it composes them, and its function called; see the exhaustive test below."""
    commands = {Stage.pretrain: (PRETRAIN, pretrain), Stage.distill: (DISTILL, everything), Stage.rl: (RL, train)}
    for stage, (command, function) in commands.items():
        folder = here / "runs" / "pipeline" / stage
        function(compose_for(command, with_start([*COMMANDS[stage], f"run_name=pipeline/{stage}"])), folder)
        same(folder, whole / "runs" / "pipeline" / stage)


class Interrupting:
    """Sends this process a SIGINT at one place of a stage, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wanted = ""
        train, shard = Trainer.train_step, CacheMaker._make_shard

        def train_step(trainer: Trainer) -> Any:
            if trainer.position.step == 1:
                self._at(trainer.config.run_name)
            return train(trainer)

        def make_shard(maker: CacheMaker, number: int) -> None:
            shard(maker, number)
            self._at("cache")

        monkeypatch.setattr(Trainer, "train_step", train_step)
        monkeypatch.setattr(CacheMaker, "_make_shard", make_shard)

    def _at(self, where: str) -> None:
        if where == self.wanted:
            self.wanted = ""
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_interrupted_in_each_stage_it_ends_with_the_same_files(
    whole: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config, interrupting = here / "runs" / "pipeline", composed(), Interrupting(monkeypatch)
    places = {
        "pipeline/pretrain": Stage.pretrain, "cache": Stage.distill, "pipeline/distill": Stage.distill,
        "pipeline/rl/warm_start": Stage.rl, "pipeline/rl": Stage.rl,
    }  # fmt: skip
    for where, stage in places.items():
        interrupting.wanted = where
        with pytest.raises(Interrupted, match=f"interrupted in {stage}.*the same command goes on there"):
            run(config, folder)
        assert not interrupting.wanted
        states = {name: record.state for name, record in store.read(folder).stages.items()}
        assert states.pop(stage) is State.interrupted and set(states.values()) <= {State.done}
    done = run(config, folder)
    assert [done.stages[stage].state for stage in Stage] == [State.done] * 3
    once, again = contents(whole / "runs" / "pipeline"), contents(folder)
    more = sorted(again.keys() - once.keys())  # the checkpoint that an interruption wrote, where no other is due
    assert once.keys() <= again.keys() and {name.rpartition("/")[0] for name in more} <= {
        "rl/warm_start/checkpoints/step_00000002"
    }
    assert [name for name in once if once[name] != again[name]] == []
    before = json.loads((folder / store.FILE).read_text())
    made: list[Stage] = []
    run(config, folder, lambda stage, _, __: made.append(stage))
    assert made == [], "nothing is done twice"
    assert json.loads((folder / store.FILE).read_text()) == before


class Pretended:
    """In place of the stages' runs: copies of those of a finished pipeline."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.made: list[str] = []

    def __call__(self, stage: Stage, run: RunConfig, folder: Path) -> None:
        self.made.append(folder.name)
        shutil.copytree(self.source / "runs" / "pipeline" / stage, folder)


@pytest.mark.slow
def test_what_changed_is_named_and_never_replaced(whole: Path, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, stages = here / "runs" / "pipeline", Pretended(whole)
    run(composed(), folder, stages)
    assert stages.made == ["pretrain", "distill", "rl"]
    # What does not decide the result changes nothing.
    run(composed("logging.every_steps=3", "data.prefetch=0", "rl.evaluation.every_steps=1"), folder, stages)
    assert stages.made == ["pretrain", "distill", "rl"]
    # Nor does a key, at its default, that an earlier version of lowbit did not have.
    made = store.read(folder)
    older = made.stages[Stage.pretrain]
    less = {key: value for key, value in older.settings.items() if key != "optim.z_loss"}
    store.write(folder, made.with_record(Stage.pretrain, replace(older, settings=less)))
    run(composed(), folder, stages)
    assert stages.made == ["pretrain", "distill", "rl"]
    with pytest.raises(ConfigError) as error:
        run(composed("distill.loss.alpha=0.5"), folder, stages)
    text = str(error.value)
    assert text.startswith("distill in runs/pipeline/distill was made otherwise: loss.alpha was 1.0, is 0.5.")
    assert "run_name" in text and "changed=anew" in text and "\n" not in text
    # Anew: a folder beside the old one, and the stage after it likewise if its weights are others.
    done = run(composed("distill.loss.alpha=0.5", "changed=anew"), folder, stages)
    assert stages.made == ["pretrain", "distill", "rl", "distill-2"], "the copy has the same weights, so rl stays"
    assert done.stages[Stage.distill].folder == "distill-2" and done.earlier[0].folder == "distill"
    assert (folder / "distill" / "checkpoints").is_dir()
    # Another document is another input of both stages that read.
    (here / "corpus" / "new.txt").write_text("a new document " * 50)
    with pytest.raises(ConfigError, match=r"pretrain in .* was made otherwise: the documents changed"):
        run(composed(), folder, stages)
    (here / "corpus" / "new.txt").unlink()
    # Somebody trained on in a stage's folder, or lost it.
    newest = sorted((folder / "pretrain" / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest)
    with pytest.raises(ConfigError, match="its newest checkpoint is not the one that the pipeline left there"):
        run(composed("distill.loss.alpha=0.5"), folder, stages)
    weights = sorted((folder / "pretrain" / "checkpoints").iterdir())[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    with pytest.raises(ConfigError, match="is not what was written"):
        run(composed("distill.loss.alpha=0.5"), folder, stages)
    shutil.rmtree(folder / "pretrain")
    run(composed("distill.loss.alpha=0.5"), folder, stages)
    assert stages.made[-1] == "pretrain" and "is gone, so the stage is done again" in caplog.text


@pytest.mark.slow
def test_stages_alone_and_where_they_begin(whole: Path, here: Path) -> None:
    folder, stages = here / "runs" / "pipeline", Pretended(whole)
    with pytest.raises(ConfigError) as error:
        run(composed("stages=[rl]"), folder, stages)
    assert "rl takes the weights of a stage before it" in str(error.value) and "rl.init_from" in str(error.value)
    run(composed("stages=[pretrain]"), folder, stages)
    run(composed("stages=[distill]"), folder, stages)
    assert stages.made == ["pretrain", "distill"]
    made = store.read(folder)
    interrupted = replace(made.stages[Stage.distill], state=State.interrupted)
    store.write(folder, made.with_record(Stage.distill, interrupted))
    with pytest.raises(LowbitError, match="rl takes the weights of distill, which is interrupted in"):
        run(composed("stages=[rl]"), folder, stages)
    source = whole / "runs" / "pipeline"
    run(composed("stages=[rl]", f"rl.init_from={source}/distill", "run_name=other"), here / "runs" / "other", stages)
    with pytest.raises(CheckpointError, match="is neither the folder of a run"):
        run(composed("stages=[rl]", "rl.init_from=corpus", "run_name=third"), here / "runs" / "third", stages)
    # A teacher of another tokenizer, found by the stage itself, which the line names.
    with pytest.raises(DataError, match=r"^distill: tokenizer: the teacher .* has .*, the data .*; train the student"):
        given = ["data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=270", f"distill.teacher.path={source}/pretrain"]
        run(composed("stages=[distill]", *given), here / "runs" / "fourth")
    assert store.read(here / "runs" / "fourth").stages[Stage.distill].state is State.failed


@pytest.mark.slow
def test_a_full_disk_between_stages(whole: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room for a stage is said before it; a manifest that cannot be written leaves the one before it."""
    folder, stages = here / "runs" / "pipeline", Pretended(whole)

    def fill_after_pretraining(stage: Stage, run: RunConfig, place: Path) -> None:
        stages(stage, run, place)
        if stage is Stage.pretrain:
            free = shutil.disk_usage(here)._replace(free=1000)
            monkeypatch.setattr(planning.shutil, "disk_usage", lambda _: free)

    with pytest.raises(LowbitError, match=r"^distill takes about [0-9.]+ MB in .*, and 0.0 are free: free some"):
        run(composed(), folder, fill_after_pretraining)
    assert stages.made == ["pretrain"]
    monkeypatch.undo()
    monkeypatch.chdir(here)
    script = """
import resource, sys
from pathlib import Path
from lowbit.pipeline import manifest
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    manifest.write(Path(sys.argv[1]), manifest.read(Path(sys.argv[1])))
except manifest.LowbitError as error:
    print(error)
"""
    before = (folder / store.FILE).read_text()
    said = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert "cannot be written (the disk is full)" in said and "the same command goes on" in said
    assert (folder / store.FILE).read_text() == before and not list(folder.glob(".pipeline.json*"))
    run(composed(), folder, stages)
    assert stages.made == ["pretrain", "distill", "rl"]
    (folder / store.FILE).write_text("{")
    with pytest.raises(LowbitError, match=r"cannot be read .* restore it, or choose another run_name"):
        run(composed(), folder, stages)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_processes_interrupted_by_control_c_and_commands_as_typed(whole: Path, tmp_path: Path) -> None:
    """Real processes: Ctrl-C wherever the log has come to, exit code 130, the same command again; then the commands."""
    (tmp_path / "piped").mkdir()
    cwd = place(tmp_path / "piped")
    folder = cwd / "runs" / "pipeline"
    marks = {
        "pretrain/metrics.jsonl": "interrupted in pretrain",
        "distill/cache/shard-00000.json": "interrupted in distill",
        "distill/metrics.jsonl": "interrupted in distill",
        "rl/warm_start/metrics.jsonl": "interrupted in rl",
        "rl/metrics.jsonl": "interrupted in rl",
    }
    for mark, message in marks.items():
        command = [sys.executable, "-m", "lowbit", "pipeline", *SETTINGS]
        process = subprocess.Popen(
            command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while process.poll() is None and not (folder / mark).exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=100)[1].decode()
        if process.returncode == 0:  # it was quicker
            continue
        *before, last = error.splitlines()  # while it trains, the signal is answered at once, too
        hint = ["", "SIGINT: the run ends after this step and saves; Ctrl-C again ends it at once, unsaved"]
        assert process.returncode == 130 and message in last and before in ([], hint), (mark, error)
    code, _, err = lowbit(cwd, "pipeline", *SETTINGS)
    assert code == 0, err
    once, again = contents(whole / "runs" / "pipeline"), contents(folder)
    assert [name for name in once if once[name] != again.get(name)] == []
    (tmp_path / "typed").mkdir()
    cwd = place(tmp_path / "typed")
    for stage, settings in COMMANDS.items():
        code, _, err = lowbit(cwd, stage, *settings, f"run_name=pipeline/{stage}")
        assert code == 0, err
        same(cwd / "runs" / "pipeline" / stage, whole / "runs" / "pipeline" / stage)


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_stages_on_two_ranks(tmp_path: Path) -> None:
    """The pipeline starts the ranks of each stage; Ctrl-C reaches them, and the same command goes on."""
    cwd = place(tmp_path)
    half = ["pretrain.batch.micro_batch=4", "distill.batch.micro_batch=4", "rl.batch.micro_batch=32"]
    command = ["pipeline", *SETTINGS, "engine=deepspeed", "engine.processes=2", *half]
    process = subprocess.Popen(
        [sys.executable, "-m", "lowbit", *command],
        cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    while process.poll() is None and not (cwd / "runs" / "pipeline" / "distill" / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 130 and "interrupted in distill" in error.splitlines()[-1], error
    code, out, err = lowbit(cwd, *command, timeout=600)
    assert code == 0, err
    assert "pretrain: done before" in out and "2 ranks, ZeRO" in out and "reached" in out
