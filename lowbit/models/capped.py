"""Attention whose logits are capped (Gemma 2, arXiv 2408.00118): no logit exceeds `cap`, however large q and k are.

    s'_ij = cap * tanh(s_ij / cap)      before the visibility rule;  its slope is 1 - (s'_ij / cap)^2

No kernel but FlexAttention takes another function of the logits; where that does not run (a CPU, and generation's
prompts), attention is written out: some queries at a time, so that their logits fit, products and softmax in FP32.
Everything here gives the logsumexp z_i of the capped logits besides, differentiable, for Attention Z-Reg.
"""

import torch
from torch import Tensor

LOGITS = 1 << 27
"""Logits that exist at once where nothing has to be kept for a backward pass: 512 MiB."""


def written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Capped attention without a kernel.

    Args:
        q: [B, H, T, D]. k, v: [B, Hkv, S, D], Hkv dividing H. mask: bool [B or 1, 1, T, S], true where visible; None
            for plain causal, T = S.

    Returns:
        [B, H, T, D] in the type of q, and z [B, H, T], FP32 (FP64 from FP64).
    """
    batch, heads, length, _ = q.shape
    exact = torch.promote_types(q.dtype, torch.float32)
    share = heads // k.shape[1]
    keys, values = (x.to(exact).repeat_interleave(share, dim=1) if share > 1 else x.to(exact) for x in (k, v))
    key = torch.arange(k.shape[2], device=q.device)
    at_once = max(1, LOGITS // (batch * heads * k.shape[2]))
    parts = []
    for begin in range(0, length, at_once):
        end = min(begin + at_once, length)
        logits = cap * torch.tanh(q[:, :, begin:end].to(exact) @ keys.mT * (scale / cap))
        seen = key[None] <= key[begin:end, None] if mask is None else mask[:, :, begin:end]
        logits = logits.masked_fill(~seen, float("-inf"))
        z = logits.logsumexp(-1)
        parts.append((torch.exp(logits - z[..., None]) @ values, z))
    out, z = (torch.cat(part, dim=2) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))
    return out.to(q.dtype), z
