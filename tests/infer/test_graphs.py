"""Recording of decoding steps, as far as it can be looked at without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sampler_oracle import model_of

from lowbit.infer.graphs import Steps
from lowbit.infer.sampling import SamplingConfig


def test_a_step_is_recorded_on_a_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own stream for recording is of the GPU that recorded first in the process; others fail on it."""
    streams: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.device = device

        def wait_stream(self, other: Any) -> None:
            pass

    class Graph:
        def pool(self) -> int:
            return 7

    @contextmanager
    def graph(graph: Graph, pool: Any = None, stream: Any = None, **settings: Any) -> Iterator[None]:
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    lines = torch.ones(4, 6, dtype=torch.int64)
    steps = Steps(model_of(torch.bfloat16), None, None, SimpleNamespace(lines=lines), True, RLock())  # type: ignore[arg-type]
    steps._step = lambda size, table, sampling: torch.zeros(size, 2)  # type: ignore[method-assign]
    steps._capture(4, 1, SamplingConfig())
    assert [stream.device for stream in streams] == [lines.device]
    assert bool((lines == 1).all()), "what is recorded runs on empty slots"
