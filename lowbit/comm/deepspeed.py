"""DeepSpeed, imported the way this project needs it, and our gradient reductions in place of its own.

What is attached to, by stage (DeepSpeed 0.19.8; none of it is a public interface, hence the check of the version, and
each attachment compares its first result with DeepSpeed's own):

    0        nothing: the engine's own all-reduce is off; buckets of ours leave during the backward pass (`whole`)
    1 and 2  `optimizer.gradient_reduction_w_predivide`, which gets a flat bucket of gradients while the backward pass
             goes on, inside the stream for reductions; only the numbers whose optimizer states this rank keeps need to
             come out right, so a bucket is reduced and scattered, which is half of an all-reduce
    3        `optimizer.__avg_scatter_grads`, which gets the whole gradients of a bucket and returns this rank's parts
    weights  `all_gather_dp_groups` after the step (1 and 2); an attribute of parameters that says in which type they
             are gathered (3)

Gradients of vectors and of small matrices always travel in FP32: they are few, and norms suffer most from errors.

Weights travel in BF16 where the model rounds them to BF16 anyway. Every rank, the owner included, then computes with
the rounded ones; masters stay FP32. At stages 1 and 2 that is 2 bytes a parameter where FP32 takes 4.
"""

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.comm.flat import cut, end_to_end, write_back
from lowbit.comm.noise import Noise
from lowbit.comm.reducers import CodedReducer, Handle, Reducer
from lowbit.comm.residuals import Clock, Residuals
from lowbit.comm.transport import scatter_passes
from lowbit.comm.whole import WholeReduction, gradient
from lowbit.errors import ConfigError, LowbitError

OLDEST, BEFORE = (0, 19, 8), (0, 20)
"""Versions whose inner workings are known here: from the first on, below the second."""


def load_deepspeed(device_type: str) -> ModuleType:
    """Import DeepSpeed for "cpu" or "cuda": quiet, nothing compiled on the way, no MPI.

    Raises:
        ConfigError: it is not installed, or its version is not one that this project knows from the inside.
    """
    os.environ["DS_ACCELERATOR"] = device_type  # else it looks for one, and takes a GPU where there is one
    os.environ.setdefault("LOCAL_RANK", "0")  # it insists on this one, also when there is one process
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # names it still uses
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(f"engine.kind=deepspeed needs a package ({error}): pip install deepspeed==0.19.8") from error
    check_version(deepspeed.__version__)
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Its shared-memory collectives for CPUs would be compiled at the first use, for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module: ModuleType = deepspeed
    return module


@contextmanager
def weights_unread() -> Iterator[None]:
    """Tensors as text are their shapes in here, but for single numbers in formatted strings.

    At stage 3 DeepSpeed writes its arguments, all weights included, into a message that it does not print: seconds for
    a large model, and once in some hundreds of times torch 2.13 failed at it on one rank, for which the others waited.
    """

    def shape_of(tensor: Tensor, *_: Any, **__: Any) -> str:
        return f"{type(tensor).__name__}{list(tensor.shape)}"

    kinds: tuple[Any, ...] = (Tensor, nn.Parameter)
    shown = [kind.__repr__ for kind in kinds]
    for kind in kinds:
        kind.__repr__ = shape_of
    try:
        yield
    finally:
        for kind, was in zip(kinds, shown, strict=True):
            kind.__repr__ = was


def check_version(version: str) -> None:
    """Raise ConfigError for a version of DeepSpeed that this project does not know."""
    digits = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not OLDEST <= digits < BEFORE:
        oldest, before = (".".join(map(str, v)) for v in (OLDEST, BEFORE))
        raise ConfigError(
            f"deepspeed {version} is installed, and engine.kind=deepspeed knows those from {oldest} to below {before} "
            f"from the inside: pip install deepspeed=={oldest}"
        )


