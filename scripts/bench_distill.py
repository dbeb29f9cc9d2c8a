"""Distillation measured on the shipped path: prints tables, writes JSON and a picture.

    python scripts/bench_distill.py quality OUT KEY=VALUE ...  # a teacher, its caches, a student of each; paired seeds
    python scripts/bench_distill.py speed OUT KEY=VALUE ...    # caching over the teacher's forward; training over CE's
    python scripts/bench_distill.py speed OUT ... --profile    # and the parts of caching on a GPU, and its kernels
    python scripts/bench_distill.py training OUT ...           # training over CE's alone
    python scripts/bench_distill.py size OUT CACHE ...         # bytes a position of caches, and at a 128k vocabulary

Settings are those of `lowbit distill` (teacher.path names a trained teacher; else one is trained in OUT/teacher and
kept). Every student of a seed sees the same samples in the same order from the same initial weights; only its targets
differ: `full` has the teacher's whole distribution online, `ce` the text alone, ESTIMATOR-K a cache of K targets.

Speed of training: runs from the cache and plain ones, whose batches come from the loader of pretraining, in turns.
Before each, what the operating system keeps of the cache in memory is dropped: `data_wait`, the share of the time in
which the loop waits for batches, is that of a cache on the disk.
"""

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import gpu_seconds, show_kernels, told, wall_seconds, write
from torch import Tensor

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import DISTILL
from lowbit.configs.schema_distill import DistillConfig, Estimator
from lowbit.configs.validate_distill import student_tokens, validate_distill
from lowbit.data.batch import Batch
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.data.loader import Loader
from lowbit.distill import run as distill
from lowbit.distill.calibration import compare
from lowbit.distill.codec import Layout
from lowbit.distill.fast import reader
from lowbit.distill.making import CacheMaker
from lowbit.distill.noise import Places
from lowbit.distill.rows import one_behind
from lowbit.distill.shards import Cache, open_cache
from lowbit.distill.student import Distillation, describe
from lowbit.distill.teacher import Teacher, open_teacher
from lowbit.models.lm_head import HeadGradients, default_chunk, scaled_gradients, token_chunks
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import ALONE
from lowbit.trainer.hardware import device_name, pick_device
from lowbit.trainer.loaded import load_run
from lowbit.trainer.objective import NextToken, Objective, ObjectiveOutput
from lowbit.trainer.run import Pretraining, execute

ROUNDS = 2
"""Turns of the runs whose speed is compared."""


class FullLoss(torch.autograd.Function):
    """sum_i KL(p_i || s_i) with the teacher's whole distribution, chunk by chunk: the gradient is softmax(z) - p."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, matrix: Tensor, vocab: int) -> Any:
        ours = weight.detach().to(hidden.dtype)
        sums = HeadGradients(hidden, weight, ours, True, True)
        total = torch.zeros(2, device=hidden.device)
        for rows in token_chunks(len(hidden), max(64, default_chunk(hidden.device.type, vocab) // 4)):
            z, y = hidden[rows] @ ours.t(), (teacher_hidden[rows] @ matrix.t()).float()
            z32 = z.float()
            z32[:, vocab:] = y[:, vocab:] = float("-inf")
            log_s, log_p = z32.log_softmax(dim=1), y.log_softmax(dim=1)
            p = log_p.exp()
            kl = torch.where(p > 0, p * (log_p - log_s), 0.0).sum(dim=1)
            total += torch.stack([kl.sum(), kl.square().sum()])
            sums.add(rows, (log_s.exp() - p).to(z.dtype), None)
        ctx.save_for_backward(sums.hidden, sums.weight)
        loss, square = total.unbind()
        ctx.mark_non_differentiable(square)
        return loss.clone(), square.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return (*scaled_gradients(ctx.saved_tensors, grad), None, None, None)


class Full:
    """The objective of online distillation."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher, self.matrix = teacher, teacher.head_matrix()

    def __call__(self, model: Transformer, batch: Batch) -> ObjectiveOutput:
        hidden = model(batch.tokens, batch.visibility).flatten(0, 1)
        loss, square = FullLoss.apply(  # type: ignore[no-untyped-call]
            hidden, model.head_weight, self.teacher.hidden(batch), self.matrix, model.vocab_size
        )
        return ObjectiveOutput(loss, loss.detach(), {"kl": torch.stack([loss.detach(), square])})


