"""A micro-batch, forward and backward, as a CUDA graph: what the host does for it is one launch.

A small model in few bits waits for the host: some hundred and sixty operators a micro-batch, each 0.1 ms of Python and
launching, for kernels of 0.02 ms. A graph records the kernels once and replays them with the same addresses, so

* the batch, and what its loss is multiplied by, are copied into tensors that stay;
* gradients add up in tensors that stay (an optimizer that drops them between steps is no harm: they come back, zeroed);
* everything else that changes between micro-batches is data on the device already: clocks, policies' signs and noise,
  optimizer steps and stabilisers work in place.

The first passes of a kind run as they are, which compiles, and warms up what allocates once. A kind is an objective,
the shapes of a batch, whether it has a mask, what the launch of a kernel for documents depends on, and the layers'
policies. Graphs share one pool of memory, which holds a pass's activations for as long as the run lasts; whatever runs
outside of graphs, an evaluation say, has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowbit.data.batch import Batch
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import lowbit_layers
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.policy import LinearPolicy
from lowbit.trainer.objective import Objective, ObjectiveOutput

WARM_UPS = 2
MOST_GRAPHS = 16
"""Kinds of micro-batch beyond these run as they are."""

Pass = Callable[[Objective, Batch, Tensor], ObjectiveOutput]
"""Forward and backward of the loss times a factor, FP32 scalar."""


@dataclass
class _Kind:
    """Micro-batches that one graph serves."""

    objective: Objective
    shapes: tuple[object, ...]
    policies: list[LinearPolicy]
    passes: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    batch: Batch | None = None
    scale: Tensor | None = None
    out: ObjectiveOutput | None = None

    def serves(self, objective: Objective, shapes: tuple[object, ...], policies: list[LinearPolicy]) -> bool:
        """Whether it is of this kind."""
        same = self.objective is objective and self.shapes == shapes
        return same and all(a is b for a, b in zip(self.policies, policies, strict=True))


@dataclass
class MicroBatchGraphs:
    """The graphs of one model; `run` takes the place of `plain`."""

    model: Transformer
    plain: Pass
    device: torch.device
    _kinds: list[_Kind] = field(default_factory=list)
    _gradients: dict[torch.nn.Parameter, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._layers: list[LowbitLinear] | None = None

    def run(self, objective: Objective, batch: Batch, scale: float) -> ObjectiveOutput:
        """See `Engine.micro_step`. What it returns is good until the next call."""
        batch = self.as_read(batch)
        kind = self._kind(objective, batch)
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            if kind.passes < WARM_UPS or kind not in self._kinds:
                out = self.plain(objective, batch, torch.full((), scale, device=self.device))
                self._keep_gradients()
            else:
                if kind.graph is None:
                    self._capture(kind, batch)
                self._give_gradients()
                out = _replay(kind, batch, scale)
            kind.passes += 1
        outside.wait_stream(self._stream)
        return out

    def as_read(self, batch: Batch) -> Batch:
        """The batch without what the model does not read, which would make kinds."""
        seen = batch.visibility
        if seen is None or self.model.uses_varlen:
            return batch
        return replace(batch, visibility=replace(seen, ends=None, sizes=None))

    def _kind(self, objective: Objective, batch: Batch) -> _Kind:
        if self._layers is None:
            self._layers = list(lowbit_layers(self.model).values())
        policies = [layer.policy for layer in self._layers]
        shapes = (*(None if tensor is None else tensor.shape for tensor in batch.tensors()), *_sizes(batch))
        for kind in self._kinds:
            if kind.serves(objective, shapes, policies):
                return kind
        made = _Kind(objective, shapes, policies)
        if batch.replayable and len(self._kinds) < MOST_GRAPHS:
            self._kinds.append(made)
        return made

    def _capture(self, kind: _Kind, batch: Batch) -> None:
        """Record a pass; nothing of it is executed."""
        self._give_gradients()
        kind.batch, kind.scale = batch.clone(), torch.zeros((), device=self.device)
        assert type(kind.batch) is type(batch), "a kind of batch that does not say what a pass over it reads"
        kind.graph = torch.cuda.CUDAGraph()
        pool = next((k.graph.pool() for k in self._kinds if k.graph is not None and k is not kind), None)
        with torch.cuda.graph(kind.graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            out = self.plain(kind.objective, kind.batch, kind.scale)
        kind.out = replace(out, loss_sum=out.loss_sum.detach())

    def _keep_gradients(self) -> None:
        """Hold on to what a pass has made: what has no gradient now will not get one from a graph either."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._gradients.setdefault(parameter, parameter.grad)

    def _give_gradients(self) -> None:
        """The tensors in which gradients add up, zeroed where an optimizer has dropped them."""
        dropped = []
        for parameter, gradient in self._gradients.items():
            if parameter.grad is None:
                dropped.append(gradient)
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        if dropped:
            torch._foreach_zero_(dropped)


def _replay(kind: _Kind, batch: Batch, scale: float) -> ObjectiveOutput:
    assert kind.graph is not None and kind.batch is not None and kind.scale is not None and kind.out is not None
    for kept, given in zip(kind.batch.tensors(), batch.tensors(), strict=True):
        if kept is not None and given is not None:
            kept.copy_(given, non_blocking=True)
    kind.scale.fill_(scale)
    kind.graph.replay()
    return kind.out


def _sizes(batch: Batch) -> tuple[int, ...]:
    """How many documents and how long, roundly."""
    seen = batch.visibility
    return () if seen is None or seen.sizes is None else tuple(seen.sizes.tolist())
