"""What travels between the ranks of a DeepSpeed engine: in which form, and how many bytes of it.

Gradients: FP32 by DeepSpeed's own reductions, or coded by ours, put in their place (`comm.kind`). Weights, which ZeRO
shards out and gathers: FP32, or BF16 where the model rounds them to it anyway (`comm.weights`). Gradients of what is
small (`travels_exactly`) and weights that are used in FP32 (`used_in_fp32`) always travel as FP32.

Error feedback and stochastic rounding remember something between steps: `state` and `load` keep it in checkpoints.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.comm.cost import weights_in_bf16
from lowbit.comm.deepspeed import Attachment, SentBytes
from lowbit.comm.reducers import make_reducer, two_levels
from lowbit.comm.residuals import Clock, Residuals
from lowbit.comm.transport import scatter_passes
from lowbit.comm.weights import count_gathers, gather_groups_in_bf16, gather_parameters_in_bf16
from lowbit.configs.schema import CommConfig, CommKind
from lowbit.errors import ConfigError
from lowbit.trainer.client_optimizer import travels_exactly, used_in_fp32
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.shards import Shards

logger = logging.getLogger("lowbit")


class Wire:
    """The forms that a configuration asks for, and a count of the bytes."""

    def __init__(self, config: CommConfig, stage: int, ranks: Ranks, compute_dtype: torch.dtype, seed: int = 0) -> None:
        """`seed`: of the run, for stochastic rounding."""
        self.config, self.stage, self.ranks = config, stage, ranks
        self._seed = seed
        self.bf16_weights = weights_in_bf16(config.weights, compute_dtype is torch.bfloat16)
        self.traffic = SentBytes()
        self.attachment: Attachment | None = None
        """Our reductions, where DeepSpeed's are replaced."""
        self._rounded: set[int] = set()  # groups whose weights travel in BF16

    @property
    def remembers(self) -> bool:
        """Whether codes depend on what was sent before. A resumed run then repeats the messages of one that was not
        interrupted only if both cut them alike, in the order of parameters rather than in that of their arrival. (What
        stage 0 sends is cut so in any case.)
        """
        return self.attachment is not None and (self.config.error_feedback or self.config.stochastic_rounding)

    def attach(self, engine: Any, shards: Shards, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Put our gradient reductions and our gathering of weights in place of those of DeepSpeed's `engine`."""
        config, ranks = self.config, self.ranks
        if config.kind is not CommKind.none:
            least = config.exact_below
            exact = {id(p) for name, p in parameters.items() if travels_exactly(name, p, least)}
            place = (ranks.rank, ranks.world, self._node_size())
            reducer, words = make_reducer(config.kind, self.stage == 0, place, device, self._greatest)
            if words:
                logger.info("%s", words)
            self.attachment = Attachment(
                engine,
                self.stage,
                ranks.rank,
                ranks.world,
                reducer,
                list(parameters.values()),
                exact,
                traffic=self.traffic,
            )
            self.attachment.attach()
            self._remember(self.attachment, shards, parameters, device)
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

    def _remember(
        self, attachment: Attachment, shards: Shards, parameters: Mapping[str, nn.Parameter], device: torch.device
    ) -> None:
        """What coding remembers between steps, where asked for."""
        if self.config.stochastic_rounding:
            attachment.clock = Clock(self._seed)
        if self.config.error_feedback:
            node_size = self._node_size()
            if two_levels(self.ranks.world, node_size):
                raise ConfigError(
                    f"comm.error_feedback=true with nodes of {node_size} ranks: what leaves a node is "
                    "its sum, not a rank's own gradient; comm.error_feedback=false would work"
                )
            attachment.names = {id(p): name for name, p in parameters.items()}
            shapes = {n: shards.parts[n].shape for n, p in parameters.items() if id(p) not in attachment.exact}
            residuals = Residuals(shapes, self.ranks.rank, self.ranks.world, device)
            attachment.keep_residuals(residuals)

    def state(self) -> dict[str, Tensor]:
        """What coding remembers, whole, on rank 0; empty elsewhere, and where it remembers nothing."""
        if self.attachment is None:
            return {}
        whole = self.attachment.residuals.state() if self.attachment.residuals is not None else {}
        if self.attachment.clock is not None and self.ranks.first:
            whole["reductions"] = torch.tensor(self.attachment.clock.count)
        return whole

    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned, on any number of ranks; only rank 0 needs to have it."""
        known: dict[str, list[int]] = self.ranks.share({key: list(t.shape) for key, t in whole.items()})
        residuals = self.attachment.residuals if self.attachment is not None else None
        clock = self.attachment.clock if self.attachment is not None else None
        if residuals is not None:
            residuals.load(whole, known)
        elif any(key.startswith("sent.") for key in known):
            logger.warning("what error feedback has kept is dropped: this run goes on without it")
        if clock is not None and "reductions" in known:
            clock.count = self.ranks.share(int(whole["reductions"]) if self.ranks.first else 0)

    def _node_size(self) -> int:
        """Ranks of every machine; 1, each a machine of its own, where machines run different numbers of them."""
        sizes = set(self.ranks.gather(self.ranks.local_world))
        return sizes.pop() if len(sizes) == 1 else 1

    def _greatest(self, numbers: list[float]) -> list[float]:
        """The largest over the ranks of each number."""
        return [max(column) for column in zip(*self.ranks.gather(numbers), strict=True)]

    def _count_weights(self, sent: int) -> None:
        self.traffic.weights += sent

    def count_step(self, shards: Shards, parameters: Collection[str]) -> None:
        """Count what DeepSpeed's own operations sent in a step for its parameters: ring all-reduces and gathers."""
        world = self.ranks.world
        parts = [shards.parts[name] for name in parameters]
        if self.attachment is None:
            passes = scatter_passes() if self.stage == 3 else 2
            numbers = sum(part.shape.numel() for part in parts)
            self.traffic.gradients += passes * 4 * numbers * (world - 1) / world
        if self.stage in (1, 2):
            for index in {part.group for part in parts}:
                layout = shards.groups[index]
                self.traffic.weights += layout.size * (2 if index in self._rounded else 4) * (world - 1)
