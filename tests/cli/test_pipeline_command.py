"""`lowbit pipeline` as typed: mistakes are one line, exit code 2 and no folder; what is printed without running."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import lowbit, together

from lowbit.cli.main import run as main_run
from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import PIPELINE, groups
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.validate_pipeline import validate_pipeline
from lowbit.errors import ConfigError

REFUSED = [
    (["stages=[pretraim]"], "stages.0=pretraim: expected one of pretrain, distill, rl; nearest: pretrain"),
    (["stages=[rl,pretrain]"], "in the order pretrain, distill, rl; stages=[pretrain,rl] would work"),
    (["stages=[rl,rl]"], "each stage once"),
    (["stages=[]"], "stages=[pretrain,distill,rl] would work"),
    (["stages=rl"], "expected a list"),
    (["changed=delete"], "expected one of refuse, anew"),
    (["max_steps=4"], "nearest: pretrain.max_steps"),
    (["model=tiny"], "lowbit pipeline takes teacher=tiny and student=tiny"),
    (["preset=gpu"], "lowbit pipeline takes pipeline=cpu or gpu or quick"),
    (["pretrian.max_steps=3"], "nearest: pretrain"),
    (["pretrain=quick"], "got text"),
    (["pretrain.optim.lr=fast"], "pretrain.optim.lr=fast: expected a number"),
    (["rl.task=adding"], "rl.task takes one of add"),
    (["pretrain.batch.sequences=7"], "pretrain: batch.sequences=7 batch.micro_batch=4: a step must be whole"),
    (["rl.rollout.temperature=0"], "rl: rollout.temperature=0.0: greedy answers are all the same"),
    (["distill.cache.targets=0"], "distill: cache.targets=0: must be at least 1"),
    (["pretrain.model.layers=3"], "pretrain.model.layers: a pipeline has two models"),
    (["rl.model=30m"], "rl.model: a pipeline has two models: set teacher (pretrained) and student"),
    (["rl.data.tokenizer.kind=bytes"], "all stages have one tokenizer: set data.tokenizer"),
    (["pretrain.init_from=x"], "pretrain.init_from: a stage goes on by itself"),
    (["distill.teacher.max_steps=3"], "set pretrain.max_steps"),
    (["distill.cache.path=x"], "distill.cache.path: the cache lies in the stage's folder"),
    (["distill.run_name=x"], "set run_name"),
    (["rl.init_from=nowhere"], "rl: init_from=nowhere: no such folder"),
    (["distill.teacher.path=nowhere"], "distill: teacher.path=nowhere: no such folder"),
    (["deterministic=true", "rl.max_minutes=3"], "rl: deterministic=true max_minutes=3.0: a run that ends"),
    (["engine.processes=2"], "pretrain: engine.processes=2 engine.kind=local: it is one process"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_what_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_pipeline(compose_for(PIPELINE, overrides))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("choice", groups(PIPELINE)["pipeline"])
def test_every_preset_composes(choice: str) -> None:
    validate_pipeline(compose_for(PIPELINE, [f"pipeline={choice}"]))


def test_what_stages_share_and_what_they_have_of_their_own() -> None:
    given = [
        "pipeline=gpu", "seed=7", "precision=nvfp4", "precision.sampler=mxfp8", "data.tokenizer.kind=bytes",
        "data.sequence_length=96", "teacher=tiny", "student=quick", "student.layers=3", "pretrain.precision=bf16",
        "distill.precision.dgrad=bf16", "rl.data.sequence_length=48", "rl.algorithm=gspo", "rl.algorithm.kl=0.1",
        "distill.seed=8", "pretrain.max_minutes=2",
    ]  # fmt: skip
    config: PipelineConfig = compose_for(PIPELINE, given)
    pretrain, distill, rl = config.pretrain, config.distill, config.rl
    assert (pretrain.seed, distill.seed, rl.seed) == (7, 8, 7)
    assert (pretrain.model.name, distill.model.name, distill.model.layers, rl.model.layers) == ("tiny", "quick", 3, 3)
    assert (pretrain.data.sequence_length, distill.data.sequence_length, rl.data.sequence_length) == (96, 96, 48)
    assert pretrain.data.sources == distill.data.sources and not rl.data.sources
    assert pretrain.data.tokenizer == distill.data.tokenizer == rl.data.tokenizer
    assert (pretrain.max_steps, pretrain.max_minutes, distill.max_steps) == (None, 2.0, 2000)
    assert (pretrain.precision.name, pretrain.precision.forward, pretrain.precision.sampler) == ("bf16", "bf16", None)
    assert (distill.precision.forward, distill.precision.dgrad) == ("nvfp4", "bf16")
    assert (rl.precision.forward, rl.precision.sampler, rl.precision.dgrad) == ("nvfp4", "mxfp8", None)
    assert (rl.algorithm.name, rl.algorithm.kl) == ("gspo", 0.1)
    assert [getattr(config, stage).run_name for stage in Stage] == [f"pipeline/{stage}" for stage in Stage]
    leg: PipelineConfig = compose_for(PIPELINE, ["precision=nvfp4_leg"])
    assert leg.distill.precision.switch and not leg.rl.precision.switch, "a schedule of pretraining"
    for chosen in ("rl.precision=nvfp4_leg", "rl.precision.switch=[{at: 0.5, forward: bf16, backward: bf16}]"):
        own: PipelineConfig = compose_for(PIPELINE, [chosen])
        assert not own.rl.precision.switch, chosen


@pytest.mark.slow
def test_what_is_printed_and_nothing_left(tmp_path: Path) -> None:
    small = ["pipeline=quick", "device=cpu"]
    plan, swept, resolved, wrong = together(
        [
            ["pipeline", *small, "--plan", "rl.max_minutes=1"],
            ["pipeline", *small, "--plan", "-m", "teacher.layers=1,2"],
            ["pipeline", *small, "--cfg", "resolved"],
            ["pipeline", *small, "rl.precision.sampler=fp8_tensor"],
        ],
        tmp_path,
    )
    assert plan.code == 0, plan.err
    rows = {line[:26].strip(): line[26:].split() for line in plan.out.splitlines()}
    # 20 steps of 8 sequences of 64; parameters by hand: two blocks of width 64, MLP 128, a vocabulary of 257 (320 rows)
    assert rows["pretrain"][0] == rows["distill: student"][0] == rows["distill: teacher's cache"][0] == "10,240"
    work = 10240 * (6 * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 320 * 64) + 6 * 2 * 64 * 64)
    assert float(rows["pretrain"][1]) == pytest.approx(work, rel=0.01)
    assert float(rows["distill: teacher's cache"][1]) == pytest.approx(work / 3, rel=0.01)
    assert rows["rl: rollouts and training"][:2] == ["n/a", "n/a"] and rows["all"][0] == "n/a"
    assert "measured just now" in plan.out and "within a factor of 2" in plan.out
    assert swept.code == 0 and [line.split(":")[0] for line in swept.out.splitlines() if line[:4] == "job "] == [
        "job 0", "job 1",
    ]  # fmt: skip
    assert resolved.code == 0 and "warm_start:" in resolved.out and "sampler: nvfp4_w4a16" in resolved.out
    assert wrong.code == 2 and "batch mates" in wrong.err and wrong.err.count("\n") == 1
    launched = lowbit(
        ["pipeline", *small], tmp_path, environment={"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}
    )  # fmt: skip
    assert launched.code == 2 and "set engine.processes" in launched.err, launched.err
    assert not list(tmp_path.iterdir())


def test_a_mistake_does_not_wait_for_pytorch(tmp_path: Path) -> None:
    script = """
import sys
from lowbit.cli.main import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
print(code, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "pipeline", "rl.rollout.temperature=0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "rl: rollout.temperature=0.0" in done.stderr and done.stdout.split() == ["2", "False"], done


def test_a_rank_of_a_stage_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_run(["stage", "pretraim", "stage.yaml", "there"]) == 2
    assert capsys.readouterr().err == "lowbit: error: stage pretraim: expected one of pretrain, distill, rl\n"
