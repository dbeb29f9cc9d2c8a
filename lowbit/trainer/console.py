"""What a run shows: a progress bar on a terminal, plain `key value` lines anywhere else, and the same lines in run.log.

All text goes through Python's logger "lowbit". While a console is open it owns the screen: records of that logger are
shown once, above the bar, and handlers that others put on the terminal (Hydra's) leave them alone; handlers that
write files (Hydra's `run.log`) get everything. Steps are lines in the log too; on a terminal the bar shows them
instead. Only rank 0 opens one: with `enabled=False` it does nothing.
"""

import logging
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

import rich.console
from rich.progress import BarColumn, Progress, TextColumn

from lowbit.trainer.files import RUN_LOG
from lowbit.trainer.reader import discard

LOG_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"
"""Hydra's own, so that a log written by either reads the same."""
STEP_RECORD = "lowbit_step"
SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "kl": ("kl", "{:.4f}"),
    "kl_se": ("±", "{:.4f}"),
    "val_bpb": ("val_bpb", "{:.4f}"),
    "reward": ("reward", "{:.3f}"),
    "val_accuracy": ("held-out accuracy", "{:.1%}"),
    "tokens_per_second": ("tok/s", "{:,.0f}"),
    "mfu": ("mfu", "{:.1%}"),
    "grad_norm": ("grad_norm", "{:.3g}"),
    "lr": ("lr", "{:.3g}"),
}
"""Columns of the bar and of a line: key of the row -> label and format."""
MEASURED = ("val_bpb", "val_accuracy")
"""Those that an evaluation brings."""


class RunLog(logging.FileHandler):
    """run.log; one that cannot be written any more (a full disk) is said once, and never stops a run."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say it, where the library would print a traceback for each record."""
        if not self.failed:
            self.failed = True
            print(f"{self.baseFilename} cannot be written ({sys.exc_info()[1]})", file=sys.stderr)

    def close(self) -> None:
        """Close the file; what it still held is lost when it cannot be written."""
        with suppress(OSError):
            super().close()


