"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard and Weights & Biases on request.

A row is a dictionary with at least `step`. In `metrics.jsonl` it becomes one line of strict JSON, handed to the system
at once, so that a killed run leaves whole lines. A run that resumes at step k drops the rows after k: they belong to a
future that is trained again, and curves would show it twice. One that begins at step 0 drops all, what it measured
before its first step included, because it measures that again.

The other two are conveniences and must never stop a training run: without a key or a network, W&B goes offline or
quiet with one warning. Only a package that is not installed is an error, at the start.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lowbit.configs.schema import LoggingConfig, WandbMode
from lowbit.errors import ConfigError
from lowbit.trainer.files import METRICS
from lowbit.trainer.jsonl import keep_rows_until, last_step, plain, to_line
from lowbit.trainer.wandb_log import Wandb


class Sink(Protocol):
    """One more place for rows."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Take a row."""
        ...

    def close(self) -> None:
        """Send or write what is left."""
        ...


class MetricsLog:
    """All sinks of a run in `run_dir`; `after_step` is the step it goes on from (0: a new run)."""

    def __init__(
        self, run_dir: Path, config: LoggingConfig, config_dict: Mapping[str, Any], *, after_step: int = 0
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        kept = after_step or -1  # one that begins measures its step 0 again
        if config.tensorboard:
            self._sinks.append(TensorBoard(run_dir / "tensorboard", kept))
        if config.wandb is not WandbMode.off:
            last = last_step(run_dir / METRICS)
            self._sinks.append(Wandb(run_dir, config, config_dict, after_step=kept, last_step=last))
        keep_rows_until(run_dir / METRICS, kept)
        self._file = (run_dir / METRICS).open("a", encoding="utf-8", buffering=1)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write one row; it needs an int `step`. Numbers may be Python's, numpy's or torch's."""
        if not isinstance(row.get("step"), int):
            raise ValueError(f"a row of metrics needs an int step: {row}")
        self._file.write(to_line(row))
        self._file.flush()
        for sink in self._sinks:
            sink.log(row)

    def close(self) -> None:
        """Finish all sinks; safe to call twice."""
        with suppress(OSError):  # a row that could not be written has been reported
            self._file.close()
        while self._sinks:
            self._sinks.pop().close()


class NoLog(MetricsLog):
    """Of the ranks that write nothing."""

    def __init__(self) -> None:
        pass

    def log(self, row: Mapping[str, Any]) -> None:
        """Ignore a row."""

    def close(self) -> None:
        """Nothing to finish."""


class TensorBoard:
    """Scalars in event files; on resume, TensorBoard hides what was written after `after_step`."""

    def __init__(self, folder: Path, after_step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ConfigError("logging.tensorboard needs a package: pip install 'lowbit[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write every number of a row."""
        for name, value in plain(row).items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()
