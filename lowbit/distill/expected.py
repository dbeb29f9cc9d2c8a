"""How large a teacher's cache will be, before there is a teacher: typical distributions, kept and encoded for real.

A trained model's logits scatter around their mean by about `SCATTER`, which over 512 tokens is an entropy of 3 nats.
The size hardly depends on it: at 2 a position of the default cache takes a fifth less, at 4 a tenth more.
"""

import torch
from torch import Tensor

from lowbit.distill.blocks import BLOCK, Distributions
from lowbit.distill.codec import Layout, encode
from lowbit.distill.estimators import sampler
from lowbit.distill.noise import Noise, Places

SCATTER = 3.0
"""Standard deviation of the logits of a position."""
_LOGITS = 1 << 20
"""Most that are drawn."""
_SAMPLE, _SHARD = 14, 1500
"""Bytes besides the targets: of a sample, its place in the index, its checksum and half a word at its end; of a shard,
its header and its record."""


def expected_bytes(layout: Layout, samples: int, length: int, shards: int) -> int:
    """Of a complete cache of samples of `length` positions."""
    return round(samples * length * expected_bits(layout) / 8) + samples * _SAMPLE + shards * _SHARD


def expected_bits(layout: Layout) -> float:
    """Of a position's targets, on average."""
    positions = min(512, max(8, _LOGITS // layout.vocab_size))
    return float(encode_typical(layout, positions).double().mean())


def encode_typical(layout: Layout, positions: int, scatter: float = SCATTER) -> Tensor:
    """Keep and encode the targets of so many positions; returns the bits of each, int64 [positions]."""
    columns = -(-layout.vocab_size // BLOCK) * BLOCK
    logits = scatter * torch.randn(positions, columns, generator=torch.Generator().manual_seed(1))
    places = Places(torch.arange(positions), torch.zeros(positions, dtype=torch.int64))
    noise = Noise(1, layout.estimator.value)
    p = Distributions(logits, layout.vocab_size)
    kept = sampler(layout.estimator)(p, layout.targets, noise, places)
    return encode(layout, kept, p.entropy, noise, places)[1].sum(dim=1)
