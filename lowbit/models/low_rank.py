"""A low-rank addition to a frozen weight: LoRA (Hu et al. 2021, arXiv 2106.09685).

    W_eff = W + s B A        W [out, in] frozen, B [out, rank], A [rank, in], s = alpha / rank
    dA = s B^T dW_eff        dB = s dW_eff A^T

The sum itself is what a layer multiplies with, and what a quantiser reads: Q(W + s B A). The usual form
Q(W) x + s B (A x) saves a sum a forward pass and is another function: merged for sampling, its weights are quantised as
a sum after all, and what was sampled is not what is trained. Here sampler and trainer have one weight, bit for bit. A
checkpoint's adapters are added on the CPU (`adapters.merged`): of a run on a GPU equal up to the order of FP32 sums.

A begins normal with deviation 1 / sqrt(in), so that A x is as large as x, and B with zeros: the first step is taken
from W itself. Each has a generator keyed by (seed, name), like every parameter. A scale of zero is exactly W.

The sum is one operator to the compiler, which therefore cannot join its product and additions into an expression that
rounds otherwise: compiled trainer and eager sampler have the same bits. A sum takes as much memory as the weight and
rank / tokens of the work of a product with it, so low-bit products make it anew in the backward pass (`again`) rather
than keep one for every layer.
"""

from collections.abc import Sequence
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
        total: Tensor = low_rank_sum(weight, *self.parts)
        return total

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is added: A, B and the scale."""
        return self.a, self.b, self.scale

    def extra_repr(self) -> str:
        return f"rank {self.a.shape[0]}"


@torch.library.custom_op("lowbit::low_rank_sum", mutates_args=())
def low_rank_sum(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor, again: bool = False) -> Tensor:
    """weight [out, in] + scale * b [out, rank] @ a [rank, in], rounded after each of the three.

    again: a backward pass makes the forward's sum once more. To a compiler that is another call, not a reason to keep
    the sum.
    """
    return (b @ a).mul_(scale).add_(weight)


@low_rank_sum.register_fake
def _(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor, again: bool = False) -> Tensor:
    return torch.empty_like(weight)


def low_rank_gradients(grad: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dA and dB, given that of the sum [out, in]."""
    return (b.t() @ grad) * scale, (grad @ a.t()) * scale


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
    da, db = low_rank_gradients(grad, *ctx.saved_tensors)
    return grad if ctx.needs_input_grad[0] else None, da, db, None, None


low_rank_sum.register_autograd(_backward, setup_context=_setup)


# Several weights at once, for operators that take flat lists of tensors -----------------------------------------------

Parts = Sequence[Tensor | None]
"""A, B and scale of one weight after the other; three times None where nothing is added. Empty: to none of them."""


def parts_of(low_ranks: Sequence[LowRank | None]) -> list[Tensor | None]:
    """The parts of these, in one list."""
    if all(low_rank is None for low_rank in low_ranks):
        return []
    return [part for low_rank in low_ranks for part in ((None,) * 3 if low_rank is None else low_rank.parts)]


def sums(weights: Sequence[Tensor], parts: Parts, again: bool = False) -> list[Tensor]:
    """Each weight with what is added to it."""
    found = list(weights)
    for index in range(len(parts) // 3):
        a, b, scale = parts[3 * index : 3 * index + 3]
        if a is not None and b is not None and scale is not None:
            found[index] = low_rank_sum(weights[index], a, b, scale, again)
    return found


def added_gradients(parts: Parts, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the parts, given those of the sums."""
    found: list[Tensor | None] = [None] * len(parts)
    for index in range(len(parts) // 3):
        (a, b, scale), grad = parts[3 * index : 3 * index + 3], grads[index]
        if a is not None and b is not None and scale is not None and grad is not None:
            found[3 * index], found[3 * index + 1] = low_rank_gradients(grad, a, b, scale)
    return found
