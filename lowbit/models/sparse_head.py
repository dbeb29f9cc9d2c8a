"""The LM head on a teacher's sparse targets: distillation losses without ever holding the batch's logits.

The teacher gives each token K ids a_k with weights w_k and its entropy H. With lse = logsumexp(z / T), log s_k =
z[a_k] / T - lse, and D the divergence,
    loss = alpha D + (1 - alpha) cross-entropy(target) + z_loss logsumexp(z)^2

    forward_kl    D = lse - sum_k w_k z[a_k] / T - H. lse is *not* multiplied by sum_k w_k: then the gradient
                  (softmax(z / T) - w) / T is unbiased whenever E[w] = p, also if sum_k w_k is 1 only on average.
                  D itself is an unbiased estimate of KL(p || s); it may be negative for a token, and is never clamped.
    reverse_kl    D = sum_j s_j log(s_j / p_j), and
    jsd           D = sum_j (p_j log(p_j / m_j) + s_j log(s_j / m_j)) / 2 with m = (p + s) / 2, over the K tokens and
                  one bucket for all others, p_k = w_k being exact. Without the bucket neither would be a divergence.

All are functions of lse and of the z[a_k], so the gradient of the logits is dD/dlse softmax(z / T), which is dense,
plus dD/dz[a_k] at the K ids: the dense part costs what cross-entropy's does, and the rest works on [C, K] numbers.
Chunks, types and padding are `lm_head`'s. Repeated ids add up: several teachers are their lists one after the other.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.configs.schema_distill import Divergence
from lowbit.errors import DataError
from lowbit.models.lm_head import (
    HeadGradients,
    HeadOutput,
    capped_logits,
    check_head,
    check_targets,
    compiled,
    default_chunk,
    head_matrix,
    scaled_gradients,
    token_chunks,
)

_FLOOR = 1e-7
"""Probabilities below this count as this in reverse_kl and jsd, in the value and in the gradient alike."""


class SparseTargets(NamedTuple):
    """A teacher's targets for N tokens."""

    ids: Tensor
    """int64 [N, K], in the vocabulary also where the weight is 0."""
    weights: Tensor
    """FP32 [N, K]; 0 where there is no target."""
    entropy: Tensor
    """FP32 [N]: entropy of the teacher's distribution in nats."""


class DistillTerms(NamedTuple):
    """What is trained for."""

    divergence: Divergence = Divergence.forward_kl
    alpha: float = 1.0
    """Share of the divergence; the rest is cross-entropy."""
    temperature: float = 1.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class DistillOutput(HeadOutput):
    """Sums over the tokens of a batch: see `HeadOutput`; with the divergence D."""

    divergence_sum: Tensor
    """FP32 scalar, detached: sum_i w_i D_i."""
    divergence_square_sum: Tensor
    """FP32 scalar, detached: sum_i w_i D_i^2, for the standard error of the mean."""


def lm_head_distill_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    teacher: SparseTargets,
    terms: DistillTerms,
    *,
    vocab_size: int,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> DistillOutput:
    """Distillation loss of a batch, with gradients for `hidden` and `weight`.

    Args: see `lm_head_loss`; `targets` are the data's own tokens, `weights` those of the tokens.

    Raises:
        DataError: shapes that do not fit; on the CPU also ids outside the vocabulary.
    """
    check_head(hidden, weight, targets, vocab_size)
    if teacher.ids.shape != teacher.weights.shape or teacher.ids.shape[:1] != targets.shape:
        raise DataError(
            f"LM head: the teacher's ids {list(teacher.ids.shape)} and weights {list(teacher.weights.shape)} must be "
            f"[{len(targets)}, K]"
        )
    if hidden.device.type == "cpu":
        check_targets(targets, weights, vocab_size)
        lowest, highest = (int(x) for x in teacher.ids.aminmax()) if teacher.ids.numel() else (0, 0)
        if lowest < 0 or highest >= vocab_size:
            raise DataError(
                f"LM head: the teacher's id {lowest if lowest < 0 else highest} lies outside the vocabulary of "
                f"{vocab_size}"
            )
    targets = torch.where(weights != 0, targets, 0)
    chunk = chunk_tokens or default_chunk(hidden.device.type, vocab_size)
    grad = torch.is_grad_enabled()
    sums = _DistillLoss.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        targets,
        weights.float(),
        teacher,
        terms,
        _Settings(vocab_size, softcap, chunk, grad and hidden.requires_grad, grad and weight.requires_grad),
    )
    return DistillOutput(*sums)


