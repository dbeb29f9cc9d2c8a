"""What runs leave in their folders, read whole: metrics as columns, settings, precision, samples, how each stands.

    metrics.jsonl    a half-written last line (a run still going, or killed) and damaged ones are skipped
    config.yaml      or rl.yaml, distill.yaml: everything that was set
    precision.json   what each layer got; of runs without one, what the newest checkpoint says of it
    samples.jsonl    generated texts
    lock             held by the process that has the folder, while there is one
    outcome.json     how a job of a sweep ended

A folder of a pipeline, of a sweep, or of anything else that holds runs stands for all of them. Only metrics have to be
there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.configs.nearest import nearest_path
from lowbit.configs.schema import RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import flatten, load_config
from lowbit.errors import ConfigError, LowbitError
from lowbit.trainer.files import CONFIG, METRICS, OUTCOME, PRECISION, SAMPLES
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.lock import held
from lowbit.trainer.report.columns import Column, Floats, read_columns
from lowbit.trainer.schedule import progress

KINDS: tuple[tuple[str, str, type[RunConfig]], ...] = (
    ("rl.yaml", "rl", RlConfig),
    ("distill.yaml", "distill", DistillConfig),
    (CONFIG, "pretrain", RunConfig),
)
"""Files that say what was set, the command that wrote them, and their class; the first that is there counts."""
PIPELINE = "pipeline.json"


@dataclass(frozen=True)
class Run:
    """What a run's folder says."""

    name: str
    folder: Path
    columns: Mapping[str, Column]
    """Key of the metrics -> its numbers, in the order of steps."""
    lists: Mapping[str, list[float]] = field(default_factory=dict)
    """Metrics that are lists (loads of experts): the last of each."""
    kind: str = "pretrain"
    """The command that made it: pretrain, distill or rl."""
    config: RunConfig | None = None
    precision: list[dict[str, Any]] = field(default_factory=list)
    """Reports of precision over time (`PolicyReport.as_dict`), each with `when`."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    """How a job of a sweep failed."""
    remarks: tuple[str, ...] = ()
    """What could not be read."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration, flat: dotted key -> value; empty when the folder has none."""
        return {} if self.config is None else flatten(asdict(self.config))

    @cached_property
    def changed(self) -> dict[str, Any]:
        """Those settings that are not their class's defaults."""
        if self.config is None:
            return {}
        defaults = flatten(asdict(type(self.config)()))
        return {key: value for key, value in self.settings.items() if defaults.get(key) != value}

    def values(self, key: str) -> Floats:
        """The numbers under `key`; those that are not finite are left out."""
        column = self.columns.get(key)
        return np.empty(0) if column is None else column.values[np.isfinite(column.values)]

    def last(self, key: str) -> float | None:
        """The latest number under `key`."""
        found = self.values(key)
        return float(found[-1]) if len(found) else None

    def curve(self, key: str, over: str = "tokens") -> tuple[Floats, Floats]:
        """(x, values) of the rows that have both."""
        x, y = self.columns.get(over), self.columns.get(key)
        if x is None or y is None:
            return np.empty(0), np.empty(0)
        if len(x.rows) == len(y.rows) and np.array_equal(x.rows, y.rows):
            at, values = x.values, y.values
        else:
            _, of_x, of_y = np.intersect1d(x.rows, y.rows, assume_unique=True, return_indices=True)
            at, values = x.values[of_x], y.values[of_y]
        good = np.isfinite(at) & np.isfinite(values)
        return at[good], values[good]

    @cached_property
    def progress(self) -> float | None:
        """The share of the run that is done; None where no configuration says when it ends."""
        if self.config is None or (step := self.last("step")) is None:
            return None
        try:
            return progress(self.config, int(step), int(self.last("tokens") or 0), self.last("seconds") or 0.0)
        except ConfigError:
            return None

    @cached_property
    def state(self) -> str:
        """finished, running, stopped or failed, and how far it came."""
        far = "" if self.progress is None else f" at {100 * self.progress:.0f}%"
        if self.error:
            return f"failed{far}"
        if self.progress is not None and self.progress >= 1:
            return "finished"
        if held(self.folder):
            return f"running{far}"
        return f"stopped{far}" if far else "unknown"


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs. A pipeline's stands for its stages, and one that holds runs or pipelines for those.

    Raises LowbitError for one without any.
    """
    if not paths:
        raise LowbitError("no run to report on: name one or more run folders")
    found: list[Path] = []
    for path in paths:
        inside = runs_in(path) or [run for child in sorted(path.glob("*"), key=_natural) for run in runs_in(child)]
        if not inside:
            if not path.exists():
                raise LowbitError(f"{path}: no such folder{nearest_path(str(path))}")
            raise LowbitError(f"{path} is not a run's folder: it has no {METRICS}, and no folder in it has one")
        found += inside
    return found


def runs_in(path: Path) -> list[Path]:
    """The run in a folder, or the stages of a pipeline, in their order, without those that it has put aside."""
    if (path / METRICS).is_file():
        return [path]
    manifest = _json(path / PIPELINE)
    stages = manifest.get("stages") if isinstance(manifest, dict) else None
    records = [record for record in stages.values() if isinstance(record, dict)] if isinstance(stages, dict) else []
    folders = [path / Path(str(record.get("folder"))).name for record in records]
    return [folder for folder in folders if (folder / METRICS).is_file()]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs' folders. LowbitError for one without metrics, or when none is given."""
    folders = find_runs(paths)
    return [read_run(path, name) for path, name in zip(folders, _short_names(folders), strict=True)]


