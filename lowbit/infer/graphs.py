"""One decoding step, as written or as a CUDA graph.

A step reads its slots' lines (`slots.py`), runs the model over one token of each, draws, and writes the lines on. All
of it stays on the device, so a GPU can record it once and replay it with one launch: a step of a small model is some
three hundred kernels of a few microseconds, and launching them one by one would take longer than they run. A graph is
for one number of slots and one way of sampling, and knows addresses: lines, cache and weights are written in place.

Recording executes nothing, but PyTorch wants to have run the code before. It does so on empty slots, which write to
block 0.

While any stream of a GPU is recorded, CUDA lets no thread wait for the whole GPU, as compilers do to measure: it fails
there. So recording holds a lock, which a thread that trains beside the sampler's holds, too, whenever it does anything.
"""

from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from lowbit.infer import kernels
from lowbit.infer.cache import PagedCache, View
from lowbit.infer.lines import NOISE, PROMPT, STORED, TABLE, TOKEN
from lowbit.infer.packed import PackedLinear
from lowbit.infer.sampling import SamplingConfig, drawn
from lowbit.infer.slots import Slots
from lowbit.infer.weights import HeldWeights
from lowbit.models.layers import GroupedLinear
from lowbit.models.rope import Rope
from lowbit.models.transformer import Transformer

WARMUPS = 2


def bucket(rows: int, most: int) -> int:
    """The number of slots that a step with so many rows computes: few different ones, at most `most`."""
    size = 1
    while size < rows:
        size += size if size < 16 else 16 if size < 128 else 32
    return min(size, most)


@dataclass
class Captured:
    """A recorded step."""

    graph: torch.cuda.CUDAGraph
    values: Tensor


class Steps:
    """The steps of one set of slots."""

    def __init__(
        self,
        model: Transformer,
        weights: HeldWeights,
        cache: PagedCache,
        slots: Slots,
        graphs: bool,
        recording: "RLock",
    ) -> None:
        """`recording`: held while a step is recorded."""
        self.model, self.weights, self.cache, self.slots = model, weights, cache, slots
        self._recording = recording
        self._packed = any(isinstance(module, PackedLinear) for module in model.modules())
        self._graphs = graphs and capturable(model)
        self._captured: dict[tuple[int, SamplingConfig], Captured] = {}
        self._memory: Any = None
        self._stream: Any = None

    def draw(self, hidden: Tensor, noise: Tensor, sampling: SamplingConfig) -> Tensor:
        """The tokens behind hidden states [rows, width] and their logprobs: FP64 [rows, 2]."""
        logits = head_logits(hidden, self.weights.head, self.model.vocab_size, self.model.config.logit_softcap)
        return drawn(logits, sampling, noise)

    def run(self, size: int, table: int, sampling: SamplingConfig) -> Tensor:
        """One step of the first `size` slots: FP64 [size, 2]. `table`: blocks of a row that are looked at."""
        if not self._graphs:
            with kernels.chaining(self._packed):
                return self._step(size, table, sampling)
        captured = self._captured.get((size, sampling))
        if captured is None:
            with self._recording, kernels.chaining(self._packed):
                captured = self._capture(size, table, sampling)
        captured.graph.replay()
        return captured.values

    def _step(self, size: int, table: int, sampling: SamplingConfig) -> Tensor:
        lines = self.slots.lines[:size]
        if self.cache.kernels:
            begun = kernels.begin_step(lines, self.slots.noise, self._rope_tables, table, self.cache.block)
            values = self._tokens(View(self.cache, *_rows(lines, table), begun=begun), lines, begun.noise, sampling)
            kernels.end_step(lines, values)
            return values
        stored, prompt = lines[:, STORED], lines[:, PROMPT]
        place = (stored + 1 - prompt).clamp(0, self.slots.longest - 1)
        noise = self.slots.noise[lines[:, NOISE], place]
        values = self._tokens(View(self.cache, *_rows(lines, table)), lines, noise, sampling)
        lines[:, TOKEN] = values[:, 0].long()
        lines[:, STORED] += prompt > 0
        return values

    def _tokens(self, view: View, lines: Tensor, noise: Tensor, sampling: SamplingConfig) -> Tensor:
        hidden = self.model(lines[:, TOKEN, None], cache=view)[:, 0]  # [size, width]
        return self.draw(hidden, noise, sampling)

    @cached_property
    def _rope_tables(self) -> Rope:
        """Of all positions that rows may have."""
        positions = torch.arange(self.slots.table * self.cache.block, device=self.slots.lines.device)
        tables: Rope = self.model.rope(positions[None])
        return tables

    def _capture(self, size: int, table: int, sampling: SamplingConfig) -> Captured:
        lines = self.slots.lines
        before = lines.clone()
        lines.zero_()
        # One of its own, for all: PyTorch's stream for recording is of the GPU that recorded first, and graphs share
        # their pool's memory only if they were recorded on one stream
        if self._stream is None:
            self._stream = torch.cuda.Stream(lines.device)  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                self._step(size, table, sampling)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            values = self._step(size, table, sampling)
        self._memory = graph.pool()
        lines.copy_(before)
        self._captured[size, sampling] = captured = Captured(graph, values)
        return captured


def _rows(lines: Tensor, table: int) -> tuple[Tensor, Tensor]:
    """Tables of blocks, `table` of each row, and tokens stored."""
    return lines[:, TABLE : TABLE + table], lines[:, STORED]


def capturable(model: Transformer) -> bool:
    """Whether a step never waits for the device: experts do in FP32, and where their products are quantised."""
    experts = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    plain = all(type(module) is GroupedLinear for module in experts)
    return not experts or (plain and model.compute_dtype is torch.bfloat16)


def head_logits(hidden: Tensor, head: Tensor, vocab_size: int, softcap: float | None) -> Tensor:
    """FP32 logits [rows, vocab_size]; the sums of a BF16 product are not rounded to BF16 on a GPU."""
    weight = head[:vocab_size].t()
    if hidden.is_cuda and hidden.dtype is torch.bfloat16:
        logits = torch.mm(hidden, weight, out_dtype=torch.float32)
    else:
        logits = (hidden @ weight).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
