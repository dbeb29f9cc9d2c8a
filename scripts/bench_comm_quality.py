"""What coding gradients costs in learning: whole runs on one device whose micro-batches stand for ranks.

    python scripts/installed_corpus.py CORPUS
    python scripts/bench_comm_quality.py OUT data.sources.files.path=CORPUS       # on a GPU: 10 runs of 1,000 steps

Every run of a seed sees the same samples in the same order from the same first weights; only what gradients are while
they "travel" differs. `SETTINGS` are the shape of the other quality tables in docs/RESULTS.md (30 million parameters in
the blocks); KEY=VALUE after OUT changes them. A step has `--ranks` equal groups of micro-batches, each a rank's; their
gradients go through the very bytes that ranks would exchange (`lowbit.comm.simulate`), cut into the buckets that ZeRO 0
cuts, vectors and small matrices in FP32. `tests/dist/test_simulated.py` holds this to the bits of real ranks.

    fp32      sums in FP32, in the order of ranks        squinch, sq48, sq48_fast    6 bits, two hops
    bf16      rounded, and added up in BF16 rank by rank, as a ring does
    int4      blocks of 2048, what ZeRO++ sends (a control; int8 likewise)

A run that is there already is not run again, so that the same command goes on after an interruption.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import Row, print_table, write
from torch import Tensor

from lowbit.comm.codecs import make_codec
from lowbit.comm.flat import buckets
from lowbit.comm.simulate import simulate
from lowbit.configs.compose import compose
from lowbit.configs.schema import RunConfig
from lowbit.configs.validate import validate
from lowbit.data.batch import Batch
from lowbit.errors import ConfigError
from lowbit.trainer.client_optimizer import reduced_exactly
from lowbit.trainer.distributed import ALONE
from lowbit.trainer.engine import Engine, LocalEngine
from lowbit.trainer.hardware import device_name, pick_device
from lowbit.trainer.objective import Objective, ObjectiveOutput
from lowbit.trainer.run import Pretraining, execute

SETTINGS = {
    "data": "files",
    "data.tokenizer.vocab_size": "16384",
    "data.sequence_length": "512",
    "data.document_mask": "false",
    "model": "30m",
    "model.layers": "6",
    "model.width": "640",
    "model.heads": "10",
    "model.kv_heads": "10",
    "model.mlp_width": "1728",
    "optim": "adamw",
    "optim.lr": "1.2e-3",
    "optim.schedule.warmup_steps": "100",
    "precision": "bf16",
    "max_steps": "1000",
    "batch.sequences": "128",
    "batch.micro_batch": "32",
    "evaluation.every_steps": "0",
    "evaluation.final_tokens": "4194304",
    "evaluation.sample_tokens": "0",
    "checkpoint.every_steps": "0",
}
MIB = 1 << 20


class SimulatedRanks(LocalEngine):
    """One process whose micro-batches are shared out between ranks that are not there; the engine of ZeRO 0."""

    def __init__(self, model: Any, config: RunConfig, kind: str, ranks: int) -> None:
        if config.engine.cuda_graphs or config.batch.warmup:
            raise ConfigError("simulated ranks: engine.cuda_graphs=false and no batch.warmup, please")
        count = config.batch.sequences // config.batch.micro_batch
        if count % ranks:
            raise ConfigError(f"simulated ranks: {count} micro-batches a step cannot be shared by {ranks} ranks")
        super().__init__(model, config.optim, config.engine)
        self._kind, self._ranks, self._share = kind, ranks, count // ranks
        named = dict(model.named_parameters())
        least = config.comm.exact_below
        exact = {n for n, p in named.items() if reduced_exactly(n, p) or p.numel() < least or kind == "fp32"}
        self._exact = [p for n, p in named.items() if n in exact]
        self._coded = [p for n, p in named.items() if n not in exact]
        self._bucket = min(sum(p.numel() for p in named.values()), config.engine.bucket_mib * MIB // 4)
        self._done = 0
        self._held: list[dict[int, Tensor]] = []  # of each rank that is through, its gradients by parameter

    def micro_step(self, objective: Objective, batch: Batch, scale: float, last: bool = True) -> ObjectiveOutput:
        """See `Engine.micro_step`; after a rank's last micro-batch its gradients are put aside."""
        out = super().micro_step(objective, batch, scale, last)
        self._done += 1
        if self._done % self._share == 0:
            mine = {id(p): p.grad for p in self.model.parameters() if p.grad is not None}
            assert len(mine) == len(self._exact) + len(self._coded), "a parameter got no gradient"
            self._held.append(mine)
            for parameter in self.model.parameters():
                parameter.grad = None
        return out

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """See `Engine.gradient_norm`; before, the exchange."""
        assert len(self._held) == self._ranks
        for parameter in self._exact:
            parameter.grad = self._held[0][id(parameter)]
            for rank in self._held[1:]:
                parameter.grad += rank[id(parameter)]
        for bucket in buckets(self._coded, self._bucket):
            flats = [torch.cat([rank[id(p)].view(-1) for p in bucket]) for rank in self._held]
            parts = torch.split(self._sum(flats), [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self._held = []
        return super().gradient_norm()

    def _sum(self, flats: list[Tensor]) -> Tensor:
        """Every rank's bucket [n] -> their sum as all ranks get it, FP32 [n]."""
        if self._kind != "bf16":
            return simulate(flats, make_codec(self._kind), factor=1.0)
        total = flats[0].bfloat16()
        for flat in flats[1:]:
            total = total + flat.bfloat16()
        return total.float()


class Simulation(Pretraining):
    """A run with that engine."""

    kind: str
    simulated: int

    def _make_engine(self) -> Engine:
        return SimulatedRanks(self.model, self.config, self.kind, self.simulated)


def train(config: RunConfig, kind: str, ranks: int, run_dir: Path) -> None:
    """A whole run with gradients in that form between that many ranks."""

    def make() -> Simulation:
        run = Simulation(config, run_dir, ALONE, pick_device(config.device))
        run.kind, run.simulated = kind, ranks
        return run

    execute(make, run_dir, ALONE)


def measured(run_dir: Path, steps: int) -> Row | None:
    """What a finished run reached; None if it is not there, or not at its end."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows or rows[-1]["step"] < steps or "val_loss" not in rows[-1]:
        return None
    tail = [row["loss"] for row in rows if row["step"] > steps * 0.9]
    return {"val_loss": rows[-1]["val_loss"], "val_bpb": rows[-1]["val_bpb"], "last tenth": sum(tail) / len(tail)}


def compared(rows: list[Row]) -> list[Row]:
    """Each run with its distance from FP32 of the same seed, in nats."""
    base = {row["seed"]: row for row in rows if row["gradients"] == "fp32"}
    for row in rows:
        if row["seed"] in base:
            row["over fp32"] = row["val_loss"] - base[row["seed"]]["val_loss"]
            row["last tenth over fp32"] = row["last tenth"] - base[row["seed"]]["last tenth"]
    return rows


def noise(rows: list[Row]) -> str:
    """By how much a seed changes the exact sums' result: what differences are to be held against."""
    words = []
    for kind in ("fp32", "bf16"):
        found = [row["val_loss"] for row in rows if row["gradients"] == kind]
        if len(found) > 1:
            words.append(f"{kind}: seeds {max(found) - min(found):.4f} nats apart")
    return "; ".join(words) or "exact sums of one seed or none: no measure of its noise"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kinds", default="fp32,bf16,squinch,sq48,int4")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_intermixed_args()
    args.out.mkdir(parents=True, exist_ok=True)
    given = dict(o.split("=", 1) for o in args.overrides)
    config = compose([f"{key}={value}" for key, value in (SETTINGS | given).items()])
    validate(config)
    steps = config.max_steps
    if steps is None:
        raise ConfigError("max_steps=null: runs that are compared take as many steps")
    config = replace(config, logging=replace(config.logging, every_steps=1))
    rows: list[Row] = []
    for seed in map(int, args.seeds.split(",")):
        for kind in args.kinds.split(","):
            run_dir, begin = args.out / f"{kind}-{seed}", time.perf_counter()
            if measured(run_dir, steps) is None:
                train(replace(config, seed=seed), kind, args.ranks, run_dir)
            found = measured(run_dir, steps)
            assert found is not None, f"{run_dir} is not finished"
            rows.append({"gradients": kind, "seed": seed} | found)
            print(
                f"{kind}, seed {seed}: {found['val_loss']:.4f} nats ({time.perf_counter() - begin:.0f} s)", flush=True
            )
            on = device_name(pick_device(config.device))
            write(args.out / "quality.json", {"on": on, "ranks": args.ranks, "rows": compared(rows)})
    print_table(compared(rows))
    print(noise(rows))


if __name__ == "__main__":
    main()
