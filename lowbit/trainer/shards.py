"""Which part of every parameter a rank keeps under ZeRO, and whole tensors from parts and back.

ZeRO lays the parameters of a group end to end and cuts that into one partition a rank (stages 1 and 2), or cuts every
parameter into equal parts (stage 3). Masters, states of the optimizer and averaged gradients of a group then are flat
tensors of one layout. A checkpoint holds whole tensors by name; `Shards` translates, for any stage and world size.

Whole tensors are assembled as integers: every rank fills in the bits it owns and zero elsewhere, and the sum over the
ranks has all of them, unchanged.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """What this rank keeps of one parameter; `numel` may be 0."""

    name: str
    shape: torch.Size
    start: int
    """Of the flattened parameter, the first number kept."""
    numel: int
    group: int
    """The flat tensors it lies in."""
    place: int
    """Its first number there."""

    def of(self, flat: Tensor) -> Tensor:
        """This part, a view of its group's flat tensor."""
        return flat.narrow(0, self.place, self.numel)

    def cut(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor, a view."""
        return whole.reshape(-1).narrow(0, self.start, self.numel)


@dataclass(frozen=True)
class GroupLayout:
    """One group: where each of its parameters lies in the partitions of all ranks, put end to end."""

    flat: Tensor
    """This rank's FP32 masters."""
    size: int
    """Numbers in one rank's partition."""
    pieces: tuple[tuple[torch.Size, tuple[tuple[int, int], ...]], ...]
    """For each parameter its shape, and (first number, count) of its pieces, in order."""


class Shards:
    """The layout of all parameters under one stage of ZeRO."""

    def __init__(self, parts: list[Part], groups: list[GroupLayout], rank: int, world: int) -> None:
        self.parts = {part.name: part for part in parts}
        self.groups = groups
        self._rank = rank
        self._world = world

    def masters(self) -> dict[str, Tensor]:
        """This rank's part of every master weight, flat; live views."""
        return {name: part.of(self.groups[part.group].flat) for name, part in self.parts.items()}

    def collect(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on rank 0 in host memory (empty elsewhere) from parts keyed by name or name.slot."""
        whole = {}
        for key in sorted(parts):
            part = self._part(key)
            mine = parts[key]
            bits = torch.zeros(part.shape.numel(), dtype=torch.int32, device=mine.device)
            bits.narrow(0, part.start, part.numel).copy_(mine.contiguous().view(torch.int32))
            dist.reduce(bits, dst=0)
            if self._rank == 0:
                whole[key] = bits.view(torch.float32).view(part.shape).cpu()
        return whole

    def distribute(
        self, whole: Mapping[str, Tensor], keys: list[str], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Each key in turn with its whole tensor, which only rank 0 has in `whole`, on every rank's device."""
        for key in sorted(keys):
            part = self._part(key)
            tensor = torch.empty(part.shape, dtype=torch.float32, device=device)
            if self._rank == 0:
                tensor.copy_(whole[key])
            dist.broadcast(tensor, src=0)
            yield key, tensor

    def _part(self, key: str) -> Part:
        return self.parts.get(key) or self.parts[key.rpartition(".")[0]]

    # Whole matrices for Muon ------------------------------------------------------------------------------------

    def gather_group(self, flat: Tensor, numbers: Tensor) -> list[Tensor]:
        """The whole tensors of the group whose masters are `flat`, given this rank's `numbers` in its layout."""
        layout = self._layout(flat)
        everyone = numbers.new_empty(layout.size * self._world)
        dist.all_gather_into_tensor(everyone, numbers.contiguous())
        tensors = []
        for shape, pieces in layout.pieces:
            cut = [everyone.narrow(0, first, count) for first, count in pieces]
            tensors.append((cut[0] if len(cut) == 1 else torch.cat(cut)).view(shape))
        return tensors

    def scatter_group(self, flat: Tensor, whole: list[Tensor]) -> Tensor:
        """This rank's flat part of a group's whole tensors; zero in its padding."""
        layout = self._layout(flat)
        mine = torch.zeros_like(flat)
        low = layout.size * self._rank
        for tensor, (_, pieces) in zip(whole, layout.pieces, strict=True):
            done = 0
            for first, count in pieces:
                if low <= first < low + layout.size:
                    mine.narrow(0, first - low, count).copy_(tensor.reshape(-1).narrow(0, done, count))
                done += count
        return mine

    def _layout(self, flat: Tensor) -> GroupLayout:
        return next(layout for layout in self.groups if layout.flat is flat)


def replicated(model: nn.Module, rank: int, world: int) -> Shards:
    """Stage 0: every rank keeps everything that trains."""
    parts, groups = [], []
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for index, (name, parameter) in enumerate(trained):
        flat = parameter.detach().view(-1)
        parts.append(Part(name, parameter.shape, 0, parameter.numel(), index, 0))
        groups.append(GroupLayout(flat, parameter.numel(), ()))
    return Shards(parts, groups, rank, world)


def partitioned_groups(zero: Any, names: Mapping[int, str], rank: int, world: int) -> Shards:
    """Stages 1 and 2: each group end to end, cut into equal partitions. `names`: by identity of the parameter."""
    parts, groups = [], []
    for index, parameters in enumerate(zero.round_robin_bit16_groups):
        size, offset = int(zero.partition_size[index]), 0
        pieces = []
        for parameter, begin in zip(parameters, zero.round_robin_bit16_offsets[index], strict=True):
            end = begin + parameter.numel()
            cuts = range(begin // size, (end - 1) // size + 1)
            bounds = [(max(begin, r * size), min(end, (r + 1) * size)) for r in cuts]
            pieces.append((parameter.shape, tuple((low, high - low) for low, high in bounds)))
            low, high = max(begin, rank * size), min(end, (rank + 1) * size)
            kept = max(0, high - low)
            offset = low - begin if kept else 0
            place = low - rank * size if kept else 0
            parts.append(Part(names[id(parameter)], parameter.shape, offset, kept, index, place))
        groups.append(GroupLayout(zero.single_partition_of_fp32_groups[index], size, tuple(pieces)))
    return Shards(parts, groups, rank, world)


def partitioned_parameters(zero: Any, names: Mapping[int, str], rank: int, world: int) -> Shards:
    """Stage 3: each parameter cut into equal parts, the last one padded; a group's parts end to end."""
    parts, groups = [], []
    for index, parameters in enumerate(zero.fp16_groups):
        flat, place = zero.fp32_partitioned_groups_flat[index], 0
        pieces = []
        for parameter in parameters:
            size, numel = parameter.partition_numel(), parameter.ds_numel
            counts = [max(0, min(size, numel - r * size)) for r in range(world)]
            pieces.append((parameter.ds_shape, tuple((r * flat.numel() + place, n) for r, n in enumerate(counts) if n)))
            start = rank * size if counts[rank] else 0
            parts.append(Part(names[id(parameter)], parameter.ds_shape, start, counts[rank], index, place))
            place += size
        groups.append(GroupLayout(flat, flat.numel(), tuple(pieces)))
    return Shards(parts, groups, rank, world)


def common_steps(name: str, steps: set[float]) -> float:
    """AdamW's step count of a flat group, which its parameters share."""
    if len(steps) != 1:
        raise CheckpointError(
            f"the parameters of {name} have taken different numbers of optimizer steps ({sorted(steps)}), and ZeRO "
            "keeps one number for all: resume with engine.zero_stage=0 or engine=local"
        )
    return next(iter(steps))