class Console:
    """Shows a run's messages and progress; `run_dir` makes it write run.log itself where nothing else does."""

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        enabled: bool = True,
        every_seconds: float = 30.0,
        stream: TextIO | None = None,
    ) -> None:
        self._enabled = enabled
        self._every = every_seconds
        self._rich = _Terminal(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._logger = logging.getLogger("lowbit")
        self._level = self._logger.level
        self._handlers: list[logging.Handler] = []
        self._muted: list[logging.Handler] = []
        self._progress: Progress | None = None
        self._known: dict[str, Any] = {}
        self._eta = _Eta()
        self._last_line = -math.inf
        if enabled:
            self._take_screen(run_dir)

    def _take_screen(self, run_dir: Path | None) -> None:
        for handler in self._others():
            if type(handler) is logging.StreamHandler:
                handler.addFilter(_not_ours)
                self._muted.append(handler)
        if run_dir is not None and not any(_writes(handler, run_dir / RUN_LOG) for handler in self._others()):
            run_dir.mkdir(parents=True, exist_ok=True)
            file = RunLog(run_dir / RUN_LOG, encoding="utf-8")
            file.setFormatter(logging.Formatter(LOG_FORMAT))
            self._handlers.append(file)
        self._handlers.append(_Screen(self))
        for handler in self._handlers:
            self._logger.addHandler(handler)
        if not self._logger.isEnabledFor(logging.INFO):
            self._logger.setLevel(logging.INFO)

    def _others(self) -> list[logging.Handler]:
        """Handlers that get records of our logger and are not ours."""
        inherited = logging.getLogger().handlers if self._logger.propagate else []
        return [handler for handler in [*self._logger.handlers, *inherited] if handler not in self._handlers]

    @property
    def live(self) -> bool:
        """Whether a progress bar is drawn (a terminal that can) rather than lines."""
        return self._rich.is_terminal and not self._rich.is_dumb_terminal

    def step(self, row: Mapping[str, Any], progress: float) -> None:
        """Show a step's metrics; `progress` is the share of the run that is done, from 0 to 1.

        Values of rarer rows (validation, speed) stay in view until they are renewed. A line is written when a row
        brings a speed or a validation, else once in `every_seconds`.
        """
        if not self._enabled:
            return
        self._known |= {key: value for key, value in row.items() if value is not None}
        eta = self._eta.update(progress)
        if self.live:
            self._draw(progress, eta)
        now = time.monotonic()
        reading = any(key in row for key in (*MEASURED, "tokens_per_second"))
        if reading or now - self._last_line >= self._every:
            self._last_line = now
            shown = self._known if reading else row
            self._logger.info("%s", self._line(row, shown, progress, eta), extra={STEP_RECORD: True})

    def _line(self, row: Mapping[str, Any], values: Mapping[str, Any], progress: float, eta: str) -> str:
        keep = {key: value for key, value in values.items() if key not in MEASURED or key in row}
        parts = [f"{label} {text}" for label, text in _texts(keep)]
        return " ".join([f"step {row.get('step', '?')}", *parts, f"done {progress:.1%}", f"eta {eta}"])

    def _draw(self, progress: float, eta: str) -> None:
        if self._progress is None:
            columns = (TextColumn("step {task.fields[step]}"), BarColumn(24), TextColumn("{task.fields[text]}"))
            self._progress = Progress(*columns, console=self._rich, refresh_per_second=4, transient=True)
            self._progress.start()
            self._progress.add_task("run", total=1.0, step="", text="")
        text = "  ".join(f"{label} {value}" for label, value in _texts(self._known))
        task = self._progress.task_ids[0]
        step = self._known.get("step", "")
        self._progress.update(task, completed=progress, step=step, text=f"{progress:.0%}  {text}  eta {eta}")

    def show(self, record: logging.LogRecord, text: str) -> None:
        """Print a record of the logger above the bar; steps are in the bar already."""
        if self.live and getattr(record, STEP_RECORD, False):
            return
        style = (
            "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
        )
        try:
            self._rich.print(text, style=style, markup=False)
        except OSError as error:  # a file on a full disk
            self._rich.fall_silent(f"this run's output cannot be written ({error.strerror})")

    def close(self) -> None:
        """Take the bar away and give the screen back; safe to call twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()
        for handler in self._muted:
            handler.removeFilter(_not_ours)
        if self._handlers:
            self._logger.setLevel(self._level)
        self._handlers, self._muted = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Terminal(rich.console.Console):
    """Falls silent when its reader goes away (`lowbit pretrain ... | head`); the library would end the process."""

    def on_broken_pipe(self) -> None:
        """The run goes on; what it has to say is in run.log."""
        self.fall_silent("nobody reads this run's output any more")

    def fall_silent(self, why: str) -> None:
        """Write nothing from now on, and say in run.log why."""
        self.quiet = True
        discard(cast(TextIO, self.file))
        logging.getLogger("lowbit").warning("%s: it goes on, run.log has the rest", why)


class _Screen(logging.Handler):
    """Hands records to a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.show(record, self.format(record))
        except Exception:
            self.handleError(record)


class _Eta:
    """Time left at the pace since the first reading of this process, so that a resumed run is not counted twice."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def update(self, progress: float) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, progress)
        start, done = self._first
        if progress <= done:
            return "?"
        return duration((1 - progress) * (now - start) / (progress - done))


def duration(seconds: float) -> str:
    """Seconds for people: 42s, 3m05s, 2h07m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and formatted values of those columns that are there."""
    return [
        (label, form.format(values[key]))
        for key, (label, form) in SHOWN.items()
        if isinstance(values.get(key), (int, float))
    ]


def _not_ours(record: logging.LogRecord) -> bool:
    return record.name != "lowbit" and not record.name.startswith("lowbit.")


def _writes(handler: logging.Handler, path: Path) -> bool:
    return isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).resolve() == path.resolve()
