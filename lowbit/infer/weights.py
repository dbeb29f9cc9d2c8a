"""The sampler's weights: held once, replaced in place, and every replacement checked.

What products read are derived copies: the head and the layers' weights rounded to the compute type, or what a low-bit
layer's quantiser makes of them, with its scales. They are made when the sampler is built and written over, never
exchanged, at each update, because captured CUDA graphs know addresses and nothing else. What goes wrong elsewhere when
weights are sent to a sampler (a tensor that is skipped in silence, scales that stay those of the old weights or become
zero, a method that writes to another tensor) is looked for each time:

    count        every tensor of the model arrived once, in its shape; none is unknown
    fingerprint  sum |w| in FP64 of each tensor as it was sent and as it is now held, and the same of each derived copy
                 as it was made and as it is now held, after all has been written: equal, bit for bit
    scales       of quantised weights: finite and above zero (a row of zeros may have zero)

Sums are taken on the sampler's device, in one order, so equality is exact; they wait for the device once.
"""

import math
from collections.abc import Iterable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from lowbit.errors import WeightsError
from lowbit.infer.requests import WeightsReport
from lowbit.models.layers import GroupedLinear, Linear, weights_and_state
from lowbit.models.transformer import Transformer

SHOWN = 5
"""Names in an error."""


def fingerprint(tensor: Tensor) -> Tensor:
    """Sum of magnitudes, FP64 scalar on the tensor's device."""
    flat = tensor.detach().flatten()
    if flat.dtype.itemsize == 1 or not flat.is_floating_point():
        flat = flat.float()
    total: Tensor = torch.linalg.vector_norm(flat, 1, dtype=torch.float64)
    return total


