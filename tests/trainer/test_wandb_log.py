"""W&B: what it is sent, read back from its own files; and that nothing of it ever stops a run."""

import base64
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_runs import pretraining

from lowbit.configs.schema import LoggingConfig, WandbMode
from lowbit.errors import ConfigError
from lowbit.trainer import wandb_log
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.metrics import MetricsLog


def records(path: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB after a header) around protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, found, parts = 7, [], b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    """What was logged, row by row."""
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                keys = [item.key] if item.key else list(item.nested_key)
                value = json.loads(item.value_json)
                if len(keys) == 1:
                    row[keys[0]] = value
                else:
                    row.setdefault(keys[0], {})[keys[1]] = value
            rows.append(row)
    return rows


SCRIPT = """
import json, logging, sys
from pathlib import Path
from lowbit.configs.schema import LoggingConfig, WandbMode
from lowbit.trainer import wandb_log
from lowbit.trainer.metrics import MetricsLog
logging.getLogger("lowbit").addHandler(logging.StreamHandler())
logging.getLogger("lowbit").setLevel(logging.INFO)
wandb_log.NETWORK_SECONDS = 3
folder, mode, turns = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
for after, resume, rows in turns:
    log = MetricsLog(folder, LoggingConfig(wandb=WandbMode(mode)), {"seed": 1, "resume": resume}, after_step=after)
    for row in rows:
        log.log(row)
    log.close()
print("done")
"""


def logged(
    folder: Path, home: Path, mode: str, turns: list[Any], **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    clean |= {"HOME": str(home), "WANDB_BASE_URL": "http://127.0.0.1:9"} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), mode, json.dumps(turns)],
        env=clean, capture_output=True, text=True, timeout=150, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
    return done


def test_what_it_is_sent(tmp_path: Path) -> None:
    """A run, gone on with from its newest checkpoint, then sent back on purpose: real files, read back."""
    folder, rows = tmp_path / "run", pretraining(12)
    folder.mkdir()
    (folder / "precision.json").write_text("[]")
    again = [row | {"loss": -1.0} for row in rows]
    turns = [[0, "auto", rows[:11]], [9, "auto", again[9:12]], [3, "checkpoints/step_3", again[3:5]]]
    done = logged(folder, tmp_path, "offline", turns)
    assert "wandb: steps 10 to 11 are trained again" in done.stderr and "warning" not in done.stderr.lower()
    last_id = (folder / "wandb_id").read_text().strip()
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    one, two, three = map(records, files)
    ids = [next(r.run.run_id for r in found if r.WhichOneof("record_type") == "run") for found in (one, two, three)]
    assert ids[0] == ids[1] != ids[2] == last_id
    steps = [[(row["_step"], row["step"], row["loss"]) for row in history(found)] for found in (one, two, three)]
    assert steps[0] == [(r["step"], r["step"], r["loss"]) for r in rows[:11]]
    assert steps[1] == [(12, 12, -1.0)], "no step twice under one id"
    assert steps[2] == [(4, 4, -1.0), (5, 5, -1.0)]
    measured = history(one)[9]
    errors = [value for key, value in rows[9].items() if key.endswith("/weight/relative_mse")]
    found = measured["quant/weight/relative_mse/layers"]
    assert found["_type"] == "histogram" and sum(found["values"]) == len(errors) == 3
    assert found["bins"][0] == pytest.approx(min(errors)) and found["bins"][-1] == pytest.approx(max(errors))
    assert measured["quant/weight/relative_mse/mean"] == pytest.approx(sum(errors) / 3)
    assert sum(measured["experts/load/layers"]["values"]) == 6 and not any("blocks." in key for key in measured)
    artifacts = [r.artifact for r in one if r.WhichOneof("record_type") == "artifact"]
    named = {a.name: [Path(entry.local_path).name for entry in a.manifest.contents] for a in artifacts}
    assert named == {f"report-{ids[0]}": ["report.html"], f"precision-{ids[0]}": ["precision.json"]}
    for artifact in artifacts:
        for entry in artifact.manifest.contents:
            digest = hashlib.md5(Path(entry.local_path).read_bytes()).digest()
            assert base64.b64encode(digest).decode() == entry.digest, "what an upload will find is what was meant"
    assert (files[0].parent / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_run_that_begins_again_sends_no_step_twice(tmp_path: Path) -> None:
    """Stopped before its first checkpoint, it measures its step 0 again too, as `lowbit rl` does before it trains."""
    folder = tmp_path / "run"
    rows = [{"step": step, "loss": float(step)} for step in range(4)]
    done = logged(folder, tmp_path, "offline", [[0, "auto", rows[:3]], [0, "auto", rows]])
    assert "wandb: steps 0 to 2 are trained again" in done.stderr
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert [[row["step"] for row in history(records(file))] for file in files] == [[0, 1, 2], [3]]
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.parametrize("case", ["no key", pytest.param("no network", marks=pytest.mark.exhaustive)])
def test_it_never_stops_a_run(tmp_path: Path, case: str) -> None:
    """The real package in a process of its own: no key, and a server that refuses connections."""
    key = {"WANDB_API_KEY": "0" * 40} if case == "no network" else {}
    rows = pretraining(3)
    done = logged(tmp_path / "run", tmp_path, "online", [[0, "auto", rows[:2]], [1, "auto", rows[1:]]], **key)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("wandb: no")]
    assert len(warnings) == 2, done.stderr  # once a process start
    run_id = (tmp_path / "run" / "wandb_id").read_text().strip()
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert folders and all(run_id in folder.name for folder in folders)  # two in a second get a number behind it
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


