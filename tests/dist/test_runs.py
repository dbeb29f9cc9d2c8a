"""Whole runs on several ranks: what they leave, how they go on elsewhere, how they end when something goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import jobs
import pytest
import ranks
import tiny_runs
import torch
from nearness import assert_near
from safetensors.torch import load_file

from lowbit.configs.schema import CommConfig, CommKind, OptimizerKind, RunConfig
from lowbit.configs.stored import save_config
from lowbit.trainer.run import pretrain

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]

JOBS = Path(jobs.__file__)
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


def run_jobs(
    world: int,
    planned: list[tuple[RunConfig, Path, dict[str, Any]]],
    folder: Path,
    backend: str = "gloo",
    nodes: int = 1,
    timeout: float = 600,
) -> list[ranks.Ended]:
    """Run configurations one after the other on `world` ranks, as if they were on so many machines."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for index, (config, run_dir, more) in enumerate(planned):
        save_config(config, folder / f"{index}.yaml")
        entries.append({"config": str(folder / f"{index}.yaml"), "run_dir": str(run_dir), **more})
    (folder / "jobs.json").write_text(json.dumps(entries))
    return ranks.run(world, [str(JOBS), str(folder), backend], folder, timeout, world // nodes)


def outcomes(ended: ranks.Ended) -> list[dict[str, Any]]:
    """What each job of a rank came to."""
    return [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]


def fine(all_ended: list[ranks.Ended]) -> None:
    """Every rank ended well, and every job on it."""
    assert not any(e.code for e in all_ended), "\n".join(f"rank {e.rank}: {e.code}\n{e.err[-3000:]}" for e in all_ended)
    for e in all_ended:
        assert outcomes(e) and not any("error" in o for o in outcomes(e)), e.out


def same(a: Path, b: Path, backend: str = "gloo") -> None:
    """Two runs ended at the same weights, states and averages, and logged the same numbers on the way."""
    left = tiny_runs.tensors(a)
    assert len(left) > 30
    assert_near(tiny_runs.tensors(b), left, backend, weight=1e-5, state=1e-3, what=b.name)
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "val_bpb", "val_loss", "val_bpb_ema")
    for ra, rb in zip(tiny_runs.rows(a), tiny_runs.rows(b), strict=True):
        for key in keys:
            assert (key in ra) == (key in rb), (ra["step"], key)
            assert ra.get(key, 0) == pytest.approx(rb.get(key, 0), rel=1e-4), (ra["step"], key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_goes_on_with_other_ranks_stages_and_engines(tmp_path: Path, backend: str) -> None:
    """From step 4 of a run on two ranks at stage 2: on 1, 3 and 4 ranks at other stages, and in one process.

    Also from a run in one process to four ranks. Oracle: the run in one process by `LocalEngine`, without a stop.
    """
    muon = replace(jobs.tiny(tmp_path).optim, kind=OptimizerKind.muon)
    more, most = (3, 4) if backend == "gloo" else (2, 2)
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pretrain(jobs.local(replace(jobs.tiny(tmp_path), optim=muon), backend), tmp_path / "whole")
    fine(
        run_jobs(
            2,
            [(replace(jobs.tiny(tmp_path, zero_stage=2), optim=muon), tmp_path / "begun", {})],
            tmp_path / "two",
            backend,
        )
    )

    def resumed(name: str, stage: int, start: str = "begun") -> tuple[RunConfig, Path, dict[str, Any]]:
        checkpoint = tmp_path / start / "checkpoints" / "step_00000004"
        config = replace(jobs.tiny(tmp_path, zero_stage=stage), optim=muon, resume=str(checkpoint))
        return config, tmp_path / name, {}

    pretrain(jobs.local(resumed("", 0)[0], backend), tmp_path / "local")
    fine(run_jobs(more, [resumed("three-0", 0), resumed("three-3", 3)], tmp_path / "three", backend))
    fine(run_jobs(most, [resumed("four-1", 1), resumed("four-l", 3, "whole")], tmp_path / "four", backend))
    expected = tiny_runs.tensors(tmp_path / "whole")
    for name in ("local", "three-0", "three-3", "four-1", "four-l"):
        assert_near(tiny_runs.tensors(tmp_path / name), expected, backend, weight=1e-5, state=1e-3, what=name)
        tail = tiny_runs.rows(tmp_path / "whole")[4:]
        for row, wanted in zip(tiny_runs.rows(tmp_path / name), tail, strict=True):
            assert row["step"] == wanted["step"] and row["tokens"] == wanted["tokens"]
            assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (0, {"error_feedback": True}),
    (2, {"stochastic_rounding": True}),
    (3, {"error_feedback": True}),
]


