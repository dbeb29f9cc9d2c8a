"""The LM head: cross-entropy over the vocabulary without ever holding the batch's logits.

With z_i = W h_i (softcap c: z = c tanh(W h / c)), lse_i = log sum_v exp z_iv and target t_i, the loss is
    sum_i w_i (lse_i - z_i[t_i])  +  z_loss * sum_i w_i lse_i^2
and its gradient with respect to the logits is known in closed form as soon as they are:
    g_iv = w_i ((1 + 2 z_loss lse_i) softmax(z_i)_v - [v = t_i])         (times 1 - (z_iv / c)^2 with a softcap)
So the forward pass goes over the tokens in chunks, makes a chunk's logits [C, V], turns them into g, adds
g W to dh and g^T h to dW, and drops them: memory is C V numbers rather than N V, and nothing is recomputed
in the backward pass, which only scales dh and dW. The scalar loss is the only thing that can be differentiated, once.

Passes over [C, V] decide the speed. On a GPU one compiled kernel does the element-wise part. On the CPU chunks
stay in the cache, and neither the normalisation nor the token weights cost a pass: with e = exp(z - max) and
s = sum e, g_i = (w_i / s_i) (e_i - s_i onehot), so the row factor multiplies h and dh [C, d] instead.

Rows of the weight at and beyond `vocab_size` are padding: never a probability, never a gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit.errors import DataError
from lowbit.models.cost import HEAD_CHUNK_NUMBERS

_CPU_CHUNK_NUMBERS = 1 << 22
"""Logits in a chunk on the CPU: 16 MiB, which a third-level cache keeps between passes."""


@dataclass(frozen=True)
class HeadOutput:
    """Sums over the tokens of a batch; divide by the global number of valid tokens."""

    loss_sum: Tensor
    """FP32 scalar, differentiable: sum_i w_i nll_i + z_loss * sum_i w_i lse_i^2."""
    nll_sum: Tensor
    """FP32 scalar, detached: sum_i w_i nll_i, in nats."""


def lm_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> HeadOutput:
    """Weighted cross-entropy of a batch, with gradients for `hidden` and `weight`.

    Args:
        hidden: [N, d] in the compute type. weight: FP32 [V, d], V >= vocab_size. targets: int64 [N].
        weights: FP32 [N]; a token of weight 0 is ignored, whatever its target.
        chunk_tokens: tokens whose logits exist at once; chosen by the device when None.

    Raises:
        DataError: shapes that do not fit; on the CPU also a target outside the vocabulary (on a GPU the check
            would wait for the device: the data layer has validated the ids).
    """
    check_head(hidden, weight, targets, vocab_size)
    if weights.shape != targets.shape:
        raise DataError(f"LM head: weights {list(weights.shape)} and targets {list(targets.shape)} differ in shape")
    if hidden.device.type == "cpu":
        check_targets(targets, weights, vocab_size)
    targets = torch.where(weights != 0, targets, 0)
    chunk = chunk_tokens or default_chunk(hidden.device.type, vocab_size)
    grad = torch.is_grad_enabled()
    loss_sum, nll_sum = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        targets,
        weights.float(),
        _Settings(vocab_size, z_loss, softcap, chunk, grad and hidden.requires_grad, grad and weight.requires_grad),
    )
    return HeadOutput(loss_sum, nll_sum)


@torch.no_grad()
def lm_head_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, softcap: float | None = None
) -> Tensor:
    """Negative log-likelihood of each target in nats: hidden [N, d], targets int64 [N] -> FP32 [N]. No gradient."""
    check_head(hidden, weight, targets, vocab_size)
    if hidden.device.type == "cpu":
        check_targets(targets, torch.ones_like(targets), vocab_size)
    settings = _Settings(vocab_size, 0.0, softcap, default_chunk(hidden.device.type, vocab_size), False, False)
    matrix = head_matrix(weight, hidden, vocab_size)
    nll = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    elementwise = _forward_part(hidden.device.type)
    for rows in token_chunks(len(targets), settings.chunk):
        nll[rows] = elementwise(hidden[rows] @ matrix.t(), targets[rows], vocab_size, softcap)[0]
    return nll


def lm_head_logits(hidden: Tensor, weight: Tensor, *, vocab_size: int, softcap: float | None = None) -> Tensor:
    """Logits of a few tokens, for generation: hidden [..., d] -> FP32 [..., vocab_size]."""
    logits = (hidden @ weight[:vocab_size].to(hidden.dtype).t()).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def default_chunk(device_type: str, vocab_size: int) -> int:
    """Tokens whose logits exist at once: a multiple of 64, at least 64."""
    numbers = _CPU_CHUNK_NUMBERS if device_type == "cpu" else HEAD_CHUNK_NUMBERS
    return max(numbers // vocab_size // 64, 1) * 64


@dataclass(frozen=True)
class _Settings:
    vocab_size: int
    z_loss: float
    softcap: float | None
    chunk: int
    hidden_grad: bool
    weight_grad: bool


class _HeadLoss(torch.autograd.Function):
    """Loss and, in the same pass over the chunks, its gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        s = settings
        matrix = head_matrix(weight, hidden, s.vocab_size)  # [rows, d], compute type
        gradient = s.hidden_grad or s.weight_grad
        sums = HeadGradients(hidden, weight, matrix, s.hidden_grad, s.weight_grad)
        totals = torch.zeros(2, device=hidden.device)  # loss, nll
        # With BF16 logits the gradient already carries the row weights; in FP32 on the CPU they come later.
        fused = hidden.device.type != "cpu"
        for rows in token_chunks(len(targets), s.chunk):
            logits = hidden[rows] @ matrix.t()  # [C, rows of the matrix]
            if not gradient:
                nll, lse = _forward_part(hidden.device.type)(logits, targets[rows], s.vocab_size, s.softcap)
                _add(totals, nll, lse, weights[rows], s.z_loss)
                continue
            if fused:
                nll, lse, grad = compiled(_fused_grad)(
                    logits, targets[rows], weights[rows], s.vocab_size, s.z_loss, s.softcap
                )
                factor = None
            else:
                nll, lse, grad, factor = _eager_grad(logits, targets[rows], weights[rows], s.z_loss, s.softcap)
            _add(totals, nll, lse, weights[rows], s.z_loss)
            sums.add(rows, grad, factor)
        ctx.save_for_backward(sums.hidden, sums.weight)
        loss_sum, nll_sum = totals.unbind()
        loss_sum, nll_sum = loss_sum.clone(), nll_sum.clone()
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        return (*scaled_gradients(ctx.saved_tensors, grad_loss), None, None, None)