def zero_config(
    stage: int, bucket_numbers: int, largest_vector: int, overlap: bool, ours: bool = False
) -> dict[str, Any]:
    """DeepSpeed's settings for FP32 parameters, our own optimizer, loss scaling and clipping.

    Args:
        bucket_numbers: gradients in a bucket. largest_vector: size of the largest 1-D parameter; up to this size
            ZeRO 3 leaves parameters whole. overlap: reduce on a stream of its own. ours: `attach` will follow.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": overlap,
        "reduce_bucket_size": bucket_numbers,
        "round_robin_gradients": stage in (1, 2),  # consecutive gradients belong to different ranks
        "reduce_scatter": not (ours and stage in (1, 2)),  # false leads to the hook for whole buckets
        "stage3_param_persistence_threshold": largest_vector,
    }
    if stage in (1, 2):
        zero["compute_grad_norm"] = False
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    if stage < 3:
        config["gradient_allreduce_op"] = "sum"
    return config


@dataclass
class SentBytes:
    """Bytes that this rank sent since the last `take`."""

    gradients: float = 0.0
    """To other nodes; to other ranks, where all are on one node."""
    inside: float = 0.0
    """Of gradients inside nodes, where the two are apart."""
    weights: float = 0.0

    def take(self) -> dict[str, float]:
        """What was counted, as metrics; starts anew."""
        row = {"comm/gradient_bytes": self.gradients, "comm/weight_bytes": self.weights}
        row |= {"comm/node_bytes": self.inside} if self.inside else {}
        self.gradients = self.inside = self.weights = 0.0
        return row


@dataclass
class Attachment:
    """Our reductions in one DeepSpeed engine."""

    engine: Any
    stage: int
    rank: int
    world: int
    reducer: Reducer
    parameters: list[Tensor]
    """In the model's order."""
    exact: set[int]
    """Identities of those whose gradients travel in FP32."""
    traffic: SentBytes = field(default_factory=SentBytes)
    residuals: Residuals | None = None
    """Error feedback, if there is to be any."""
    clock: Clock | None = None
    """Stochastic rounding, likewise."""
    names: dict[int, str] = field(default_factory=dict)
    """Of parameters, by identity."""
    whole: WholeReduction | None = None
    """Stage 0: the coded ones' all-reduces, from `attach` on."""
    _checked: bool = False
    _counted: tuple[float, float] = (0.0, 0.0)
    """Bytes that the reducer had sent, to other nodes and inside its own, when they were last counted."""
    _pieces: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def zero(self) -> Any:
        return self.engine.optimizer

    def attach(self) -> None:
        """Take the place of DeepSpeed's reductions. Raises LowbitError when they are not as known (stages 1 to 3)."""
        self._counted = self.reducer.sent, self.reducer.sent_inside
        if self.stage == 0:
            coded = [p for p in self.parameters if id(p) not in self.exact]
            self.whole = WholeReduction(coded, self.engine.zero_reduce_bucket_size(), self._begin_bucket)
            return
        replacement: Callable[..., Any]
        if self.stage in (1, 2):
            name, replacement = "gradient_reduction_w_predivide", self._reduce_bucket
            expected = ["self", "tensor", "communication_data_type"]
        else:
            name, replacement = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads", self._scatter_gradients
            expected = ["self", "params_to_reduce", "communication_data_type"]
        stock = getattr(type(self.zero), name, None)
        if stock is None or _arguments(stock) != expected:
            raise LowbitError(f"deepspeed: {name} is not what this version of lowbit attaches to; install 0.19.8")
        setattr(self.zero, name, replacement)

    def _noise(self) -> Noise | None:
        return self.clock.next() if self.clock is not None else None

    # Stage 0 --------------------------------------------------------------------------------------------------------

    def keep_residuals(self, residuals: Residuals) -> None:
        """Have error feedback. `residuals`: of the coded parameters, in their order."""
        self.residuals = residuals
        if self.whole is not None:
            assert isinstance(self.reducer, CodedReducer)
            for bucket in self.whole.buckets:
                sent = residuals.span([self.names[id(p)] for p in bucket])
                residuals.buckets.append(self.reducer.feedback(sent))

    def leave_early(self) -> None:
        """Stage 0: buckets may leave during the coming backward pass, the last before `reduce_whole`."""
        if self.whole is not None:
            self.whole.open()

    def reduce_whole(self) -> None:
        """Stage 0: what has not left yet does; all gradients become sums over the ranks, in place."""
        assert self.whole is not None
        self.whole.finish()
        self._exact_sum([gradient(p) for p in self.parameters if id(p) in self.exact])
        self._count()

    def _begin_bucket(self, index: int, flat: Tensor) -> Handle:
        """Start the all-reduce of a bucket's gradients."""
        stock = None if self._checked else flat.clone()
        feedback = self.residuals.buckets[index] if self.residuals is not None else None
        work = self.reducer.all_reduce(flat, feedback, self._noise())
        if stock is not None:
            work.wait()
            dist.all_reduce(stock)
            self._check(flat, stock)
        return work

    def _exact_sum(self, tensors: list[Tensor]) -> None:
        """FP32 sums over the ranks, in place."""
        if tensors:
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.all_reduce(flat)
            self.traffic.gradients += 2 * (self.world - 1) / self.world * flat.nbytes
            write_back(flat, tensors)

    def _count(self) -> None:
        """What the reducer has sent since the last time counts as gradients."""
        sent, inside = self.reducer.sent, self.reducer.sent_inside
        self.traffic.gradients += sent - self._counted[0]
        self.traffic.inside += inside - self._counted[1]
        self._counted = sent, inside

    # Stages 1 and 2 -------------------------------------------------------------------------------------------------

    def _reduce_bucket(self, tensor: Tensor, communication_data_type: torch.dtype) -> Tensor:
        """In place of DeepSpeed's all-reduce of a flat bucket: this rank's numbers in it become sums over the ranks."""
        stock = None
        if not self._checked:
            stock = tensor.clone()
            type(self.zero).gradient_reduction_w_predivide(self.zero, stock, communication_data_type)
        exact: list[Tensor] = []
        chunks: list[list[Tensor]] = [[] for _ in range(self.world)]
        lost: list[list[Tensor]] = [[] for _ in range(self.world)]
        offset = 0
        for group, index, number in self.zero.ipg_buckets[communication_data_type].params:
            parameter = self.zero.bit16_groups[group][index]
            flat = tensor.narrow(0, offset, parameter.numel())
            offset += parameter.numel()
            if id(parameter) in self.exact:
                exact.append(flat)
                continue
            for owner, start, count in self._owners(group, number, parameter.numel()):
                chunks[owner].append(flat.narrow(0, start, count))
                if self.residuals is not None:
                    lost[owner].append(self.residuals.sent(self.names[id(parameter)]).narrow(0, start, count))
        self._exact_sum(exact)
        mine = self._reduce_chunks(chunks, lost, tensor)
        if stock is not None:
            kept = chunks[self.rank]
            places = [(t.storage_offset() - tensor.storage_offset(), t.numel()) for t in kept]
            self._check(mine, torch.cat([stock.narrow(0, *place) for place in places]) if places else mine)
        return tensor

    def _reduce_chunks(self, chunks: list[list[Tensor]], lost: list[list[Tensor]], like: Tensor) -> Tensor:
        """Sum each rank's pieces over the ranks; this one's are written back, and returned end to end."""
        flat = [end_to_end(pieces, like) for pieces in chunks]
        if not any(chunk.numel() for chunk in flat):
            return flat[self.rank]
        mine = self._reduce_flat(flat, lost, like)
        write_back(mine, chunks[self.rank])
        return mine

    def _reduce_flat(self, flat: list[Tensor], lost: list[list[Tensor]], like: Tensor) -> Tensor:
        """One flat chunk a rank -> the sum of this rank's; `lost`: the residuals of each chunk's pieces."""
        kept = [end_to_end(pieces, like) for pieces in lost] if self.residuals is not None else None
        mine = self.reducer.reduce_scatter(flat, kept, self._noise())
        self._count()
        for whole, pieces in zip(kept or [], lost, strict=False):
            write_back(whole, pieces)
        return mine

    def _owners(self, group: int, number: int, numel: int) -> list[tuple[int, int, int]]:
        """Which ranks keep which (start, count) of a parameter's numbers."""
        known = self._pieces.get(number)
        if known is None:
            offsets = self.zero.grad_start_offset[group]
            ranks = sorted(self.zero.param_to_partition_ids[group][number], key=lambda rank: offsets[rank][number])
            starts = [int(offsets[rank][number]) for rank in ranks]
            ends = [*starts[1:], numel]
            known = [(rank, start, end - start) for rank, start, end in zip(ranks, starts, ends, strict=True)]
            self._pieces[number] = known
        return known

    # Stage 3 --------------------------------------------------------------------------------------------------------

    def _scatter_gradients(self, params_to_reduce: list[Any], communication_data_type: torch.dtype) -> list[Tensor]:
        """In place of DeepSpeed's reduce-scatter: this rank's part of each gradient's *mean* over the ranks."""
        stock_method = type(self.zero)._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
        exact = [p for p in params_to_reduce if id(p) in self.exact]
        coded = [p for p in params_to_reduce if id(p) not in self.exact]
        parts: dict[int, Tensor] = {}
        if exact:
            parts |= dict(zip(map(id, exact), stock_method(self.zero, exact, communication_data_type), strict=True))
            numbers = scatter_passes() * sum(p.grad.nbytes for p in exact)
            self.traffic.gradients += (self.world - 1) / self.world * numbers
        if coded:
            stock = None if self._checked else [g.clone() for g in self._stock_scatter(coded)]
            pieces = [list(_parts_of_ranks(p.grad.reshape(-1), self.world)) for p in coded]
            chunks = [[parts[rank] for parts in pieces] for rank in range(self.world)]
            flat = [torch.cat(chunk).div_(self.world) for chunk in chunks]
            mine = self._reduce_flat(flat, self._lost_parts(coded), flat[0])
            lengths = [piece.numel() for piece in chunks[self.rank]]
            parts |= dict(zip(map(id, coded), cut(mine, lengths), strict=True))
            if stock is not None:
                self._check(mine, torch.cat([g.reshape(-1) for g in stock]))
        return [parts[id(p)] for p in params_to_reduce]

    def _lost_parts(self, params: list[Any]) -> list[list[Tensor]]:
        """For each rank the residuals of its parts of the parameters."""
        if self.residuals is None:
            return []
        pieces = [list(_parts_of_ranks(self.residuals.sent(self.names[id(p)]), self.world)) for p in params]
        return [[parts[rank] for parts in pieces] for rank in range(self.world)]

    def _stock_scatter(self, params: list[Any]) -> list[Tensor]:
        from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

        copies = [p.grad.clone() for p in params]
        result: list[Tensor] = reduce_scatter_coalesced(copies, self.zero.dp_process_group)
        return result

    # The first result -----------------------------------------------------------------------------------------------

    def _check(self, ours: Tensor, stock: Tensor) -> None:
        """Compare the first reduction with DeepSpeed's own; raises LowbitError when they are not the same thing."""
        self._checked = True
        if not ours.numel() or not bool(stock.isfinite().all()):
            return
        error = float((ours - stock).norm() / stock.norm().clamp(min=1e-30))
        if not error < 0.2 and float(stock.norm()) > 0:
            raise LowbitError(
                f"comm: the first reduced gradients differ by {error:.0%} from what DeepSpeed's own reduction gives: "
                "comm=none works; please report it with the version of deepspeed"
            )


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Names of a function's arguments; DeepSpeed's decorator for profiles hides them in a closure."""
    inner = [cell.cell_contents for cell in function.__closure__ or () if inspect.isfunction(cell.cell_contents)]
    return list(inspect.signature(inner[0] if len(inner) == 1 else function).parameters)


def _parts_of_ranks(flat: Tensor, world: int) -> Iterator[Tensor]:
    """ZeRO 3's cut of a tensor into one part a rank: all of one length, the last ones shorter or empty."""
    length = -(-flat.numel() // world)
    for rank in range(world):
        low = min(rank * length, flat.numel())
        yield flat[low : min(low + length, flat.numel())]
