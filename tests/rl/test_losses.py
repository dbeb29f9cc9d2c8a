"""Losses against straightforward FP64 code and closed forms; what must leave denominators does; nothing makes a NaN."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema_rl import Advantage, AlgorithmConfig, Correction, Loss, Reduction
from lowbit.rl.losses import (
    Tokens,
    accepted,
    group_outcome,
    k3,
    policy_terms,
    rl_loss,
    scale_batch,
    segment_mean,
    token_weights,
)

N, SEGMENTS = 40, 7


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """lp (a leaf), p, q, advantage, segment: FP64, ratios far enough from 1 to be clipped on both sides."""
    g = torch.Generator().manual_seed(seed)
    lp = (-torch.rand(N, generator=g, dtype=torch.float64) * 3).requires_grad_()
    p = lp.detach() + 0.5 * torch.randn(N, generator=g, dtype=torch.float64)
    q = p + 0.4 * torch.randn(N, generator=g, dtype=torch.float64)
    advantage = torch.randn(N, generator=g, dtype=torch.float64)
    segment = torch.sort(torch.randint(0, SEGMENTS, (N,), generator=g)).values
    return lp, p, q, advantage, segment


def by_hand(config: AlgorithmConfig, lp: Tensor, p: Tensor, q: Tensor, advantage: Tensor, segment: Tensor) -> Tensor:
    """The sum of losses, one token at a time, as the papers write them."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(N):
        same = segment == segment[t]
        a = advantage[t]
        rho = torch.exp((lp[same] - p[same]).mean()) if config.loss is Loss.gspo else torch.exp(lp[t] - p[t])
        if config.loss is Loss.reinforce:
            value = -a * lp[t]
        elif config.loss is Loss.cispo:
            value = -min(rho.item(), config.cispo_max) * a * lp[t]
        else:
            clipped = torch.clamp(rho, 1 - config.clip_low, 1 + config.clip_high)
            value = -torch.min(rho * a, clipped * a)
            if config.dual_clip is not None and a < 0:
                value = torch.min(value, -config.dual_clip * a)
        weight = 1.0
        if config.correction is Correction.tis:
            weight = min(math.exp(p[t] - q[t]), config.correction_max)
        elif config.correction is Correction.icepop:
            weight = math.exp(p[t] - q[t])
        total = total + weight * value
    return total


@pytest.mark.parametrize("correction", [Correction.none, Correction.tis, Correction.icepop])
@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(loss=Loss.clip),
        AlgorithmConfig(loss=Loss.clip, dual_clip=1.3),
        AlgorithmConfig(loss=Loss.gspo, clip_low=0.05, clip_high=0.1),
        AlgorithmConfig(loss=Loss.cispo, cispo_max=1.2),
        AlgorithmConfig(loss=Loss.reinforce),
    ],
    ids=["clip", "dual", "gspo", "cispo", "reinforce"],
)
def test_value_and_gradient_are_those_of_the_papers(config: AlgorithmConfig, correction: Correction) -> None:
    config = replace(config, correction=correction)
    lp, p, q, advantage, segment = problem()
    [wanted] = torch.autograd.grad(by_hand(config, lp, p, q, advantage, segment), lp)
    tokens = Tokens(q, advantage, torch.ones(N, dtype=torch.float64), segment, SEGMENTS, p)
    out = rl_loss(lp, torch.zeros(N, dtype=torch.float64), tokens, config)
    torch.testing.assert_close(out.loss_sum, by_hand(config, lp, p, q, advantage, segment), rtol=1e-12, atol=1e-12)
    [found] = torch.autograd.grad(out.loss_sum, lp)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    clipped = out.per_token["clip/low"].any(), out.per_token["clip/high"].any()
    assert clipped == {Loss.cispo: (False, True), Loss.reinforce: (False, False)}.get(config.loss, (True, True))


@pytest.mark.parametrize("loss", [Loss.clip, Loss.gspo, Loss.cispo])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss: Loss) -> None:
    """At rho = 1: d/dlp = -A (gspo: -A averaged over its conversation's tokens)."""
    lp, _, _, advantage, segment = problem()
    advantage = torch.randn(SEGMENTS, dtype=torch.float64)[segment]  # one a conversation
    config = AlgorithmConfig(loss=loss, correction=Correction.none)
    for p in (None, lp.detach().clone()):
        terms = policy_terms(lp, p, advantage, segment, SEGMENTS, config)
        [found] = torch.autograd.grad(terms.loss.sum(), lp)
        torch.testing.assert_close(found, -advantage)
        assert not terms.clipped_low.any() and not terms.clipped_high.any()


