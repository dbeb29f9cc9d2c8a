"""Weights gathered in BF16 after a ZeRO step, masters kept in FP32.

A rank that owns a part of the weights updates its FP32 masters, and everybody gathers them: 4 bytes a parameter, which
would undo what 6-bit gradients save. A model that computes in BF16 rounds every matrix to BF16 where it uses it, so the
ranks may as well receive the rounded numbers: 2 bytes, and not a bit of the computation changes. The owner's copy is
rounded too, or replicas would differ. Vectors (gains of norms) are used in FP32 and travel in FP32.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.errors import LowbitError

CHUNK = 1 << 25
"""Most numbers a rank contributes at once: bounds the buffer to 64 MiB of BF16 a rank."""


class RoundedGroups(list[Tensor]):
    """ZeRO's list of flat groups, marked as one whose groups in `rounded` are gathered in BF16."""

    def __init__(self, groups: list[Tensor], rounded: set[int]) -> None:
        super().__init__(groups)
        self.rounded = rounded


def gather_groups_in_bf16(module: ModuleType, zero: Any, rounded: set[int]) -> None:
    """Stages 1 and 2: gather these groups of the optimizer `zero` in BF16. `module`: deepspeed's stage_1_and_2."""
    stock: Callable[..., None] | None = getattr(module, "all_gather_dp_groups", None)
    if stock is None:
        raise LowbitError("deepspeed: stage_1_and_2.all_gather_dp_groups is gone; install 0.19.8")
    zero.bit16_groups_flat = RoundedGroups(zero.bit16_groups_flat, rounded)
    if getattr(stock, "knows_rounded", False):
        return

    def gather(groups_flat: list[Tensor], partitioned_param_groups: list[Any], **rest: Any) -> None:
        if not isinstance(groups_flat, RoundedGroups):
            stock(groups_flat=groups_flat, partitioned_param_groups=partitioned_param_groups, **rest)
            return
        for index, (flat, partitions) in enumerate(zip(groups_flat, partitioned_param_groups, strict=True)):
            group = rest["dp_process_group"][index]
            mine = partitions[dist.get_rank(group)]
            if index in groups_flat.rounded:
                gather_rounded(flat, mine, group)
            else:
                dist.all_gather_into_tensor(flat, mine, group)

    gather.knows_rounded = True  # type: ignore[attr-defined]
    module.all_gather_dp_groups = gather  # type: ignore[attr-defined]


def gather_parameters_in_bf16(parameters: list[Any]) -> None:
    """Stage 3: gather these parameters in BF16; what the model sees stays FP32."""
    for parameter in parameters:
        parameter.comm_dtype = torch.bfloat16


def count_gathers(module: ModuleType, count: Callable[[int], None]) -> None:
    """Stage 3: report what this rank sends in each gather, in bytes. `module`: deepspeed's partition_parameters."""
    stock: Callable[..., Any] | None = getattr(module, "_dist_allgather_fn", None)
    if stock is None:
        raise LowbitError("deepspeed: partition_parameters._dist_allgather_fn is gone; install 0.19.8")
    stock = getattr(stock, "stock", stock)

    def gather(input_tensor: Tensor, output_tensor: Tensor, group: Any = None) -> Any:
        count(input_tensor.nbytes * (dist.get_world_size(group) - 1))
        return stock(input_tensor, output_tensor, group)

    gather.stock = stock  # type: ignore[attr-defined]
    module._dist_allgather_fn = gather  # type: ignore[attr-defined]


def gather_rounded(flat: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """flat [world * n] FP32 <- every rank's `mine` [n], rounded to BF16; `mine` may be a view of it."""
    world, size = dist.get_world_size(group), mine.numel()
    rows = flat.view(world, size)
    for begin in range(0, size, CHUNK):
        part = mine[begin : begin + CHUNK].to(torch.bfloat16)
        everyone = part.new_empty(world * part.numel())
        dist.all_gather_into_tensor(everyone, part, group)
        rows[:, begin : begin + part.numel()] = everyone.view(world, -1)
