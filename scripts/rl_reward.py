"""What RL in two precisions reaches: runs, the file that several calls fill, its table and its picture."""

import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import Row, print_table, write
from rl_sides import own_start, plain_start, with_sides

from lowbit.configs.schema_rl import Correction, RlConfig
from lowbit.errors import ConfigError
from lowbit.rl.run import train
from lowbit.trainer.hardware import device_name, pick_device
from lowbit.trainer.jsonl import read_rows

KEY = ("pair", "correction", "seed")
"""What tells a run of one file from the others."""


@dataclass(frozen=True)
class Wanted:
    """Which runs a call makes, unless the file has them."""

    pairs: Sequence[str]
    """SAMPLER/TRAINER, or a preset of `precision`."""
    corrections: Sequence[str]
    seeds: Sequence[int]
    own: bool = False
    """Each run begins with a supervised start of its own seed and precision."""


class Results:
    """The runs in a JSON file; each is there as soon as it has ended.

    Raises: ConfigError where the file's runs had other settings.
    """

    def __init__(self, path: Path, settings: Sequence[str]) -> None:
        self.path, self.settings = path, sorted(settings)
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.runs: list[Row] = found.get("runs", [])
        if self.runs and found["settings"] != self.settings:
            raise ConfigError(f"{path} has runs with {' '.join(found['settings'])}: give the same, or another folder")

    def has(self, *key: Any) -> bool:
        """Whether a run is there: pair, correction, seed."""
        return any(tuple(run[name] for name in KEY) == key for run in self.runs)

    def add(self, run: Row, device: str, model: str) -> None:
        """Keep a run."""
        self.runs.append(run)
        write(self.path, {"settings": self.settings, "runs": self.runs, "device": device, "model": model})


def fill(results: Results, config: RlConfig, overrides: Sequence[str], out: Path, wanted: Wanted) -> None:
    """Make the runs that are not there yet, pair by pair of a seed, so that what is compared comes together."""
    device = device_name(pick_device(config.device))
    for seed in wanted.seeds:
        for pair in wanted.pairs:
            for correction in wanted.corrections:
                if not results.has(pair, correction, seed):
                    here = with_sides(replace(config, seed=seed), overrides, pair)
                    run = one_run(here, config.seed, out, pair, Correction(correction), wanted.own)
                    results.add(run, device, config.model.name)


def one_run(config: RlConfig, start_seed: int, out: Path, pair: str, correction: Correction, own: bool) -> Row:
    """What `config` reaches from the start that it is to have; a run that has ended already is only read."""
    began = time.perf_counter()
    begun = own_start(config, out, pair) if own else plain_start(replace(config, seed=start_seed), out)
    begun = replace(begun, seed=config.seed, algorithm=replace(config.algorithm, correction=correction))
    folder = out / f"{pair.replace('/', '-')}-{correction.value}-{config.seed}"
    train(begun, folder)
    key = dict(zip(KEY, (pair, correction.value, config.seed), strict=True))
    start = {"start": _digest(Path(begun.init_from)), "start_steps": _steps_of(Path(begun.init_from))}
    return key | start | outcome(folder) | {"wall_seconds": time.perf_counter() - began}


