"""`lowbit distill` as typed: real processes on a corpus of a few files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest

SMALL = [
    "data=files",
    "data.sources.files.path=corpus",
    "data.tokenizer.kind=bytes",
    "data.pack_workers=1",
    "data.sequence_length=32",
    "data.held_out=0.1",
    "batch.sequences=4",
    "batch.micro_batch=4",
    "evaluation.sample_tokens=0",
    "evaluation.final_tokens=512",
    "logging.every_steps=1",
    "logging.softmax_saturation=false",
    "model.layers=1",
    "model.width=32",
    "model.mlp_width=32",
    "device=cpu",
]


def lowbit(cwd: Path, *arguments: str) -> tuple[int, str, str]:
    done = forked.run(["-m", "lowbit", "distill", *arguments], cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    for i in range(60):
        words = " ".join(f"word{(i * 7 + j * j) % 23}" for j in range(20 + i % 17))
        (tmp_path / "corpus" / f"{i:02d}.txt").write_text(f"document {i}\n{words}\n")
    return tmp_path


@pytest.mark.slow
def test_the_whole_story(place: Path) -> None:
    """Everything in one run; then its parts by themselves; a second student of the first one's cache."""
    teacher = ["teacher.model.layers=1", "teacher.model.width=48", "teacher.model.mlp_width=48", "teacher.max_steps=5"]
    code, out, err = lowbit(place, *SMALL, *teacher, "max_steps=4", "run_name=first")
    assert code == 0, err
    assert "teacher: none is named, so one is trained first (5 steps)" in out
    assert "cache runs/first/cache: 512 positions, 16 targets by varopt" in out
    assert "step 4 loss" in out and re.search(r" kl -?[\d.]+ ± [\d.]+ ", out)
    run = place / "runs" / "first"
    assert {"config.yaml", "distill.yaml", "metrics.jsonl", "checkpoints", "cache", "teacher"} <= {
        p.name for p in run.iterdir()
    }
    code, out, err = lowbit(place, "stats", "runs/first/cache")
    assert code == 0 and "varopt at temperature 1" in out and "bytes a position" in out
    code, out, err = lowbit(place, "verify", "runs/first/cache", "--samples", "16", "--device", "cpu")
    assert code == 0 and "1 shards match" in out and "16 samples read again by the teacher, 16 identical" in out, err
    code, out, err = lowbit(
        place, "cache", *SMALL, "teacher.path=runs/first/teacher", "cache.path=k", "cache.estimator=topk",
        "cache.tokens=512",
    )  # fmt: skip
    assert code == 0 and "cache k: 512 positions, 16 targets by topk" in out, err
    code, out, err = lowbit(
        place, "train", *SMALL, "cache.path=k", "max_steps=3", "run_name=second", "loss.divergence=jsd",
        "cache.estimator=topk", "loss.alpha=0.5",
    )  # fmt: skip
    assert code == 0, err
    assert "biased towards the likeliest tokens" in out
    log = [json.loads(line) for line in (place / "runs" / "second" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log] == [1, 2, 3] and all(r["kl"] > 0 for r in log)


@pytest.mark.slow
def test_mistakes_are_one_line_and_leave_nothing(place: Path) -> None:
    (place / "empty").mkdir()
    for arguments, expected in (
        (["cache", *SMALL, "max_steps=2"], "teacher.path=: there is nothing to cache"),
        (["cache", *SMALL, "teacher.path=nope", "max_steps=2"], "teacher.path=nope: no such folder"),
        (["train", *SMALL, "cache.path=nope", "max_steps=2"], "cache.path=nope: no such folder"),
        (["loss.divergence=jsd"], "sampled targets would bias it"),
        (["preset=gpu"], "lowbit distill takes distill=cpu or gpu or quick"),
        (["max_minutes=1"], "cache.tokens=null max_minutes=1.0: how many positions to cache"),
        (["cache.targets=0"], "cache.targets=0: must be at least 1 and at most 255; cache.targets=16 would work"),
        (["verify", "empty"], "holds no teacher's cache"),
    ):
        code, out, err = lowbit(place, *arguments)
        assert code in (1, 2) and expected in err and err.count("\n") == 1, (arguments, err, out)
    assert not (place / "runs").exists()
    code, out, err = lowbit(place, "cache", *SMALL, "teacher.path=empty", "max_steps=2")
    assert code == 2 and "empty: it is neither the folder of a run nor of a Hugging Face model" in err, err


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_two_ranks_share_a_cache_and_train_like_one(place: Path, teacher_run: Path) -> None:
    """torchrun with the DeepSpeed engine: the same shards to the bit, and the same divergences as one process."""
    settings = [*SMALL, "data.tokenizer.kind=file", f"data.tokenizer.path={teacher_run}/tokenizer"]
    settings += [f"teacher.path={teacher_run}", "max_steps=6", "cache.micro_batch=2", "cache.shard_tokens=128"]
    settings += ["batch.micro_batch=2", "precision.compute=fp32"]
    code, _, err = lowbit(place, *settings, "run_name=one")
    assert code == 0, err
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lowbit"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "distill", *settings, "engine=deepspeed", "run_name=two"],
        cwd=place, env=env, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    caches = [place / "runs" / name / "cache" for name in ("one", "two")]
    one, two = ({p.name: p.read_bytes() for p in c.glob("shard-*")} for c in caches)
    assert one == two and len(one) == 6
    logs = [
        [json.loads(line) for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert len(logs[0]) == len(logs[1]) == 6
    for a, b in zip(*logs, strict=True):
        for key in ("step", "tokens", "loss", "kl", "kl_se", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
