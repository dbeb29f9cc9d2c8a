"""What appears on a terminal (a real pseudo-terminal), elsewhere, and in run.log."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowbit.trainer.console import Console, duration

ROW = {
    "step": 10,
    "tokens": 640,
    "loss": 3.21987,
    "lr": 0.003,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.6,
    "mfu": None,
}
logger = logging.getLogger("lowbit")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = (list(logger.handlers), logger.level, list(root.handlers))
    yield
    assert (logger.handlers, logger.level) == before[:2], "a closed console leaves nothing behind"
    root.handlers[:] = before[2]


def test_plain_lines_and_run_log_agree(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Console(tmp_path, stream=screen) as console:
        logger.info("packing %s [not markup]", "a file")
        console.step(ROW, 0.25)
        console.step({"step": 11, "loss": 3.1}, 0.275)  # too soon for a line
        console.step({"step": 20, "loss": 3.0, "lr": 0.003, "val_bpb": 1.98768, "val_bpb_bf16": 1.99}, 0.5)
        logger.warning("careful")
    lines = screen.getvalue().splitlines()
    assert lines[0] == "packing a file [not markup]"
    assert lines[1] == "step 10 loss 3.2199 tok/s 12,346 grad_norm 0.5 lr 0.003 done 25.0% eta ?"
    assert lines[2].startswith("step 20 loss 3.0000 val_bpb 1.9877 tok/s 12,346 ") and "eta 0s" in lines[2]
    assert lines[3:] == ["careful"]
    logged = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" - ", 1)[1] for line in logged] == lines
    assert all(re.match(r"\[\d{4}-.*\]\[lowbit\]\[(INFO|WARNING)\] - ", line) for line in logged)


def test_with_hydra_s_handlers_nothing_is_shown_or_written_twice(tmp_path: Path) -> None:
    """Hydra puts a terminal handler and a file handler for run.log on the root logger."""
    terminal, screen = io.StringIO(), io.StringIO()
    handlers = [logging.StreamHandler(terminal), logging.FileHandler(tmp_path / "run.log")]
    for handler in handlers:
        logging.getLogger().addHandler(handler)
    with Console(tmp_path, stream=screen) as console:
        logger.warning("once")
        console.step(ROW, 0.5)
        logging.getLogger("another").warning("theirs")
    logger.warning("after")
    handlers[1].close()
    assert screen.getvalue().splitlines()[0] == "once" and "theirs" not in screen.getvalue()
    assert terminal.getvalue() == "theirs\nafter\n"
    written = (tmp_path / "run.log").read_text()
    assert written.count("once") == 1 and written.count("step 10") == 1


def test_a_reader_that_goes_away_ends_the_output_and_not_the_run(tmp_path: Path) -> None:
    """`lowbit pretrain ... | head`: run.log has every step, and says what happened once."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as stream, Console(tmp_path, stream=stream) as console:
        for step in range(3):
            console.step({"step": step, "tokens_per_second": 1.0}, step / 3)
    log = (tmp_path / "run.log").read_text()
    assert [f"step {step} " in log for step in range(3)] == [True] * 3
    assert log.count("nobody reads") == 1


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Console(tmp_path, enabled=False, stream=screen) as console:
        console.step(ROW, 0.5)
        logger.info("nothing")
    assert screen.getvalue() == "" and list(tmp_path.iterdir()) == []


BAR = """
import logging, sys, time
from pathlib import Path
from lowbit.trainer.console import Console
with Console(Path(sys.argv[1])) as console:
    for step in range(1, 4):
        console.step({"step": step, "loss": 3.0 - step / 10, "lr": 1e-3, "tokens_per_second": 5000.0}, step / 4)
        time.sleep(0.3)
    logging.getLogger("lowbit").warning("a message above the bar")
    time.sleep(0.3)
"""


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    main, other = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", BAR, str(tmp_path)], stdin=other, stdout=other, stderr=other, env=environment
    )
    os.close(other)
    shown = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    assert process.wait() == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "loss 2.7000" in text and "tok/s 5,000" in text and "75%" in text and "eta" in text and "━" in text
    assert text.count("a message above the bar") == 1
    assert "done 75.0%" not in text, "steps are in the bar, not lines of their own"
    assert (tmp_path / "run.log").read_text().count("done 75.0%") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (7620, "2h07m"), (273600, "3d04h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_whose_output_lies_on_a_full_disk_falls_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `lowbit pretrain > FILE`: run.log says so, once, and has everything."""
    with Path("/dev/full").open("w") as full, Console(tmp_path, stream=full) as console:
        logger.info("one")
        console.step(ROW, progress=0.5)
        logger.info("two")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [any(text in line for line in lines) for text in ("one", "loss 3.2199", "two")] == [True] * 3
    assert sum("cannot be written (No space left on device): it goes on, run.log has the rest" in x for x in lines) == 1
    assert capsys.readouterr() == ("", "")
