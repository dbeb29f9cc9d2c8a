"""`--plan` against a run: tokens and disk as they were, work as PyTorch counts it, time as it was taken.

Oracles: the files and the manifest that a finished pipeline left; PyTorch's own count of operations in its products;
the processor's time, which other work on the machine changes little.
"""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_runs import SETTINGS, environment, place
from torch.utils.flop_counter import FlopCounterMode

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import PIPELINE
from lowbit.configs.schema_distill import DistillConfig, Estimator
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import load_config
from lowbit.distill.codec import Layout
from lowbit.distill.expected import encode_typical, expected_bits
from lowbit.distill.shards import open_cache
from lowbit.errors import CheckpointError
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.transformer import Transformer
from lowbit.pipeline import timing
from lowbit.pipeline.manifest import read
from lowbit.pipeline.plan import FACTOR, ON_CPU, Part, describe, parts_of, with_models_given
from lowbit.pipeline.run import run as run_pipeline
from lowbit.pipeline.stages import perform
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.plan import plan as plan_run


@pytest.fixture
def planned(whole: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """Part by part, from the settings alone: the stages' folders play no part in it."""
    monkeypatch.chdir(whole)
    config: PipelineConfig = compose_for(PIPELINE, SETTINGS)
    stages = {Stage.pretrain: config.pretrain, Stage.distill: config.distill, Stage.rl: config.rl}
    return {part.name: part for stage, run in stages.items() for part in parts_of(stage, run)}


def of(folder: Path, pattern: str) -> int:
    """Bytes of the files that match."""
    return sum(file.stat().st_size for file in folder.glob(pattern))


@pytest.mark.slow
def test_tokens_and_disk(whole: Path, planned: dict[str, Part]) -> None:
    folder = whole / "runs" / "pipeline"
    records = read(folder).stages
    reached = {stage: record.reached["tokens"] for stage, record in records.items()}
    assert (
        planned["pretrain"].tokens == reached[Stage.pretrain]
        and planned["distill: student"].tokens == reached["distill"]
    )
    cache = open_cache(folder / "distill" / "cache")
    held = sum(shard.samples for shard in cache.shards) * 32
    assert planned["distill: teacher's cache"].tokens == held
    # Answers may end early: at most as many as planned, and not a small part of them.
    [*_, start] = read_rows(folder / "rl" / "warm_start" / "metrics.jsonl")
    for name, tokens in (
        ("rl: supervised start, at most", start["tokens"]),
        ("rl: rollouts and training", reached["rl"]),
    ):
        assert 0.3 * planned[name].tokens <= tokens <= planned[name].tokens, name
    # Of these few steps every checkpoint but one is kept; that one is still there while the last is written.
    kept = {"pretrain": ("pretrain", 3), "distill: student": ("distill", 3), "rl: rollouts and training": ("rl", 2)}
    kept["rl: supervised start, at most"] = ("rl/warm_start", 3)
    for name, (where, most) in kept.items():
        count = len(list((folder / where / "checkpoints").glob("step_*")))
        there = of(folder / where / "checkpoints", "*/*.safetensors")
        assert planned[name].disk == pytest.approx(most * there / count, rel=0.05), name
        assert of(folder / where, "checkpoints/*/*") <= 1.05 * planned[name].disk, name
    # This teacher has learned for five steps only, and says less than a trained one.
    assert 0.6 < of(folder / "distill" / "cache", "*") / planned["distill: teacher's cache"].disk < 1.1


def test_the_size_of_a_cache() -> None:
    """As the default pipeline's was (7,064,565 bytes of 307,200 positions), and hardly other for other teachers.

    Only multinomial's depends much on the teacher: its draws become fewer entries the surer that is.
    """
    config: PipelineConfig = compose_for(PIPELINE, ["device=cpu"])
    [cache, _] = parts_of(Stage.distill, config.distill)
    assert cache.tokens == 307_200 and cache.disk == pytest.approx(7_064_565, rel=0.1)
    for estimator in Estimator:
        for vocabulary in (257, 512, 16384):
            layout = Layout(estimator, 16, vocabulary)
            expected = expected_bits(layout)
            assert layout.header_bits < expected <= layout.most_bits
            for scatter in (2.0, 4.0) if estimator is not Estimator.multinomial else ():
                other = float(encode_typical(layout, 64, scatter).double().mean())
                assert other == pytest.approx(expected, rel=0.3), (estimator, vocabulary, scatter)


TIMED = [
    "device=cpu", "data=files", "data.sources.files.path=corpus", "data.held_out=0.1", "data.pack_workers=1",
    "data.tokenizer.kind=bytes", "pretrain.max_steps=24", "distill.max_steps=60", "rl.max_steps=8",
    "rl.warm_start.steps=12", "rl.warm_start.check_steps=0", "pretrain.evaluation.final_tokens=8192",
    "distill.evaluation.final_tokens=8192",
]  # fmt: skip
"""The default pipeline's models, precisions and batches, for fewer steps."""


@pytest.mark.parametrize(
    "stages", [pytest.param("pretrain", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.exhaustive)]
)
def test_the_time_of_the_default_stages(stages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place(tmp_path))
    fewer = ["stages=[pretrain]", "pretrain.max_steps=12"] if stages == "pretrain" else []
    config: PipelineConfig = compose_for(PIPELINE, [*TIMED, *fewer])
    taken: dict[Stage, float] = {}

    def timed(stage: Stage, run: Any, folder: Path) -> Any:
        started = time.process_time()
        ended = perform(stage, run, folder)
        taken[stage] = time.process_time() - started
        return ended

    run_pipeline(config, tmp_path / "runs" / "pipeline", timed)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=time.process_time))
    rate = timing.measured_rate(torch.device("cpu"), torch.float32)
    for stage in config.stages:
        run = getattr(config, stage)
        tokens = [part.tokens for part in parts_of(stage, run)]
        found = timing.times(run, 257, tokens, rate)
        assert None not in found
        planned = sum(seconds or 0.0 for seconds in found)
        assert 1 / FACTOR < taken[stage] / planned < FACTOR, (stage, found, taken)