def failed_jobs(paths: Sequence[Path]) -> list[str]:
    """Of the jobs of sweeps in these folders those that failed, each with its reason."""
    lines = []
    for path in paths:
        for file in sorted(path.glob(f"*/{OUTCOME}"), key=_natural):
            found = _json(file)
            if isinstance(found, dict) and found.get("exit_code"):
                settings = found.get("settings")
                words = " ".join(map(str, settings)) if isinstance(settings, list) else ""
                lines.append(f"job {found.get('job')} ({words}): {found.get('error')}")
    return lines


def read_run(folder: Path, name: str) -> Run:
    """Everything that a run's folder says."""
    columns = read_columns(folder / METRICS)
    kind, config, remarks = _config(folder)
    outcome = _json(folder / OUTCOME)
    failed = isinstance(outcome, dict) and outcome.get("exit_code")
    return Run(
        name,
        folder,
        columns.numbers,
        columns.lists,
        kind,
        config,
        _precision(folder),
        read_rows(folder / SAMPLES),
        str(outcome.get("error") or "failed") if failed else "",
        tuple(remarks),
    )


def _config(folder: Path) -> tuple[str, RunConfig | None, list[str]]:
    """The command, what was set, and what could not be read."""
    for file, kind, cls in KINDS:
        if (folder / file).is_file():
            try:
                return kind, load_config(folder / file, cls), []
            except ConfigError as error:
                return kind, None, [str(error)]
    return "pretrain", None, []


def _precision(folder: Path) -> list[dict[str, Any]]:
    found = _json(folder / PRECISION)
    if isinstance(found, list):
        return [report for report in found if isinstance(report, dict)]
    checkpoints = sorted((folder / "checkpoints").glob("step_*/meta.json"))
    meta = _json(checkpoints[-1]) if checkpoints else None
    try:
        report = meta["meta"]["precision"]["layers"]  # type: ignore[index]
        return [{"when": f"at step {meta['step']}"} | report]  # type: ignore[index]
    except (KeyError, TypeError):
        return []


def _json(path: Path) -> Any:
    """A JSON file; None where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _natural(path: Path) -> tuple[Any, ...]:
    """Order of paths in which job 10 comes after job 9."""
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in path.parts)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    parts = [path.resolve().parts for path in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in folders]