def outcome(folder: Path) -> Row:
    """What a run reached: means of its last fifth, and what its held-out answers were like before and after.

    Its seconds are those of the steps after the first logged one, in which a GPU's code is compiled.
    """
    every = read_rows(folder / "metrics.jsonl")
    rows = [row for row in every if row["step"]]
    last = [row["reward"] for row in rows[-max(1, len(rows) // 5) :]]
    accuracies = [row["val_accuracy"] for row in every if "val_accuracy" in row]
    return {
        "reward": statistics.fmean(last),
        "accuracy": accuracies[-1],
        "first_accuracy": accuracies[0],
        "k3_kl": statistics.fmean(row["mismatch/k3_kl"] for row in rows),
        "steps": rows[-1]["step"],
        "seconds": rows[-1]["seconds"] - rows[0]["seconds"],
        "curve": [[row["step"], row["reward"]] for row in rows],
    }


def _digest(folder: Path) -> str:
    """Eight digits that tell the weights in a run's folder, or a Hugging Face model's, from others."""
    files = sorted(folder.glob("checkpoints/*/model.safetensors"))[-1:] or sorted(folder.glob("*.safetensors"))
    found = hashlib.sha256()
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()[:8]


def _steps_of(folder: Path) -> int:
    """Supervised steps of a start; 0 where it kept no rows."""
    rows = read_rows(folder / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


# The table ------------------------------------------------------------------------------------------------------------


def groups(runs: Sequence[Row]) -> list[list[Row]]:
    """Runs that differ only by their seed, those of a pair together, in the order in which they came."""
    pairs = list(dict.fromkeys(run["pair"] for run in runs))
    kinds = dict.fromkeys(
        (run["pair"], run["correction"]) for run in sorted(runs, key=lambda r: pairs.index(r["pair"]))
    )
    return [[run for run in runs if (run["pair"], run["correction"]) == kind] for kind in kinds]


def table(runs: Sequence[Row]) -> list[Row]:
    """A row for each pair and correction; differences are from the first one's runs with the same seeds."""
    every = groups(runs)
    base = {run["seed"]: run for run in every[0]} if every else {}
    return [_table_row(group, base) for group in every]


def _table_row(group: list[Row], base: dict[int, Row]) -> Row:
    sampler, _, trainer = group[0]["pair"].partition("/")
    row = {"sampler": sampler, "trainer": trainer or "its own", "correction": group[0]["correction"]}
    row |= {"seeds": " ".join(str(run["seed"]) for run in group), "steps": _range(group, "steps")}
    row |= {"seconds": _range(group, "seconds"), "k3 KL": f"{statistics.fmean(r['k3_kl'] for r in group):.2e}"}
    row["before"] = _mean(run["first_accuracy"] for run in group)
    for name in ("reward", "accuracy"):
        row[name] = _mean(run[name] for run in group)
        row[f"{name} - first"] = _mean(r[name] - base[r["seed"]][name] for r in group if r["seed"] in base)
    return row


def _range(group: list[Row], name: str) -> str:
    low, high = (round(edge(run[name] for run in group)) for edge in (min, max))
    return f"{low}" if low == high else f"{low} to {high}"


def _mean(values: Any) -> str:
    found = list(values)
    if not found:
        return "-"
    return f"{statistics.fmean(found):.3f} +- {statistics.stdev(found) if len(found) > 1 else 0.0:.3f}"


def show(runs: Sequence[Row], path: Path, own: bool = False) -> None:
    """Print the table, and draw the rewards into `path`."""
    print_table(table(runs))
    starts = {run["start"] for run in runs}
    if len(starts) > 1 and not own:
        print(f"\nruns that cannot be compared: they begin with {len(starts)} different starts")
    if runs:
        picture(groups(runs), path)


def picture(found: Sequence[list[Row]], path: Path) -> None:
    """Sampled reward over steps, smoothed: a colour a pair, its mean over seeds in their range; with and without."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(group[0]["correction"] for group in found))
    figure, panels = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 3.8), sharey=True, squeeze=False)
    for kind, axes in zip(kinds, panels[0], strict=True):
        for group in (group for group in found if group[0]["correction"] == kind):
            curves = [smooth([reward for _, reward in run["curve"]]) for run in group]
            steps = [step for step, _ in min((run["curve"] for run in group), key=len)]
            every = list(zip(*curves, strict=False))
            [line] = axes.plot(steps, [statistics.fmean(v) for v in every], label=group[0]["pair"].replace("/", " / "))
            axes.fill_between(
                steps, [min(v) for v in every], [max(v) for v in every], color=line.get_color(), alpha=0.12
            )
        axes.set_title(f"correction: {kind}", fontsize=9)
        axes.set_xlabel("optimizer steps")
    panels[0][0].set_ylabel("sampled reward")
    panels[0][0].legend(fontsize=8, title="sampler / trainer", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def smooth(values: list[float], width: int = 15) -> list[float]:
    """Means of the `width` values up to each."""
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
