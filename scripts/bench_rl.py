"""How far a sampler and a trainer in different precisions disagree, and what that costs: tables, JSON and a picture.

    python scripts/bench_rl.py mismatch OUT KEY=VALUE ...   # k3 KL of every sampler with every trainer
    python scripts/bench_rl.py reward OUT KEY=VALUE ...     # reward after a fixed budget: pairs, seeds, with correction
    python scripts/bench_rl.py overlap OUT KEY=VALUE ...    # sampler beside the trainer, or on a device of its own

Settings are those of `lowbit rl`. A model is needed that knows the task a little: `init_from=FOLDER`, or the warm start
that the settings ask for, made once in OUT/start and kept. On a CPU `rl=cpu precision.compute=bf16` is small enough.

`mismatch`: each sampler draws a set of rollouts with the embedded engine, and every trainer reads the log-probabilities
of the same tokens in its training forward. k3 = E[r - 1 - log r] with r = pi_trainer / pi_sampler over the sampler's
tokens estimates KL(sampler || trainer); its standard error is over tokens. Nothing is truncated.

`reward`: from the same weights, which a supervised start in BF16 made, each pair of precisions is trained for
`max_steps` steps (or `max_minutes`), with token truncated importance sampling and without; reported are the mean
sampled reward of the last fifth of the steps and the held-out greedy accuracy, mean and standard deviation over seeds,
and the same of their differences from the first pair with the same seed, which draws the same prompts. With
`--own-start` a pair begins with a supervised start in the trainer's own precision, which ends at the same accuracy.
Runs that are finished already are only read.

`overlap`: the same run with the sampler on the trainer's device and on `--other`, at staleness 0 and at `--staleness`.
Reported are medians over the last half of the steps: seconds a step, drawn tokens a second by the clock, the shares of
the step that drawing, training and waiting for conversations take (drawing and training overlap where they add up to
more than 1), the share of drawing that training hides, the age of rollouts and the mismatch.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import print_table, write

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import RL
from lowbit.configs.schema import PrecisionConfig
from lowbit.configs.schema_rl import Correction, RlConfig
from lowbit.configs.validate_rl import validate_rl, warm_start_config
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.models.transformer import Transformer
from lowbit.quant.stages import resolve
from lowbit.rl.batches import drawn_index, pack_conversations
from lowbit.rl.objective import read_logprobs
from lowbit.rl.precision import trainer_precision
from lowbit.rl.prompts import Prompts
from lowbit.rl.rewards import RewardPool
from lowbit.rl.rollout import Collector, Conversation
from lowbit.rl.run import train
from lowbit.rl.task_run import WarmStart, run_config, tokenizer_of
from lowbit.rl.tasks import Split, make_task
from lowbit.trainer.distributed import ALONE
from lowbit.trainer.hardware import compute_dtype, device_name, pick_device
from lowbit.trainer.imported import begin_from
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.loaded import build_model
from lowbit.trainer.precision import RunPrecision
from lowbit.trainer.run import execute

PRECISIONS = ("bf16", "fp8_row", "mxfp8", "nvfp4_w4a16", "nvfp4")
PAIRS = (("bf16", "bf16"), ("nvfp4", "nvfp4"), ("nvfp4", "bf16"), ("fp8_row", "bf16"))
"""Sampler and trainer."""
TOKENS_A_CELL = 200_000
"""Most tokens that a cell of the matrix is measured on."""


def start_of(config: RlConfig, out: Path, precision: str = "") -> RlConfig:
    """The configuration with weights to start from, made in BF16 or in `precision` on both sides."""
    if config.init_from:
        return config
    folder = out / (f"start-{precision}" if precision else "start")
    if not (folder / "checkpoints").is_dir():
        plain = replace(config, precision=PrecisionConfig(compute=config.precision.compute))
        start = warm_start_config(with_pair(config, precision, precision) if precision else plain)
        execute(lambda: WarmStart(start, folder, ALONE, pick_device(config.device)), folder, ALONE)
    return replace(config, init_from=str(folder), warm_start=replace(config.warm_start, steps=0))


def with_pair(config: RlConfig, sampler: str, trainer: str) -> RlConfig:
    """A sampler, and a trainer with its forward and a BF16 backward on dequantised operands."""
    define = {"trainer_side": _forward_of(trainer)}
    precision = PrecisionConfig(
        compute=config.precision.compute, backend=config.precision.backend, sampler=sampler, trainer="trainer_side",
        define=define,
    )  # fmt: skip
    return replace(config, precision=precision)


def _forward_of(name: str) -> Any:
    from lowbit.configs.schema import AlignmentKind, PolicyConfig, ProductConfig

    return PolicyConfig(base=name, dgrad=ProductConfig(), wgrad=ProductConfig(), alignment=AlignmentKind.aligned)


# The matrix -----------------------------------------------------------------------------------------------------------


def trained_model(config: RlConfig, name: str, device: torch.device) -> Transformer:
    """The model with the training forward of a precision."""
    run = replace(run_config(config), precision=trainer_precision(with_pair(config, name, name).precision))
    model = build_model(run, tokenizer_of(run).vocab_size, compute_dtype(run.precision, device), device)
    RunPrecision(run, model)
    begin_from(Path(config.init_from).expanduser(), model)
    return model.requires_grad_(False)


def rollouts(config: RlConfig, model: Transformer, sampler: str, prompts: int) -> list[Conversation]:
    """Conversations drawn by the embedded engine in a precision."""
    rewards = RewardPool(config.task, config.reward)
    try:
        task, text = make_task(config.task), Prompts(tokenizer_of(config), config.task)
        policy = resolve(with_pair(config, sampler, sampler).precision)
        engine = EmbeddedSampler(model, text.tokenizer.eot_id, policy, slots=config.rollout.slots, share=True)
        collector = Collector(config, task, text, engine, rewards)
        drawn = collector.draw(range(prompts), Split.train, config.rollout.samples)
    finally:
        rewards.close()
    return [c for group in drawn for c in group]


def differences(config: RlConfig, model: Transformer, conversations: list[Conversation]) -> torch.Tensor:
    """log pi_trainer - log pi_sampler of all drawn tokens, FP64 [N]."""
    length, rows = config.data.sequence_length, config.batch.micro_batch
    found = []
    for packed in pack_conversations(conversations, length, rows, tokenizer_of(config).eot_id, True):
        index = drawn_index(packed, conversations).to(model.head_weight.device)
        batch = packed.batch.to(model.head_weight.device)
        here = [conversations[place.item] for place in packed.places]
        sampled = torch.tensor([c.logprobs[i] for c in here for i in c.drawn], dtype=torch.float64)
        found.append(read_logprobs(model, batch, index, config.rollout.temperature).double().cpu() - sampled)
    return torch.cat(found)


def mismatch(config: RlConfig, out: Path, prompts: int) -> dict[str, Any]:
    """Every sampler with every trainer."""
    device = pick_device(config.device)
    config = start_of(config, out)
    cells = []
    models = {name: trained_model(config, name, device) for name in PRECISIONS}
    for sampler in PRECISIONS:
        drawn = rollouts(config, models[sampler], sampler, prompts)
        for trainer in PRECISIONS:
            d = differences(config, models[trainer], drawn)[:TOKENS_A_CELL]
            k3 = d.exp() - 1 - d
            cells.append(
                {
                    "sampler": sampler,
                    "trainer": trainer,
                    "k3_kl": k3.mean().item(),
                    "k3_kl_se": k3.std().item() / math.sqrt(len(k3)),
                    "mult_prob_error": d.abs().exp().mean().item(),
                    "abs_max": d.abs().max().item(),
                    "tokens": len(d),
                }
            )
    print("k3 KL, sampler down, trainer across; max |difference| in brackets")
    print(" ".join([f"{'':<12}", *(f"{name:>22}" for name in PRECISIONS)]))
    for sampler in PRECISIONS:
        row = [cell for cell in cells if cell["sampler"] == sampler]
        print(" ".join([f"{sampler:<12}", *(f"{c['k3_kl']:>12.2e} ({c['abs_max']:7.1e})" for c in row)]))
    picture_of_matrix(cells, out / "mismatch.png", device_name(device))
    return {"cells": cells, "device": device_name(device), "model": config.model.name}


def picture_of_matrix(cells: list[dict[str, Any]], path: Path, title: str) -> None:
    """A heat map of k3 on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    table = [
        [next(c["k3_kl"] for c in cells if (c["sampler"], c["trainer"]) == (s, t)) for t in PRECISIONS]
        for s in PRECISIONS
    ]
    floor = 1e-10
    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    image = axes.imshow([[max(v, floor) for v in row] for row in table], norm=LogNorm(floor, 1e-1), cmap="viridis")
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            axes.text(
                j, i, f"{value:.1e}", ha="center", va="center", color="white" if value < 1e-4 else "black", fontsize=8
            )
    axes.set_xticks(range(len(PRECISIONS)), PRECISIONS, rotation=30, ha="right")
    axes.set_yticks(range(len(PRECISIONS)), PRECISIONS)
    axes.set_xlabel("trainer")
    axes.set_ylabel("sampler")
    axes.set_title(f"KL(sampler || trainer), nats a token, {title}", fontsize=9)
    figure.colorbar(image)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# Reward ---------------------------------------------------------------------------------------------------------------