def test_what_is_not_known_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the clock ends has that time; a model that takes too long for a moment is supposed at a share of a rate."""
    monkeypatch.chdir(tmp_path)
    config: PipelineConfig = compose_for(PIPELINE, ["pipeline=quick", "device=cpu", "rl.max_minutes=1"])
    assert timing.times(config.rl, 257, [100, None], 1e12)[1] == timing.AROUND + 60
    by_clock: PipelineConfig = compose_for(PIPELINE, ["pipeline=quick", "device=cpu", "pretrain.max_minutes=0.01"])
    assert timing.times(by_clock.pretrain, 257, [None], 1e12) == [timing.AROUND + 0.6]
    from_file: PipelineConfig = compose_for(PIPELINE, ["pipeline=quick", "device=cpu", "rl.task.path=problems.jsonl"])
    assert timing.times(from_file.rl, 257, [None, None], 1e12) == [None, None]
    [seconds] = timing.times(config.pretrain, 257, [1000], 1e3)
    [part] = parts_of(Stage.pretrain, config.pretrain)
    assert part.flops is not None and part.tokens is not None and seconds is not None
    a_token = part.flops / part.tokens / (timing.SHARE * 1e3)
    assert seconds == pytest.approx(timing.AROUND + (1000 + 4096 / 3) * a_token)
    assert "n/a" in describe(config)[5]


HOLDING = """
import sys
from pathlib import Path
from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import PIPELINE
from lowbit.trainer.run import Pretraining

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

run = Pretraining(compose_for(PIPELINE, sys.argv[1:]).pretrain, Path("run"))
make, before = run._make_model, []

def from_here():
    Path("/proc/self/clear_refs").write_text("5")  # the most that was held is counted from here
    before.append(status("VmRSS"))
    return make()

run._make_model = from_here
trainer = run.build()
for _ in range(3):
    trainer.train_step()
