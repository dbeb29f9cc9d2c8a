"""Training speed of the shipped path: prints one table, writes JSON.

    python scripts/bench_train.py gpu      # the 20 x 1280 shape, causal and document-masked attention, whole steps
    python scripts/bench_train.py cpu      # the CPU default against a straightforward FP32 eager loop, in one process
    python scripts/bench_train.py startup  # process start to first step with --tokens packed tokens, compilation off

`gpu` runs `pretrain` itself and reads its metrics, so that nothing a user pays is left out: data, optimizer,
clipping, logging. MFU counts 6 FLOPs a matrix parameter (head included) and the causal half of attention, over
the BF16 product rate measured on the H200 (800 TFLOP/s); the vendor's dense peak is the second figure.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import write

MEASURED_BF16 = 800e12

SHAPE = [
    "model.name=20x1280",
    "model.layers=20",
    "model.width=1280",
    "model.heads=10",
    "model.kv_heads=10",
    "model.mlp=relu2",
    "model.mlp_width=5120",
    "model.tied_head=false",
    "model.max_sequence=2048",
    "data.sequence_length=2048",
    "data.tokenizer.vocab_size=32768",
    "batch.micro_batch=16",
    "batch.sequences=64",
    "optim=muon",
    "precision=bf16",
    "checkpoint.every_steps=0",
    "evaluation.every_steps=0",
    "evaluation.final_tokens=65536",
    "evaluation.sample_tokens=0",
    "logging.every_steps=5",
    "logging.softmax_saturation=false",
]


def write_documents(folder: Path, characters: int) -> Path:
    """The standard library's text cut into documents of `characters` on average, as .jsonl."""
    from lowbit.configs.schema import SourceConfig
    from lowbit.data.sources import list_source, read_documents

    path = folder / "documents.jsonl"
    with path.open("w") as out:
        for text in read_documents(list_source("python_docs", SourceConfig())):
            at = 0
            while at < len(text):
                size = characters // 2 + (at * 2654435761 + len(text)) % characters
                out.write(json.dumps({"text": text[at : at + size]}) + "\n")
                at += size
    return path


def run_pretrain(overrides: list[str], run_dir: Path) -> list[dict[str, Any]]:
    """`lowbit pretrain` in a process of its own; its metrics."""
    command = [sys.executable, "-m", "lowbit", "pretrain", *overrides, f"hydra.run.dir={run_dir}"]
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def bench_gpu(args: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """Tokens/s at the 20 x 1280 shape."""
    documents = write_documents(out, 2500)
    rows = []
    for name, mask in (("causal", "false"), ("documents", "true")):
        overrides = [*SHAPE, "data=files", f"data.sources.files.path={documents}", f"data.cache_dir={out / 'data'}"]
        overrides += [f"data.document_mask={mask}", f"max_steps={args.steps}", *args.overrides]
        metrics = run_pretrain(overrides, out / name)
        timed = metrics[2:]  # the first ten steps compile and warm up
        speed = statistics.median(row["tokens_per_second"] for row in timed)
        from lowbit.configs.stored import load_config
        from lowbit.models.cost import flops_per_token

        config = load_config(out / name / "config.yaml")
        flops = flops_per_token(config.model, 32768, 2048)
        rows.append(
            {
                "row": name,
                "tokens_per_second": round(speed),
                "spread": [round(f(row["tokens_per_second"] for row in timed)) for f in (min, max)],
                "mfu_of_800": round(speed * flops / MEASURED_BF16, 4),
                "mfu_of_peak": timed[-1]["mfu"],
                "data_wait": max(row["time/data"] for row in timed),
                "memory_gib": timed[-1]["memory_gib"],
                "loss": metrics[-1]["loss"],
            }
        )
    return rows


def bench_cpu(args: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """The CPU preset's step against the plain loop, AdamW on both sides, taking turns on the same batches."""
    import torch
    from reference_gpt import ReferenceGPT

    from lowbit.configs.compose import compose
    from lowbit.models.visibility import causal
    from lowbit.trainer.run import Pretraining

    config = compose(
        [
            "preset=cpu",
            "device=cpu",
            "optim=adamw",
            "max_steps=100000",
            "max_minutes=null",
            f"data.cache_dir={out / 'data'}",
            *args.overrides,
        ]
    )
    run = Pretraining(config, out / "cpu")
    trainer = run.build()
    plain = ReferenceGPT(config.model, run.model.padded_vocab)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def plain_step() -> None:
        batches = run.loader.next_step()  # type: ignore[union-attr]
        for b in batches:
            v = b.visibility or causal(*b.tokens.shape)
            loss = plain(b.tokens, b.targets, b.weights, v.start, v.limit, v.position)
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    times: dict[str, list[float]] = {"lowbit": [], "plain FP32 eager": []}
    for turn in range(args.steps):
        for name, step in (("lowbit", trainer.train_step), ("plain FP32 eager", plain_step)):
            start = time.perf_counter()
            step()
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    run.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["plain FP32 eager"] / medians["lowbit"]
    return [{"row": "cpu", "seconds_a_step": medians, "speed_over_plain": round(ratio, 3), "dtype": str(run.dtype)}]


def bench_startup(args: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """Seconds from starting the command to the end of its first step, with the data packed before."""
    text = out / f"text{args.tokens}.txt"
    if not text.exists():
        from lowbit.configs.schema import SourceConfig
        from lowbit.data.sources import list_source, read_documents

        library = "".join(read_documents(list_source("python_docs", SourceConfig())))
        with text.open("w") as file:
            for copy in range(-(-args.tokens // len(library.encode()))):
                file.write(f"copy {copy}\n{library}")
    data = ["data=files", f"data.sources.files.path={text}", f"data.cache_dir={out / 'data'}"]
    data += ["data.tokenizer.kind=bytes", "data.held_out=0.001"]
    subprocess.run([sys.executable, "-m", "lowbit", "data", "pack", *data], check=True)
    seconds = []
    for turn in range(3):
        run_dir = out / f"startup{turn}-{time.time_ns()}"
        overrides = [*args.overrides, *data, "engine.compile=off", "max_steps=2", "logging.every_steps=1"]
        overrides += ["evaluation.final_tokens=1", "evaluation.sample_tokens=0", "checkpoint.every_steps=0"]
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "lowbit", "pretrain", *overrides, f"hydra.run.dir={run_dir}"])
        metrics = run_dir / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        seconds.append(round(time.perf_counter() - start, 2))
        if process.wait() != 0:
            raise SystemExit("lowbit pretrain failed: see above")
    return [{"row": "startup", "tokens": args.tokens, "seconds": seconds, "median": statistics.median(seconds)}]


BENCHES = {"gpu": bench_gpu, "cpu": bench_cpu, "startup": bench_startup}


def main() -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="startup: size of the packed data")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_train"))
    parser.add_argument("overrides", nargs="*", help="more configuration overrides")
    args = parser.parse_intermixed_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = BENCHES[args.bench](args, args.out)
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    write(args.out / f"{args.bench}.json", {"rows": rows})


if __name__ == "__main__":
    main()