@dataclass(frozen=True)
class _Settings:
    vocab_size: int
    softcap: float | None
    chunk: int
    hidden_grad: bool
    weight_grad: bool


class _Slopes(NamedTuple):
    """Derivatives of a chunk's losses, each token's on its own."""

    loss: Tensor
    """[C]"""
    nll: Tensor
    divergence: Tensor
    plain: Tensor
    """[C]: by logsumexp(z), hence the coefficient of softmax(z)."""
    tempered: Tensor
    """[C]: by logsumexp(z / T)."""
    at_ids: Tensor
    """[C, K + 1]: by z[a_k], and by z[target]."""


class _DistillLoss(torch.autograd.Function):
    """Loss and, in the same pass over the chunks, its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        teacher: SparseTargets,
        terms: DistillTerms,
        settings: _Settings,
    ) -> tuple[Tensor, ...]:
        s = settings
        matrix = head_matrix(weight, hidden, s.vocab_size)
        gradient = s.hidden_grad or s.weight_grad
        sums = HeadGradients(hidden, weight, matrix, s.hidden_grad, s.weight_grad)
        totals = torch.zeros(4, device=hidden.device)
        chunk_part = _chunk_on_cpu if hidden.device.type == "cpu" else _chunk_on_gpu
        for rows in token_chunks(len(targets), s.chunk):
            ids = torch.cat([teacher.ids[rows], targets[rows, None]], dim=1)  # [C, K + 1]
            part = SparseTargets(ids, teacher.weights[rows], teacher.entropy[rows])
            logits = hidden[rows] @ matrix.t()
            slopes, grad, factor = chunk_part(logits, part, weights[rows], terms, s, gradient)
            w = weights[rows]
            values = torch.stack((slopes.loss, slopes.nll, slopes.divergence, slopes.divergence.square()))  # [4, C]
            totals += torch.where(w != 0, values, 0.0) @ w
            if grad is not None:
                sums.add(rows, grad, factor)
        ctx.save_for_backward(sums.hidden, sums.weight)
        loss, *others = (total.clone() for total in totals.unbind())
        ctx.mark_non_differentiable(*others)
        return (loss, *others)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (*scaled_gradients(ctx.saved_tensors, grad_loss), None, None, None, None, None)


# The losses: functions of lse and of the logits at the ids ----------------------------------------------------


def _slopes(lse: Tensor, lse_tempered: Tensor, z: Tensor, teacher: SparseTargets, terms: DistillTerms) -> _Slopes:
    """From lse, lse_tempered [C] and z [C, K + 1], the logits after the softcap at the teacher's ids and the target."""
    alpha, temperature = terms.alpha, terms.temperature
    nll = lse - z[:, -1]
    log_s = z[:, :-1] / temperature - lse_tempered[:, None]  # [C, K]
    if terms.divergence is Divergence.forward_kl:
        divergence = lse_tempered - (teacher.weights * z[:, :-1]).sum(dim=1) / temperature - teacher.entropy
        by_lse, by_log_s = torch.ones_like(lse), -teacher.weights
    else:
        divergence, by_log_s = _bucketed(log_s, teacher.weights, terms.divergence)
        by_lse = -by_log_s.sum(dim=1)
    loss = alpha * divergence + (1 - alpha) * nll + terms.z_loss * lse.square()
    at_ids = torch.cat([by_log_s * (alpha / temperature), torch.full_like(lse, alpha - 1)[:, None]], dim=1)
    plain = 1 - alpha + 2 * terms.z_loss * lse
    return _Slopes(loss, nll, divergence, plain, by_lse * alpha, at_ids)