class Student(Distillation):
    """A student of a cache's samples with an objective of its own."""

    objective: Objective | None = None
    plain = False
    """The batches of pretraining, in which there is no cache."""

    def _make_loader(self) -> Loader:
        cached = super()._make_loader()
        if not self.plain:
            return cached
        cached.close()
        return Pretraining._make_loader(self)

    def _make_objective(self) -> Objective:
        return self.objective or super()._make_objective()


def train(
    config: DistillConfig,
    cache: Path,
    run_dir: Path,
    device: torch.device,
    objective: Objective | None,
    plain: bool = False,
) -> None:
    """A whole run."""

    def make() -> Student:
        student = Student(config, cache, run_dir, ALONE, device)
        student.objective, student.plain = objective, plain
        return student

    execute(make, run_dir, ALONE)


# Quality ------------------------------------------------------------------------------------------------------


def quality(config: DistillConfig, out: Path, students: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """A student of each kind and seed, measured on the held-out text."""
    device = pick_device(config.device)
    config = distill.with_teacher(config, out, ALONE, device)
    teacher = open_teacher(config.teacher, config.engine, device)
    data = prepare_data(config.data, print)
    measured = compare(teacher.model, teacher.model, held_out(config, data))
    print(f"teacher: loss {measured.loss:.4f}, ECE {measured.ece:.4f}")
    rows: list[dict[str, Any]] = [{"student": "teacher", "seed": 0, "bytes": 0.0} | asdict(measured)]
    for seed in seeds:
        base = None
        for name in students:
            estimator, _, targets = name.partition("-")
            kind = Estimator(estimator) if targets else Estimator.varopt
            settings = replace(config.cache, estimator=kind, targets=int(targets or 16), seed=seed)
            here = replace(config, seed=seed, cache=settings)
            if targets or base is None:
                folder = out / f"cache-{kind.value}-{settings.targets}-{seed}"
                cache = CacheMaker(folder, here, here.cache.tokens or student_tokens(here), teacher, data).make()
                print(describe(cache))
                base = base or folder
            objective: Objective | None = None
            if name == "full":
                objective = Full(teacher)
            elif name == "ce":
                objective = NextToken(config.optim.z_loss)
            run_dir = out / f"{name}-{seed}"
            started = time.perf_counter()
            train(here, folder if targets else base, run_dir, device, objective)
            seconds = time.perf_counter() - started
            student = load_run(run_dir, device=str(device)).model
            found = compare(student, teacher.model, held_out(config, data))
            size = cache.bytes / (cache.samples * cache.length) if targets else 2.0 * data.tokenizer.vocab_size
            rows.append({"student": name, "seed": seed, "bytes": 0.0 if name == "ce" else size} | asdict(found))
            print(f"{name} seed {seed}: loss {found.loss:.4f} KL {found.kl:.4f} ECE {found.ece:.4f} ({seconds:.0f} s)")
            write(out / "quality.json", {"rows": rows})
    return rows


def held_out(config: DistillConfig, data: Dataset) -> Any:
    """Held-out batches."""
    return data.validation_batches(config.batch.micro_batch, config.evaluation.final_tokens)


def print_quality(rows: list[dict[str, Any]]) -> None:
    """Means over seeds, and each student's distance from `full` seed by seed."""
    names = list(dict.fromkeys(r["student"] for r in rows))
    seeds = sorted({r["seed"] for r in rows} - {0})
    by = {(r["student"], r["seed"]): r for r in rows}
    print(
        f"\n{'student':16} {'bytes':>8} {'loss':>8} {'KL':>8} {'ECE':>8} {'excess':>8}   loss - full, KL - full by seed"
    )
    for name in names:
        mine = [r for r in rows if r["student"] == name]
        mean = {k: statistics.fmean(r[k] for r in mine) for k in ("bytes", "loss", "kl", "ece", "excess")}
        apart = [
            f"{by[name, s]['loss'] - by['full', s]['loss']:+.4f} {by[name, s]['kl'] - by['full', s]['kl']:+.4f}"
            for s in seeds
            if (name, s) in by and ("full", s) in by
        ]
        print(
            f"{name:16} {mean['bytes']:8.1f} {mean['loss']:8.4f} {mean['kl']:8.4f} {mean['ece']:8.4f} "
            f"{mean['excess']:+8.4f}   {'   '.join(apart)}"
        )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss and ECE of each student, a mark a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [n for n in dict.fromkeys(r["student"] for r in rows) if n != "teacher"]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, key, label in zip(
        axes, ("loss", "kl", "ece"), ("held-out loss (nats)", "KL to the teacher (nats)", "ECE"), strict=True
    ):
        for x, name in enumerate(names):
            values = [r[key] for r in rows if r["student"] == name]
            axis.scatter([x] * len(values), values, s=18)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)


