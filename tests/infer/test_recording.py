"""Recording of decoding steps, as far as it can be looked at without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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

    graphs_replayed: list[int] = []

    class Graph:
        def pool(self) -> int:
            return 7

        def replay(self) -> None:
            graphs_replayed.append(1)

    class Lock:
        held = False

        def __enter__(self) -> bool:
            self.held = True
            return True

        def __exit__(self, *error: Any) -> None:
            self.held = False

    @contextmanager
    def graph(graph: Graph, pool: Any = None, stream: Any = None, **settings: Any) -> Iterator[None]:
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    lines, lock, seen = torch.ones(4, 6, dtype=torch.int64), Lock(), []
    steps = Steps(model_of(torch.bfloat16), None, None, SimpleNamespace(lines=lines), True, lock)  # type: ignore[arg-type]

    def step(size: int, table: int, sampling: SamplingConfig) -> torch.Tensor:
        seen.append((lock.held, bool(lines.any())))
        return torch.zeros(size, 2)

    steps._step = step  # type: ignore[method-assign]
    for size in (4, 2, 4):
        steps.run(size, 1, SamplingConfig())
    assert [stream.device for stream in streams] == [lines.device] * 2 and streams[0] is streams[1], "one, for its pool"
    assert seen == [(True, False)] * 6, "what is recorded runs on empty slots, and holds the lock"
    assert bool((lines == 1).all()) and not lock.held and graphs_replayed == [1, 1, 1]
