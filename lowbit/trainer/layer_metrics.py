"""Layers during training: loads of experts and sizes of attention logits as metrics; experts' biases, moved.

After each optimizer step, with load_e the choices that fell on expert e of a layer over all micro-batches and ranks:
    b_e <- b_e + rate * sign(mean load - load_e)                                  (arXiv 2408.15664)
Every rank computes the same from the same sums. Nothing waits for the device but reading the metrics.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.models.layers import state_buffers
from lowbit.models.router import STATISTICS, Router
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import Ranks


class LayerMetrics:
    """What the layers of one model measure while it trains, over all ranks; moves the biases of its experts."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._routers = {
            name.removesuffix(".mlp.router"): module
            for name, module in model.named_modules()
            if isinstance(module, Router)
        }
        self._device = model.head_weight.device
        self._sums: Tensor | None = None
        self._greatest: Tensor | None = None

    def begin_step(self) -> None:
        """Forget what passes that were no training measured."""
        self._model.take_measured()

    @torch.no_grad()
    def end_step(self) -> None:
        """Take in the passes of a step and move the biases. Collective when there are several ranks."""
        taken = self._model.take_measured()
        if taken is None:
            return
        z = torch.zeros(0, 2, device=self._device) if taken.z is None else taken.z
        routing = torch.zeros(0, device=self._device) if taken.routing is None else taken.routing
        passes = torch.full((1,), float(taken.passes), device=self._device)
        sums, greatest = torch.cat([routing.flatten(), z[:, 0], passes]), z[:, 1].contiguous()
        if self._ranks.world > 1:
            dist.all_reduce(sums)
            dist.all_reduce(greatest, dist.ReduceOp.MAX)
        self._move(sums[: routing.numel()].view_as(routing))
        self._sums = sums if self._sums is None else self._sums + sums
        self._greatest = greatest if self._greatest is None else torch.maximum(self._greatest, greatest)

    def _move(self, measured: Tensor) -> None:
        for router, numbers in zip(self._routers.values(), measured, strict=True):
            if router.bias is not None:
                loads = numbers[:-STATISTICS]
                router.bias += router.config.bias_rate * torch.sign(loads.mean() - loads)

    def read(self) -> dict[str, Any]:
        """Metrics of the steps since the last call: for each layer the load of its experts, 1 when even, and biases;
        over all layers the extremes of both, the routers' entropy in nats, the dropped share, the mean logsumexp.
        For each layer with Z-Reg the mean and the greatest logsumexp of its attention logits."""
        if self._sums is None or self._greatest is None:
            return {}
        *values, passes = self._sums.tolist()
        greatest = self._greatest.tolist()
        self._sums = self._greatest = None
        split = len(values) - len(greatest)
        metrics = self._of_experts(values[:split], passes) if split else {}
        for layer, (mean, most) in enumerate(zip(values[split:], greatest, strict=True)):
            metrics |= {f"attention_z/mean/blocks.{layer}": mean / passes, f"attention_z/max/blocks.{layer}": most}
        if greatest:
            metrics["attention_z/max"] = max(greatest)
        return metrics

    def _of_experts(self, values: list[float], passes: float) -> dict[str, Any]:
        size = len(values) // len(self._routers)
        rows = [values[i : i + size] for i in range(0, len(values), size)]
        loads = {name: _even(row[:-STATISTICS]) for name, row in zip(self._routers, rows, strict=True)}
        entropy, dropped, lse = (sum(column) / len(rows) / passes for column in list(zip(*rows, strict=True))[-3:])
        metrics: dict[str, Any] = {
            "experts/load_max": max(map(max, loads.values())),
            "experts/load_min": min(map(min, loads.values())),
            "experts/entropy": entropy,
            "experts/dropped": dropped,
            "experts/lse": lse,
        }
        metrics |= {f"experts/load/{name}": load for name, load in loads.items()}
        biases = {name: router.bias.tolist() for name, router in self._routers.items() if router.bias is not None}
        if biases:
            metrics["experts/bias_max"] = max(max(map(abs, bias)) for bias in biases.values())
            metrics |= {f"experts/bias/{name}": bias for name, bias in biases.items()}
        return metrics


def _even(loads: list[float]) -> list[float]:
    """Loads over their mean, to four places."""
    mean = sum(loads) / len(loads)
    return [round(load / mean, 4) for load in loads]


def without_state(model: Transformer, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Put a checkpoint's state buffers into `model`; the rest of its tensors. Only rank 0 needs to have any."""
    buffers = state_buffers(model)
    held = {name: tensors[name].tolist() for name in buffers if name in tensors}
    for name, values in ranks.share(held).items():
        buffers[name].copy_(torch.tensor(values))
    return {name: tensor for name, tensor in tensors.items() if name not in buffers}