# Speed --------------------------------------------------------------------------------------------------------

IN_TURN = 8
"""Micro-batches that are timed together: the device has work while the host prepares the next."""


def speed(config: DistillConfig, out: Path, profile: bool, caching: bool = True) -> dict[str, Any]:
    """What caching adds to the teacher's forward pass (head included), and distilled steps against plain ones."""
    device = pick_device(config.device)
    config = distill.with_teacher(config, out, ALONE, device)
    teacher = open_teacher(config.teacher, config.engine, device)
    data = prepare_data(config.data, print)
    result: dict[str, Any] = {"on": device_name(device)}
    for estimator in Estimator if caching else ():
        settings = replace(config, cache=replace(config.cache, estimator=estimator))
        maker = CacheMaker(out / "unused", settings, 1, teacher, data)
        [batch] = maker._loader.next_step()
        maker._loader.close()
        tokens = IN_TURN * batch.tokens.numel()
        plain = wall_seconds(partial(forward, teacher, batch, device), device)
        both = wall_seconds(partial(cached, maker, batch), device)
        result[f"caching {estimator.value}"] = {
            "forward_tokens_per_second": tokens / plain,
            "caching_tokens_per_second": tokens / both,
            "overhead": both / plain - 1,
        }
        if profile and device.type == "cuda":
            result[f"parts {estimator.value}"] = found = parts(maker, batch)
            print(f"{estimator.value}, ms of a micro-batch:", "  ".join(f"{k} {v:.3f}" for k, v in found.items()))
            show_kernels(partial(cached, maker, batch, 1), 25)
    result |= training(config, out, teacher, data)
    write(out / "speed.json", result)
    return result


def training(config: DistillConfig, out: Path, teacher: Teacher, data: Dataset) -> dict[str, Any]:
    """Steps from the cache against plain ones: medians of runs that take turns."""
    device = pick_device(config.device)
    tokens = config.cache.tokens or student_tokens(config)
    cache = CacheMaker(out / "cache-speed", config, tokens, teacher, data).make()
    config = replace(config, logging=replace(config.logging, every_steps=5))
    rows: dict[str, list[dict[str, Any]]] = {"ce": [], "distilled": []}
    for turn in range(ROUNDS):
        for name, found in rows.items():
            run_dir, plain = out / f"speed-{name}-{turn}", name == "ce"
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            drop_pages(cache)
            train(config, cache.folder, run_dir, device, NextToken(config.optim.z_loss) if plain else None, plain)
            metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            found += [r for r in metrics if r["step"] > 10 and "tokens_per_second" in r]
    result: dict[str, Any] = {
        name: {
            "tokens_per_second": statistics.median(r["tokens_per_second"] for r in found),
            "data_wait": statistics.median(r["time/data"] for r in found),
            "memory_gib": found[-1].get("memory_gib"),
        }
        for name, found in rows.items()
    }
    result["training"] = result["distilled"]["tokens_per_second"] / result["ce"]["tokens_per_second"]
    return result | {"reading": reading(cache, device)}


def drop_pages(cache: Cache) -> None:
    """Have the operating system forget what it keeps of a cache's shards, so that they are read from the disk.

    What a process has mapped stays: an earlier run's caches go first.
    """
    gc.collect()
    for shard in cache.shards:
        file = os.open(cache.folder / shard.file, os.O_RDONLY)
        try:
            os.fsync(file)  # only what is written can be forgotten
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


