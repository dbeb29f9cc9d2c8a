"""Attention under one visibility rule, by the fastest correct kernel of the device.

Plain causal attention (`mask` None) is SDPA: on a GPU cuDNN first, then flash (H200, B4 H16 T4096 D128: cuDNN 589
TFLOP/s forward, flash 275); cuDNN's backward is not bitwise reproducible, and PyTorch itself passes over it where
deterministic algorithms are asked for. Documents and other visibilities are a dense bool mask on the CPU and
FlexAttention on a GPU; packed documents go to flash attention's kernel for sequences of varying length where a model is
told so (models/varlen.py). Capped logits are FlexAttention's on a GPU, and written out elsewhere (models/capped.py).

FlexAttention skips blocks of the score matrix, and wants to be told which. Evaluating the rule on all T^2 pairs
would cost more than it saves; but start and limit are intervals, so their extremes over each block of B keys decide:
for queries [q0, q1) and a block of keys K,
    some pair may be visible   when  q0 < max(limit_K)  and  q1 - 1 >= min(start_K)
    all pairs are visible      when  q0 >= max(start_K) and  q1 <= min(limit_K)
which is O(T + (T/B)^2) and free of host synchronisation. Blocks that are "some" but not "all" evaluate the
rule pair by pair. An incomplete last block is never "all": its missing rows are nobody's. A local layer's window asks
the same of the extremes of positions: distances between two blocks lie between those of their ends.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from lowbit.errors import DataError
from lowbit.models.capped import written_out
from lowbit.models.varlen import Varlen, varlen_with_z
from lowbit.models.visibility import Visibility, causal

AttentionMask = Tensor | BlockMask | Varlen | None
"""None: plain causal. Tensor: bool [B, 1, T, S], true where visible. BlockMask: FlexAttention's. Varlen: documents."""
FLEX_NARROWEST = 16
"""The narrowest heads that FlexAttention's kernel takes."""

BLOCK = 128
_PREFERRED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def prepare_mask(
    visibility: Visibility | None,
    batch: int,
    length: int,
    device: torch.device | str,
    window: int | None = None,
    flex: bool = False,
    varlen: bool = False,
) -> AttentionMask:
    """What `attention` needs to know of a batch's visibility; built once a batch and shared by all layers of a kind.

    Args:
        visibility: None for plain causal, which a rule on the CPU may turn out to be. batch, length: shape [B, T] of
            the tokens. device: where attention runs.
        window: of a local layer, in positions; None for a global one.
        flex: plain causal attention is FlexAttention's on a GPU, too, as where logits are capped.
        varlen: packed documents go to the kernel for sequences of varying length. Of a rule that lies on a GPU already
            that is known only if it was known before (`Visibility.with_ends`).

    Raises:
        DataError: the visibility has another shape; or its values are on the CPU, where they can be read without
            waiting, and break a rule: `Visibility.validate` names the token.
    """
    if window is not None and window >= length:
        window = None
    on_gpu = torch.device(device).type == "cuda"
    needed = window is not None or (flex and on_gpu)
    if visibility is None:
        if not needed:
            return None
        visibility = causal(1, length, device).expand(batch)
    if visibility.start.shape != (batch, length):
        raise DataError(
            f"visibility has shape {list(visibility.start.shape)}, the tokens have [{batch}, {length}]: "
            "build it from the same batch"
        )
    if visibility.start.device.type == "cpu":
        visibility.validate()
        if not needed and visibility.is_causal():
            return None
        if varlen and visibility.ends is None:
            visibility = visibility.with_ends()
    visibility = visibility.to(device, non_blocking=True)
    if varlen and visibility.ends is not None and visibility.sizes is not None:
        return Varlen(visibility.ends, visibility.sizes, window or 0)
    if on_gpu:
        return block_mask(visibility, window)
    return dense_mask(visibility, window)


def dense_mask(visibility: Visibility, window: int | None = None) -> Tensor:
    """The rule for every pair: bool [B, 1, T, T], true where query (row) sees key (column)."""
    query = torch.arange(visibility.start.shape[1], device=visibility.start.device)[None, None, :, None]
    seen = (visibility.start[:, None, None, :] <= query) & (query < visibility.limit[:, None, None, :])
    if window is None:
        return seen
    position = visibility.position[:, None]
    return seen & ((position[:, :, :, None] - position[:, :, None, :]).abs() < window)