def test_what_codes_remember_is_in_checkpoints(tmp_path: Path) -> None:
    """From step 2 on a run with error feedback, and one with stochastic rounding, go on bit for bit.

    Also without what was left over, which a run in one process has no use for; several say which nodes cannot have it.
    """
    planned = []
    for stage, options in VARIANTS:
        comm = CommConfig(kind=CommKind.sq48, exact_below=100, **options)
        config = replace(jobs.tiny(tmp_path, steps=4, zero_stage=stage), comm=comm)
        begun = tmp_path / f"whole{stage}"
        resumed = replace(config, resume=str(begun / "checkpoints" / "step_00000002"))
        planned += [(config, begun, {}), (resumed, tmp_path / f"resumed{stage}", {})]
    fine(run_jobs(2, planned, tmp_path / "jobs"))
    for stage, key in ((0, "owned.blocks.0.mlp.up.weight"), (2, "reductions"), (3, "sent.blocks.1.mlp.up.weight")):
        last = [tmp_path / f"{name}{stage}" / "checkpoints" / "step_00000004" for name in ("whole", "resumed")]
        for part in ("model", "optimizer", "exchange"):
            left, right = (load_file(folder / f"{part}.safetensors") for folder in last)
            assert left.keys() == right.keys()
            assert all(torch.equal(tensor, right[name]) for name, tensor in left.items()), (stage, part)
        assert left[key].any()
    alone = replace(jobs.local(planned[1][0]), comm=CommConfig())
    assert pretrain(alone, tmp_path / "alone").step == 4
    [[error], *_] = [outcomes(e) for e in run_jobs(4, [(planned[0][0], tmp_path / "n", {})], tmp_path / "n4", nodes=2)]
    assert error["error"] == "ConfigError" and "comm.error_feedback=true with nodes of 2 ranks" in error["message"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_runs_equal_one_process(tmp_path: Path, backend: str) -> None:
    """Metrics, validation (shared out between the ranks) and moving averages too, at stages 1 and 3; with a tied head
    at 3, which an evaluation must find whole.
    """
    world = 3 if backend == "gloo" else 2
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip("needs 2 GPUs")
    config = jobs.tiny(tmp_path)
    tied = replace(config.model, tied_head=True)
    pretrain(jobs.local(config, backend), tmp_path / "one")
    pretrain(jobs.local(replace(config, model=tied), backend), tmp_path / "tied")
    planned = [(jobs.tiny(tmp_path, zero_stage=stage), tmp_path / f"stage{stage}", {}) for stage in (1, 3)]
    planned += [(replace(jobs.tiny(tmp_path, zero_stage=3), model=tied), tmp_path / "tied3", {})]
    all_ended = run_jobs(world, planned, tmp_path / "all", backend)
    fine(all_ended)
    for stage in (1, 3):
        same(tmp_path / "one", tmp_path / f"stage{stage}", backend)
    same(tmp_path / "tied", tmp_path / "tied3", backend)
    assert all(outcomes(e) == outcomes(all_ended[0]) for e in all_ended)
    written = {p.name for p in (tmp_path / "stage1").iterdir()}
    files = {"checkpoints", "config.yaml", "metrics.jsonl", "precision.json", "run.log", "samples.jsonl", "tokenizer"}
    assert written == files
    assert "comm/gradient_bytes" in tiny_runs.rows(tmp_path / "stage1")[0]


def test_errors_are_raised_on_every_rank(tmp_path: Path) -> None:
    """Each of these ends on all ranks at once, with one line that says where it came from; the next job can run."""
    config = jobs.tiny(tmp_path)
    coded = replace(config, comm=CommConfig(kind=CommKind.squinch, exact_below=100))
    planned = [
        (config, tmp_path / "a", {"disturb": {"kind": "nan", "rank": 1, "step": 1}}),
        (replace(config, resume=str(tmp_path / "corpus")), tmp_path / "b", {}),
        (coded, tmp_path / "z", {"disturb": {"kind": "zero", "step": 0}}),
        (config, tmp_path / "v", {"disturb": {"kind": "version", "rank": 1}}),
    ]
    all_ended = run_jobs(2, planned, tmp_path / "two")
    for e in all_ended:
        assert e.code == 0, e.err[-3000:]
        first, second, third, fourth = outcomes(e)
        assert first["error"] == "NonFiniteError" and "step 2" in first["message"], first
        assert "output of blocks.1.mlp.down, on rank 1" in first["message"], first
        assert second["error"] == "CheckpointError", second
        assert third["error"] == "NonFiniteError" and "step 1: every gradient is zero" in third["message"], third
        assert fourth["error"] == "ConfigError" and "pip install deepspeed==9.9.9" in fourth["message"], fourth
        assert fourth["message"].startswith("rank 1: ") == (e.rank == 0)
    assert outcomes(all_ended[0])[0] == outcomes(all_ended[1])[0]
    all_ended = run_jobs(2, [(config, tmp_path / "c", {"disturb": {"kind": "data", "rank": 0}})], tmp_path / "data")
    for e in all_ended:
        assert outcomes(e)[0]["error"] == "DataError" and "the corpus is gone" in outcomes(e)[0]["message"]
    assert outcomes(all_ended[1])[0]["message"].startswith("rank 0: ")


def test_a_signal_to_one_rank_ends_all_after_a_step(tmp_path: Path) -> None:
    disturbed = {"disturb": {"kind": "signal", "rank": 1, "step": 2}}
    for e in run_jobs(2, [(jobs.tiny(tmp_path), tmp_path / "run", disturbed)], tmp_path / "two"):
        assert e.code == 0, e.err[-3000:]
        assert outcomes(e)[0]["error"] == "Interrupted" and "saved at step 3" in outcomes(e)[0]["message"]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())[-1] == "step_00000003"