def test_k3_is_the_divergence_and_never_overflows() -> None:
    """E[k3] = KL(pi || ref) for categorical pi, in closed form; its clamps keep the greatest ratios finite."""
    torch.manual_seed(3)
    pi, ref = torch.randn(9, dtype=torch.float64).log_softmax(0), torch.randn(9, dtype=torch.float64).log_softmax(0)
    expected = (pi.exp() * (pi - ref)).sum()
    torch.testing.assert_close((pi.exp() * k3(pi, ref)).sum(), expected)
    assert (k3(pi, ref) >= 0).all() and (k3(pi, pi) == 0).all()
    lp = torch.tensor([-200.0, -1e-3], requires_grad=True)
    value = k3(lp, torch.tensor([-1e-3, -200.0]))
    assert value.isfinite().all() and value[0] == 10.0
    value.sum().backward()
    assert lp.grad is not None and lp.grad.isfinite().all()


def test_kl_and_entropy_are_weighed_and_the_correction_leaves_them_alone() -> None:
    lp, p, q, _, segment = problem()
    entropy = torch.rand(N, dtype=torch.float64, requires_grad=True)
    reference = lp.detach() + 0.1
    zero = torch.zeros(N, dtype=torch.float64)
    config = AlgorithmConfig(kl=0.3, entropy=0.2, correction=Correction.tis)
    tokens = Tokens(q, zero, torch.full((N,), 0.5, dtype=torch.float64), segment, SEGMENTS, p, reference)
    out = rl_loss(lp, entropy, tokens, config)
    expected = 0.5 * (0.3 * (torch.exp(reference - lp) - (reference - lp) - 1) - 0.2 * entropy).sum()
    torch.testing.assert_close(out.loss_sum, expected)
    assert out.per_token["kl"].mean() == pytest.approx(math.exp(0.1) - 1.1)


def test_mismatch_is_measured_before_anything_is_truncated() -> None:
    """Closed form: differences of +-1 and C = 2: half of the weights are truncated, the metrics do not see it."""
    lp = torch.zeros(4)
    q = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    tokens = Tokens(q, torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64), 1)
    out = rl_loss(lp, lp, tokens, AlgorithmConfig(correction=Correction.tis, correction_max=2.0))
    found = {name: values.mean().item() for name, values in out.per_token.items()}
    assert found["mismatch/k3_kl"] == pytest.approx((math.e - 2 + 1 / math.e) / 2)
    assert found["mismatch/mult_prob_error"] == pytest.approx(math.e)
    assert found["mismatch/ratio"] == pytest.approx((math.e + 1 / math.e) / 2)
    assert found["correction/truncated"] == 0.5
    assert out.largest_difference == 1.0
    assert out.loss_sum == pytest.approx(-(2 * 2.0 + 2 / math.e))


def test_stale_tokens_are_compared_with_what_drew_them() -> None:
    """p made anew by newer weights would be lp: the ratio 1, nothing clipped. Stale tokens take the sampler instead."""
    lp, q = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-2.0, -2.0])
    config = AlgorithmConfig(correction=Correction.tis, correction_max=2.0)
    tokens = Tokens(
        q, torch.ones(2), torch.ones(2), torch.tensor([0, 1]), 2, lp.detach().clone(),
        stale=torch.tensor([True, False]),
    )  # fmt: skip
    out = rl_loss(lp, torch.zeros(2), tokens, config)
    assert out.per_token["clip/high"].tolist() == [1.0, 0.0]
    out.loss_sum.backward()
    assert lp.grad is not None and lp.grad.tolist() == [0.0, -2.0]  # clipped; and -min(e, 2) A


def test_rejection() -> None:
    d = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.5, 0.0])
    segment, q = torch.tensor([0, 0, 0, 1, 1, 1]), torch.zeros(6)
    band = {"band_low": 0.5, "band_high": 1.6}
    by_token = accepted(d, q, segment, 2, AlgorithmConfig(correction=Correction.icepop, **band))
    assert by_token.tolist() == [True, False, False, False, False, True]
    whole = accepted(d, q, segment, 2, AlgorithmConfig(correction=Correction.sequence, band_low=0.5, band_high=1.3))
    assert whole.tolist() == [True, True, True, False, False, False]  # exp(0) = 1 in, exp(1/3) = 1.4 out
    assert accepted(d, q, segment, 2, AlgorithmConfig()).all()


