"""The router of a mixture of experts: which experts a token goes to, how much each counts, and what keeps them busy.

Logits are FP32 products of the BF16 input with FP32 weights: a rounded logit would send tokens to another expert. With
s the softmax of a token's logits over all experts, or the sigmoid of each (DeepSeek-V3, arXiv 2412.19437), a token goes
to the top k of s + b and weighs them by s alone, normalised to sum 1 where so configured. Two ways to even the load:

    balance loss   experts * sum_e f_e P_e, with f_e the share of all choices that fell on expert e and P_e the mean of
                   s_e (sigmoid: of s_e / sum s), over the tokens of a micro-batch (Switch, arXiv 2101.03961). It is 1
                   when balanced; f is a constant in its gradient.
    bias b         moved after each optimizer step by `bias_rate` towards the experts below the mean load (arXiv
                   2408.15664); it changes the choice and no gradient. `trainer/layer_metrics.py` moves it.

Router z-loss, mean (logsumexp of a token's logits)^2 (ST-MoE, arXiv 2202.08906), keeps the logits small.

Tokens are then sorted by expert, which makes of all experts' rows one product (`GroupedLinear`). The sort is stable and
no shape depends on the data: nothing waits for the device, nothing is padded, nothing is dropped. With a capacity, an
expert's tokens beyond it, in the order of the batch, get weight 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.configs.schema import GateKind, MoeConfig

STATISTICS = 3
"""Numbers a layer reports behind the loads of its experts: entropy, dropped share, mean logsumexp."""


@dataclass(frozen=True)
class Routing:
    """Where the rows of a batch go: tokens [N], k choices each."""

    order: Tensor
    """int64 [N k]: which choice (token * k + rank) stands at each place, sorted by expert."""
    place: Tensor
    """int64 [N k]: at which place each choice stands, the inverse of `order`."""
    offsets: Tensor
    """int32 [experts]: one past the last place of each expert."""
    weights: Tensor
    """FP32 [N, k]."""
    loss: Tensor
    """FP32 scalar: balance loss and z-loss, weighed, as means over the tokens."""
    statistics: Tensor
    """FP32 [experts + 3], detached: choices of each expert, then as `STATISTICS` says."""


class Router(nn.Module):
    """Chooses k of the experts for every token."""

    bias: Tensor | None
    """FP32 [experts]: state that no gradient reaches, kept in checkpoints."""

    def __init__(self, config: MoeConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.experts, width))
        self.register_buffer("bias", torch.zeros(config.experts) if config.bias_rate else None)

    def forward(self, x: Tensor) -> Routing:
        """x [N, width] -> where its rows go."""
        config = self.config
        logits = F.linear(x.float(), self.weight)  # [N, experts]
        lse = torch.logsumexp(logits, dim=-1)
        scores = logits.sigmoid() if config.gate is GateKind.sigmoid else torch.exp(logits - lse[:, None])
        preferred = scores.detach() if self.bias is None else scores.detach() + self.bias
        chosen = preferred.topk(config.top_k, dim=-1).indices  # [N, k]
        weights = scores.gather(1, chosen)
        if config.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        order, place, offsets = sort_choices(chosen, config.experts)
        loads = offsets.diff(prepend=offsets.new_zeros(1))
        dropped = torch.zeros((), device=x.device)
        if config.capacity is not None and torch.is_grad_enabled():
            kept = place.view_as(chosen) < (offsets - loads + capacity(config, len(x)))[chosen]
            weights = torch.where(kept, weights, 0.0)
            dropped = 1.0 - kept.float().mean()
        shares = scores if config.gate is GateKind.softmax else scores / scores.sum(-1, keepdim=True)
        balance = config.experts * (loads / chosen.numel() * shares.mean(0)).sum()
        loss = config.balance_loss * balance + config.z_loss * lse.square().mean()
        entropy = -torch.special.xlogy(shares, shares).sum(-1).mean()
        numbers = torch.stack((entropy, dropped, lse.mean()))
        return Routing(
            order, place, offsets, weights * config.gate_scale, loss, torch.cat((loads.float(), numbers)).detach()
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.config.top_k} of {self.config.experts}, {self.config.gate}"


def capacity(config: MoeConfig, tokens: int) -> int:
    """Most tokens an expert takes of a micro-batch."""
    assert config.capacity is not None
    return max(1, int(min(config.capacity * tokens * config.top_k / config.experts, tokens)))  # a token goes there once


def sort_choices(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """chosen int64 [N, k] -> (order [N k], place [N k], offsets int32 [experts]); see `Routing`."""
    experts_sorted, order = chosen.flatten().sort(stable=True)
    ends = torch.arange(1, experts + 1, device=chosen.device)
    offsets = torch.searchsorted(experts_sorted, ends, out_int32=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return order, place, offsets


class Dispatch(torch.autograd.Function):
    """x [N, width] -> its rows in the order of the experts, [N k, width]; the gradient gathers instead of adding up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.choices = choices
        return x[order // choices]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        back = grad[place].view(-1, ctx.choices, grad.shape[-1])
        return back.sum(1, dtype=torch.float32).to(grad.dtype), None, None, None


class Collect(torch.autograd.Function):
    """Rows [N k, width] in the order of the experts -> in the order of the tokens, [N, k, width]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, place: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        return y[place].view(-1, choices, y.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1)[order], None, None, None