def reward(config: RlConfig, out: Path, seeds: int, pairs: Sequence[Sequence[str]], own: bool) -> dict[str, Any]:
    """Pairs of precisions from the same start (`own`: from one in the trainer's), with and without correction."""
    given = config
    found: list[dict[str, Any]] = []
    for sampler, trainer in pairs:
        config = start_of(given, out, trainer if own else "")
        for correction in (Correction.tis, Correction.none):
            runs = []
            for seed in range(1, seeds + 1):
                folder = out / f"{sampler}-{trainer}-{correction.value}-{seed}"
                here = replace(
                    with_pair(config, sampler, trainer),
                    seed=seed,
                    algorithm=replace(config.algorithm, correction=correction),
                )
                train(here, folder)
                runs.append(outcome(folder))
            found.append({"sampler": sampler, "trainer": trainer, "correction": correction.value, "seeds": runs})
    columns = ("reward", "accuracy", "reward - first", "accuracy - first")
    print(f"{'sampler':<12} {'trainer':<12} {'correction':<10} {'k3 KL':>10} " + " ".join(f"{c:>17}" for c in columns))
    for row in found:
        values = [[r[key] for r in row["seeds"]] for key in ("reward", "accuracy")]
        first = [[r[key] for r in found[0]["seeds"]] for key in ("reward", "accuracy")]
        values += [[a - b for a, b in zip(v, f, strict=True)] for v, f in zip(values, first, strict=True)]
        cells = " ".join(f"{f'{statistics.fmean(v):.3f} +- {_deviation(v):.3f}':>17}" for v in values)
        k3 = statistics.fmean(r["k3_kl"] for r in row["seeds"])
        print(f"{row['sampler']:<12} {row['trainer']:<12} {row['correction']:<10} {k3:>10.2e} {cells}")
    picture_of_rewards(found, out / "reward.png")
    return {"rows": found, "device": device_name(pick_device(config.device)), "model": config.model.name}


