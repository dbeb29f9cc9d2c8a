"""What travels between the ranks of a DeepSpeed engine: in which form, and how many bytes of it.

Gradients: FP32 by DeepSpeed's own reductions, or coded by ours, put in their place (`comm.kind`). Weights, which ZeRO
shards out and gathers: FP32, or BF16 where the model rounds them to it anyway (`comm.weights`). What is small or used
in FP32 (`exact_below`, `used_in_fp32`) always travels as FP32.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowbit.comm.cost import weights_in_bf16
from lowbit.comm.deepspeed import Attachment, Traffic
from lowbit.comm.reducers import make_reducer
from lowbit.comm.weights import count_gathers, gather_groups_in_bf16, gather_parameters_in_bf16
from lowbit.configs.schema import CommConfig, CommKind
from lowbit.trainer.client_optimizer import used_in_fp32
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.shards import Shards

logger = logging.getLogger("lowbit")


class Wire:
    """The forms that a configuration asks for, and a count of the bytes."""

    def __init__(self, config: CommConfig, stage: int, ranks: Ranks, compute_dtype: torch.dtype) -> None:
        self.config, self.stage, self.ranks = config, stage, ranks
        self.bf16_weights = weights_in_bf16(config.weights, compute_dtype is torch.bfloat16)
        self.traffic = Traffic()
        self.attachment: Attachment | None = None
        """Our reductions, where DeepSpeed's are replaced."""
        self._rounded: set[int] = set()  # groups whose weights travel in BF16

    def attach(self, engine: Any, shards: Shards, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Put our gradient reductions and our gathering of weights in place of those of DeepSpeed's `engine`."""
        config, ranks = self.config, self.ranks
        if config.kind is not CommKind.none:
            least = config.exact_below
            exact = {id(p) for name, p in parameters.items() if used_in_fp32(name, p) or _numel(p) < least}
            place = (ranks.rank, ranks.world, ranks.local_world)
            reducer, words = make_reducer(config.kind, self.stage == 0, place, device, self._greatest)
            if words:
                logger.info("%s", words)
            self.attachment = Attachment(
                engine, self.stage, ranks.rank, ranks.world, reducer, exact, traffic=self.traffic
            )
            self.attachment.attach()
        coded = {name: p for name, p in parameters.items() if not used_in_fp32(name, p)}
        if self.stage in (1, 2) and self.bf16_weights:
            from deepspeed.runtime.zero import stage_1_and_2

            self._rounded = {shards.parts[name].group for name in coded}
            gather_groups_in_bf16(stage_1_and_2, engine.optimizer, self._rounded)
        if self.stage == 3:
            from deepspeed.runtime.zero import partition_parameters

            if self.bf16_weights:
                gather_parameters_in_bf16(list(coded.values()))
            count_gathers(partition_parameters, self._count_weights)

    def _greatest(self, numbers: list[float]) -> list[float]:
        """The largest over the ranks of each number."""
        return [max(column) for column in zip(*self.ranks.gather(numbers), strict=True)]

    def _count_weights(self, sent: int) -> None:
        self.traffic.weights += sent

    def count_step(self, shards: Shards) -> None:
        """Count what DeepSpeed's own operations sent in a step: ring all-reduces and gathers."""
        world = self.ranks.world
        if self.attachment is None:
            passes = 1 if self.stage == 3 else 2
            numbers = sum(part.shape.numel() for part in shards.parts.values())
            self.traffic.gradients += passes * 4 * numbers * (world - 1) / world
        if self.stage in (1, 2):
            for index, layout in enumerate(shards.groups):
                self.traffic.weights += layout.size * (2 if index in self._rounded else 4) * (world - 1)


def _numel(parameter: Any) -> int:
    """Numbers of a parameter, also of one that is partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