print(status("VmHWM") - before[0])
run.close()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [[], ["teacher=30m", "pretrain.batch.micro_batch=8", "pretrain.batch.sequences=8"]])
def test_memory_of_a_process(given: list[str], tmp_path: Path) -> None:
    """What training the teacher adds to a process that has its libraries and its documents, on a CPU."""
    settings = [*TIMED, *given]
    command = [sys.executable, "-c", HOLDING, *settings]
    done = subprocess.run(
        command, cwd=place(tmp_path), env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    config: PipelineConfig = compose_for(PIPELINE, settings)
    [part] = parts_of(Stage.pretrain, config.pretrain)
    assert ON_CPU * part.memory / 1.4 < int(done.stdout.split()[-1]) < ON_CPU * part.memory * 1.4


def test_memory_of_one_of_several_ranks() -> None:
    """As `lowbit plan --ranks` says of the stage's run; the disk is that of one process."""
    given = ["device=cpu", "engine=deepspeed", "engine.zero_stage=1"]
    one: PipelineConfig = compose_for(PIPELINE, given)
    four: PipelineConfig = compose_for(PIPELINE, [*given, "engine.processes=4", "pretrain.batch.micro_batch=1"])
    alone: PipelineConfig = compose_for(PIPELINE, [*given, "pretrain.batch.micro_batch=1"])
    [part], [single] = parts_of(Stage.pretrain, four.pretrain), parts_of(Stage.pretrain, alone.pretrain)
    planned = plan_run(four.pretrain, 512, compute_bytes=4, ranks=4)
    assert part.memory == planned.memory.total < single.memory and part.disk == single.disk
    for stage in (Stage.distill, Stage.rl):
        many, few = parts_of(stage, getattr(four, stage)), parts_of(stage, getattr(one, stage))
        assert many[-1].memory < few[-1].memory and many[-1].disk == few[-1].disk


@pytest.mark.slow
def test_a_plan_takes_the_models_that_are_named(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher's folder, and a student's, of other sizes than the settings would have."""
    monkeypatch.chdir(whole)
    begin = ["pipeline=quick", "device=cpu", "student.layers=3", "rl.init_from=runs/pipeline/pretrain"]
    config: PipelineConfig = compose_for(PIPELINE, begin)
    given = with_models_given(config.rl)
    assert isinstance(given, RlConfig)
    expected = load_config(whole / "runs/pipeline/pretrain/config.yaml").model
    assert given.model == expected != config.rl.model
    distill = compose_for(PIPELINE, ["pipeline=quick", "stages=[distill]", "distill.teacher.path=runs/pipeline/rl"])
    taught = with_models_given(distill.distill)
    assert isinstance(taught, DistillConfig)
    assert taught.teacher.model == load_config(whole / "runs/pipeline/rl/config.yaml").model
    with pytest.raises(CheckpointError, match=r"^distill: teacher.path=runs is neither"):
        describe(compose_for(PIPELINE, ["stages=[distill]", "distill.teacher.path=runs"]))


def test_work_as_pytorch_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage whose attention, which PyTorch does not count on a CPU, is a small part.

    The plan counts all rows of the head, 320 with the padding, of which 257 are multiplied.
    """
    monkeypatch.chdir(tmp_path)
    config: PipelineConfig = compose_for(PIPELINE, ["pipeline=quick", "device=cpu", "data.sequence_length=16"])
    [part] = parts_of(Stage.pretrain, config.pretrain)
    model = Transformer(config.pretrain.model, 257)
    model.init_weights(1)
    tokens = torch.randint(257, (8, 16))
    weights = torch.ones(tokens.numel())
    with FlopCounterMode(display=False) as counted:
        hidden = model(tokens).flatten(0, 1)
        lm_head_loss(hidden, model.head_weight, tokens.flatten(), weights, vocab_size=257).loss_sum.backward()
    assert part.tokens == 20 * 8 * 16
    padding = part.tokens * 6 * (320 - 257) * 64
    assert part.flops is not None and part.flops - padding == pytest.approx(20 * counted.get_total_flops(), rel=0.03)
