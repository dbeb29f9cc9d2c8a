"""A run's stabilisers and statistics: what happens to the model around each optimizer step, beside training it.

    before the step   OutControl measures the layers' inputs, or fixes its channels; statistics are taken where due
    after the step    OsciReset looks at the masters; the clamp's bounds follow the weights

Passes for measuring are made for the purpose, uncompiled and without recomputation, on the step's own micro-batches;
they leave no gradient. A step in which nothing is due costs nothing. Experts are left out of all of it, and a run that
has some says so at its start.

All state goes into the checkpoint's `stabilisers` part, by `<stabiliser>.<name>`: a resumed run goes on bit for bit,
and a run that is opened for generation gets the channels, bounds and choices that its forward pass depends on. Of
masters that ZeRO shards a window travels as whole tensors, for any other stage and world size. What the efficient
detector watches belongs to one layout of shards, so its open windows are left out there: after a resume the next one
opens at its time.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.configs.schema import PrecisionConfig, Recompute
from lowbit.data.batch import Batch
from lowbit.errors import ConfigError
from lowbit.models.block import Block
from lowbit.models.moe import Mlp
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import candidates, lowbit_layers
from lowbit.quant.grouped import LowbitGroupedLinear
from lowbit.quant.report import collapse
from lowbit.quant.stabilisers.clamp import Clamp, Site, install
from lowbit.quant.stabilisers.masters import Master, weight_specs, whole_masters
from lowbit.quant.stabilisers.oscireset import OsciReset
from lowbit.quant.stabilisers.outcontrol import OutControl
from lowbit.quant.statistics import as_row, means, measuring, weight_statistics
from lowbit.trainer.distributed import ALONE, Ranks
from lowbit.trainer.engine import Engine

logger = logging.getLogger("lowbit")

PARTS = ("outcontrol", "oscireset", "clamp")
Loss = Callable[[Batch], Tensor]
"""The sum that is differentiated for one micro-batch, moved to the model's device."""