class HeldWeights:
    """The weights that a model of a sampler computes with."""

    def __init__(self, model: Transformer, shared: bool) -> None:
        """`model`: a `precision.shadow`. `shared`: its parameters are those of a trainer."""
        self.model, self.shared = model, shared
        self.state = weights_and_state(model)
        self.layers: dict[str, Linear | GroupedLinear] = {
            name: module for name, module in model.named_modules() if isinstance(module, Linear | GroupedLinear)
        }
        self._derived: dict[str, Tensor] = {}
        """By the layer's name and the attribute's."""
        self._head: Tensor | None = None
        self._seen: list[int] = []
        self.broken: str | None = None
        """Why the weights cannot be used, if an update failed."""
        self.scales = 0
        self._check(self._refresh(), {})

    @property
    def head(self) -> Tensor:
        """The LM head's weight [padded vocabulary, width] in the compute type."""
        if self._head is not None:
            return self._head
        assert self.model.head is not None and self.model.head.frozen is not None
        return self.model.head.frozen

    def require_current(self) -> None:
        """Raises WeightsError when shared masters have changed since the last update, or an update failed."""
        if self.broken is not None:
            raise WeightsError(f"the sampler's last update failed ({self.broken}): update it again before sampling")
        if self.shared and self._versions() != self._seen:
            raise WeightsError("the trainer's weights have changed since the sampler's last update: call update first")

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightsReport:
        """See `requests.Sampler.update`. Shared masters need not be given; what is given is counted all the same."""
        begin = perf_counter()
        self.broken = "it was not finished"
        try:
            with torch.no_grad():
                sent = self._write(weights)
                total = self._check(self._refresh(), sent)
        except WeightsError as error:
            self.broken = str(error)
            raise
        self.broken = None
        parameters = sum(tensor.numel() for tensor in self.state.values())
        return WeightsReport(version, len(self.state), parameters, total, self.scales, perf_counter() - begin)

    # In order -------------------------------------------------------------------------------------------------

    def _write(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy what is sent; the fingerprint of each tensor as it was sent."""
        sent: dict[str, Tensor] = {}
        for name, tensor in weights:
            held = self.state.get(name)
            if held is None:
                raise WeightsError(f"update of the sampler: {name} is no tensor of its model")
            if name in sent:
                raise WeightsError(f"update of the sampler: {name} was sent twice")
            if tensor.shape != held.shape:
                raise WeightsError(
                    f"update of the sampler: {name} has shape {list(tensor.shape)}, the model's is {list(held.shape)}"
                )
            arrived = tensor.detach().to(held.device)
            sent[name] = fingerprint(arrived)
            write(held, arrived)
        missing = [name for name in self.state if name not in sent]
        if missing and not (self.shared and not sent):
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise WeightsError(
                f"update of the sampler: {len(missing)} of {len(self.state)} tensors are missing: "
                f"{', '.join(missing[:SHOWN])}{more}"
            )
        return sent

    @torch.no_grad()
    def _refresh(self) -> dict[str, Tensor]:
        """Derive everything anew; the fingerprint of each derived copy as it was made."""
        made: dict[str, Tensor] = {}
        dtype = self.model.compute_dtype
        for name, layer in self.layers.items():
            layer.freeze(dtype)
            for attribute, tensor in [(a, t) for a, t in vars(layer).items() if a.startswith("frozen")]:
                if isinstance(tensor, Tensor):
                    setattr(layer, attribute, self._keep(f"{name}.{attribute}", tensor, made))
        if self.model.head is None:
            tied = self.model.embedding.weight.detach().to(dtype)
            self._head = self._keep("head", tied, made)
        self._seen = self._versions()
        return made

    def _keep(self, name: str, tensor: Tensor, made: dict[str, Tensor]) -> Tensor:
        """The held copy called `name`, now with the contents of `tensor`."""
        held = self._derived.get(name)
        made[name] = fingerprint(tensor)
        if held is None:
            self._derived[name] = tensor
            return tensor
        if held.data_ptr() != tensor.data_ptr():
            write(held, tensor)
        return held

    def join(self, names: Sequence[str], attribute: str) -> Tensor:
        """Put what some layers hold under this name into one buffer, of which each then holds a part."""
        parts = [self._derived[f"{name}.{attribute}"] for name in names]
        buffer = torch.cat(parts)
        for name, part in zip(names, torch.split(buffer, [len(part) for part in parts]), strict=True):
            self._derived[f"{name}.{attribute}"] = part
            setattr(self.layers[name], attribute, part)
        return buffer

    def _check(self, made: dict[str, Tensor], sent: dict[str, Tensor]) -> float:
        """Compare everything with what is held now; the fingerprint of all weights."""
        held = {name: fingerprint(tensor) for name, tensor in self.state.items()}
        derived = {name: fingerprint(self._derived[name]) for name in made}
        scales = {name: t for name, t in self._derived.items() if name.endswith("scale")}
        worst = {name: self._bad_scales(name, scale) for name, scale in scales.items()}
        parts = [*held.values(), *sent.values(), *derived.values(), *made.values(), *worst.values()]
        numbers = iter(torch.stack([part.double() for part in parts]).tolist())  # the only wait for the device
        now, was, copies, fresh, bad = (
            {name: next(numbers) for name in group} for group in (held, sent, derived, made, worst)
        )
        self.scales = sum(scale.numel() for scale in scales.values())
        for name, value in now.items():
            if not math.isfinite(value):
                raise WeightsError(f"update of the sampler: {name} has a number that is not finite")
            if name in was and was[name] != value:
                raise WeightsError(
                    f"update of the sampler: {name} was sent with sum |w| = {was[name]:.9g} and is held with "
                    f"{value:.9g}: it was not written, or written over"
                )
        for name, value in bad.items():
            if value:
                raise WeightsError(f"update of the sampler: {name} has {value:.0f} scales that are zero or not finite")
        for name, value in copies.items():
            if fresh[name] != value:
                raise WeightsError(
                    f"update of the sampler: {name} was made with sum |w| = {fresh[name]:.9g} and is held with "
                    f"{value:.9g}: it is stale, or shares its memory with another"
                )
            if value == 0 and now.get(f"{name.removesuffix('.frozen')}.weight", 0) > 0:
                raise WeightsError(f"update of the sampler: {name} is all zeros, and the weight is not")
        return math.fsum(now.values())

    def _bad_scales(self, name: str, scale: Tensor) -> Tensor:
        """How many scales are not finite, or zero though their row is not."""
        layer = self.layers[name.rpartition(".")[0]]
        weight = layer.effective() if isinstance(layer, Linear) else layer.weight
        rows = weight.detach().abs().amax(-1, keepdim=True)
        used = rows > 0 if rows.shape == scale.shape else rows.amax() > 0
        return (~scale.isfinite() | ((scale <= 0) & used)).sum()

    def _versions(self) -> list[int]:
        """PyTorch's counters of in-place changes."""
        return [tensor._version for tensor in self.model.parameters()]


def write(held: Tensor, new: Tensor) -> None:
    """Replace what a tensor holds; its address stays."""
    if held.data_ptr() != new.data_ptr():
        held.copy_(new)
