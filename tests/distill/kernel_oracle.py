"""What the kernels choose against FP64: every row is checked for what its estimator is defined by, not for its bits.

Slacks are those of FP32 exponentials: 1e-6 of a probability. A choice may differ from the exact one only where the
number that decides lies that near to a boundary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.blocks import _transform
from lowbit.distill.estimators import Chosen
from lowbit.distill.noise import Lane, Noise, Places


@dataclass(frozen=True)
class Row:
    """One position, exact."""

    z: Tensor
    """FP64 [V], transformed."""
    p: Tensor
    """FP64 [V]."""
    u: Tensor
    """FP64 [V or k]: the words of its lane as uniform numbers."""


def check(
    estimator: Estimator,
    chosen: Chosen,
    logits: Tensor,
    vocab: int,
    softcap: float | None,
    temperature: float,
    noise: Noise,
    places: Places,
    slack: float = 1e-6,
) -> None:
    """Every row of `chosen`; all on the CPU."""
    z = _transform(logits[:, :vocab], softcap, temperature).double()
    lse = torch.logsumexp(z, dim=1)
    p = torch.exp(z - lse[:, None])
    torch.testing.assert_close(chosen.lse, lse, rtol=slack, atol=slack)
    entropy = -torch.where(p > 0, p * (z - lse[:, None]), 0.0).sum(dim=1)
    torch.testing.assert_close(chosen.entropy, entropy, rtol=slack, atol=slack)
    k = chosen.kept.ids.shape[1]
    gumbel = estimator is Estimator.gumbel
    words = noise.words(places, Lane.TARGETS, vocab if gumbel else k)
    if gumbel:  # as they are defined: rounded to FP32, and below one
        u = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24).double()
    else:
        u = (words.double() + 0.5) * 2.0**-32
    one = {
        Estimator.varopt: _check_varopt,
        Estimator.topk: _check_topk,
        Estimator.gumbel: _check_gumbel,
        Estimator.multinomial: _check_multinomial,
    }[estimator]
    assert int(chosen.kept.ids.min()) >= 0 and int(chosen.kept.ids.max()) < vocab
    for r in range(len(z)):
        one(chosen[slice(r, r + 1)], Row(z[r], p[r], u[r]), slack)


def _kept(chosen: Chosen) -> tuple[Tensor, Tensor, int, float]:
    kept = chosen.kept
    return kept.ids[0], kept.weights[0], int(kept.named[0]), float(kept.rest[0])


def _check_head(row: Row, ids: Tensor, weights: Tensor, slack: float) -> None:
    """The likeliest in falling order, equal ones by rising id, with their probabilities; those without any are free."""
    some = weights > 0
    assert bool((row.p[ids[~some]] < 1e-300).all())
    ids, weights = ids[some], weights[some]
    if len(ids) == 0:
        return
    assert len(ids.unique()) == len(ids)
    torch.testing.assert_close(weights, row.p[ids], rtol=2 * slack, atol=0)
    order = torch.argsort(row.z, descending=True, stable=True)[: len(ids)]
    if slack <= 1e-6:
        assert torch.equal(ids, order)
    else:
        torch.testing.assert_close(row.z[ids], row.z[order], rtol=slack, atol=slack)


def _check_topk(chosen: Chosen, row: Row, slack: float) -> None:
    ids, weights, named, rest = _kept(chosen)
    assert named == len(ids)
    _check_head(row, ids, weights, slack)
    left = row.p.clone()
    left[ids[weights > 0]] = 0.0
    torch.testing.assert_close(rest, float(left.sum()), rtol=2 * slack, atol=1e-15)


def _check_varopt(chosen: Chosen, row: Row, slack: float) -> None:
    ids, weights, named, rest = _kept(chosen)
    k = len(ids)
    assert 0 <= named < k
    _check_head(row, ids[:named], weights[:named], slack)
    left = row.p.clone()
    left[ids[:named][weights[:named] > 0]] = 0.0
    total = float(left.sum())
    torch.testing.assert_close(rest, total, rtol=2 * slack, atol=1e-15)
    before = torch.cat([torch.zeros(1).double(), weights[:named].cumsum(0)])
    for h in range(named + 1):
        room = float(1 - before[h])
        if room < 4 * slack:
            break
        tau, near = room / (k - h), 1e-8 + 2 * slack / room
        if h < named:
            assert float(weights[h]) >= tau * (1 - near), "the head ends at the threshold"
        elif h < k - 1:
            assert float(left.max()) <= tau * (1 + near), "the head goes on to the threshold"
    torch.testing.assert_close(weights[named:], torch.full_like(weights[named:], rest / (k - named)))
    upto = left.cumsum(0)
    for j, item in enumerate(ids[named:].tolist()):
        point = (j + float(row.u[0])) * total / (k - named)
        beyond = 3 * slack * total + 1e-15
        assert upto[item] - left[item] - beyond <= point <= upto[item] + beyond
        assert left[item] > 0 or total < 1e-15


def _check_gumbel(chosen: Chosen, row: Row, slack: float) -> None:
    ids, weights, named, rest = _kept(chosen)
    assert named == len(ids) and rest == 0
    keys = row.p.log() - torch.log(-torch.log1p(-row.u))
    some = weights > 0
    assert bool((row.p[ids[~some]] < 1e-300).all())
    ids, weights = ids[some], weights[some]
    assert len(ids.unique()) == len(ids)
    taken = keys[ids]
    others = keys.clone()
    others[ids] = float("-inf")
    kappa = others.max()
    assert float(taken.min()) >= float(kappa) - 5 * slack and bool((taken.diff() <= 5 * slack).all())
    expected = row.p[ids] / -torch.expm1(-torch.exp(row.p[ids].log() - kappa))
    torch.testing.assert_close(weights, expected, rtol=2 * slack, atol=0)


def _check_multinomial(chosen: Chosen, row: Row, slack: float) -> None:
    ids, weights, named, rest = _kept(chosen)
    k = len(ids)
    assert rest == 0 and 1 <= named <= k and bool((weights[named:] == 0).all())
    assert bool((ids[:named].diff() > 0).all())
    counts = torch.round(weights * k)
    torch.testing.assert_close(weights, counts / k, rtol=0, atol=1e-15)
    assert int(counts.sum()) == k
    upto = row.p.cumsum(0)
    low, high = (torch.searchsorted(upto, row.u + side * 3 * slack, right=True) for side in (-1, 1))
    drawn = torch.repeat_interleave(ids[:named], counts[:named].long())
    points = row.u.argsort()
    assert bool((drawn >= low[points]).all()) and bool((drawn <= high[points].clamp(max=len(upto) - 1)).all())
    assert bool((row.p[ids[:named]] > 0).all())
