"""Signals against real processes, the first bad layer, and the spike score against numpy."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from lowbit.trainer.guard import SignalGuard, SpikeScore, first_bad, first_bad_gradient

LOOP = """
import sys, time
from lowbit.trainer.guard import SignalGuard
with SignalGuard() as guard:
    print("ready", flush=True)
    for step in range(600):
        time.sleep(0.05)
        if guard.requested and "patient" not in sys.argv:
            print("stopped by", guard.requested, flush=True)
            break
"""


def _run(signals: list[signal.Signals], *arguments: str) -> tuple[int, str, str]:
    """Exit status and output of the loop above after these signals, in a process of its own."""
    command = [sys.executable, "-c", LOOP, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        out, error = process.communicate(timeout=60)
    return process.returncode, out, error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_the_loop_at_its_boundary(number: signal.Signals) -> None:
    status, out, error = _run([number])
    assert (status, out) == (0, f"stopped by {number.name}\n")
    assert number.name in error


def test_a_second_interrupt_ends_it_at_once() -> None:
    status, _, error = _run([signal.SIGINT, signal.SIGINT], "patient")
    assert status in (1, -signal.SIGINT) and "KeyboardInterrupt" in error


def test_a_repeated_sigterm_changes_nothing() -> None:
    status, _, error = _run([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGINT], "patient")
    assert status != -signal.SIGTERM and "KeyboardInterrupt" in error


def test_handlers_come_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError), SignalGuard() as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.requested == "SIGTERM"
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_the_main_thread_it_does_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with SignalGuard() as guard:
            seen.append((guard.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


# Non-finite -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)  # registered first, run last
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["blocks.0.up", "blocks.2.down", "head"])
def test_first_bad_module(name: str, value: float) -> None:
    model = Model()
    hooks = len(model.head._forward_hooks)
    assert first_bad(model, lambda: model(torch.ones(3, 4))) is None
    with torch.no_grad():
        model.get_submodule(name).weight[0, 0] = value
    assert first_bad(model, lambda: model(torch.ones(3, 4))) == name
    assert len(model.head._forward_hooks) == hooks


def test_first_bad_sees_through_compilation() -> None:
    """`compile` with Dynamo alone needs no C++ compiler; hooks added later are invisible to its code."""
    model = Model()
    for block in model.blocks:
        block.compile(backend="eager")
    model(torch.ones(3, 4))
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(math.nan)
    model(torch.ones(3, 4))
    assert first_bad(model, lambda: model(torch.ones(3, 4))) == "blocks.1.up"


def test_first_bad_looks_inside_containers() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"ids": [torch.arange(3)], "x": [x, x / 0]}

    model = nn.ModuleDict({"pair": Pair()})
    assert first_bad(model, lambda: model["pair"](torch.ones(2))) == "pair"


def test_first_bad_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert first_bad_gradient(model) is None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert first_bad_gradient(model) is None
    model[0].weight.grad[0, 0] = math.nan
    model[1].bias.grad[1] = math.inf
    assert first_bad_gradient(model) == "1.bias"


# Spikes -----------------------------------------------------------------------------------------------------------


def test_spike_score_against_numpy() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.1, 400)
    losses[300] += 1.0
    score = SpikeScore()
    for index, loss in enumerate(losses):
        got = score.update(float(loss))
        before = losses[max(0, index - 128) : index]
        if index < 16:
            assert got is None
        else:
            assert got == pytest.approx((loss - before.mean()) / before.std())
            assert (got > 6) == (index == 300)


def test_spike_score_edge_cases_and_state() -> None:
    score = SpikeScore()
    for _ in range(20):
        last = score.update(2.0)
    assert last == 0.0
    assert score.update(math.nan) is None
    restored = SpikeScore.from_dict(json.loads(json.dumps(score.as_dict())))
    assert restored.as_dict() == score.as_dict() and len(score.as_dict()["losses"]) == 20
    assert restored.update(2.1) == score.update(2.1) > 1e6
