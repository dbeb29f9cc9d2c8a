"""Policy-gradient losses as pure functions on packed tokens.

Of N sampled tokens, each of one conversation (`segment`), are given, all FP32 [N]:

    lp   log pi of the trainer now, differentiable
    p    log pi of the trainer before this rollout's first update (proximal); sg(lp) when nothing has changed since
    q    log mu of the sampler when the token was drawn
    A    advantage

    rho = exp(clamp(lp - p, -20, 20))
    clip        -min(rho A, clip(rho, 1 - lo, 1 + hi) A); dual clip: where A < 0 at most -c A
    gspo        the same with s = exp(mean over the conversation of lp - p); its gradient goes through the mean
    cispo       -sg(min(rho, max)) A lp
    reinforce   -A lp

What the sampler got wrong is a weight w = f(p - q), detached, on the policy term alone. A token that the correction
rejects leaves the numerator and the denominator: it is decided before the step, because a step is divided by the
tokens that count. The KL to a reference is k3 = exp(d) - d - 1 with d = ref - lp clamped to [-20, 20] and the value to
at most 10. Nothing here divides by a number of tokens: `weights` hold what a token counts, and callers add up.

Sources: PPO (arXiv 1707.06347), GRPO (2402.03300), Dr.GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071), CISPO
(2506.13585), RLOO (2402.14740), dual clip (1912.09729), truncated importance sampling
(fengyao.notion.site/off-policy-rl), IcePop (ring-2.0), k3 (joschu.net/blog/kl-approx.html).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.configs.schema_rl import Advantage, AlgorithmConfig, Correction, Loss, Reduction

LARGEST_LOG_RATIO = 20.0
LARGEST_K3 = 10.0
STD_FLOOR = 1e-4


# Advantages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupOutcome:
    """What a group's rewards say."""

    advantages: list[float | None]
    """One a sample; None: it has no reward, or nothing can be learned from the group."""
    zero_variance: bool
    """All rewards are equal, or fewer than two samples have one."""


def group_outcome(rewards: Sequence[float | None], kind: Advantage) -> GroupOutcome:
    """Advantages of one group. Samples without a reward (None or NaN) are neither in the mean nor in the loss.

    `Advantage.batch` is left centred; `scale_batch` divides it.
    """
    known = [r for r in rewards if r is not None and math.isfinite(r)]
    if len(known) < 2 or max(known) == min(known):
        return GroupOutcome([None] * len(rewards), True)
    mean = math.fsum(known) / len(known)
    scale = 1.0
    if kind is Advantage.std:
        scale = 1.0 / (math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1)) + STD_FLOOR)
    elif kind is Advantage.rloo:
        scale = len(known) / (len(known) - 1)
    return GroupOutcome([scale * (r - mean) if r is not None and math.isfinite(r) else None for r in rewards], False)


def scale_batch(
    groups: Sequence[Sequence[float | None]], everywhere: Callable[[Sequence[float]], list[float]] = list
) -> list[list[float | None]]:
    """`Advantage.batch`: centred advantages of all groups, divided by their common deviation + 1e-4.

    `everywhere` adds numbers up over ranks.
    """
    known = [a for group in groups for a in group if a is not None]
    count, squares = everywhere([float(len(known)), math.fsum(a * a for a in known)])
    if count < 2:
        return [list(group) for group in groups]
    deviation = math.sqrt(squares / (count - 1)) + STD_FLOOR
    return [[None if a is None else a / deviation for a in group] for group in groups]


# Per conversation -------------------------------------------------------------------------------------------------