@pytest.mark.parametrize(
    ("kind", "said", "seconds"),
    [
        ("die", "died", 15),
        pytest.param("raise", "failed: ZeroDivisionError: one over nothing", 15, marks=pytest.mark.exhaustive),
        pytest.param("hang", "hangs", 35, marks=pytest.mark.exhaustive),
        pytest.param("stop", "has not been heard of", 90, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("exchange", ["fp32 after", pytest.param("squinch during", marks=pytest.mark.exhaustive)])
def test_a_lost_rank_ends_the_others(tmp_path: Path, kind: str, said: str, seconds: float, exchange: str) -> None:
    """The others name it within the time, and the run goes on from its checkpoint afterwards.

    What hangs, or is stopped, never ends by itself: the time is then from the last step that was logged. "During": in
    the middle of a backward pass, in which coded gradients of the last blocks are on their way.
    """
    config = jobs.tiny(tmp_path, rank_timeout_seconds=10 if kind == "hang" else 300)
    disturbed: dict[str, Any] = {"disturb": {"kind": kind, "rank": 1, "step": 3}}
    if exchange == "squinch during":
        coded = CommConfig(kind=CommKind.squinch, exact_below=100)
        model = replace(config.model, width=192, mlp_width=320, layers=6)
        config = replace(config, comm=coded, model=model, engine=replace(config.engine, bucket_mib=1))
        disturbed["disturb"]["backward"] = 4
    begun = time.time()
    patience = 150 if kind == "stop" else 600  # nobody can end what is stopped, but whoever started it
    all_ended = run_jobs(3, [(config, tmp_path / "run", disturbed)], tmp_path / "three", timeout=patience)
    ends = [e for e in all_ended if e.rank != 1]
    for e in ends:
        assert e.code == 1, (e.code, e.out, e.err[-2000:])
        assert "rank 1 (" in e.out + e.err and said in e.out + e.err, (e.out, e.err[-2000:])
    lost = all_ended[1].seconds
    if kind in ("hang", "stop"):
        lost = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime - begun
    assert max(e.seconds for e in ends) - lost < seconds
    fine(run_jobs(2, [(config, tmp_path / "run", {})], tmp_path / "again"))
    assert tiny_runs.rows(tmp_path / "run")[-1]["step"] == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "comm", "rank"), [(0, "squinch", 1), (3, "none", 0)])
def test_a_rank_that_fails_alone_ends_those_that_wait_for_it(tmp_path: Path, stage: int, comm: str, rank: int) -> None:
    """While engines are built, which takes collectives and posts: all say what the one failed of, before collectives
    time out; also when the one runs the job's store.
    """
    config = replace(jobs.tiny(tmp_path, zero_stage=stage), comm=CommConfig(kind=CommKind(comm)))
    planned = [(config, tmp_path / "run", {"disturb": {"kind": "build", "rank": rank}})]
    for e in run_jobs(3, planned, tmp_path / "three"):
        assert e.code != 0, e
        assert "ZeroDivisionError: one over nothing" in e.out + e.err, (e.rank, e.out, e.err[-2000:])
        assert e.rank == rank or f"rank {rank} (" in e.out + e.err
        assert e.seconds < 60


@pytest.mark.exhaustive
def test_torchrun_restarts_a_run(tmp_path: Path) -> None:
    """`torchrun --max-restarts`: a rank is killed in the first attempt, the second goes on from the checkpoint."""
    config = jobs.tiny(tmp_path)
    save_config(config, tmp_path / "config.yaml")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from lowbit.configs.stored import load_config\n"
        "from lowbit.trainer import loop, run\n"
        "step = loop.Trainer.train_step\n"
        "def broken(self):\n"
        "    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if self.position.step == 3 and os.environ['RANK'] == '1' and first:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self)\n"
        "loop.Trainer.train_step = broken\n"
        f"run.pretrain(load_config(Path({str(tmp_path / 'config.yaml')!r})), Path({str(tmp_path / 'run')!r}))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"]
    clean = {k: v for k, v in os.environ.items() if k not in ranks.VARIABLES}
    port = f"--master-port={ranks.free_port()}"
    ended = subprocess.run([*torchrun, port, str(script)], env=clean, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    steps = [row["step"] for row in tiny_runs.rows(tmp_path / "run")]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert "resumed at step 2" in (tmp_path / "run" / "run.log").read_text()


SETTINGS = ["data=files", "data.sources.files.path=corpus", "data.tokenizer.kind=bytes", "data.sequence_length=32"]
SETTINGS += ["preset=quick", "model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=1"]
SETTINGS += ["model.mlp_width=48", "device=cpu", "max_steps=3", "data.held_out=0.1", "run_name=two"]
SETTINGS += ["evaluation.final_tokens=256", "evaluation.sample_tokens=4", "engine=deepspeed"]
SETTINGS += ["comm.exact_below=100", "engine.zero_stage=2"]


def test_the_command_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun ... -m lowbit pretrain engine=deepspeed`: rank 0 has Hydra, the folder and the screen.

    Nothing is compiled on the way: DeepSpeed's extensions would be, for minutes, into that folder.
    """
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    tiny_runs.make_corpus(tmp_path / "corpus")
    command = ["-m", "lowbit", "pretrain", *SETTINGS, "comm=sq48"]
    first, second = ranks.run(2, [*command, "batch.micro_batch=2"], tmp_path)
    assert first.code == 0 and second.code == 0, first.err + second.err
    assert not (tmp_path / "extensions").exists()
    assert "run folder: runs/two" in first.out and second.out == ""
    assert (tmp_path / "runs" / "two" / ".hydra").is_dir()
    assert "[lowbit][INFO] - step 3" in (tmp_path / "runs" / "two" / "run.log").read_text()
    for e in ranks.run(2, [*command, "batch.micro_batch=8", "run_name=uneven"], tmp_path):
        assert e.code == 2 and e.err.count("\n") == 1, e.err
        assert "batch.sequences=8 batch.micro_batch=8: 2 processes cannot share a step" in e.err
    assert not (tmp_path / "runs" / "uneven").exists()


LATE = """
import time
from lowbit.configs.compose import compose
from lowbit.trainer.launch import open_ranks

with open_ranks(compose(["engine=deepspeed", "device=cpu", "batch.sequences=12"])) as (ranks, device):
    if ranks.rank:
        time.sleep(1.5)
    assert ranks.share("read late" if ranks.first else None) == "read late"
"""


def test_the_store_outlives_the_last_who_reads_it(tmp_path: Path) -> None:
    """Rank 0 runs the store, and is done when it has posted."""
    (tmp_path / "late.py").write_text(LATE)
    for ended in ranks.run(3, [str(tmp_path / "late.py")], tmp_path):
        assert ended.code == 0, ended.err[-2000:]
        assert ended.seconds < 20


@pytest.mark.exhaustive
def test_launchers(tmp_path: Path) -> None:
    """torchrun on two machines that know the first one's address, as in the README, and `deepspeed`: the same run."""
    tiny_runs.make_corpus(tmp_path / "corpus")
    pretrain_command = ["pretrain", *SETTINGS, "comm=squinch", "batch.micro_batch=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    torchrun += ["--master_addr=127.0.0.1", f"--master_port={ranks.free_port()}"]
    nodes = [
        subprocess.Popen(
            [*torchrun, f"--node_rank={node}", "-m", "lowbit", *pretrain_command, "run_name=nodes"],
            cwd=tmp_path,
            env=unlaunched(),
            stdout=subprocess.DEVNULL,
            stderr=(tmp_path / f"err{node}").open("w"),
        )
        for node in range(2)
    ]
    assert [node.wait(300) for node in nodes] == [0, 0], [(tmp_path / f"err{n}").read_text()[-2000:] for n in range(2)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus=2", "--no_local_rank"]
    launcher += [f"--master_port={ranks.free_port()}", "--module", "lowbit", *pretrain_command, "run_name=launched"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it starts `python`
    environment = unlaunched() | {"PATH": path, "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(launcher, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    last, other = (tiny_runs.rows(tmp_path / "runs" / name)[-1] for name in ("nodes", "launched"))
    assert last["step"] == 3 and last["loss"] == other["loss"]


OWN_RANKS = ["-m", "lowbit", "pretrain", "preset=quick", "data=files", "data.sources.files.path=corpus"]
OWN_RANKS += ["data.tokenizer.kind=bytes", "data.sequence_length=32", "data.held_out=0.1", "model.layers=1"]
OWN_RANKS += ["model.width=32", "model.heads=2", "model.kv_heads=1", "model.mlp_width=48", "device=cpu", "max_steps=2"]
OWN_RANKS += ["evaluation.sample_tokens=0", "evaluation.final_tokens=256", "batch.micro_batch=2"]
OWN_RANKS += ["engine=deepspeed", "engine.processes=2"]


def unlaunched() -> dict[str, str]:
    """The environment of a terminal."""
    return {k: v for k, v in os.environ.items() if k not in ranks.VARIABLES} | {"OMP_NUM_THREADS": "1"}


def start_own_ranks(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return forked.run([*OWN_RANKS, *more], folder)


@pytest.mark.parametrize("seeds", [[1], pytest.param([1, 2], marks=pytest.mark.exhaustive)], ids=str)
def test_a_sweep_starts_ranks_for_each_job(tmp_path: Path, seeds: list[int]) -> None:
    """`engine.processes=2 -m`: a torchrun a job, each in its own folder; what two ranks cannot share is refused."""
    tiny_runs.make_corpus(tmp_path / "corpus")
    swept = start_own_ranks(tmp_path, f"seed={','.join(map(str, seeds))}", "hydra.sweep.dir=swept", "-m")
    assert swept.returncode == 0, swept.stderr[-3000:]
    folders = {path.name for path in (tmp_path / "swept").iterdir() if path.is_dir()}
    assert folders == {str(job) for job in range(len(seeds))}
    for job in map(str, range(len(seeds))):
        assert tiny_runs.rows(tmp_path / "swept" / job)[-1]["step"] == 2
        assert "2 ranks" in (tmp_path / "swept" / job / "run.log").read_text()
    losses = {tiny_runs.rows(tmp_path / "swept" / str(job))[0]["loss"] for job in range(len(seeds))}
    assert len(losses) == len(seeds) and "seed" in swept.stdout
    uneven = start_own_ranks(tmp_path, "batch.micro_batch=8", "run_name=uneven")
    assert uneven.returncode == 2 and "2 processes cannot share a step" in uneven.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.exhaustive
def test_ranks_that_were_started_fail_and_end_as_one(tmp_path: Path) -> None:
    tiny_runs.make_corpus(tmp_path / "corpus")
    failed = start_own_ranks(tmp_path, "optim.lr=1e30", "max_steps=5", "run_name=failed")
    assert failed.returncode == 1 and "the run on 2 ranks failed" in failed.stderr
    ended = subprocess.Popen(
        [sys.executable, *OWN_RANKS, "max_steps=100000", "run_name=long"],
        cwd=tmp_path,
        env=unlaunched(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ended.stdout is not None
    for line in ended.stdout:
        if "step 20" in line:
            ended.send_signal(signal.SIGTERM)
            break
    ended.stdout.read()
    assert ended.wait(280) == 130
    assert list((tmp_path / "runs" / "long" / "checkpoints").glob("step_*"))


@pytest.mark.exhaustive
def test_what_few_bits_cost_in_learning(tmp_path: Path) -> None:
    """300 steps on four ranks: 6 bits end where FP32 does, within what another seed changes."""

    def config(comm: str, seed: int = 1) -> RunConfig:
        base = jobs.tiny(tmp_path, 300, zero_stage=1)
        quiet = replace(base.evaluation, every_steps=0, max_tokens=2048, final_tokens=2048)
        code = CommConfig(kind=CommKind(comm), exact_below=100)
        saved = replace(base.checkpoint, every_steps=0)
        return replace(base, seed=seed, comm=code, evaluation=quiet, checkpoint=saved)

    names = [("none", 1), ("none", 2), ("none", 3), ("bf16", 1), ("squinch", 1), ("sq48", 1)]
    all_ended = run_jobs(4, [(config(*n), tmp_path / f"{n[0]}{n[1]}", {}) for n in names], tmp_path / "four")
    fine(all_ended)
    bpb = dict(zip(names, [o["val_bpb"] for o in outcomes(all_ended[0])], strict=True))
    print(bpb)
    plain = [bpb["none", seed] for seed in (1, 2, 3)]
    noise = max(plain) - min(plain)
    for code in ("bf16", "squinch", "sq48"):
        assert abs(bpb[code, 1] - bpb["none", 1]) < max(noise, 0.01), bpb
    assert bpb["none", 1] < 0.6 * tiny_runs.rows(tmp_path / "none1")[0]["loss"] / 0.693, "it learned"
