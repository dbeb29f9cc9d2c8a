"""Weights & Biases as one more place for a run's numbers: never in the way of training.

Without a key or a network the run is logged offline, in its own folder, with one warning; a failure later on ends the
logging there with one warning. The run keeps its id in `wandb_id`, so that a resumed run goes on in its curves:

- A run that goes on from its newest checkpoint trains the steps since then again. W&B cannot take back what it was
  sent (its own rewinding needs a server that allows it), and a curve that goes back in time is drawn twice; so these
  steps are not sent again, and keep the values of the first time. metrics.jsonl has those of the second.
- A run that is sent back on purpose (`resume=PATH`) is another history, and gets another id.

What is measured of each layer goes there as one histogram over the layers and their mean, under the metric's name
without the layer's: thousands of charts would help nobody. At the end the report's page and the table of precision
follow as artifacts.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowbit.configs.schema import LoggingConfig
from lowbit.errors import ConfigError
from lowbit.trainer.files import PRECISION
from lowbit.trainer.jsonl import plain

logger = logging.getLogger("lowbit")

NETWORK_SECONDS = 20
"""Longest wait for W&B's server when a run starts, and when its last data are sent."""
ID = "wandb_id"
_BLOCK = re.compile(r"(^|/)blocks\.\d+[^/]*")


class Wandb:
    """A W&B run, new or gone on with.

    `after_step`: the step that the run goes on from. `last_step`: the last that it had logged before; each -1 for none.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LoggingConfig,
        config_dict: Mapping[str, Any],
        *,
        after_step: int = -1,
        last_step: int = -1,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("logging.wandb needs a package: pip install wandb") from error
        self._wandb: Any = wandb
        self._run: Any = None
        self._run_dir = run_dir
        on_purpose = config_dict.get("resume", "auto") not in ("auto", "none") and last_step > after_step
        known = (run_dir / ID).is_file() and not on_purpose
        self._after, self._last = after_step, last_step if known else -1
        self.id = _run_id(run_dir / ID, anew=on_purpose)
        options: dict[str, Any] = {
            "project": config.wandb_project,
            "name": run_dir.name,
            "id": self.id,
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
        self._say_repeated()

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
        with _quiet():
            run = self._wandb.init(mode=mode, settings=self._wandb.Settings(**known), **options)
        run.define_metric("*", step_metric="step")
        if mode == "online":
            logger.info("wandb: %s", run.url)
            there = run.summary.get("step")  # what the server has is what counts
            self._last = int(there) if isinstance(there, (int, float)) else self._last
        return run

    def _say_repeated(self) -> None:
        if self._run is not None and self._last > self._after:
            logger.info(
                "wandb: steps %d to %d are trained again; its curves keep what they had, metrics.jsonl is new",
                self._after + 1,
                self._last,
            )

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row, unless its step was sent before; the first failure is reported and ends the sending."""
        if self._run is not None and not self._after < row["step"] <= self._last:
            self._guarded(lambda: self._send(row))

    def _send(self, row: Mapping[str, Any]) -> None:
        # W&B drops what is logged for a step that lies behind its own, as a last evaluation after a resume may do.
        step = max(row["step"], int(getattr(self._run, "step", 0)))
        self._run.log(over_layers(plain(row), self._wandb.Histogram), step=step, commit=True)

    def close(self) -> None:
        """Send the report and what is left, for a limited time."""
        if self._run is not None:
            self._guarded(self._send_artifacts, "its report is not sent", ends=False)
            self._guarded(lambda: self._run.finish())
        self._run = None

    def _send_artifacts(self) -> None:
        """The page about the run, and its precision: copies in W&B's own folder, which an upload later finds as now."""
        from lowbit.trainer.report import write_page

        folder = Path(self._run.dir).parent
        files = {"report": write_page([self._run_dir], folder / "report.html")}
        if (self._run_dir / PRECISION).is_file():
            files["precision"] = Path(shutil.copy(self._run_dir / PRECISION, folder))
        for kind, path in files.items():
            artifact = self._wandb.Artifact(f"{kind}-{self.id}", type=kind)
            artifact.add_file(str(path), policy="immutable")
            self._run.log_artifact(artifact)

    def _guarded(self, action: Callable[[], object], what: str = "no more is logged there", ends: bool = True) -> None:
        try:
            with _quiet():
                action()
        except Exception as error:
            logger.warning("wandb: %s: %s", _line(error), what)
            if ends:
                self._run = None


def over_layers(row: Mapping[str, Any], histogram: Callable[[list[float]], Any]) -> dict[str, Any]:
    """A row with, in place of metrics of single layers, `<metric>/layers`, a histogram, and `<metric>/mean`.

    `quant/blocks.3.mlp.up/weight/amax` is one layer's `quant/weight/amax`. Lists of numbers are histograms too.
    """
    kept: dict[str, Any] = {}
    grouped: dict[str, list[float]] = {}
    for key, value in row.items():
        values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, (int, float))]
        if _BLOCK.search(key):
            grouped.setdefault(_BLOCK.sub("", key), []).extend(values)
        elif isinstance(value, list):
            kept |= {key: histogram(values)} if values else {}
        else:
            kept[key] = value
    for key, values in grouped.items():
        if values:
            kept |= {f"{key}/layers": histogram(values), f"{key}/mean": sum(values) / len(values)}
    return kept


@contextmanager
def _quiet() -> Iterator[None]:
    """W&B writes logs of its own into the run's folder; when it cannot (a full disk), no traceback is printed."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before
        for handler in logging.getLogger("wandb").handlers:  # its threads may log at any time from now on
            handler.handleError = _ignore  # type: ignore[method-assign]


def _ignore(record: logging.LogRecord) -> None:
    pass


def _run_id(path: Path, anew: bool = False) -> str:
    """The run's id: the stored one, else a new one that is stored."""
    if not anew and path.is_file() and (stored := path.read_text(encoding="utf-8").strip()):
        return stored
    new = secrets.token_hex(4)
    path.write_text(new + "\n", encoding="utf-8")
    return new


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
