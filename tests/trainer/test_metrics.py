"""Rows that survive kills and resumptions, and sinks that never stop a run."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit.configs.schema import LoggingConfig
from lowbit.errors import ConfigError
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.metrics import MetricsLog

PLAIN = LoggingConfig()


def _strict(path: Path) -> list[dict[str, object]]:
    """Every line as strict JSON; NaN and the like are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_rows_are_strict_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, PLAIN, {})
    log.log({"step": 1, "loss": torch.tensor(1.5), "norm": np.float32(2), "bad": math.nan, "worse": [math.inf, 1]})
    log.log({"step": 2, "tokens": np.int64(7), "note": "né", "flag": True, "none": None, "nan": torch.tensor(math.nan)})
    rows = _strict(tmp_path / "metrics.jsonl")  # before close: each row is out at once
    assert rows == [
        {"step": 1, "loss": 1.5, "norm": 2.0, "bad": None, "worse": [None, 1]},
        {"step": 2, "tokens": 7, "note": "né", "flag": True, "none": None, "nan": None},
    ]
    log.close()
    log.close()


@pytest.mark.parametrize("row", [{}, {"step": 1.0}, {"step": None}])
def test_a_row_needs_its_step(tmp_path: Path, row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="step"):
        MetricsLog(tmp_path, PLAIN, {}).log(row)


def test_a_resumed_run_drops_the_abandoned_future_and_damage(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, PLAIN, {})
    for step in range(1, 8):
        log.log({"step": step, "loss": 1.0})
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "lo')
    log = MetricsLog(tmp_path, PLAIN, {}, after_step=5)
    log.log({"step": 6, "loss": 2.0})
    log.close()
    assert [(row["step"], row["loss"]) for row in _strict(path)] == [(k, 1.0) for k in range(1, 6)] + [(6, 2.0)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    log = MetricsLog(tmp_path, PLAIN, {})  # a new run: nothing stays, not what was measured before the first step
    assert path.read_text() == ""
    log.log({"step": 0, "val_accuracy": 0.5})
    log.close()
    MetricsLog(tmp_path, PLAIN, {}, after_step=1).close()
    assert [row["step"] for row in _strict(path)] == [0]
    MetricsLog(tmp_path, PLAIN, {}).close()
    assert path.read_text() == ""


WRITER = """
import sys
from pathlib import Path
from lowbit.configs.schema import LoggingConfig
from lowbit.trainer.metrics import MetricsLog
log = MetricsLog(Path(sys.argv[1]), LoggingConfig(), {})
for step in range(10**9):
    log.log({"step": step, "text": "x" * 3000})
    if step == 50:
        print("going", flush=True)
"""


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert len(rows) >= len(lines) - 1 > 50
    assert [row["step"] for row in rows] == list(range(len(rows)))


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after, steps in ((0, (0, 1)), (0, (0, 1, 2, 3)), (2, (3, 4))):  # the second begins again
        log = MetricsLog(tmp_path, LoggingConfig(tensorboard=True), {}, after_step=after)
        for step in steps:
            log.log({"step": step, "loss": step + len(steps) / 10, "name": "text", "gone": math.nan})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("loss")] == [
        (0, 0.4),
        (1, 1.4),
        (2, 2.4),
        (3, 3.2),
        (4, 4.2),
    ]


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match=r"pip install 'lowbit\[tensorboard\]'"):
        MetricsLog(tmp_path, LoggingConfig(tensorboard=True), {})