def _bucketed(log_s: Tensor, p: Tensor, kind: Divergence) -> tuple[Tensor, Tensor]:
    """reverse_kl or jsd over K tokens and one bucket: (D [C], dD / dlog s_k [C, K]). Empty entries (p = 0) count not;
    a weight that is no number makes both so.

    With g_j = dD / ds_j and s_0 = 1 - sum s_k the derivative by log s_k is s_k (g_k - g_0).
    """
    there = ~(p <= 0)
    s = torch.where(there, log_s.exp(), 0.0)
    bucket_s, bucket_p = 1 - s.sum(dim=1, keepdim=True), 1 - p.sum(dim=1, keepdim=True)
    free = bucket_s > _FLOOR  # at its floor the bucket is a constant
    s_all = torch.cat([s, bucket_s.clamp(min=_FLOOR)], dim=1).clamp(min=_FLOOR)
    p_all = torch.cat([p, bucket_p], dim=1).clamp(min=_FLOOR)
    log_s_all, log_p_all = s_all.log(), p_all.log()
    if kind is Divergence.reverse_kl:
        terms = s_all * (log_s_all - log_p_all)
        g = log_s_all - log_p_all + 1
    else:
        log_m = ((s_all + p_all) / 2).log()
        terms = (p_all * (log_p_all - log_m) + s_all * (log_s_all - log_m)) / 2
        g = (log_s_all - log_m) / 2
    counted = torch.cat([there, torch.ones_like(free)], dim=1)
    value = torch.where(counted, terms, 0.0).sum(dim=1)
    by_log_s = s * (torch.where(s > _FLOOR, g[:, :-1], 0.0) - torch.where(free, g[:, -1:], 0.0))
    return value, torch.where(there, by_log_s, 0.0)


# A chunk on each kind of device -------------------------------------------------------------------------------


def _chunk_on_cpu(
    logits: Tensor, teacher: SparseTargets, weights: Tensor, terms: DistillTerms, s: _Settings, gradient: bool
) -> tuple[_Slopes, Tensor | None, Tensor | None]:
    """In place: (losses and slopes, gradient of the logits without its row factor [C, V], that factor [C, 1])."""
    z = logits.float()
    slope = None
    if s.softcap is not None:
        tanh = z.div_(s.softcap).tanh_()
        slope = 1 - tanh.square() if gradient else None
        z = tanh.mul_(s.softcap)
    at_ids = z.gather(1, teacher.ids)
    tempered = None if terms.temperature == 1 else z / terms.temperature
    e, lse = _exponentials(z)
    if tempered is None:
        slopes = _slopes(lse, lse, at_ids, teacher, terms)
        total = e.sum(dim=1, keepdim=True)
        dense = slopes.plain + slopes.tempered
    else:
        other, lse_tempered = _exponentials(tempered)
        slopes = _slopes(lse, lse_tempered, at_ids, teacher, terms)
        total = torch.ones_like(lse)[:, None]
        dense = torch.ones_like(lse)
        if gradient:
            e.mul_((slopes.plain / e.sum(dim=1))[:, None])
            e.addcmul_(other, (slopes.tempered / terms.temperature / other.sum(dim=1))[:, None])
    if not gradient:
        return slopes, None, None
    if not bool((dense == 1).all()):
        e.mul_(dense[:, None])
    e.scatter_add_(1, teacher.ids, slopes.at_ids * total)
    if slope is not None:
        e.mul_(slope)
    return slopes, e.to(logits.dtype), weights[:, None] / total


def _exponentials(z: Tensor) -> tuple[Tensor, Tensor]:
    """exp(z - max) in place of z, and logsumexp [C]."""
    greatest = z.amax(dim=1, keepdim=True)
    e = z.sub_(greatest).exp_()
    return e, greatest.squeeze(1) + e.sum(dim=1).log()


