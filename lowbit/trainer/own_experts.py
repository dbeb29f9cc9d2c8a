"""A rank's own experts, beside what ZeRO shards: their weights, gradients, optimizer and place in checkpoints.

Under expert parallelism (`engine.expert_parallel`) DeepSpeed never sees the experts. Their gradients are complete on
the rank that has them (`models/spread.py`), so they need no reduction; AdamW updates them where they are, with the
settings of the other hidden matrices. In checkpoints they are whole tensors by name like all others: to `Shards` each
is a parameter [experts, out, in] of which this rank keeps a stretch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.configs.schema import OptimConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import GroupedLinear
from lowbit.models.moe import Moe
from lowbit.models.spread import Spread
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.optim import GroupRow, expert_optimizer
from lowbit.trainer.shards import GroupLayout, Part, Shards


class OwnExperts:
    """The experts of one rank; made from a whole model, of which the other ranks' experts are then gone."""

    def __init__(self, model: Transformer, ranks: Ranks, config: OptimConfig) -> None:
        """Raises ConfigError when the ranks cannot share the experts evenly."""
        moe = model.config.moe
        if not moe.experts or moe.experts % ranks.world:
            raise ConfigError(
                f"engine.expert_parallel=true: {ranks.world} processes cannot share model.moe.experts={moe.experts} "
                "evenly; choose a multiple"
            )
        self._model = model
        self._layers = [module for module in model.modules() if isinstance(module, Moe)]
        self._spread = Spread(ranks.rank, ranks.world, moe.experts)
        self._shapes: dict[str, torch.Size] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, GroupedLinear):
                self._shapes[f"{name}.weight"] = layer.weight.shape
                self._keep_mine(layer)
                self.parameters[f"{name}.weight"] = layer.weight
        for moe_layer in self._layers:
            moe_layer.spread = self._spread
        self.optimizer = expert_optimizer(self.parameters, model, config)

    def _keep_mine(self, layer: GroupedLinear) -> None:
        layer.experts = self._spread.local
        layer.weight = nn.Parameter(layer.weight.detach()[self._spread.mine].clone())
        keys = getattr(layer, "keys", None)  # of low-bit experts: the noise of each belongs to it wherever it is
        if keys is not None:
            layer.keys = keys[self._spread.mine].clone()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """The model without experts, for DeepSpeed to look at."""
        kept = [(layer, layer._modules.pop("experts")) for layer in self._layers]
        try:
            yield
        finally:
            for layer, experts in kept:
                layer._modules["experts"] = experts

    def add_to(self, shards: Shards) -> None:
        """Take a place in the layout, behind what ZeRO has."""
        for name, parameter in self.parameters.items():
            numel = parameter.numel()
            start = self._spread.rank * numel
            shards.parts[name] = Part(name, self._shapes[name], start, numel, len(shards.groups), 0)
            shards.groups.append(GroupLayout(parameter.detach().view(-1), numel, ()))

    def gradients(self) -> list[Tensor]:
        """Those that there are."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def states(self, name: str) -> dict[str, Tensor]:
        """The optimizer's states of one of them, by slot."""
        prefix = f"{name}."
        return {k.removeprefix(prefix): t for k, t in self.optimizer.state_tensors().items() if k.startswith(prefix)}

    def step(self, lr_scale: float) -> None:
        """Update, and drop the gradients."""
        for parameter in self.parameters.values():
            if parameter.grad is None:  # no token came by: decay and momentum go on as for any other matrix
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.set_lr_scale(lr_scale)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take_sent(self) -> int:
        """Bytes of tokens and their gradients that this rank sent to other ranks' experts since the last call."""
        sent, self._spread.sent_bytes = self._spread.sent_bytes, 0
        return sent

    def rows(self) -> list[GroupRow]:
        """For the printed table of groups: this rank's part."""
        return self.optimizer.groups()

    @contextmanager
    def together(self) -> Iterator[None]:
        """The model with all experts on every rank, and no way to others: for a rank to use alone. Collective."""
        mine, mine_keys = {}, {}
        layers = {name: self._model.get_submodule(name.removesuffix(".weight")) for name in self.parameters}
        for name, layer in layers.items():
            assert isinstance(layer, GroupedLinear)
            mine[name] = layer.weight.data
            layer.weight.data = self._gathered(layer.weight.data)
            layer.experts = self._spread.local * self._spread.world
            keys = getattr(layer, "keys", None)
            if keys is not None:
                mine_keys[name] = keys
                layer.keys = self._gathered(keys)
        for moe_layer in self._layers:
            moe_layer.spread = None
        try:
            yield
        finally:
            for name, layer in layers.items():
                assert isinstance(layer, GroupedLinear)
                layer.weight.data = mine[name]
                layer.experts = self._spread.local
                if name in mine_keys:
                    layer.keys = mine_keys[name]
            for moe_layer in self._layers:
                moe_layer.spread = self._spread

    def _gathered(self, part: Tensor) -> Tensor:
        whole = part.new_empty(part.shape[0] * self._spread.world, *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous())
        return whole
