"""A straightforward FP32 eager model and loop: the yardstick of `bench_train.py cpu`, and an oracle in tests.

It is written the way one writes a first training script: `nn.Linear`, full logits, `F.cross_entropy`,
`torch.optim.AdamW` with its defaults, a boolean attention mask. Same function as `lowbit.models.Transformer`,
none of its code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.configs.schema import MlpKind, ModelConfig
from lowbit.configs.schema_model import head_dim_of


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, first half with second half. x [B, H, T, D]; cos, sin [B, 1, T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = c.heads, c.kv_heads
        self.dim = head_dim_of(c)
        self.norm1, self.norm2 = (nn.RMSNorm(c.width, eps=c.norm_eps) for _ in range(2))
        self.q = nn.Linear(c.width, c.heads * self.dim, bias=False)
        self.k = nn.Linear(c.width, c.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(c.width, c.kv_heads * self.dim, bias=False)
        self.out = nn.Linear(c.heads * self.dim, c.width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.dim, eps=c.norm_eps) if c.qk_norm else nn.Identity() for _ in "qk")
        self.gate = nn.Linear(c.width, c.mlp_width, bias=False) if c.mlp is MlpKind.swiglu else None
        self.up = nn.Linear(c.width, c.mlp_width, bias=False)
        self.down = nn.Linear(c.mlp_width, c.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, width], mask [B, 1, T, T]."""
        b, t, _ = x.shape
        h = self.norm1(x)
        q = rotate(self.q_norm(self.q(h).view(b, t, self.heads, self.dim)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k(h).view(b, t, self.kv_heads, self.dim)).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        h = self.norm2(x)
        h = F.silu(self.gate(h)) * self.up(h) if self.gate is not None else F.relu(self.up(h)).square()
        out: Tensor = x + self.down(h)
        return out


class ReferenceGPT(nn.Module):
    """The whole model; `forward` returns the mean cross-entropy over weighted targets."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def logits(self, tokens: Tensor, start: Tensor, limit: Tensor, position: Tensor) -> Tensor:
        """All [B, T] -> [B, T, vocab]; key j is visible to query i when start[j] <= i < limit[j]."""
        c = self.config
        i = torch.arange(tokens.shape[1], device=tokens.device)[None, :, None]  # queries
        mask = ((start[:, None, :] <= i) & (i < limit[:, None, :]))[:, None]  # [B, 1, T, T]
        dim = head_dim_of(c)
        frequency = c.rope.theta ** (-torch.arange(0, dim, 2, device=tokens.device) / dim)  # [D/2]
        angle = position[:, None, :, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, start: Tensor, limit: Tensor, position: Tensor
    ) -> Tensor:
        """Weighted mean cross-entropy in nats."""
        logits = self.logits(tokens, start, limit, position)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (nll * weights.flatten()).sum() / weights.sum()
