"""A low-rank addition to a frozen weight: LoRA (Hu et al. 2021, arXiv 2106.09685).

    W_eff = W + s B A        W [out, in] frozen, B [out, rank], A [rank, in], s = alpha / rank
    dA = s B^T dW_eff        dB = s dW_eff A^T

The sum itself is what a layer multiplies with, and what a quantiser reads: Q(W + s B A). The usual form
Q(W) x + s B (A x) saves a sum a forward pass and is another function: merged for sampling, its weights are quantised as
a sum after all, and what was sampled is not what is trained. Here sampler, trainer and export have one weight.

A begins normal with deviation 1 / sqrt(in), so that A x is as large as x, and B with zeros: the first step is taken
from W itself. Each has a generator keyed by (seed, name), like every parameter. A scale of zero is exactly W.

The sum is one operator to the compiler, which therefore cannot join its product and additions into an expression that
rounds otherwise: compiled trainer and eager sampler have the same bits.
"""

from typing import Any

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """A and B of one weight [out, in], FP32 masters."""

    scale: Tensor

    def __init__(self, out_features: int, in_features: int, rank: int, alpha: float, device: torch.device) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(rank, in_features, device=device))
        self.b = nn.Parameter(torch.zeros(out_features, rank, device=device))
        self.register_buffer("scale", torch.tensor(alpha / rank, device=device), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """weight FP32 [out, in] -> the sum, FP32 [out, in]."""
        total: Tensor = low_rank_sum(weight, self.a, self.b, self.scale)
        return total

    def extra_repr(self) -> str:
        return f"rank {self.a.shape[0]}"


@torch.library.custom_op("lowbit::low_rank_sum", mutates_args=())
def low_rank_sum(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] + scale * b [out, rank] @ a [rank, in], rounded after each of the three."""
    return (b @ a).mul_(scale).add_(weight)


@low_rank_sum.register_fake
def _(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    a, b, scale = ctx.saved_tensors
    dw, da, db, _ = ctx.needs_input_grad
    return grad if dw else None, (b.t() @ grad) * scale if da else None, (grad @ a.t()) * scale if db else None, None


low_rank_sum.register_autograd(_backward, setup_context=_setup)
