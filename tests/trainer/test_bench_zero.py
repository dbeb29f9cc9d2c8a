"""The benchmark of ZeRO refuses what it could not measure before anything has run."""

import sys
from pathlib import Path

import bench_zero
import pytest

from lowbit.errors import LowbitError


@pytest.mark.parametrize("arguments", [["--steps", "7"], ["--steps", "0"], ["--micro-batch", "0"]])
def test_steps_come_in_windows(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_zero.py", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        bench_zero.main()
    assert "--steps must be a multiple of 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--models", "nosuch"], "nosuch"), (["--comms", "foo"], "foo"), (["--stages", "0,5"], "zero_stage")],
)
def test_every_run_is_checked_before_the_first(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["bench_zero.py", str(tmp_path), "--models", "tiny", *arguments])
    with pytest.raises(LowbitError, match=told):
        bench_zero.main()
    assert list(tmp_path.iterdir()) == []
