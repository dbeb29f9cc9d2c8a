"""`-m` of the stages' commands and of the pipeline: a failed job is named, the others finish and are compared."""

import html
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
import yaml
from processes import Ended, lowbit

from lowbit.cli import sweep
from lowbit.cli.task import Task
from lowbit.errors import LowbitError

STUB = Path(__file__).parent / "stub_stages.py"


def stubbed(arguments: list[str], cwd: Path) -> Ended:
    done = forked.run([str(STUB), *arguments], cwd)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_sweeps_of_the_stages(tmp_path: Path) -> None:
    cases = {
        "distill": ["seed=13,1", "distill=quick"],
        "rl": ["seed=13,1", "rl=quick"],
        "pipeline": ["seed=13,1", "rl.algorithm=grpo,gspo", "pipeline=quick", "pretrain.max_steps=3"],
    }
    with ThreadPoolExecutor(2) as pool:
        ended = dict(zip(cases, pool.map(lambda c: stubbed([c[0], "-m", *c[1]], tmp_path), cases.items()), strict=True))
    for name in ("distill", "rl"):
        lines = ended[name].err.splitlines()
        assert ended[name].code == 1 and lines[0] == "lowbit: error: job 0 (seed=13): step 7: loss is nan", lines
        assert lines[-1].startswith("lowbit: error: 1 of 2 jobs failed: job 0 (seed=13); see")
        [sweep] = (tmp_path / "multirun" / name).iterdir()
        assert json.loads((sweep / "1" / "outcome.json").read_text())["exit_code"] == 0
    lines = ended["pipeline"].err.splitlines()
    assert lines[0] == "lowbit: error: job 0 (seed=13 rl.algorithm=grpo): step 7: loss is nan", lines
    assert "2 of 4 jobs failed: job 0 (seed=13 rl.algorithm=grpo), job 1 (seed=13 rl.algorithm=gspo)" in lines[-1]
    rows = [line.split()[0] for line in ended["pipeline"].out.splitlines() if line[:2] in ("2/", "3/")]
    assert rows == [f"{n}/{stage}" for n in (2, 3) for stage in ("pretrain", "distill", "rl")], "in their order"
    [sweep] = (tmp_path / "multirun" / "pipeline").iterdir()
    made = [yaml.safe_load((sweep / n / "whole.yaml").read_text()) for n in "23"]
    assert [tree["rl"]["algorithm"]["name"] for tree in made] == ["grpo", "gspo"]
    assert [tree["pretrain"]["max_steps"] for tree in made] == [3, 3]


@pytest.mark.parametrize("reports", [True, False])
def test_a_job_that_was_killed_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    reports: bool,
) -> None:
    """A launcher of other processes raises its own error for one that died; the others' results are kept.

    The job is named before the report, and whatever becomes of that; the launcher's own words come with it.
    """
    monkeypatch.chdir(tmp_path)

    def launched(work: object, arguments: list[str], task: Task) -> None:
        folder = Path(arguments[-1].partition("=")[2].strip("'"))
        for number in (0, 2):
            (folder / str(number)).mkdir(parents=True)
            (folder / str(number) / "outcome.json").write_text(
                json.dumps({"job": number, "settings": [f"seed={number}"], "exit_code": 0, "error": ""})
            )
        (folder / "1").mkdir()
        (folder / "1" / "outcome.json").write_text('{"job": 1, "settings": ["se')
        raise RuntimeError("a worker died\nof many lines")

    before: list[str] = []

    def shown(*_: object) -> None:
        before.append(capsys.readouterr().err)
        if not reports:
            raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "under_hydra", launched)
    monkeypatch.setattr(sweep, "_print_report", shown)
    said = r"1 of 3 jobs failed: job 1 \(seed=1\) without a word; RuntimeError: a worker died; see"
    with pytest.raises(LowbitError, match=said):
        sweep.run_sweep(["seed=0,1,2", "preset=quick"])
    assert before == ["lowbit: error: job 1 (seed=1) without a word\n"]
    [record] = [record for record in caplog.records if record.name == "lowbit"]
    assert record.exc_info and record.exc_info[1] is not None and "of many lines" in str(record.exc_info[1])


READS = [
    "data=files", "data.sources.files.path=corpus", "data.tokenizer.kind=bytes", "data.held_out=0.2",
    "data.pack_workers=2", "data.sequence_length=64",
]  # fmt: skip
REAL = {
    "pretrain": ["preset=quick", *READS, "max_steps=3", "evaluation.sample_tokens=0", "optim.lr=1e-3,1e30"],
    "distill": ["distill=quick", *READS, "teacher.max_steps=3", "max_steps=3", "optim.lr=1e-3,1e30"],
    "rl": ["rl=quick", "max_steps=2", "task.examine=8", "optim.lr=1e-3,1e30"],
    "pipeline": [
        "pipeline=quick", *READS, "pretrain.max_steps=3", "distill.max_steps=3", "rl.max_steps=1",
        "rl.warm_start.steps=90", "distill.optim.lr=1e-3,1e30",
    ],
}  # fmt: skip
"""Of each command, two jobs of seconds: the second one's steps are so large that its loss is no number."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", REAL)
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_launchers_that_start_processes(launcher: str, command: str, tmp_path: Path) -> None:
    """Where the extra is installed: real runs in its processes, which pack their documents in more of them."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    (tmp_path / "corpus").mkdir()
    for n in range(20):
        (tmp_path / "corpus" / f"{n}.txt").write_text(" ".join(map(str, range(n, 200))))
    ended = lowbit([command, *REAL[command], "device=cpu", "-m", f"hydra/launcher={launcher}"], tmp_path)
    key = REAL[command][-1].partition("=")[0]
    assert ended.code == 1 and f"1 of 2 jobs failed: job 1 ({key}=1e+30); see" in ended.err, ended.err
    [sweep] = (tmp_path / "multirun" / command).iterdir()
    assert json.loads((sweep / "0" / "outcome.json").read_text())["exit_code"] == 0
    failed = json.loads((sweep / "1" / "outcome.json").read_text())["error"]
    assert "loss" in failed and failed.startswith("distill: ") == (command == "pipeline")
    first = {line.split(" ")[0] for line in ended.out.splitlines()}
    assert ({"pretrain", "distill", "rl"} if command == "pipeline" else {"0"}) <= first, ended.out
    page = (sweep / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "1e+30" in page and html.escape(failed) in page
