"""The LM head for policy gradients: log-probability of each token and entropy of its distribution, chunk by chunk.

With z_i = W h_i / T (softcap c: c tanh(W h / c) / T) and p_i = softmax(z_i),
    logprob_i = z_i[t_i] - lse_i          d logprob_i / dz_i = onehot(t_i) - p_i
    entropy_i = lse_i - sum_v p_iv z_iv   d entropy_i / dz_iv = -p_iv (log p_iv + entropy_i)
T is the temperature that tokens were drawn at: a policy's probabilities are those of the distribution sampled from.
What an objective makes of the two is its own business, so their gradients arrive only in the backward pass, which makes
each chunk's logits again: memory is C V numbers instead of N V, for one more product.

Operands have the compute type; logits are accumulated and kept in FP32, because rounding them to BF16 is the greatest
single disagreement between a sampler and a trainer (Fast-LLM #525: 0.04 nats against 0.002).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.models.lm_head import (
    HeadGradients,
    capped_logits,
    check_head,
    check_targets,
    compiled,
    default_chunk,
    head_matrix,
    token_chunks,
)


@dataclass(frozen=True)
class PolicyOutput:
    """Of N tokens, FP32, differentiable where gradients are on."""

    logprob: Tensor
    """[N]: of the token that was drawn."""
    entropy: Tensor
    """[N], nats: of the distribution it was drawn from."""


def lm_head_policy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> PolicyOutput:
    """Log-probability and entropy of each token.

    Args:
        hidden: [N, d] in the compute type, of the positions before the drawn tokens. weight: FP32 [V, d].
        targets: int64 [N], the tokens. temperature: greater than 0.

    Raises:
        DataError: shapes that do not fit; on the CPU also a target outside the vocabulary.
    """
    check_head(hidden, weight, targets, vocab_size)
    if hidden.device.type == "cpu":
        check_targets(targets, torch.ones_like(targets), vocab_size)
    grad = torch.is_grad_enabled()
    settings = _Settings(
        vocab_size,
        temperature,
        softcap,
        chunk_tokens or default_chunk(hidden.device.type, vocab_size),
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    return PolicyOutput(*_Policy.apply(hidden, weight, targets, settings))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Settings:
    vocab_size: int
    temperature: float
    softcap: float | None
    chunk: int
    hidden_grad: bool
    weight_grad: bool


class _Policy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        s = settings
        matrix = head_matrix(weight, hidden, s.vocab_size)
        logprob = torch.empty(targets.shape, device=hidden.device)
        entropy, lse = torch.empty_like(logprob), torch.empty_like(logprob)
        function = compiled(_values) if hidden.is_cuda else _values
        for rows in token_chunks(len(targets), s.chunk):
            found = function(fp32_logits(hidden[rows], matrix), targets[rows], s.vocab_size, s.temperature, s.softcap)
            logprob[rows], entropy[rows], lse[rows] = found
        ctx.save_for_backward(hidden, weight, targets, entropy, lse)
        ctx.settings = s
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, entropy, lse = ctx.saved_tensors
        s: _Settings = ctx.settings
        matrix = head_matrix(weight, hidden, s.vocab_size)
        sums = HeadGradients(hidden, weight, matrix, s.hidden_grad, s.weight_grad)
        zero = torch.zeros_like(lse)
        g, h = (zero if x is None else x.float() for x in (grad_logprob, grad_entropy))
        function = compiled(_gradient) if hidden.is_cuda else _gradient
        for rows in token_chunks(len(targets), s.chunk):
            grad = function(
                fp32_logits(hidden[rows], matrix), targets[rows], lse[rows], entropy[rows], g[rows], h[rows],
                s.vocab_size, s.temperature, s.softcap, grad_entropy is not None,
            )  # fmt: skip
            sums.add(rows, grad.to(hidden.dtype), None)
        return sums.hidden, sums.weight, None, None


def fp32_logits(hidden: Tensor, matrix: Tensor) -> Tensor:
    """hidden [C, d] times matrix [V, d] transposed, accumulated and kept in FP32 whatever the operands' type."""
    if hidden.dtype is torch.float32:
        return hidden @ matrix.t()
    if hidden.is_cuda:
        return torch.mm(hidden, matrix.t(), out_dtype=torch.float32)
    return hidden.float() @ matrix.float().t()


def _values(
    logits: Tensor, targets: Tensor, vocab_size: int, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, lse), each [C]."""
    z, _, _ = capped_logits(logits, vocab_size, softcap)
    lse = torch.logsumexp(z / temperature, dim=1)  # log_softmax sums less exactly on a CPU (`infer.sampling`)
    logp = z / temperature - lse[:, None]
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(dim=1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy, lse


def _gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    vocab_size: int,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
) -> Tensor:
    """Gradient of the logits before temperature and cap, FP32 [C, V]."""
    z, slope, columns = capped_logits(logits, vocab_size, softcap)
    logp = z / temperature - lse[:, None]
    p = logp.exp()
    grad = grad_logprob[:, None] * (torch.where(columns == targets[:, None], 1.0, 0.0) - p)
    if with_entropy:
        grad = grad - grad_entropy[:, None] * torch.where(p > 0, p * (logp + entropy[:, None]), 0.0)
    return grad * slope / temperature
