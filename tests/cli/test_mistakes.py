"""Mistakes on the command line: exit code 2, one line on standard error, nothing on disk."""

from pathlib import Path

import pytest
from processes import lowbit, together

from lowbit.cli.main import run

MISTAKES: list[tuple[list[str], list[str]]] = [
    (["pretrain", "max_stepz=3"], ["max_stepz=3", "nearest: max_steps"]),
    (["pretrain", "+optim.lrr=1"], ["optim.lrr=1", "nearest: optim.lr"]),
    (["pretrain", "steps=1"], ["steps=1", "nearest: max_steps"]),
    (["pretrain", "model=tyni"], ["model=tyni", "nearest: tiny"]),
    (["pretrain", "max_steps=abc"], ["max_steps=abc", "an integer"]),
    (["pretrain", "data=files"], ["data.sources.files.path", "no value"]),
    (["pretrain", "data=files", "data.sources.files.path=/nowhere"], ["path=/nowhere", "no such"]),
    (["pretrain", "model.heads=5"], ["model.width=192", "model.heads=5"]),
    (["pretrain", "deterministic=true"], ["max_minutes=null"]),
    (["pretrain", "seed=1,2"], ["seed=1,2", "-m"]),
    (["pretrain", "-m", "seed=1,2", "model=tiny,tyni"], ["job 1", "model=tyni", "nearest: tiny"]),
    (["pretrain", "-m", "seed=1,2", "model.heads=3,5"], ["job 1", "model.heads=5"]),
    (["pretrain", "--max-steps", "3"], ["--max-steps", "max_steps=value"]),
    (["pretrain", "--cfg", "everything"], ["--cfg"]),
    (["pretrain", "hydra.rn.dir=x"], ["hydra.rn.dir=x"]),
    (["pretrain", "precision=nvfp5"], ["precision=nvfp5", "nearest: nvfp4"]),
    (["pretrain", "precision.forward=nvfp5"], ["precision.forward=nvfp5", "nearest: nvfp4"]),
    (["pretrain", "precision.rules=[{match: '.*upp', policy: bf16}]"], ["rules.0.match=.*upp", "blocks.{0..3}"]),
    (["pretrain", "precision=mxfp8", "model.mlp_width=500"], ["blocks.0.mlp.gate", "out_features=500"]),
    (["plan", "precision.define.a.fprop.left=E2M1"], ["precision.define.a.fprop.left=E2M1", "BF16, MXFP8"]),
    (["plan", "max_stepz=3"], ["max_stepz=3", "nearest: max_steps"]),
    (["pretrain", "evalution.max_tokens=3"], ["nearest: evaluation.max_tokens"]),
    (["pretrain", "resume=~/x"], ["resume=~/x", "any of ~", "resume=\"'a, b'\""]),
    (["generate"], ["RUN", "lowbit generate --help"]),
    (["generate", "runs/x", "--max-tokens", "0"], ["--max-tokens"]),
    (["generate", "runs/x", "--colour"], ["--colour"]),
    (["pretrian"], ["pretrian", "lowbit --help"]),
]


@pytest.mark.parametrize(("arguments", "fragments"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line(
    arguments: list[str],
    fragments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lowbit: error: ") and err.count("\n") == 1 and "Traceback" not in err
    for fragment in fragments:
        assert fragment in err
    assert not list(tmp_path.iterdir())


def test_the_same_through_real_processes(tmp_path: Path) -> None:
    """The first, and one of a sweep, with all the imports of their own."""
    chosen = [MISTAKES[i] for i in (0, 10, 3, 5, 12, 16)]
    given = [a for a, _ in chosen]
    all_ended = [*together(given[:2], tmp_path, fresh=True), *together(given[2:], tmp_path)]
    for (arguments, fragments), ended in zip(chosen, all_ended, strict=True):
        assert ended.code == 2, arguments
        assert ended.out == "" and ended.err.startswith("lowbit: error: ") and ended.err.count("\n") == 1
        assert all(fragment in ended.err for fragment in fragments)
    assert not list(tmp_path.iterdir())


def test_several_processes_need_an_engine_for_them(tmp_path: Path) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    ended = lowbit(["pretrain"], tmp_path, environment=torchrun)
    assert ended.code == 2 and "(rank 1)" in ended.err and "engine=deepspeed would work" in ended.err
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_none(tmp_path: Path) -> None:
    for ended in together([["generate", "nowhere"], ["eval", "nowhere"]], tmp_path):
        assert ended.code == 1 and ended.err.startswith("lowbit: error: nowhere") and ended.err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "eval", "report"])
def test_a_misspelt_run_is_answered_with_the_nearest(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert run([command, "runs/frist"]) == 1
    assert capsys.readouterr().err.endswith("; nearest: runs/first\n")
    assert run([command, "runs/first"]) == 1
    assert "nearest" not in capsys.readouterr().err
