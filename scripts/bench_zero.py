"""Whole runs of `lowbit pretrain` on several GPUs: tokens/s, memory and bytes of each ZeRO stage and gradient code.

    torchrun --nproc_per_node=2 scripts/bench_zero.py OUT --models 370m,1b --comms none,squinch KEY=VALUE ...
    python scripts/bench_zero.py OUT --models 370m,1b KEY=VALUE ...     # one GPU, without DeepSpeed

A step is one micro-batch a rank, so that nothing hides the reduction but the step's own backward pass. The runs of a
launch follow each other in the same processes; the first steps of each, in which it compiles, are not counted.
KEY=VALUE are settings of `lowbit pretrain`, such as where the text is. A row's speed is that of all ranks together.
"""

import argparse
import gc
import os
import statistics
from pathlib import Path

import torch
from measure import Row, print_table, told, write

from lowbit.configs.compose import compose
from lowbit.configs.schema import RunConfig
from lowbit.configs.validate import validate
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.launch import open_ranks
from lowbit.trainer.run import Pretraining

WINDOW = 6
"""Steps between two readings of the clock; the first window is the warm-up."""
COMMON = [
    "optim=adamw",
    "precision=bf16",
    "device=cuda",
    "data.sequence_length=2048",
    "data.document_mask=false",
]


def configurations(args: argparse.Namespace) -> dict[tuple[str, str, str], RunConfig]:
    """By model, stage and code."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    found: dict[tuple[str, str, str], RunConfig] = {}
    for model in args.models.split(","):
        settings = [
            *COMMON,
            f"model={model}",
            f"max_steps={args.steps + WINDOW}",
            f"batch.micro_batch={args.micro_batch}",
        ]
        settings += [f"batch.sequences={args.micro_batch * world}", *args.overrides]
        if world == 1:
            found[model, "one GPU", ""] = compose([*settings, "engine=local"])
            continue
        for stage in args.stages.split(","):
            for comm in args.comms.split(","):
                engine = ["engine=deepspeed", f"engine.zero_stage={stage}", f"comm={comm}"]
                found[model, stage, comm] = compose([*settings, *engine])
    return found


def measured(config: RunConfig, run_dir: Path, ranks: Ranks, device: torch.device) -> Row:
    """A run's figures, on rank 0; the others have none. Steps alone: a last checkpoint of 1b would be 12 GB."""
    gc.collect()
    held = 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device) / 2**30
    run_dir.mkdir(parents=True, exist_ok=True)
    run = Pretraining(config, run_dir, ranks, device)
    try:
        trainer = run.build()
        windows = []
        while not trainer.done:
            step = trainer.train_step()
            if step["step"] % WINDOW == 0:
                windows.append(step | trainer.meter.read())
    finally:
        run.close()
    if ranks.rank > 0:
        return {}
    timed = windows[1:]
    speeds = [row["tokens_per_second"] * ranks.world for row in timed]
    bytes_sent = {key: timed[-1].get(f"comm/{key}_bytes", 0) for key in ("gradient", "weight", "token")}
    return {
        "tokens/s": round(statistics.median(speeds)),
        "least": round(min(speeds)),
        "most": round(max(speeds)),
        "GiB": round((timed[-1]["memory_gib"] or held) - held, 2),
        **{f"{key} MB": round(count / 1e6, 1) for key, count in bytes_sent.items()},
        "loss": round(timed[-1]["loss"], 4),
    }


def main() -> None:
    """Every combination, one after the other; what was measured is on disk after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="370m,1b")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--comms", default="none,squinch")
    parser.add_argument("--steps", type=int, default=30, help="timed steps, a multiple of six")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of 2048")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    if args.steps < WINDOW or args.steps % WINDOW or args.micro_batch < 1:
        parser.error(f"--steps must be a multiple of {WINDOW}, and --micro-batch at least 1")
    found = configurations(args)
    for config in found.values():  # before the first is measured
        validate(config)
    rows: list[Row] = []
    with open_ranks(next(iter(found.values()))) as (ranks, device):
        for (model, stage, comm), config in found.items():
            run_dir = args.out / "-".join(filter(None, (model, stage.replace(" ", ""), comm)))
            rows.append({"model": model, "ZeRO": stage, "comm": comm, **measured(config, run_dir, ranks, device)})
            if ranks.rank == 0:
                write(args.out / f"zero-{ranks.world}.json", {"rows": rows})
    if ranks.rank == 0:
        print_table(rows)


if __name__ == "__main__":
    told(main)