def _chunk_on_gpu(
    logits: Tensor, teacher: SparseTargets, weights: Tensor, terms: DistillTerms, s: _Settings, gradient: bool
) -> tuple[_Slopes, Tensor | None, None]:
    """Two passes over the chunk, each one kernel, and a few on [C, K]."""
    lse, lse_tempered = compiled(_fused_lse)(logits, s.vocab_size, s.softcap, terms.temperature)
    at_ids = logits.gather(1, teacher.ids)
    slopes, slope, z = compiled(_fused_slopes)(at_ids, lse, lse_tempered, teacher, terms, s.softcap)
    if not gradient:
        return slopes, None, None
    # Not left to the compiler: that of torch 2.11 fails over three dimensions here, or finds a wrong sum.
    same = teacher.ids[:, :, None] == teacher.ids[:, None, :]  # [C, K + 1, K + 1]
    sparse = torch.where(same, slopes.at_ids[:, None, :], 0.0).sum(dim=2)
    exact = compiled(_fused_exact)(z, lse, lse_tempered, slopes, sparse, slope, weights, terms.temperature)
    grad = compiled(_fused_dense)(
        logits, lse, lse_tempered, slopes.plain, slopes.tempered, weights, s.vocab_size, s.softcap, terms.temperature
    )
    return slopes, grad.scatter_(1, teacher.ids, exact.to(grad.dtype)), None


def _fused_lse(logits: Tensor, vocab_size: int, softcap: float | None, temperature: float) -> tuple[Tensor, Tensor]:
    """logsumexp [C] of z and of z / T."""
    z, _, _ = capped_logits(logits, vocab_size, softcap)
    lse = torch.logsumexp(z, dim=1)
    return lse, lse if temperature == 1 else torch.logsumexp(z / temperature, dim=1)


def _fused_slopes(
    at_ids: Tensor,
    lse: Tensor,
    lse_tempered: Tensor,
    teacher: SparseTargets,
    terms: DistillTerms,
    softcap: float | None,
) -> tuple[_Slopes, Tensor | float, Tensor]:
    """Losses and slopes; the softcap's derivative and the logits behind it at the ids, [C, K + 1]."""
    z, slope, _ = capped_logits(at_ids, at_ids.shape[1], softcap)
    return _slopes(lse, lse_tempered, z, teacher, terms), slope, z


def _fused_exact(
    z: Tensor,
    lse: Tensor,
    lse_tempered: Tensor,
    slopes: _Slopes,
    sparse: Tensor,
    slope: Tensor | float,
    weights: Tensor,
    temperature: float,
) -> Tensor:
    """The whole gradient at the ids [C, K + 1]: repeated ids have the same value each time."""
    exact = (_dense(z, lse, lse_tempered, slopes.plain, slopes.tempered, temperature) + sparse) * slope
    return torch.where(weights[:, None] != 0, exact * weights[:, None], 0.0)


def _fused_dense(
    logits: Tensor,
    lse: Tensor,
    lse_tempered: Tensor,
    plain: Tensor,
    tempered: Tensor,
    weights: Tensor,
    vocab_size: int,
    softcap: float | None,
    temperature: float,
) -> Tensor:
    """Gradient of the logits [C, V], in their type, but for what is added at the ids."""
    z, slope, _ = capped_logits(logits, vocab_size, softcap)
    grad = _dense(z, lse, lse_tempered, plain, tempered, temperature) * slope * weights[:, None]
    return torch.where(weights[:, None] != 0, grad, 0.0).to(logits.dtype)


def _dense(z: Tensor, lse: Tensor, lse_tempered: Tensor, plain: Tensor, tempered: Tensor, temperature: float) -> Tensor:
    """plain softmax(z) + tempered softmax(z / T) / T at the columns of z."""
    if temperature == 1:
        return (plain + tempered)[:, None] * torch.exp(z - lse[:, None])
    first = plain[:, None] * torch.exp(z - lse[:, None])
    return first + (tempered / temperature)[:, None] * torch.exp(z / temperature - lse_tempered[:, None])