def outcome(folder: Path) -> dict[str, Any]:
    """What a run reached."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"]]
    last = [row["reward"] for row in rows[-max(1, len(rows) // 5) :]]
    return {
        "reward": statistics.fmean(last),
        "accuracy": next(row["val_accuracy"] for row in reversed(rows) if "val_accuracy" in row),
        "k3_kl": statistics.fmean(row["mismatch/k3_kl"] for row in rows),
        "steps": rows[-1]["step"],
        "seconds": rows[-1]["seconds"],
        "curve": [[row["step"], row["reward"]] for row in rows],
    }


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def picture_of_rewards(found: list[dict[str, Any]], path: Path) -> None:
    """Sampled reward over steps, smoothed: a colour a pair, its mean over seeds in their range; with and without."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row["correction"] for row in found))
    figure, panels = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 3.8), sharey=True, squeeze=False)
    for kind, axes in zip(kinds, panels[0], strict=True):
        for row in (row for row in found if row["correction"] == kind):
            curves = [smooth([reward for _, reward in run["curve"]]) for run in row["seeds"]]
            steps = [step for step, _ in row["seeds"][0]["curve"]]
            every = list(zip(*curves, strict=True))
            [line] = axes.plot(
                steps, [statistics.fmean(v) for v in every], label=f"{row['sampler']} / {row['trainer']}"
            )
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