def test_infinite_differences_stay_finite() -> None:
    """A sampler that says -inf, or a token that the trainer finds impossible: bounded weights, finite gradients."""
    lp = torch.tensor([-1.0, -80.0, -1.0], requires_grad=True)
    q = torch.tensor([-torch.inf, 0.0, -1.0])
    for loss in Loss:
        config = AlgorithmConfig(loss=loss, kl=0.1)
        tokens = Tokens(
            q, torch.tensor([1.0, -1.0, 1.0]), torch.ones(3), torch.tensor([0, 0, 1]), 2, lp.detach() + 30,
            torch.tensor([-2.0, -torch.inf, -1.0]),
        )  # fmt: skip
        out = rl_loss(lp, torch.zeros(3), tokens, config)
        [grad] = torch.autograd.grad(out.loss_sum, lp)
        assert out.loss_sum.isfinite() and grad.isfinite().all(), loss
        assert all(values.isfinite().all() for values in out.per_token.values())


def test_nothing_is_nothing() -> None:
    """A micro-batch without tokens that count: a loss of 0 that can be differentiated."""
    lp = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    out = rl_loss(lp, empty, Tokens(empty, empty, empty, empty.long(), 0), AlgorithmConfig())
    out.loss_sum.backward()
    assert out.loss_sum == 0 and out.largest_difference == 0


# Advantages ---------------------------------------------------------------------------------------------------------


def test_advantages_in_closed_form() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean = [r - 0.6 for r in rewards]
    assert group_outcome(rewards, Advantage.mean).advantages == pytest.approx(mean)
    assert group_outcome(rewards, Advantage.rloo).advantages == pytest.approx(
        [r - (3 - r) / 4 for r in rewards]
    )  # minus the mean of the others
    deviation = torch.tensor(rewards).std().item() + 1e-4
    assert group_outcome(rewards, Advantage.std).advantages == pytest.approx([a / deviation for a in mean])
    batch = scale_batch([[1.0, -1.0], [2.0, None, -2.0]])
    assert batch[1][0] == pytest.approx(2 / (math.sqrt(10 / 3) + 1e-4)) and batch[1][1] is None


def test_missing_rewards_are_neither_in_the_mean_nor_in_the_loss() -> None:
    for missing in (None, math.nan):
        found = group_outcome([1.0, missing, 0.0], Advantage.mean)
        assert found.advantages == [0.5, None, -0.5] and not found.zero_variance


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0, 0.0], [1.0, None, None], [None, None], [0.3, math.nan]])
def test_groups_that_teach_nothing(rewards: list[float | None]) -> None:
    found = group_outcome(rewards, Advantage.std)
    assert found.zero_variance and found.advantages == [None] * len(rewards)


def test_reductions_are_what_they_say() -> None:
    """Any per-token values: the loop divides by all tokens, and the result is the mean that was asked for."""
    lengths, values = [1, 4, 7], torch.randn(12, dtype=torch.float64)
    parts = values.split(lengths)
    total = sum(lengths)
    for reduction, expected in (
        (Reduction.tokens, values.mean()),
        (Reduction.sequences, torch.stack([part.mean() for part in parts]).mean()),
        (Reduction.fixed, values.sum() / (3 * 16)),
    ):
        weights = token_weights(lengths, reduction, 16, total, 3)
        found = sum(w * part.sum() for w, part in zip(weights, parts, strict=True)) / total
        torch.testing.assert_close(torch.as_tensor(found), expected)


def test_segment_mean() -> None:
    values = torch.tensor([1.0, 3.0, 5.0], requires_grad=True)
    mean = segment_mean(values, torch.tensor([0, 0, 2]), 3)
    assert mean.tolist() == [2.0, 0.0, 5.0]


def test_the_deviation_of_a_batch_is_that_of_all_ranks() -> None:
    """Two ranks, one with half of the groups each: as if one had all of them."""
    groups: list[list[float | None]] = [[1.0, -1.0], [2.0, None, -2.0]]
    sums = [2.0 + 2.0, 2.0 + 8.0]
    found = [scale_batch([group], lambda _: sums)[0] for group in groups]
    assert found == scale_batch(groups)