class HeadGradients:
    """Gradients of hidden states [N, d] and of the head's weight [V, d], added up chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, matrix: Tensor, hidden_grad: bool, weight_grad: bool) -> None:
        self._inputs, self._matrix = hidden, matrix
        self.hidden = torch.empty_like(hidden) if hidden_grad else None
        self.weight = torch.zeros(weight.shape, device=weight.device) if weight_grad else None

    def add(self, rows: slice, grad: Tensor, factor: Tensor | None) -> None:
        """Take in the gradient of a chunk's logits, grad [C, V] * factor [C, 1]."""
        if self.hidden is not None:
            torch.mm(grad, self._matrix, out=self.hidden[rows])
            if factor is not None:
                self.hidden[rows].mul_(factor)
        if self.weight is not None:
            left = self._inputs[rows] if factor is None else self._inputs[rows] * factor.to(self._inputs.dtype)
            _accumulate(self.weight[: grad.shape[1]], grad, left)


def scaled_gradients(saved: tuple[Tensor | None, ...], grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What `HeadGradients` added up, times the gradient of the scalar loss (in FP32 also where hidden is BF16)."""
    hidden, weight = saved
    return (
        None if hidden is None else (hidden.float() * grad_loss).to(hidden.dtype),
        None if weight is None else weight * grad_loss,
    )


def _add(totals: Tensor, nll: Tensor, lse: Tensor, weights: Tensor, z_loss: float) -> None:
    nll_sum = torch.dot(nll, weights)
    totals[1] += nll_sum
    totals[0] += nll_sum if z_loss == 0.0 else nll_sum + z_loss * torch.dot(lse.square(), weights)


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total [V, d] FP32 += grad [C, V].T @ hidden [C, d], added up in FP32."""
    if grad.dtype == torch.float32:
        torch.addmm(total, grad.t(), hidden, out=total)
    elif grad.is_cuda:
        torch.addmm(total, grad.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total += grad.t().float() @ hidden.float()


def head_matrix(weight: Tensor, hidden: Tensor, vocab_size: int) -> Tensor:
    """The weight in the compute type. A GPU multiplies the padded rows too (aligned shapes) and masks them."""
    matrix = weight.detach() if hidden.device.type != "cpu" else weight.detach()[:vocab_size]
    return matrix.to(hidden.dtype)


def _eager_grad(
    logits: Tensor, targets: Tensor, weights: Tensor, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In place, for the CPU: (nll [C], lse [C], g without its row factor [C, V], the row factor [C, 1])."""
    z = logits.float()
    slope = None
    if softcap is not None:
        tanh = z.div_(softcap).tanh_()
        slope = 1 - tanh.square()
        z = tanh.mul_(softcap)
    column = targets[:, None]
    target_logit = z.gather(1, column).squeeze(1)
    greatest = z.amax(dim=1, keepdim=True)
    e = z.sub_(greatest).exp_()
    total = e.sum(dim=1, keepdim=True)
    lse = greatest.add(total.log()).squeeze(1)
    factor = weights[:, None] / total
    onehot = -total
    if z_loss != 0.0:
        e.mul_(1 + 2 * z_loss * lse[:, None])
    e.scatter_add_(1, column, onehot)
    if slope is not None:
        e.mul_(slope)
    return lse - target_logit, lse, e.to(logits.dtype), factor


def _fused_grad(
    logits: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For the compiler: (nll [C], lse [C], g with its row factor [C, V] in the type of the logits)."""
    z, slope, columns = capped_logits(logits, vocab_size, softcap)
    hit = columns == targets[:, None]
    lse = torch.logsumexp(z, dim=1)
    nll = lse - torch.where(hit, z, 0.0).sum(dim=1)
    grad = (1 + 2 * z_loss * lse[:, None]) * torch.exp(z - lse[:, None]) - torch.where(hit, 1.0, 0.0)
    grad = grad * slope * weights[:, None]
    # A token of weight 0 may have anything in it, even a NaN.
    return nll, lse, torch.where(weights[:, None] != 0, grad, 0.0).to(logits.dtype)


def _fused_nll(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(nll [C], lse [C])."""
    z, _, columns = capped_logits(logits, vocab_size, softcap)
    lse = torch.logsumexp(z, dim=1)
    return lse - torch.where(columns == targets[:, None], z, 0.0).sum(dim=1), lse


def capped_logits(logits: Tensor, vocab_size: int, softcap: float | None) -> tuple[Tensor, Tensor | float, Tensor]:
    """(FP32 logits after the cap, -inf in padding; the cap's derivative; column numbers)."""
    z = logits.float()
    slope: Tensor | float = 1.0
    if softcap is not None:
        tanh = torch.tanh(z / softcap)
        z, slope = softcap * tanh, 1 - tanh.square()
    columns = torch.arange(logits.shape[1], device=logits.device)
    if logits.shape[1] > vocab_size:
        z = torch.where(columns < vocab_size, z, float("-inf"))
    return z, slope, columns


def _eager_nll(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(nll [C], lse [C]) on the CPU, in place."""
    z = logits.float()
    if softcap is not None:
        z = z.div_(softcap).tanh_().mul_(softcap)
    target_logit = z.gather(1, targets[:, None]).squeeze(1)
    greatest = z.amax(dim=1, keepdim=True)
    lse = z.sub_(greatest).exp_().sum(dim=1).log_().add_(greatest.squeeze(1))
    return lse - target_logit, lse


def _forward_part(device_type: str) -> Callable[[Tensor, Tensor, int, float | None], tuple[Tensor, Tensor]]:
    return _eager_nll if device_type == "cpu" else compiled(_fused_nll)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for the chunk at hand; a second number of tokens makes one more kernel, which takes any number."""
    return torch.compile(function, fullgraph=True)


def token_chunks(tokens: int, chunk: int) -> Iterator[slice]:
    """Consecutive slices of at most `chunk` tokens."""
    for begin in range(0, tokens, chunk):
        yield slice(begin, min(begin + chunk, tokens))


def check_head(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> None:
    """Raises DataError for shapes that do not fit each other."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise DataError(
            f"LM head: hidden must be [tokens, width] and weight [vocabulary, width], "
            f"got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise DataError(f"LM head: targets {list(targets.shape)} must be [{hidden.shape[0]}], one a hidden state")
    if not 0 < vocab_size <= weight.shape[0]:
        raise DataError(f"LM head: vocab_size={vocab_size} must lie in 1..{weight.shape[0]}, the rows of the weight")


def check_targets(targets: Tensor, weights: Tensor, vocab_size: int) -> None:
    """Raises DataError for a target outside the vocabulary whose weight is not 0. Reads values."""
    bad = ((targets < 0) | (targets >= vocab_size)) & (weights != 0)
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        raise DataError(
            f"LM head: target {int(targets[index])} of token {index} lies outside the vocabulary of {vocab_size}"
        )
