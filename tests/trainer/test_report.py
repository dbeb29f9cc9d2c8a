"""Tables and pictures from what runs leave behind, damaged files included."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import pretraining, rollouts, write_run
from typer.testing import CliRunner

from lowbit.cli.report import report
from lowbit.configs.schema import OptimConfig, RunConfig
from lowbit.configs.schema_distill import DistillLossConfig, TeacherConfig
from lowbit.configs.stored import save_config
from lowbit.errors import ConfigError, LowbitError
from lowbit.trainer import report as reports
from lowbit.trainer.report import comparison_table, draw
from lowbit.trainer.report.compare import partial_settings


def _run(folder: Path, lr: float, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    save_config(
        RunConfig(run_name=folder.name, max_steps=3, optim=replace(OptimConfig(), lr=lr)), folder / "config.yaml"
    )
    rows = [
        {"step": 1, "tokens": 1000, "loss": 5.0, "tokens_per_second": 100.0, "seconds": 10.0, "lr": lr},
        {"step": 2, "tokens": 2000, "loss": None, "tokens_per_second": 500.0, "seconds": 60.0, "val_bpb": 2.0},
        {"step": 3, "tokens": 3000, "loss": 4.0, "tokens_per_second": 300.0, "seconds": 125.0, "val_bpb": 2.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def test_the_table(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", 1e-3), _run(tmp_path / "b", 3e-4, '{"step": 4, "loss": 1')]
    table = comparison_table(runs)
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == [
        "run",
        "steps",
        "tokens",
        "loss",
        "best",
        "val_bpb",
        "last",
        "val_bpb",
        "tokens/s",
        "time",
        "optim.lr",
    ]
    assert lines[1] == ["a", "3", "3,000", "4.0000", "2.0000", "2.5000", "300", "2m05s", "0.001"]
    assert lines[2] == ["b", "3", "3,000", "4.0000", "2.0000", "2.5000", "300", "2m05s", "0.0003"]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "x" / "0", 1e-3), _run(tmp_path / "y" / "0", 1e-3)]
    assert [line.split()[0] for line in comparison_table(runs).splitlines()[1:]] == ["x/0", "y/0"]
    assert len(comparison_table([runs[0], runs[0]]).splitlines()) == 3


def test_a_run_that_has_just_begun_and_one_without_configuration(tmp_path: Path) -> None:
    new, bare = tmp_path / "new", _run(tmp_path / "bare", 1e-3)
    new.mkdir()
    (new / "metrics.jsonl").write_text("\x00\n[1]\n")
    (bare / "config.yaml").unlink()
    lines = comparison_table([new, bare, _run(tmp_path / "c", 1.0)]).splitlines()
    assert lines[1].split() == ["new"] + ["-"] * 7
    draw([new, bare], tmp_path / "out.png")


def test_runs_of_different_commands(tmp_path: Path) -> None:
    """Only settings that both have are columns, not too many nor too long; the rest is counted."""
    runs = [
        write_run(tmp_path / "a", pretraining(3), seed=1, device="cpu", init_from="x" * 80),
        write_run(tmp_path / "b", rollouts(3), "rl", seed=2),
    ]
    table = comparison_table(runs).splitlines()
    header = table[0].split()
    assert {"reward", "val_bpb", "seed", "device"} - set(header) == {"val_bpb"} and not any(
        "rollout." in w for w in header
    )
    assert f"  {'x' * 31}…" in table[1] and re.fullmatch(r"\d+ more settings differ, .*", table[-1])
    assert len(table[0]) < 400


def test_a_sweep_of_pipelines_is_compared_stage_by_stage(tmp_path: Path) -> None:
    """What the sweep set is a column; that stages are of other commands, and begin in their own folders, is none."""
    stages = ("pretrain", "distill", "rl")
    for n, alpha in enumerate((0.5, 1.0)):
        job = tmp_path / str(n)
        write_run(job / "pretrain", pretraining(3))
        loss, teacher = DistillLossConfig(alpha=alpha), TeacherConfig(path=str(job / "pretrain"))
        write_run(job / "distill", pretraining(3), "distill", loss=loss, teacher=teacher)
        write_run(job / "rl", rollouts(3), "rl", init_from=str(job / "distill"))
        (job / "pipeline.json").write_text(json.dumps({"stages": {stage: {"folder": stage} for stage in stages}}))
    runs = reports.read_runs([tmp_path])
    assert [run.name for run in runs] == [f"{n}/{stage}" for n in (0, 1) for stage in stages]
    assert reports.differing_settings(runs) == ["loss.alpha"] and partial_settings(runs) == []
    table = comparison_table([tmp_path]).splitlines()
    assert len(table) == 7 and table[0].endswith("loss.alpha") and [line.split()[-1] for line in table[1:]] == [
        "-", "0.5", "-", "-", "1", "-",
    ]  # fmt: skip


def test_the_picture(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", 1e-3), _run(tmp_path / "b", 3e-4)]
    path = draw(runs, tmp_path / "deep" / "curves")
    assert path == tmp_path / "deep" / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    one = draw(runs[:1], tmp_path / "one.png").read_bytes()
    assert one != path.read_bytes()


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "a", 1e-3)
    with pytest.raises(LowbitError, match="no run"):
        comparison_table([])
    with pytest.raises(LowbitError, match=r"aa: no such folder; nearest: .*a$"):
        comparison_table([run, tmp_path / "aa"])
    (tmp_path / "none").mkdir()
    with pytest.raises(LowbitError, match=r"none is not a run's folder: it has no metrics\.jsonl"):
        comparison_table([run, tmp_path / "none"])
    with pytest.raises(LowbitError, match=r"curves\.nope"):
        draw([run], tmp_path / "curves.nope")
    with pytest.raises(LowbitError, match="cannot write"):
        draw([run], run / "metrics.jsonl" / "x.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'lowbit\[plot\]'"):
        draw([run], tmp_path / "x.png")
    assert reports.differing_settings(reports.read_runs([run])) == []


def test_the_command(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(report)
    runs = [str(_run(tmp_path / "a", 1e-3)), str(_run(tmp_path / "b", 3e-4))]
    result = CliRunner().invoke(app, [*runs, "--out", str(tmp_path / "c.png")])
    assert result.exit_code == 0, result.output
    assert "optim.lr" in result.output and "c.png" in result.output
    assert (tmp_path / "c.png").exists()
