"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard and Weights & Biases on request.

A row is a dictionary with at least `step`. In `metrics.jsonl` it becomes one line of strict JSON, handed to the system
at once, so that a killed run leaves whole lines. A run that resumes at step k drops the rows after k: they belong to a
future that is trained again, and curves would show it twice.

The other two are conveniences and must never stop a training run: without a key or a network, W&B goes offline or
quiet with one warning. Only a package that is not installed is an error, at the start.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lowbit.configs.schema import LoggingConfig, WandbMode
from lowbit.errors import ConfigError
from lowbit.trainer.jsonl import keep_rows_until, plain, to_line

logger = logging.getLogger("lowbit")

FILE = "metrics.jsonl"
NETWORK_SECONDS = 20
"""Longest wait for W&B's server when a run starts, and when its last data are sent."""


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
        if config.tensorboard:
            self._sinks.append(TensorBoard(run_dir / "tensorboard", after_step))
        if config.wandb is not WandbMode.off:
            self._sinks.append(Wandb(run_dir, config, config_dict))
        keep_rows_until(run_dir / FILE, after_step)
        self._file = (run_dir / FILE).open("a", encoding="utf-8", buffering=1)

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
        purge = after_step + 1 if after_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write every number of a row."""
        for name, value in plain(row).items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run that keeps its id in the run's folder, so that a resumed run goes on in its curves."""

    def __init__(self, run_dir: Path, config: LoggingConfig, config_dict: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("logging.wandb needs a package: pip install wandb") from error
        self._wandb: Any = wandb
        self._run: Any = None
        options: dict[str, Any] = {
            "project": config.wandb_project,
            "name": run_dir.name,
            "id": _run_id(run_dir / "wandb_id"),
            "resume": "allow",
            "dir": str(run_dir),
            "config": plain(config_dict),
        }
        mode = config.wandb.value
        if mode == "online" and not self._has_key():
            logger.warning("wandb: no API key (wandb login): logging offline; upload later with `wandb sync`")
            mode = "offline"
        try:
            self._run = self._start(mode, options)
        except Exception as error:  # whatever it is, it must not stop a training run
            logger.warning("wandb: no connection (%s): logging offline; upload with `wandb sync`", _line(error))
            self._guarded(lambda: setattr(self, "_run", self._start("offline", options)))

    def _has_key(self) -> bool:
        """Whether credentials are there, found without asking on the terminal and without the network."""
        try:
            return bool(self._wandb.login(prompt=False))
        except TypeError:  # an older wandb, which always asks: look where it stores keys
            return self._wandb.api.api_key is not None
        except Exception:
            return False

    def _start(self, mode: str, options: dict[str, Any]) -> Any:
        wanted = {
            "init_timeout": NETWORK_SECONDS,
            "finish_timeout": NETWORK_SECONDS,
            "console": "off",
            "silent": True,
        }
        known = {name: value for name, value in wanted.items() if name in self._wandb.Settings.model_fields}
        run = self._wandb.init(mode=mode, settings=self._wandb.Settings(**known), **options)
        run.define_metric("*", step_metric="step")  # W&B's own step cannot go back when a run does
        if mode == "online":
            logger.info("wandb: %s", run.url)
        return run

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row; the first failure is reported and ends the sending."""
        if self._run is not None:
            self._guarded(lambda: self._run.log(plain(row)))

    def close(self) -> None:
        """Send what is left, for a limited time."""
        if self._run is not None:
            self._guarded(lambda: self._run.finish())
        self._run = None

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            logger.warning("wandb: %s: no more is logged there", _line(error))
            self._run = None


def _run_id(path: Path) -> str:
    """The run's id: the stored one, else a new one that is stored."""
    if path.is_file() and (stored := path.read_text(encoding="utf-8").strip()):
        return stored
    new = secrets.token_hex(4)
    path.write_text(new + "\n", encoding="utf-8")
    return new


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
