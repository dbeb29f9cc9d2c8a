"""Micro-batches replayed as CUDA graphs: the bits of those that run as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_runs
import torch

from lowbit.configs.schema import (
    AttentionKernel,
    CompileMode,
    ComputeDtype,
    ModelConfig,
    PrecisionConfig,
    PrecisionSwitch,
    RunConfig,
)
from lowbit.data.batch import Batch
from lowbit.errors import ConfigError
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import documents
from lowbit.trainer.graphs import MicroBatchGraphs
from lowbit.trainer.objective import NextToken
from lowbit.trainer.run import pretrain


def with_graphs(config: RunConfig) -> RunConfig:
    return replace(config, engine=replace(config.engine, cuda_graphs=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has them")
def test_a_cpu_has_no_graphs(tiny_run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs=true.*only a GPU"):
        pretrain(with_graphs(replace(tiny_run, device="auto")), tmp_path / "run")


def on_a_gpu(tiny_run: RunConfig) -> RunConfig:
    """Twelve steps of three micro-batches in BF16."""
    return replace(
        tiny_run,
        device="cuda",
        max_steps=12,
        model=replace(tiny_run.model, width=128, mlp_width=256),
        batch=replace(tiny_run.batch, sequences=12, micro_batch=4),
        precision=PrecisionConfig(compute=ComputeDtype.bf16),
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_has_the_same_bits(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """With masks and without, a switch of precision, evaluations between steps, and a resume in the middle."""
    replayed = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counting(torch.cuda.CUDAGraph.replay, replayed))
    switch = [PrecisionSwitch(at_step=7, forward="bf16")]
    config = replace(
        on_a_gpu(tiny_run),
        precision=PrecisionConfig(compute=ComputeDtype.bf16, forward="nvfp4", switch=switch),
        engine=replace(tiny_run.engine, compile=CompileMode.on if compiled else CompileMode.off),
    )
    pretrain(config, tmp_path / "plain")
    assert not replayed
    pretrain(with_graphs(config), tmp_path / "graphs")
    assert len(replayed) > 10
    tiny_runs.crash_after(6, with_graphs(config), tmp_path / "parts", monkeypatch)
    pretrain(with_graphs(config), tmp_path / "parts")
    plain = tiny_runs.tensors(tmp_path / "plain")
    for other in ("graphs", "parts"):
        found = tiny_runs.tensors(tmp_path / other)
        assert found.keys() == plain.keys()
        different = [name for name, tensor in plain.items() if not torch.equal(tensor, found[name])]
        assert not different, (other, different)
    losses = [[row["loss"] for row in tiny_runs.rows(tmp_path / name)] for name in ("plain", "graphs")]
    assert losses[0] == losses[1]


@pytest.mark.gpu
@pytest.mark.slow
def test_documents_by_the_kernel_for_varying_lengths(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph serves batches of as many documents, roundly; its sums are in another order each time, so no bits."""
    replayed: list[int] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counting(torch.cuda.CUDAGraph.replay, replayed))
    config = on_a_gpu(tiny_run)
    losses = {}
    for kernel in (AttentionKernel.flex, AttentionKernel.varlen):
        for graphs in (False, True):
            engine = replace(config.engine, attention=kernel, cuda_graphs=graphs)
            folder = tmp_path / f"{kernel}{graphs}"
            pretrain(replace(config, engine=engine), folder)
            losses[kernel, graphs] = [row["loss"] for row in tiny_runs.rows(folder)]
    assert replayed
    for found in losses.values():
        assert found == pytest.approx(losses[AttentionKernel.flex, False], rel=5e-3)


@pytest.mark.parametrize("wanted", [False, True])
def test_kinds_of_batches(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where documents begin makes kinds only for the kernel that is told."""
    graphs = object.__new__(MicroBatchGraphs)
    graphs.model, graphs._kinds, graphs._layers = Transformer(ModelConfig(), 50), [], []
    monkeypatch.setattr(Transformer, "uses_varlen", wanted)
    ids, weights = torch.zeros(2, 300, dtype=torch.int64), torch.ones(2, 300)
    kinds = set()
    for every in (300, 290, 30, 29, 10, 1):
        seen = documents((torch.arange(300) % every == 0).expand(2, 300)).with_ends()
        batch = graphs.as_read(Batch(ids, ids, weights, seen, 600))
        kinds.add(id(graphs._kind(NextToken, batch)))  # type: ignore[arg-type]
    # one document of 300 tokens and one of 290; of 30 and of 29; of 10; too many for the kernel
    assert len(kinds) == (4 if wanted else 1)


def counting(replay: object, seen: list[int]) -> object:
    """`replay`, counted."""

    def counted(self: torch.cuda.CUDAGraph) -> None:
        seen.append(1)
        replay(self)  # type: ignore[operator]

    return counted


def test_gradients_come_back_where_an_optimizer_drops_them() -> None:
    """The tensors that graphs write to: zeroed after `set_to_none`, with the numbers of whatever replaced them."""
    graphs = object.__new__(MicroBatchGraphs)
    a, b, c = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    kept = {p: torch.full((3,), float(i)) for i, p in enumerate((a, b, c))}
    graphs._gradients = dict(kept)
    a.grad, b.grad, c.grad = None, torch.full((3,), 7.0), kept[c]
    graphs._give_gradients()
    assert all(p.grad is kept[p] for p in (a, b, c))
    assert [float(kept[p][0]) for p in (a, b, c)] == [0.0, 7.0, 2.0]
