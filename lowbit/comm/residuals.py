"""What a coded exchange remembers between steps, by parameter: error feedback's residuals, the noise's clock.

A rank keeps what its own rounding lost of each coded parameter's gradient, whole, at every ZeRO stage; at stage 0,
where sums travel too, their owners keep what those lost. Both are in units of the summed gradient, so that

    what all ranks have lost so far = sum over ranks of `sent` + `owned`

whatever the stage, the buckets and the number of ranks. A checkpoint holds `sent.<name>` [ranks, *shape] and
`owned.<name>`: as many ranks take back what each of them had, another number of ranks share the sum equally.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.comm.feedback import Feedback
from lowbit.comm.noise import Noise


class Residuals:
    """Error feedback of the coded parameters of one rank, laid end to end in the order given."""

    def __init__(self, shapes: Mapping[str, torch.Size], rank: int, world: int, device: torch.device) -> None:
        self._shapes, self._rank, self._world = dict(shapes), rank, world
        self._sent = torch.zeros(sum(s.numel() for s in shapes.values()), dtype=torch.float32, device=device)
        self._places: dict[str, int] = {}
        place = 0
        for name, shape in shapes.items():
            self._places[name] = place
            place += shape.numel()
        self.buckets: list[Feedback] = []
        """Stage 0: of the buckets that are all-reduced, in order."""

    def sent(self, name: str) -> Tensor:
        """What this rank lost of one parameter's gradient, flat; a view."""
        return self._sent.narrow(0, self._places[name], self._shapes[name].numel())

    def span(self, names: Sequence[str]) -> Tensor:
        """The same of consecutive parameters."""
        first = self._places[names[0]]
        return self._sent.narrow(0, first, sum(self._shapes[name].numel() for name in names))

    # Checkpoints. All ranks call these; whole tensors are on rank 0.

    def state(self) -> dict[str, Tensor]:
        """Whole tensors in host memory on rank 0, nothing elsewhere."""
        whole: dict[str, Tensor] = {}
        for name, shape in self._shapes.items():
            mine = self.sent(name)
            every = [torch.empty_like(mine) for _ in range(self._world)] if self._rank == 0 else None
            dist.gather(mine.contiguous(), every, dst=0)
            if every is not None:
                whole[f"sent.{name}"] = torch.stack(every).view(self._world, *shape).cpu()
        if self.buckets:
            owned = torch.cat([bucket.spread() for bucket in self.buckets])
            dist.reduce(owned, dst=0)  # every number is zero but with its owner
            if self._rank == 0:
                cut = torch.split(owned, [shape.numel() for shape in self._shapes.values()])
                pairs = zip(self._shapes.items(), cut, strict=True)
                whole |= {f"owned.{name}": part.view(shape).cpu() for (name, shape), part in pairs}
        return whole

    def load(self, whole: Mapping[str, Tensor], known: Mapping[str, Sequence[int]]) -> None:
        """Take back what `state` returned, `whole` on rank 0; `known`, on every rank: its names and shapes."""
        keeps_sums = bool(self.buckets) and any(key.startswith("owned.") for key in known)
        for name in self._shapes:
            if f"sent.{name}" in known:
                self._load_sent(name, whole, known, keeps_sums)
        if keeps_sums:
            owned = torch.zeros_like(self._sent)
            if self._rank == 0:
                parts = [whole.get(f"owned.{name}", torch.zeros(shape)) for name, shape in self._shapes.items()]
                owned.copy_(torch.cat([part.reshape(-1) for part in parts]))
            dist.broadcast(owned, src=0)
            sizes = [bucket.numel for bucket in self.buckets]
            for bucket, part in zip(self.buckets, torch.split(owned, sizes), strict=True):
                bucket.take(part)

    def _load_sent(
        self, name: str, whole: Mapping[str, Tensor], known: Mapping[str, Sequence[int]], keeps_sums: bool
    ) -> None:
        saved_ranks = known[f"sent.{name}"][0]
        stays = saved_ranks == self._world and (keeps_sums or f"owned.{name}" not in known)
        every: list[Tensor] | None = None
        if self._rank == 0:
            rows = whole[f"sent.{name}"].reshape(saved_ranks, -1)
            if not stays:
                total = rows.sum(0)
                if not keeps_sums and f"owned.{name}" in known:
                    total += whole[f"owned.{name}"].reshape(-1)
                rows = (total / self._world).expand(self._world, -1)
            every = list(rows.to(self._sent.device).contiguous())
        mine = torch.empty_like(self.sent(name))
        dist.scatter(mine, every, src=0)
        self.sent(name).copy_(mine)


class Clock:
    """Noise for each reduction of a run: the n-th one draws the n-th stream of the run's seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.count = 0
        """Reductions so far, the same on every rank."""

    def next(self) -> Noise:
        """The next reduction's noise."""
        self.count += 1
        return Noise((self._seed & 0xFFFFFFFF, self._seed >> 32, self.count))