def cached_mask(lengths: Tensor, new_tokens: int, extent: int, window: int | None = None) -> Tensor:
    """Mask of `new_tokens` queries behind a cache: bool [B, 1, T, S]; query t of row b sees keys 0..lengths[b] + t.

    With a window only the last `window` of these.
    """
    query = (lengths[:, None] + torch.arange(new_tokens, device=lengths.device))[:, None, :, None]  # [B, 1, T, 1]
    key = torch.arange(extent, device=lengths.device)[None, None, None, :]
    return key <= query if window is None else (key <= query) & (key > query - window)


def block_mask(visibility: Visibility, window: int | None = None, block: int = BLOCK) -> BlockMask:
    """FlexAttention's BlockMask of a visibility, from the extremes of start, limit and position over blocks."""
    start, limit, position = visibility.start, visibility.limit, visibility.position
    length = start.shape[1]
    blocks = -(-length // block)
    pad = blocks * block - length

    def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest over each block, [B, 1, blocks]; the last real token stands in for padding."""
        padded = torch.cat((tensor, tensor[:, -1:].expand(-1, pad)), dim=1).view(-1, blocks, block)
        least, greatest = padded.aminmax(dim=-1)
        return least[:, None, :], greatest[:, None, :]

    start_least, start_greatest = extremes(start)
    limit_least, limit_greatest = extremes(limit)
    first = torch.arange(blocks, device=start.device)[None, :, None] * block  # [1, blocks of queries, 1]
    last = first + block
    some = (first < limit_greatest) & (last - 1 >= start_least)
    every = (first >= start_greatest) & (last <= limit_least)
    if window is not None:
        least, greatest = extremes(position)
        ahead, behind = greatest.mT - least, greatest - least.mT  # the largest position[i] - position[j], and reversed
        nearest = torch.maximum(least.mT - greatest, least - greatest.mT)  # the smallest distance, where positive
        some = some & (nearest < window)
        every = every & (torch.maximum(ahead, behind) < window)
    if pad:
        every = every & (torch.arange(blocks, device=start.device) < blocks - 1)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (start[b, k] <= q) & (q < limit[b, k])

    def visible_nearby(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert window is not None
        return visible(b, h, q, k) & ((position[b, q] - position[b, k]).abs() < window)

    partial_count, partial_index = _listed(some & ~every)
    full_count, full_index = _listed(some & every)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=block,
        mask_mod=visible if window is None else visible_nearby,
        seq_lengths=(length, length),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, Q, K] -> how many are chosen in each row, int32 [B, 1, Q], and their columns first, [B, 1, Q, K]."""
    count = chosen.sum(dim=-1, dtype=torch.int32)
    index = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None], index[:, None].contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """softmax(q k^T * scale + mask) v, with the heads of k and v shared by groups of query heads.

    Args:
        q: [B, H, T, D]. k, v: [B, Hkv, S, D], Hkv dividing H. mask: of `prepare_mask` or `cached_mask`.
        scale: 1 / sqrt(D) when None. softcap: logits become cap * tanh(logits / cap).

    Returns:
        [B, H, T, D].
    """
    if isinstance(mask, BlockMask):
        return flex_with_z(q, k, v, mask, scale, softcap)[0]
    if isinstance(mask, Varlen):
        assert softcap is None
        return varlen_with_z(q, k, v, mask, scale or q.shape[-1] ** -0.5)[0]
    if softcap is not None:
        return written_out(q, k, v, mask, scale or q.shape[-1] ** -0.5, softcap)[0]
    grouped = k.shape[1] != q.shape[1]
    if q.device.type == "cuda" and mask is None:
        with sdpa_kernel(_PREFERRED, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def flex_with_z(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """FlexAttention, and the logsumexp z [B, H, T], FP32, of each query's visible logits. Both are differentiable."""
    flex = flex_attention if torch.compiler.is_compiling() else compiled_flex()
    dim = q.shape[-1]
    if dim < FLEX_NARROWEST:  # zeros change no logit
        q, k, v = (F.pad(x, (0, FLEX_NARROWEST - dim)) for x in (q, k, v))
    out, more = flex(
        q,
        k,
        v,
        score_mod=None if softcap is None else _capping(softcap),
        block_mask=mask,
        scale=scale or dim**-0.5,
        enable_gqa=k.shape[1] != q.shape[1],
        return_aux=AuxRequest(lse=True),
        # Left to itself it takes a kernel for decoding where there are fewer than 128 queries, and may find none.
        kernel_options={"BACKEND": "TRITON"},
    )
    return out[..., :dim], more.lse


def _capping(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What FlexAttention makes of a logit."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def compiled_flex() -> Any:
    """FlexAttention is a kernel only when compiled; blocks that run uncompiled use this one."""
    return torch.compile(flex_attention, dynamic=False)
