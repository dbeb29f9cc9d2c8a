"""What low-bit layers change in the memory of training. Pure arithmetic.

* **Inputs.** A layer that trains keeps its input for wgrad. A low-bit one keeps packed codes and scales instead
  (`LinearPolicy.kept`): one copy for siblings, which have the same policy, and one each where their policies differ.
  Attention's result stays besides, for attention's own backward pass, and so does an input that a sibling reads in high
  precision.
* **Weights.** Quantised weights are made anew in the backward pass: no rounded copy waits for it.
* **OsciReset's windows**: for each watched weight w' and both distances in FP32, Q(w'), and its index where only some
  are watched; for each block of four over six the choice of 4 or 6, and once more with hysteresis.
"""

import math
from collections.abc import Mapping

from lowbit.configs.schema import ModelConfig, OsciDetector, StabiliserConfig
from lowbit.models.cost import LowBit
from lowbit.models.layers import GroupedLinear, Linear
from lowbit.quant.policy import Kept, LinearPolicy
from lowbit.quant.spec import FOUR_OVER_SIX, MXFP8, Outer
from lowbit.quant.stabilisers.outcontrol import gains

READERS = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate and up", "up": "gate and up"}
"""Layers of a block or of its experts that read the same input."""


def low_bit_memory(
    config: ModelConfig,
    layers: Mapping[str, Linear | GroupedLinear],
    policies: Mapping[str, LinearPolicy],
    stabilisers: StabiliserConfig,
) -> LowBit:
    """What these policies save and cost, against layers that quantise nothing; by the layers' full names."""
    readers: dict[str, list[str]] = {}
    for name in layers:
        module, _, own = name.rpartition(".")
        readers.setdefault(f"{module}.{READERS.get(own, own)}", []).append(name)
    dropped, packed = 0, 0.0
    for names in readers.values():
        layer = layers[names[0]]
        each = layer.in_features * (config.moe.top_k if isinstance(layer, GroupedLinear) else 1)
        kept = {policies[name] for name in names}
        if not any(policy.kept is Kept.INPUT for policy in kept) and not names[0].endswith("attention.out"):
            dropped += each
        copies = [policies[name] for name in (names if len(kept) > 1 else names[:1])]
        packed += sum(each * _kept_bits(policy, stabilisers) / 8 for policy in copies)
    weights = sum(_weights(layers[name]) for name, policy in policies.items() if policy.quantised)
    windows = 0
    if stabilisers.oscireset.enabled:
        windows = sum(_window(layer, policies[name], stabilisers) for name, layer in layers.items())
    return LowBit(dropped, packed, weights, windows)


def _kept_bits(policy: LinearPolicy, stabilisers: StabiliserConfig) -> float:
    """Bits that each number of an input takes beside the input itself, OutControl's channels included."""
    if policy.kept is Kept.INPUT:
        return 0.0
    bits, share = policy.kept_operand.bits, stabilisers.outcontrol.share
    if stabilisers.outcontrol.enabled and gains(policy):
        bits = (1 - share) * bits + share * MXFP8.bits
    return bits


def _weights(layer: Linear | GroupedLinear) -> int:
    return layer.in_features * layer.out_features * (layer.experts if isinstance(layer, GroupedLinear) else 1)


def _window(layer: Linear | GroupedLinear, policy: LinearPolicy, stabilisers: StabiliserConfig) -> int:
    """Bytes of a layer's open window; experts have none."""
    spec, config = policy.fprop.right.spec, stabilisers.oscireset
    if spec is None or isinstance(layer, GroupedLinear):
        return 0
    watched, each = _weights(layer), 12 + (2 if spec.after is Outer.NONE else 4)
    if config.detector is OsciDetector.efficient:
        watched, each = min(watched, max(1, math.ceil(watched * config.tracked))), each + 8
    blocks = 0
    if spec.rounding in FOUR_OVER_SIX:
        columns = -(-layer.in_features // spec.column_multiple) * spec.column_multiple // spec.block[1]
        blocks = -(-layer.out_features // spec.block[0]) * columns * (2 if config.hysteresis > 0 else 1)
    return watched * each + blocks