# Two devices ----------------------------------------------------------------------------------------------------------


def overlap(config: RlConfig, out: Path, other: str, staleness: int) -> dict[str, Any]:
    """The same run with one device and with two, synchronous and ahead."""
    config = start_of(config, out)
    config = replace(config, logging=replace(config.logging, every_steps=1))
    found = []
    for ahead in (0, staleness):
        for device in ("", other):
            folder = out / f"{device.replace(':', '') or 'same'}-{ahead}"
            train(replace(config, rollout=replace(config.rollout, device=device, staleness=ahead)), folder)
            found.append({"sampler": device or "trainer's", "staleness": ahead} | pace(folder))
    print_table(found)
    return {"rows": found, "device": device_name(pick_device(config.device)), "model": config.model.name}


def pace(folder: Path) -> dict[str, Any]:
    """Medians over the last half of a run."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"]]
    last = rows[len(rows) // 2 :]
    steps = [b["seconds"] - a["seconds"] for a, b in pairwise(rows[len(rows) // 2 - 1 :])]

    def median(name: str) -> float:
        return float(statistics.median(row[name] for row in last))

    drawing = median("share/rollout") + median("share/reward")
    drawn = statistics.median(row["rollout_tokens_per_second"] * row["share/rollout"] for row in last)
    return {
        "seconds/step": round(statistics.median(steps), 4),
        "drawn tokens/s": round(drawn),
        "draw": round(drawing, 3),
        "train": round(median("share/train"), 3),
        "wait": round(median("share/wait"), 3),
        "send": round(median("share/sync"), 3),
        "hidden": round(max(0.0, 1 - median("share/wait") / max(drawing, 1e-9)), 3),
        "age": round(statistics.fmean(row["stale/steps"] for row in last), 2),
        "k3": f"{median('mismatch/k3_kl'):.2e}",
        "reward": round(statistics.fmean(row["reward"] for row in last), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mismatch", "reward", "overlap"))
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--prompts", type=int, default=64, help="mismatch: prompts a sampler answers")
    parser.add_argument("--seeds", type=int, default=3, help="reward: runs of each kind")
    everything = ["/".join(pair) for pair in PAIRS]
    parser.add_argument("--pairs", nargs="+", default=everything, metavar="SAMPLER/TRAINER", help="reward: which")
    parser.add_argument("--own-start", action="store_true", help="reward: each trainer's start in its own precision")
    parser.add_argument("--other", default="cuda:1", help="overlap: the sampler's own device")
    parser.add_argument("--staleness", type=int, default=1, help="overlap: steps that the sampler may be behind")
    given = parser.parse_intermixed_args()
    config = compose_for(RL, given.overrides)
    validate_rl(config)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "mismatch":
        found = mismatch(config, given.out, given.prompts)
    elif given.what == "reward":
        pairs = [pair.split("/") for pair in given.pairs]
        found = reward(config, given.out, given.seeds, pairs, given.own_start)
    else:
        found = overlap(config, given.out, given.other, given.staleness)
    write(given.out / f"{given.what}.json", {"settings": given.overrides} | found)


if __name__ == "__main__":
    main()
