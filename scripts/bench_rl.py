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
and the same of their differences from the first pair with the same seed, which draws the same prompts. A pair is
SAMPLER/TRAINER, or the name of a preset of `precision`. With `--own-start` each run begins with a supervised start of
its own seed in its trainer's precision, as `lowbit rl` does by itself; such starts end at the same accuracy.

OUT/reward.json has every run as soon as it has ended. A call makes those that are not there, seed by seed, and prints
the table of all; a run that was cut off goes on where its folder has a checkpoint. So many short calls fill a table:

    python scripts/bench_rl.py start OUT KEY=VALUE ...                                 # the supervised start alone
    python scripts/bench_rl.py reward OUT KEY=VALUE ... --pairs bf16/bf16 --seeds 1    # as often as there are runs
    python scripts/bench_rl.py reward OUT KEY=VALUE ... --table                        # what there is, and its picture

On a GPU: `rl=gpu max_steps=N evaluation.every_steps=0 logging.every_steps=1`; without `max_steps` that preset runs 400
steps. `max_minutes` counts the first step's compilation too, so take N from the seconds that a run of 20 steps in
another folder shows in the table (they leave the first step out); `max_minutes=3` beside it only keeps a call from
being cut off. The table's steps say where it ended a run: such pairs cannot be compared.

`overlap`: the same run with the sampler on the trainer's device and on `--other`, at staleness 0 and at `--staleness`.
Reported are medians over the last half of the steps: seconds a step, drawn tokens a second by the clock, the shares of
the step that drawing, training and waiting for conversations take (drawing and training overlap where they add up to
more than 1), the share of drawing that training hides, the age of rollouts and the mismatch.
"""

import argparse
import math
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import print_table, told, write
from rl_reward import Results, Wanted, fill, show
from rl_sides import plain_start, with_pair

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import RL
from lowbit.configs.schema_rl import Correction, RlConfig
from lowbit.configs.validate_rl import validate_rl
from lowbit.errors import ConfigError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.models.transformer import Transformer
from lowbit.quant.resolve import resolve
from lowbit.rl.batches import drawn_index, pack_conversations
from lowbit.rl.objective import read_logprobs
from lowbit.rl.precision import trainer_precision
from lowbit.rl.prompts import Prompts
from lowbit.rl.rewards import RewardPool
from lowbit.rl.rollout import Collector, Conversation
from lowbit.rl.run import train
from lowbit.rl.task_run import run_config, tokenizer_of
from lowbit.rl.tasks import Split, make_task
from lowbit.trainer.hardware import compute_dtype, device_name, find_device, pick_device
from lowbit.trainer.imported import begin_from
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.loaded import build_model
from lowbit.trainer.precision import RunPrecision

PRECISIONS = ("bf16", "fp8_row", "mxfp8", "nvfp4_w4a16", "nvfp4")
PAIRS = ("bf16/bf16", "nvfp4/nvfp4", "nvfp4/bf16", "fp8_row/bf16")
"""Sampler and trainer."""
TOKENS_A_CELL = 200_000
"""Most tokens that a cell of the matrix is measured on."""


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
    config = plain_start(config, out)
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


# Two devices ----------------------------------------------------------------------------------------------------------


def overlap(config: RlConfig, out: Path, other: str, staleness: int) -> dict[str, Any]:
    """The same run with one device and with two, synchronous and ahead."""
    config = replace(config, logging=replace(config.logging, every_steps=1))
    runs: dict[Path, RlConfig] = {}
    for ahead in (0, staleness):
        for device in ("", other):
            folder = out / f"{device.replace(':', '') or 'same'}-{ahead}"
            runs[folder] = replace(config, rollout=replace(config.rollout, device=device, staleness=ahead))
    check(runs)
    begun = plain_start(config, out)
    found = []
    for folder, run in runs.items():
        train(replace(begun, rollout=run.rollout), folder)
        found.append({"sampler": run.rollout.device or "trainer's", "staleness": run.rollout.staleness} | pace(folder))
    print_table(found)
    return {"rows": found, "device": device_name(pick_device(config.device)), "model": config.model.name}


def check(runs: dict[Path, RlConfig]) -> None:
    """Raises ConfigError before anything is trained, where a run could not be, or would be an earlier call's."""
    for folder, run in runs.items():
        validate_rl(run)
        if run.rollout.device:
            find_device(run.rollout.device, "--other")
        if folder.exists():
            raise ConfigError(f"{folder} is there already, maybe with other settings: give another OUT")
        if run.max_steps is not None and run.max_steps < 4:
            raise ConfigError(f"max_steps={run.max_steps}: the last half of the steps is timed; 20 would do")


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


def reward(config: RlConfig, given: argparse.Namespace) -> None:
    """The runs that were asked for and are not there yet, and the table of all that are."""
    settings = [*given.overrides, *(["--own-start"] if given.own_start else [])]
    results = Results(given.out / "reward.json", settings)
    if not given.table:
        wanted = Wanted(given.pairs, given.corrections, given.seeds, given.own_start)
        fill(results, config, given.overrides, given.out, wanted)
    show(results.runs, given.out / "reward.png", given.own_start)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("what", choices=("start", "mismatch", "reward", "overlap"))
    found.add_argument("out", type=Path)
    found.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    found.add_argument("--prompts", type=int, default=64, help="mismatch: prompts a sampler answers")
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="SEED", help="reward: a run for each")
    found.add_argument("--pairs", nargs="+", default=PAIRS, metavar="PAIR", help="reward: SAMPLER/TRAINER, or a preset")
    kinds = [kind.value for kind in Correction]
    both = [Correction.tis.value, Correction.none.value]
    found.add_argument("--corrections", nargs="+", choices=kinds, default=both, help="reward: algorithm.correction")
    found.add_argument("--own-start", action="store_true", help="reward: each run's start in its own precision")
    found.add_argument("--table", action="store_true", help="reward: only print what there is")
    found.add_argument("--other", default="cuda:1", help="overlap: the sampler's own device")
    found.add_argument("--staleness", type=int, default=1, help="overlap: steps that the sampler may be behind")
    return found


def main() -> None:
    given = parser().parse_intermixed_args()
    config = compose_for(RL, given.overrides)
    validate_rl(config)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "reward":
        reward(config, given)
    elif given.what == "start":
        plain_start(config, given.out)
    elif given.what == "mismatch":
        keep(given, mismatch(config, given.out, given.prompts))
    else:
        keep(given, overlap(config, given.out, given.other, given.staleness))


def keep(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Figures in OUT, with the settings that made them."""
    write(given.out / f"{given.what}.json", {"settings": given.overrides} | found)


if __name__ == "__main__":
    told(main)
