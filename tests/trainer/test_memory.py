"""Out of memory: one line that names settings which the arithmetic of the plan says will fit."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowbit.configs.schema import BatchConfig, BatchWarmupConfig, Recompute, RunConfig
from lowbit.configs.validate import validate
from lowbit.errors import OutOfMemoryError
from lowbit.models.transformer import Transformer
from lowbit.trainer.memory import explain_out_of_memory, what_to_change
from lowbit.trainer.plan import RESERVE, plan
from lowbit.trainer.run import pretrain


def with_settings(config: RunConfig, settings: str) -> RunConfig:
    """The configuration with the advised `key=value`s."""
    for key, value in re.findall(r"(batch\.micro_batch|engine\.recompute)=(\w+)", settings):
        if key == "batch.micro_batch":
            config = replace(config, batch=replace(config.batch, micro_batch=int(value)))
        else:
            config = replace(config, engine=replace(config.engine, recompute=Recompute(value)))
    return config


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize(
    ("sequences", "micro_batch", "stages"), [(24, 12, [12]), (15, 5, []), (16, 16, []), (3, 1, [])]
)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_every_advice_is_valid_takes_less_and_fits(
    tiny_run: RunConfig, recompute: Recompute, sequences: int, micro_batch: int, stages: list[int], share: float
) -> None:
    warmup = [BatchWarmupConfig(1000 * (i + 1), s) for i, s in enumerate(stages)]
    config = replace(tiny_run, batch=BatchConfig(sequences, micro_batch, warmup))
    config = replace(config, engine=replace(config.engine, recompute=recompute))
    needs = plan(config, 257, compute_bytes=4).memory.total
    memory = int((needs * share + RESERVE) / 0.95)
    advice = what_to_change(config, 257, 4, memory)
    choices = advice.removeprefix("try ").split(" or ") if advice.startswith("try ") else []
    for choice in choices:
        changed = with_settings(config, choice)
        validate(changed)
        planned = plan(changed, 257, compute_bytes=4, memory_bytes=memory)
        assert changed != config and planned.fits and planned.memory.total < needs, choice
    smallest = with_settings(config, "batch.micro_batch=1 engine.recompute=full")
    if smallest != config and plan(smallest, 257, compute_bytes=4, memory_bytes=memory).fits:
        assert choices, "something fits, so something is advised"
    elif not choices:
        assert "smaller model" in advice


class Exhausted:
    """A forward pass that runs out of memory at its n-th call."""

    def __init__(self, call: int, error: Exception) -> None:
        self.left, self.error, self.forward = call, error, Transformer.forward

    def __call__(self, model: Transformer, *arguments: object, **named: object) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.forward(model, *arguments, **named)  # type: ignore[arg-type]


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["device", "machine"])
def test_a_run_out_of_memory_says_what_to_change(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for call, saved in ((0, False), (5, True)):  # two micro-batches a step, a checkpoint every second step
        fails = Exhausted(call, error)
        monkeypatch.setattr(Transformer, "forward", lambda *a, _fails=fails, **k: _fails(*a, **k))
        with pytest.raises(OutOfMemoryError) as raised:
            pretrain(tiny_run, tmp_path / "run")
        monkeypatch.setattr(Transformer, "forward", fails.forward)
        message = str(raised.value)
        assert "batch.micro_batch=2" in message and "engine.recompute=selective" in message and "\n" not in message
        assert ("checkpoint is intact" in message) == saved
    assert pretrain(with_settings(tiny_run, "batch.micro_batch=2"), tmp_path / "run").step == 6


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shape"), explain_out_of_memory(lambda: ""):
        raise RuntimeError("shape mismatch")
