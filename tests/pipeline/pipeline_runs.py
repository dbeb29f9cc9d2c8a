"""A pipeline of seconds, for every test that runs one."""

import os
from pathlib import Path

import forked
from tiny_runs import make_corpus

SETTINGS = [
    "pipeline=quick",
    "device=cpu",
    "deterministic=true",
    "engine.compile=off",
    "checkpoint.every_steps=2",
    "logging.every_steps=1",
    "logging.softmax_saturation=false",
    "data=files",
    "data.sources.files.path=corpus",
    "data.pack_workers=1",
    "data.sequence_length=32",
    "data.held_out=0.1",
    "teacher.layers=1",
    "pretrain.max_steps=5",
    "pretrain.evaluation.sample_tokens=0",
    "distill.max_steps=5",
    "distill.cache.shard_tokens=512",
    "distill.evaluation.sample_tokens=0",
    "rl.max_steps=3",
    "rl.task.examine=8",
]


def place(folder: Path) -> Path:
    """A folder with documents."""
    make_corpus(folder / "corpus")
    return folder


def environment() -> dict[str, str]:
    """Of a process with one thread that no launcher started."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "OMP_NUM_THREADS": "1"
    }


def lowbit(cwd: Path, *arguments: str, timeout: float = 280) -> tuple[int, str, str]:
    """Exit code and what a process prints."""
    done = forked.run(["-m", "lowbit", *arguments], cwd, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of weights, of optimizer state and of a cache, by name."""
    patterns = ("**/*.safetensors", "cache/*")
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for pattern in patterns
        for file in folder.glob(pattern)
        if file.is_file() and file.suffix not in (".json", ".lock")
    }
