"""Micro-batches replayed as CUDA graphs: the bits of those that run as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_runs
import torch

from lowbit.configs.schema import CompileMode, ComputeDtype, PrecisionConfig, PrecisionSwitch, RunConfig
from lowbit.errors import ConfigError
from lowbit.trainer.graphs import MicroBatchGraphs
from lowbit.trainer.run import pretrain


def with_graphs(config: RunConfig) -> RunConfig:
    return replace(config, engine=replace(config.engine, cuda_graphs=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has them")
def test_a_cpu_has_no_graphs(tiny_run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs=true.*only a GPU"):
        pretrain(with_graphs(replace(tiny_run, device="auto")), tmp_path / "run")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_has_the_same_bits(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """With masks and without, a switch of precision, evaluations between steps, and a resume in the middle."""
    replayed = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counting(torch.cuda.CUDAGraph.replay, replayed))
    config = replace(
        tiny_run,
        device="cuda",
        max_steps=12,
        model=replace(tiny_run.model, width=128, mlp_width=256),
        batch=replace(tiny_run.batch, sequences=12, micro_batch=4),
        precision=PrecisionConfig(
            compute=ComputeDtype.bf16, forward="nvfp4", switch=[PrecisionSwitch(at_step=7, forward="bf16")]
        ),
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