FULL = """
import logging, resource, sys
from pathlib import Path
import wandb, wandb.sdk.wandb_init
from lowbit.configs.schema import LoggingConfig, WandbMode
from lowbit.trainer.wandb_log import Wandb
logging.getLogger("lowbit").addHandler(logging.StreamHandler())
folder = Path(sys.argv[1])
(folder / "wandb_id").write_text("abcdefgh")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
sink = Wandb(folder, LoggingConfig(wandb=WandbMode.offline), {})
logging.getLogger("wandb").error("cannot be written")
sink.log({"step": 1, "loss": 1.0})
sink.close()
print("done", flush=True)
"""


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """Its own log cannot be written from the start: our one line, and no traceback of its."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | {"HOME": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
    lines = done.stderr.splitlines()
    assert lines and all(line.startswith("wandb: ") for line in lines) and "Traceback" not in done.stderr, done.stderr


def test_a_failing_one_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        step = 0

        def log(self, row: dict[str, object], **options: object) -> None:
            raise ConnectionError("the server\nwent away")

    class Package:
        Histogram = list

    sink = wandb_log.Wandb.__new__(wandb_log.Wandb)
    sink._wandb, sink._run, sink._after, sink._last = Package, Failing(), 0, 0
    said: list[str] = []
    monkeypatch.setattr(wandb_log.logger, "warning", lambda text, *args: said.append(text % args))
    for _ in range(3):
        sink.log({"step": 1})
    sink.close()
    assert said == ["wandb: the server went away: no more is logged there"]


def test_layers_become_histograms() -> None:
    row = {
        "step": 1, "loss": 2.0, "attention_z/max": 9.0, "attention_z/max/blocks.0": 9.0,
        "attention_z/max/blocks.1": 3.0, "quant/blocks.0.mlp.up/input/amax": 1.0,
        "quant/blocks.1.mlp.up/input/amax": None, "list": [1, None], "none": [],
    }  # fmt: skip
    assert wandb_log.over_layers(row, tuple) == {
        "step": 1, "loss": 2.0, "attention_z/max": 9.0, "attention_z/max/layers": (9.0, 3.0),
        "attention_z/max/mean": 6.0,
        "quant/input/amax/layers": (1.0,), "quant/input/amax/mean": 1.0, "list": (1,),
    }  # fmt: skip


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        MetricsLog(tmp_path, LoggingConfig(wandb=WandbMode.offline), {})