def segment_mean(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Mean of values [N] over each conversation: [segments]; 0 where there are no tokens. Differentiable."""
    sums = torch.zeros(segments, dtype=values.dtype, device=values.device).index_add(0, segment, values)
    counts = torch.zeros(segments, dtype=values.dtype, device=values.device)
    return sums / counts.index_add(0, segment, torch.ones_like(values)).clamp(min=1)


def token_weights(
    lengths: Sequence[int], reduction: Reduction, longest: int, total_tokens: int, total: int
) -> list[float]:
    """What a token of each conversation counts, so that `sum / total_tokens` over the step is the reduction asked for.

    Args:
        lengths: tokens of each conversation that count. longest: of any completion. total_tokens, total: tokens and
            conversations of the whole step, over all ranks.
    """
    if reduction is Reduction.tokens:
        return [1.0] * len(lengths)
    if reduction is Reduction.sequences:
        return [total_tokens / (total * length) if length else 0.0 for length in lengths]
    return [total_tokens / (total * longest)] * len(lengths)


# Sampler correction ------------------------------------------------------------------------------------------------


def correction_weights(p: Tensor, q: Tensor, config: AlgorithmConfig) -> Tensor:
    """What the policy term of each token is multiplied by: [N], no gradient. Rejections apart (`accepted`)."""
    ratio = (p.detach() - q).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if config.correction is Correction.tis:
        return ratio.clamp(max=config.correction_max)
    return ratio if config.correction is Correction.icepop else torch.ones_like(ratio)


def accepted(p: Tensor, q: Tensor, segment: Tensor, segments: int, config: AlgorithmConfig) -> Tensor:
    """Which tokens count after the correction: bool [N]."""
    d = (p - q).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if config.correction is Correction.icepop:
        ratio = d.exp()
    elif config.correction is Correction.sequence:
        ratio = segment_mean(d, segment, segments).exp()[segment]
    else:
        return torch.ones_like(d, dtype=torch.bool)
    return (ratio >= config.band_low) & (ratio <= config.band_high)


def rejects(config: AlgorithmConfig) -> bool:
    """Whether tokens may be rejected, which has to be known before a step."""
    return config.correction in (Correction.icepop, Correction.sequence)


# Losses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyTerms:
    """Of each token."""

    loss: Tensor
    """FP32 [N], differentiable."""
    clipped_low: Tensor
    """FP32 [N], 1 where the lower bound holds the token's gradient back."""
    clipped_high: Tensor


def policy_terms(
    lp: Tensor, p: Tensor | None, advantage: Tensor, segment: Tensor, segments: int, config: AlgorithmConfig
) -> PolicyTerms:
    """The policy loss of each token, before weights and correction. `p` None: nothing has changed since the rollout."""
    zero = torch.zeros_like(lp.detach())
    if config.loss is Loss.reinforce:
        return PolicyTerms(-advantage * lp, zero, zero)
    log_ratio = lp - (lp.detach() if p is None else p)
    if config.loss is Loss.gspo:
        log_ratio = segment_mean(log_ratio, segment, segments)[segment]
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if config.loss is Loss.cispo:
        high = (ratio.detach() > config.cispo_max).float()
        return PolicyTerms(-ratio.detach().clamp(max=config.cispo_max) * advantage * lp, zero, high)
    lower, upper = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(lower, upper) * advantage)
    if config.dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -config.dual_clip * advantage), loss)
    now = ratio.detach()
    return PolicyTerms(loss, ((now < lower) & (advantage < 0)).float(), ((now > upper) & (advantage > 0)).float())


def k3(lp: Tensor, reference: Tensor) -> Tensor:
    """k3 estimate of KL(pi || reference) from tokens of pi: [N], never negative, differentiable through lp."""
    d = (reference - lp).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(d) - d).clamp(max=LARGEST_K3)


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of a micro-batch that count, [N] each."""

    q: Tensor
    advantage: Tensor
    weights: Tensor
    segment: Tensor
    """int64: number of the conversation."""
    segments: int
    p: Tensor | None = None
    """The trainer's log pi when training on this rollout began; None: it is sg(lp)."""
    reference: Tensor | None = None
    stale: Tensor | None = None
    """bool: drawn by older weights. There the ratio is to the sampler, rho = pi / mu: p by the weights of now would be
    lp itself, and nothing would ever be clipped. None: none are."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Tokens":
        """The same on another device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            q=self.q.to(device, non_blocking=non_blocking),
            advantage=self.advantage.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
            segment=self.segment.to(device, non_blocking=non_blocking),
            p=moved(self.p),
            reference=moved(self.reference),
            stale=moved(self.stale),
        )


@dataclass(frozen=True)
class LossOutput:
    """Sums to differentiate, and what each token showed."""

    loss_sum: Tensor
    """FP32 scalar, differentiable."""
    per_token: dict[str, Tensor]
    """Metrics, FP32 [N], detached."""
    largest_difference: Tensor
    """FP32 scalar: max |log pi - log mu|, 0 without tokens."""


def rl_loss(lp: Tensor, entropy: Tensor, tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Everything that is trained for, summed over the tokens of a micro-batch.

    Args:
        lp, entropy: FP32 [N], of the trainer at the sampling temperature.
    """
    now = lp.detach()
    proximal = now if tokens.p is None else tokens.p
    correction = correction_weights(proximal, tokens.q, config)
    base = tokens.p
    if tokens.stale is not None:
        base = torch.where(tokens.stale, tokens.q, proximal)
        if config.loss is not Loss.reinforce:  # which has no ratio of its own
            correction = torch.where(tokens.stale, 1.0, correction)
    terms = policy_terms(lp, base, tokens.advantage, tokens.segment, tokens.segments, config)
    loss = correction * terms.loss
    d = proximal - tokens.q
    bounded = d.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    raw = bounded.exp()
    per_token = {
        "mismatch/k3_kl": torch.expm1(bounded) - bounded,
        "mismatch/mult_prob_error": bounded.abs().exp(),
        "mismatch/ratio": raw,
        "entropy": entropy.detach(),
        "clip/low": terms.clipped_low,
        "clip/high": terms.clipped_high,
    }
    if config.correction is Correction.tis:
        per_token["correction/truncated"] = (raw > config.correction_max).float()
    per_token["ratio"] = (now - (now if base is None else base)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if config.kl and tokens.reference is not None:
        divergence = k3(lp, tokens.reference)
        loss = loss + config.kl * divergence
        per_token["kl"] = divergence.detach()
    if config.entropy:
        loss = loss - config.entropy * entropy
    largest = d.abs().amax() if len(d) else torch.zeros((), device=lp.device)
    return LossOutput(torch.dot(tokens.weights, loss), per_token, largest)
