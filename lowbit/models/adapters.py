"""LoRA in a whole model: which layers get adapters, what still trains, and plain weights from it.

A model with adapters has the parameters `<layer>.low_rank.a` and `.b` beside its own, which are frozen: they have no
gradient and no state of the optimizer. To everyone outside of training it is the plain model of its sums
(`merged_weights` of a live model, `merged` of a checkpoint's tensors), with the names and shapes that it had before.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowbit.errors import ConfigError
from lowbit.models.layers import Linear, weights_and_state
from lowbit.models.low_rank import LowRank, low_rank_sum

MARK = ".low_rank."
"""In the full name of every parameter of an adapter, and in no other."""


def adapted(model: nn.Module) -> dict[str, Linear]:
    """The layers that have adapters, by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.low_rank is not None
    }


@torch.no_grad()
def adapt(
    model: nn.Module, rank: int, alpha: float, targets: Collection[str], seed: int, also: Collection[str] = ()
) -> list[str]:
    """Freeze a model that has its weights, and give the linear layers of its blocks adapters.

    Args:
        targets: last parts of layers' names (`q`, `down`), or `all`. also: of `norms`, `embedding` and `head`, what
            goes on training as a whole.

    Returns:
        The full names of the layers.

    Raises:
        ConfigError: nothing matches; a layer is narrower than the rank.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear)
        and name.startswith("blocks.")
        and ("all" in targets or name.rpartition(".")[2] in targets)
    }
    if not layers:
        raise ConfigError(f"lora.targets={list(targets)}: no linear layer of the model has such a name")
    for name, parameter in model.named_parameters():
        room = "norms" if parameter.ndim < 2 else name.partition(".")[0]
        parameter.requires_grad_(room in also)
    for name, layer in layers.items():
        if rank > min(layer.in_features, layer.out_features):
            raise ConfigError(f"lora.rank={rank}: {name} is {layer.out_features} x {layer.in_features}: choose less")
        made = LowRank(layer.out_features, layer.in_features, rank, alpha, layer.weight.device)
        key = hashlib.blake2b(f"{seed}:{name}{MARK}a".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
        made.a.copy_(torch.empty(made.a.shape).normal_(0.0, layer.in_features**-0.5, generator=generator))
        layer.low_rank = made
    return list(layers)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """`layers.weights_and_state` of the plain model that computes the same: sums in place of adapted weights."""
    tensors = weights_and_state(model)
    sums = {f"{name}.weight": layer.effective().detach() for name, layer in adapted(model).items()}
    return {name: sums.get(name, tensor) for name, tensor in tensors.items() if MARK not in name}


def merge(model: nn.Module) -> None:
    """Make the model that plain model: its own weights become the sums, and the adapters go."""
    for layer in adapted(model).values():
        layer.weight = nn.Parameter(layer.effective().detach(), requires_grad=False)
        layer.low_rank = None


@torch.no_grad()
def merged(tensors: Mapping[str, Tensor], rank: int, alpha: float) -> dict[str, Tensor]:
    """The plain model's tensors from those of a checkpoint with adapters: one sum in memory for each adapted layer."""
    scale = torch.tensor(alpha / rank)
    plain = {name: tensor for name, tensor in tensors.items() if MARK not in name}
    for name in tensors:
        layer, _, part = name.partition(MARK)
        if part == "a":
            a, b = tensors[name], tensors[f"{layer}{MARK}b"]
            plain[f"{layer}.weight"] = low_rank_sum(plain[f"{layer}.weight"], a, b, scale)
    return plain


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as before anything was learned (bit for bit, unless more than adapters trains)."""
    scales = [layer.low_rank.scale for layer in adapted(model).values() if layer.low_rank is not None]
    before = [scale.clone() for scale in scales]
    try:
        for scale in scales:
            scale.zero_()
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale.copy_(value)
