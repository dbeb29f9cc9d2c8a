"""One run and sweeps under real Hydra, with a trainer that only ends as its seed says (stub_main.py).

Seeds: 13 raises a LowbitError, 14 a bug, 15 Interrupted after saving, 16 KeyboardInterrupt; 17 ends well
though a signal came in its last step; others end well.
"""

import json
from pathlib import Path

import yaml
from processes import lowbit, together

from lowbit.configs.compose import compose
from lowbit.configs.stored import load_config


def files(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


HYDRA = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"}


def test_one_run(tmp_path: Path) -> None:
    ended = lowbit(["pretrain", "+optim.lr=1e-3", "run_name=first", "seed=3"], tmp_path, stub=True)
    assert (ended.code, ended.out, ended.err) == (0, "training with seed 3\n", "")
    run = tmp_path / "runs" / "first"
    assert files(tmp_path) == {f"runs/first/{f}" for f in HYDRA | {"config.yaml", "run.log"}}
    assert load_config(run / "config.yaml") == compose(["optim.lr=1e-3", "run_name=first", "seed=3"])
    assert yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text()) == [
        "optim.lr=1e-3",
        "run_name=first",
        "seed=3",
    ]
    log = (run / "run.log").read_text()
    assert "[lowbit][INFO] - training with seed 3" in log and "[other.library][WARNING] - chatter" in log


def test_a_limit_in_place_of_the_presets_is_said(tmp_path: Path) -> None:
    """On the console and in run.log; each job of a sweep says its own."""
    said = f"takes the place of the preset's max_steps={compose([]).max_steps}; give both to have whichever comes first"
    one = lowbit(["pretrain", "max_minutes=2", "run_name=first"], tmp_path, stub=True)
    assert (one.code, one.out) == (0, f"max_minutes=2 {said}\ntraining with seed 1\n"), one.err
    assert f"max_minutes=2 {said}" in (tmp_path / "runs" / "first" / "run.log").read_text()
    swept = lowbit(["pretrain", "max_minutes=2,3", "-m"], tmp_path, stub=True)
    assert swept.code == 0 and [line for line in swept.out.splitlines() if said in line] == [
        f"max_minutes=2 {said}",
        f"max_minutes=3 {said}",
    ], swept.err


def test_how_runs_end(tmp_path: Path) -> None:
    cases = [["pretrain", f"seed={seed}", f"hydra.run.dir=r{seed}"] for seed in (13, 14, 15, 16)]
    failed, bug, saved, killed = together(cases, tmp_path, stub=True)
    assert (failed.code, failed.err) == (1, "lowbit: error: step 7: loss is nan\n")
    assert "step 7: loss is nan" in (tmp_path / "r13" / "run.log").read_text()
    assert bug.code == 1 and "Traceback" in bug.err and bug.err.rstrip().endswith("ZeroDivisionError: a bug")
    assert "ZeroDivisionError: a bug" in (tmp_path / "r14" / "run.log").read_text()
    assert (saved.code, saved.err) == (130, "lowbit: SIGTERM: saved at step 3; the same command goes on from there\n")
    assert killed.code == 130 and killed.err.startswith("lowbit: interrupted") and killed.err.count("\n") == 1


def test_a_sweep_goes_on_after_failures(tmp_path: Path) -> None:
    ended = lowbit(["pretrain", "-m", "seed=1,13,14", "optim.lr=1e-3,3e-4", "max_steps=2"], tmp_path, stub=True)
    assert ended.code == 1
    [sweep] = (tmp_path / "multirun" / "pretrain").iterdir()
    assert (sweep / "multirun.yaml").is_file()
    job_files = HYDRA | {"config.yaml", "run.log", "outcome.json"}
    assert {f.name for f in sweep.iterdir() if f.is_dir()} == set("012345")
    assert all(files(sweep / job) == job_files for job in "012345")
    lines = ended.err.splitlines()
    assert lines[0] == "lowbit: error: job 2 (seed=13 optim.lr=0.001): step 7: loss is nan"
    assert lines[-1].startswith("lowbit: error: 4 of 6 jobs failed: job 2 (seed=13 optim.lr=0.001), job 3 (seed=13")
    assert "ZeroDivisionError: a bug" in ended.err
    assert ended.out.splitlines()[-1] == "table: 0 1"
    seeds = [load_config(sweep / job / "config.yaml").seed for job in "012345"]
    assert seeds == [1, 1, 13, 13, 14, 14]
    outcome = json.loads((sweep / "5" / "outcome.json").read_text())
    assert outcome == {"job": 5, "settings": ["seed=14", "optim.lr=0.0003"], "exit_code": 1, "error": "a bug"}


def test_a_sweep_that_works_and_one_that_is_interrupted(tmp_path: Path) -> None:
    works = ["pretrain", "model=tiny,30m", "--multirun", "hydra.sweep.dir='it''s here'".replace("''", "\\'")]
    signal = ["pretrain", "-m", "seed=1,15,2", "hydra.sweep.dir=signal"]
    control_c = ["pretrain", "-m", "seed=16,2", "hydra.sweep.dir=control_c"]
    late = ["pretrain", "-m", "seed=17,2", "hydra.sweep.dir=late"]
    good, saved, killed, finished = together([works, signal, control_c, late], tmp_path, stub=True)
    assert (good.code, good.err) == (0, "") and good.out.splitlines()[-1] == "table: 0 1"
    assert load_config(tmp_path / "it's here" / "1" / "config.yaml").model.name == "30m"
    assert saved.code == 130 and not (tmp_path / "signal" / "2").exists()
    assert saved.err.splitlines()[-1].startswith("lowbit: the sweep was interrupted: 1 of 3 jobs are done")
    assert "error" not in saved.err + killed.err
    assert "[ERROR]" not in (tmp_path / "signal" / "1" / "run.log").read_text()
    assert saved.err.endswith("; the same command with hydra.sweep.dir=signal goes on\n")
    assert killed.code == 130 and not (tmp_path / "control_c" / "1").exists()
    assert json.loads((tmp_path / "control_c" / "0" / "outcome.json").read_text())["exit_code"] == 130
    assert finished.code == 130 and not (tmp_path / "late" / "1").exists(), "no job follows"
    assert json.loads((tmp_path / "late" / "0" / "outcome.json").read_text())["exit_code"] == 0
    assert "the sweep was interrupted: 1 of 2 jobs are done" in finished.err


def test_printing_the_configuration(tmp_path: Path) -> None:
    cases = [
        ["pretrain", "seed=5", "--cfg", "resolved"],
        ["pretrain", "seed=5", "run_name=run${seed}", "--cfg", "job"],
        ["pretrain", "seed=5,6", "-m", "--cfg", "resolved"],
    ]
    resolved, job, sweep = together(cases, tmp_path)
    (tmp_path / "config.yaml").write_text(resolved.out)
    assert load_config(tmp_path / "config.yaml") == compose(["seed=5"])
    assert yaml.safe_load(job.out)["run_name"] == "run${seed}"
    assert [d["seed"] for d in yaml.safe_load_all(sweep.out)] == [5, 6]
    assert {e.code for e in (resolved, job, sweep)} == {0}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    ended = lowbit(["pretrain"], tmp_path, stub=True)
    assert ended.code == 1 and "cannot be written" in ended.err and ended.err.count("\n") == 1
