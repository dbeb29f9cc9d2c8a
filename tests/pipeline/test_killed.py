"""Killed, or interrupted, at every kind of place of a pipeline: it ends with the files of the one that was not.

Real processes, each ended by a signal at exactly one place (ending_itself.py), in one folder one after the other.
Oracle: the files that an uninterrupted pipeline left, all of them, compared byte for byte; of logs and records what is
not a time.
"""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest
from pipeline_runs import SETTINGS, lowbit, place

from lowbit.configs.schema_pipeline import Stage

SCRIPT = Path(__file__).with_name("ending_itself.py")
PLACES = {
    Stage.pretrain: [
        "begin:pretrain", "train:pretrain:1", "checkpoint:pretrain/checkpoints/step_00000004", "train:pretrain:4",
        "end:pretrain", "manifest:1",
    ],
    Stage.distill: [
        "begin:distill", "shard:1", "record:1", "cache", "train:distill:0",
        "checkpoint:distill/checkpoints/step_00000002", "train:distill:3", "end:distill", "manifest:2",
    ],
    Stage.rl: [
        "begin:rl", "train:rl/warm_start:1", "train:rl/warm_start:39", "train:rl:0", "train:rl:1",
        "checkpoint:rl/checkpoints/step_00000002", "train:rl:2", "end:rl", "manifest:3",
    ],
}  # fmt: skip
"""Where a process is ended, in the order in which they come."""
FEW = "train:pretrain:4", "record:1", "train:distill:3", "train:rl/warm_start:39", "train:rl:2"
"""Of them, those that every test run tries."""
TIMES = re.compile(r"seconds|per_second|mfu|memory_gib|time/|share/")
LOGS = ("run.log", ".hydra/", ".lock", "pipeline.json", "cache/stamps.json")
"""Words for people, and times: nothing is read from them that decides a result."""
TEXTS = (".json", ".yaml")
"""Files that name the folder in which all this is, which no two tests share."""


def without_times(value: Any) -> Any:
    """A record without what a clock said."""
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if not TIMES.search(key)}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def left(folder: Path) -> dict[str, Any]:
    """Everything in a pipeline's folder, by name: bytes, or what a record says apart from times.

    A checkpoint's own manifest has hashes of files that are compared themselves, and the number of the writing.
    """
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if not file.is_file() or any(log in name for log in LOGS):
            continue
        if file.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in file.read_text().splitlines()]
        elif file.name == "meta.json":
            found[name] = without_times(json.loads(file.read_text()))
        elif "checkpoints" in name and file.name == "manifest.json":
            found[name] = sorted(json.loads(file.read_text())["files"])
        else:
            content = file.read_bytes()
            found[name] = content.replace(str(folder.parents[1]).encode(), b"HERE") if file.suffix in TEXTS else content
    records = json.loads((folder / "pipeline.json").read_text())
    found["pipeline.json"] = without_times(records)
    return found


FINISHING = {
    "checkpoint:pretrain/checkpoints/step_00000004", "train:pretrain:4", "train:rl/warm_start:39",
    "checkpoint:rl/checkpoints/step_00000002", "train:rl:2",
}  # fmt: skip
"""Those in a run's last step, which Ctrl-C does not stop: see the other test."""
KILL, CONTROL_C = signal.SIGKILL, signal.SIGINT
ALL = pytest.mark.exhaustive


def ended(cwd: Path, number: int, where: str) -> subprocess.CompletedProcess[str]:
    """The pipeline, ended by a signal at a place."""
    return forked.run([str(SCRIPT), str(int(number)), where, "pipeline", *SETTINGS], cwd)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "few"),
    [(KILL, True), pytest.param(KILL, False, marks=ALL), pytest.param(CONTROL_C, False, marks=ALL)],
)
def test_ended_at_every_place_it_leaves_the_same_files(whole: Path, tmp_path: Path, number: int, few: bool) -> None:
    cwd = place(tmp_path)
    folder = cwd / "runs" / "pipeline"
    for where, stage in {where: s for s in Stage for where in PLACES[s] if where in FEW or not few}.items():
        if number == CONTROL_C and where in FINISHING:
            continue
        done = ended(cwd, number, where)
        assert done.returncode == (-KILL if number == KILL else 130), (where, done.stderr)
        records = json.loads((folder / "pipeline.json").read_text())["stages"]
        states = {name: record["state"] for name, record in records.items()}
        assert states.pop(stage) in ("running", "interrupted") and set(states.values()) <= {"done"}, (where, states)
    code, _, err = lowbit(cwd, "pipeline", *SETTINGS)
    assert code == 0, err
    once, again = left(whole / "runs" / "pipeline"), left(folder)
    assert len(once) > 30
    assert once.keys() <= again.keys(), once.keys() - again.keys()
    assert [name for name in once if once[name] != again[name]] == []
    more = {name.rpartition("/")[0] for name in again.keys() - once.keys()}
    assert not more or number == CONTROL_C, "a killed process leaves nothing of its own"
    assert more <= {"rl/warm_start/checkpoints/step_00000002"}, "a checkpoint of where it was interrupted"


@pytest.mark.slow
def test_control_c_in_a_runs_last_step_finishes_that_run_and_begins_no_other(whole: Path, tmp_path: Path) -> None:
    """The run has nothing left to be interrupted in; what would follow it, for hours perhaps, does not begin."""
    cwd = place(tmp_path)
    folder = cwd / "runs" / "pipeline"
    done = ended(cwd, CONTROL_C, "train:pretrain:4")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 130 and "interrupted by SIGINT when pretrain was done" in last, done.stderr
    assert "the same command goes on with distill" in last
    assert json.loads((folder / "pipeline.json").read_text())["stages"].keys() == {"pretrain"}
    done = ended(cwd, CONTROL_C, "train:rl/warm_start:39")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 130 and "interrupted in rl" in last and "rl/warm_start was done" in last, done.stderr
    assert not (folder / "rl" / "metrics.jsonl").exists()
    done = ended(cwd, CONTROL_C, "train:rl:2")
    assert done.returncode == 0 and re.search(r"\nstage +took", done.stdout), "nothing would follow"
    once, again = left(whole / "runs" / "pipeline"), left(folder)
    assert once.keys() == again.keys() and [name for name in once if once[name] != again[name]] == []