@torch.no_grad()
def forward(teacher: Teacher, batch: Batch, device: torch.device) -> None:
    """The teacher's passes over micro-batches, one after the other, logits included."""
    matrix = teacher.head_matrix()
    for _ in range(IN_TURN):
        hidden = teacher.hidden(batch.to(device))
        for rows in token_chunks(len(hidden), default_chunk(device.type, len(matrix))):
            _ = hidden[rows] @ matrix.t()


def cached(maker: CacheMaker, batch: Batch, count: int = IN_TURN) -> None:
    """Rows of as many micro-batches, each looked at after the next one was begun, as a shard is made."""
    for rows in one_behind(maker.begin(batch, turn * len(batch.tokens)) for turn in range(count)):
        rows.wait()


@torch.no_grad()
def parts(maker: CacheMaker, batch: Batch) -> dict[str, float]:
    """Milliseconds of a micro-batch on the GPU, part by part; `rest` is what `rows` has beside head, choice, codes."""
    make, here = maker._row_maker, batch.to(maker._device)
    hidden, matrix = maker.teacher.hidden(here), make.head.matrix
    samples, length = here.tokens.shape
    places, counted = Places.of(samples, length, device=hidden.device), here.weights.flatten() != 0

    def head() -> None:
        for rows in token_chunks(len(hidden), default_chunk("cuda", len(matrix))):
            _ = hidden[rows] @ matrix.t()

    found = {
        "teacher": gpu_seconds(lambda: maker.teacher.hidden(here)),
        "head": gpu_seconds(head),
        "rows": gpu_seconds(lambda: make(hidden, here.weights, 0)),
    }
    kernels = make._kernels
    if kernels is not None:
        chosen = kernels.chosen(hidden, places, matrix)
        found["choice"] = gpu_seconds(lambda: kernels.chosen(hidden, places, matrix)) - found["head"]
        found["codes"] = gpu_seconds(lambda: kernels.encoded(chosen, places, counted, len(batch.tokens)))
        found["rest"] = found["rows"] - found["head"] - found["choice"] - found["codes"]
    return {name: 1e3 * seconds for name, seconds in found.items()}


def reading(cache: Cache, device: torch.device) -> dict[str, float]:
    """Positions a second of reading random samples, and of unpacking them on the device."""
    count = min(cache.samples, 64)
    order = torch.randperm(cache.samples)[:count].numpy()
    read = wall_seconds(lambda: cache.read(order), torch.device("cpu"))
    packed = cache.read(order)
    words, starts = packed.words.to(device), packed.starts.to(device)
    unpack = wall_seconds(lambda: reader(cache.layout, words.device)(words, starts, cache.length), device)
    positions = count * cache.length
    return {"read_positions_per_second": positions / read, "unpack_positions_per_second": positions / unpack}


# Size ---------------------------------------------------------------------------------------------------------


def size(paths: list[Path]) -> list[dict[str, Any]]:
    """Bytes a position of caches; and of the same choices if ids were as long as in a 128k vocabulary.

    The estimate spreads ids evenly over the larger vocabulary, which is the worst for differences.
    """
    rows = []
    for path in paths:
        cache = open_cache(path)
        layout, positions = cache.layout, cache.samples * cache.length
        counted = sum(s.totals["rows"] for s in cache.shards)
        totals = {k: sum(s.totals[k] for s in cache.shards) / counted for k in ("named", "entropy")}
        large = Layout(layout.estimator, layout.targets, 128_256)
        extra = (large.id_bits - layout.id_bits) * layout.targets / 8 if layout.id_bits < large.id_bits else 0.0
        each = cache.bytes / positions
        rows.append({"cache": str(path), "bytes": each, "at_128k": each + extra} | totals)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "speed", "training", "size"))
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--students", default="full,varopt-16,topk-16,gumbel-16,multinomial-16,varopt-6,topk-6,ce")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--profile", action="store_true", help="with speed, on a GPU: where caching spends its time")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "size":
        for row in size([Path(p) for p in args.overrides]):
            print(json.dumps(row))
        return
    config = compose_for(DISTILL, args.overrides)
    validate_distill(config)
    if args.what in ("speed", "training"):
        print(json.dumps(speed(config, args.out, args.profile, args.what == "speed"), indent=1))
        return
    rows = quality(config, args.out, args.students.split(","), [int(s) for s in args.seeds.split(",")])
    print_quality(rows)
    draw(rows, args.out / "quality.png")


if __name__ == "__main__":
    told(main)