class Stabilisers:
    """Those that a configuration asks for, attached to a model whose layers have their policies."""

    def __init__(self, config: PrecisionConfig, model: Transformer, engine: Engine | None = None) -> None:
        """`engine` trains the model; without one its weights are whole and only `resume` is of use.

        Raises ConfigError when a stabiliser finds nothing to do, or cannot do it.
        """
        wanted, self._config = config.stabilisers, config
        self._model, self._engine = model, engine
        self._layers = lowbit_layers(model)
        self._row: dict[str, float] = {}
        self._ranks = ALONE if engine is None else engine.ranks
        self.outcontrol = OutControl(wanted.outcontrol, self._layers, self._sum) if wanted.outcontrol.enabled else None
        self.clamp = Clamp(wanted.clamp, _clamp_sites(model)) if wanted.clamp.enabled else None
        self.oscireset = None
        if wanted.oscireset.enabled:
            self.oscireset = OsciReset(wanted.oscireset, self._masters, self._sum, self.outcontrol is not None)
        if self.oscireset is not None and not any(map(weight_specs, whole_masters(model))):
            raise ConfigError(
                "precision.stabilisers.oscireset.enabled=true: no layer's forward product quantises its weight: "
                "precision=nvfp4 would work"
            )
        if config.statistics.every_steps and not self._layers:
            raise ConfigError(
                f"precision.statistics.every_steps={config.statistics.every_steps}: no layer is quantised: "
                "precision=nvfp4 would work, or every_steps=0"
            )
        if engine is not None:
            self._name_experts()

    def _name_experts(self) -> None:
        """Say which quantised layers nothing here looks at."""
        layers = [name for name, layer in candidates(self._model).items() if isinstance(layer, LowbitGroupedLinear)]
        parts = [*self._parts, *(["statistics"] if self._config.statistics.every_steps else [])]
        if layers and parts:
            logger.info("%s: experts are left out (%s)", ", ".join(parts), collapse(layers))

    @property
    def _parts(self) -> dict[str, OutControl | OsciReset | Clamp]:
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    def _masters(self) -> Iterator[Master]:
        if self._engine is None:
            yield from whole_masters(self._model)
            return
        weights = self._engine.weights()
        for name, layer in self._layers.items():
            key = f"{name}.weight"
            yield Master(key, weights[key], layer, self._engine.start_of(key))

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._ranks.world == 1:
            return tensor
        total = torch.tensor(self._ranks.sum(tensor.flatten().tolist()), dtype=torch.float64)
        return total.reshape(tensor.shape).to(tensor)

    # Around a step ----------------------------------------------------------------------------------------------

    def before_step(self, step: int, batches: Sequence[Batch], loss: Loss, valid: float) -> None:
        """Optimizer step `step` (from 1) is about to begin, on these micro-batches of this rank.

        `valid`: the step's valid tokens on all ranks, which its gradients are divided by.
        """
        if self.outcontrol is not None:
            for line in self.outcontrol.begin_step(step):
                logger.info("%s", line)
            if self.outcontrol.measures(step):
                with self.outcontrol.measuring(), self._passes(gradients=False):
                    for batch in batches:
                        loss(batch)
        settings = self._config.statistics
        if settings.every_steps and step % settings.every_steps == 0:
            self._row = self._statistics(batches[0].head(settings.sequences), loss, valid)
            if self._row:  # none while no layer quantises anything
                logger.info("%s", describe(step, self._row))

    def after_step(self, step: int, progress: float) -> dict[str, float]:
        """Optimizer step `step` has been taken, and `progress` of the run is done; metrics that are new, if any."""
        row, self._row = self._row, {}
        if self.oscireset is not None and (found := self.oscireset.after_step(step, progress)):
            row |= found
            if self._engine is not None:
                self._engine.refresh()
        if self.clamp is not None:
            self.clamp.update()
        return row

    def _statistics(self, batch: Batch, loss: Loss, valid: float) -> dict[str, float]:
        """Of every operand of every layer. Where ZeRO's stage 3 has taken the weights away, of the inputs alone."""
        layers = self._layers
        whole = all(layer.weight.numel() == layer.in_features * layer.out_features for layer in layers.values())
        weights = {name: weight_statistics(layer) for name, layer in layers.items()} if whole else {}
        gradients = self._config.statistics.gradients and whole
        with measuring(layers) as passing, self._passes(gradients):
            total = loss(batch)
            if gradients:
                first = next(p for p in self._model.parameters() if p.requires_grad)
                torch.autograd.grad(total / valid, [first])
        return as_row({f"{name}/weight": found for name, found in weights.items() if found is not None} | passing)

    @contextmanager
    def _passes(self, gradients: bool) -> Iterator[None]:
        """Passes inside run uncompiled and recompute nothing, so that every layer is heard, once."""
        before = [block.recompute for block in self._model.blocks if isinstance(block, Block)]
        self._model.set_recompute(Recompute.none)
        try:
            with torch.compiler.set_stance("force_eager"), nullcontext() if gradients else torch.no_grad():
                yield
        finally:
            for block, recompute in zip(self._model.blocks, before, strict=True):
                assert isinstance(block, Block)
                block.recompute = recompute

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor] | None:
        """For a checkpoint, on rank 0 (with several ranks all must ask); None when there is nothing."""
        parts = {name: part.state_tensors() for name, part in self._parts.items()}
        if self.oscireset is not None and self._sharded:
            parts["oscireset"] = self.oscireset.state_tensors(windows=False)
            parts["windows"] = self._collect(self.oscireset.shard_slots())
        return {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()} or None

    def resume(self, state: Mapping[str, Tensor] | None) -> None:
        """Weights are as they will be trained or used: go on from a checkpoint's state (of rank 0), or begin."""
        state = _everywhere(state or {}, self._ranks, self._model.head_weight.device)
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            part, _, name = key.partition(".")
            parts.setdefault(part, {})[name] = tensor
        if self._engine is not None and (lost := [name for name in PARTS if name in parts and name not in self._parts]):
            logger.warning("this run goes on without %s, which it has had so far", " and ".join(lost))
        if self.outcontrol is not None and "outcontrol" in parts:
            self.outcontrol.load_state_tensors(parts["outcontrol"], self._ranks.first)
        if self.oscireset is not None and "oscireset" in parts:  # after OutControl, which makes layers forget choices
            self.oscireset.load_state_tensors(parts["oscireset"])
            if "windows" in parts:
                self.oscireset.load_shard_slots(self._distribute(parts["windows"]))
        if self.clamp is not None and "clamp" in parts:
            self.clamp.load_state_tensors(parts["clamp"])
        elif self.clamp is not None:
            self.clamp.update()

    @property
    def _sharded(self) -> bool:
        """Whether some rank holds a part of a master, not the whole."""
        if self._ranks.world == 1:
            return False
        parts = [m for m in self._masters() if m.tensor.numel() != m.layer.in_features * m.layer.out_features]
        return self._ranks.sum([float(len(parts))])[0] > 0

    def _collect(self, slots: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Slots of shards -> `<slot>.<weight>` whole, on rank 0; nothing if no window is open on any rank."""
        assert self._engine is not None
        held = sum(part.numel() for part in slots.get("weight", {}).values())
        if self._ranks.sum([float(held)])[0] == 0:
            return {}
        return {
            f"{slot}.{name}": whole
            for slot, parts in slots.items()
            for name, whole in self._engine.collect(parts).items()
        }

    def _distribute(self, whole: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The inverse, on every rank."""
        assert self._engine is not None
        slots: dict[str, dict[str, Tensor]] = {}
        for key, tensor in whole.items():
            slot, _, name = key.partition(".")
            slots.setdefault(slot, {})[name] = tensor
        return {slot: self._engine.distribute(tensors) for slot, tensors in slots.items()}


def _everywhere(state: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Rank 0's tensors on all ranks."""
    if ranks.world == 1:
        return dict(state)
    kinds: list[Any] = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in state.items()]
    found = {}
    for name, dtype, shape in ranks.share(kinds):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if ranks.first:
            tensor.copy_(state[name])
        data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor  # no backend refuses bytes
        dist.broadcast(data, src=0)
        found[name] = tensor
    return found


def _clamp_sites(model: Transformer) -> list[Site]:
    """Every squared-ReLU network, with a clamped square put in."""
    sites = []
    for name, block in model.blocks.named_children():
        assert isinstance(block, Block)
        for path, mlp in block.named_modules():
            if isinstance(mlp, Mlp) and mlp.gate is None:
                full = f"blocks.{name}.{path}"
                if block.norms_after:
                    raise ConfigError(
                        f"{full}: the clamp's bound needs an input of unit mean square, and with "
                        "model.norm_placement=after nothing normalises it: before would work"
                    )
                site = install(full, mlp.up, block.mlp_norm.weight, mlp.down)
                mlp.square = site.square
                sites.append(site)
    return sites


def describe(step: int, row: Mapping[str, float]) -> str:
    """One line for people: the means over layers."""
    parts = []
    for operand, found in sorted(means(row).items()):
        words = [f"error {found['relative_mse']:.2e}", f"clipped {found['clipped_share']:.2%}"]
        words += [f"underflow {found['underflow_share']:.2%}", f"amax {found['amax']:.3g}"]
        if "oscillation_risk" in found:
            words.append(f"at an edge {found['oscillation_risk']:.1%}")
        parts.append(f"{operand}: {', '.join(words)}")
    return f"quantisation at step {step}: {'; '.join(parts)}"
