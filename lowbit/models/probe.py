"""Measurements of a model that training does not make.

Softmax saturation: a row of attention weights whose largest exceeds 0.99 hardly passes a gradient to its query and
keys. A growing share of such rows goes ahead of many loss spikes, and quantised attention inputs make it likelier.
"""

import math

import torch
from torch import Tensor

from lowbit.models.attention import dense_mask, prepare_mask
from lowbit.models.block import KV, Block
from lowbit.models.cost import kv_source, window_of
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import Visibility, causal

SCORES = 1 << 25
"""Attention scores that exist at once: 128 MiB, where all of 32 heads and 8192 tokens would be 8 GiB."""


@torch.no_grad()
def softmax_saturation(
    model: Transformer, tokens: Tensor, visibility: Visibility | None = None, threshold: float = 0.99
) -> list[float]:
    """Share of attention rows (head and query) whose largest weight exceeds `threshold`, for each layer.

    Walks through the blocks itself, uncompiled, and recomputes each layer's weights, some queries at a time: it
    leaves the training path alone and adds little to its memory. Queries that see one key only are not counted:
    their weight is 1 whatever the model does. Give it a few sequences.

    Args:
        tokens: int64 [B, T]. visibility: None for plain causal.

    Returns:
        One number in [0, 1] a layer; 0 when no query sees two keys.
    """
    batch, length = tokens.shape
    rule = causal(batch, length).to(tokens.device) if visibility is None else visibility.to(tokens.device)
    rope = model.rope(rule.position)
    x = model.embed(tokens)
    shares = []
    softcap = model.config.attention_softcap
    kept: dict[int, KV] = {}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        window, source = window_of(model.config, layer) or None, kv_source(model.config, layer)
        visible = dense_mask(rule, window)  # [B, 1, T, T]
        counted = visible.sum(-1) > 1  # [B, 1, T]
        mask = prepare_mask(visibility, batch, length, tokens.device, window, softcap is not None)
        borrowed = kept[source] if source != layer else None
        before = x if block.norms_after else block.attention_norm(x)
        if borrowed is None:
            q, k, _ = block.attention.project(before, rope)
        else:
            q, k = block.attention.queries(before, rope), borrowed[0]
        saturated = torch.zeros((), device=x.device)
        for row in range(batch):
            greatest = _greatest_weight(q[row].float(), k[row].float(), visible[row], softcap)  # [H, T]
            saturated += ((greatest > threshold) & counted[row]).sum()
        shares.append(saturated / (counted.sum() * q.shape[1]).clamp(min=1))
        out = block.forward(x, mask, rope, borrowed)
        x = out.x
        if out.kv is not None:
            kept[layer] = out.kv
    return [float(share) for share in torch.stack(shares).cpu()]


def _greatest_weight(q: Tensor, k: Tensor, visible: Tensor, softcap: float | None) -> Tensor:
    """Largest softmax weight of each query: q [H, T, D], k [Hkv, T, D], visible bool [1, T, T] -> [H, T]."""
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    at_once = max(1, SCORES // (q.shape[0] * q.shape[1]))
    greatest = []
    for begin in range(0, q.shape[1], at_once):
        queries = slice(begin, begin + at_once)
        scores = q[:, queries] @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, queries], -math.inf)
        greatest.append(torch.exp(scores.amax(-1) - scores.logsumexp(-1)))
    return torch.cat(greatest, dim=1)
