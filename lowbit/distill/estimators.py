"""What of a teacher's distribution is kept: a few tokens and weights whose expectation is the whole distribution.

A student learns from -sum_i w_i z_i + logsumexp(z), whose gradient softmax(z) - w is unbiased as soon as E[w] = p,
and carries exactly the variance sum_i Var(w_i) on top of that of full distillation. Four ways to choose k targets:

varopt       Choose inclusion probabilities pi_i = min(1, p_i / tau) with sum k: they minimise the variance among all
             ways to keep k items. Items with p_i >= tau (the head, h of them) are kept exactly; the other k - h are
             drawn by systematic sampling of the tail, one uniform number for all, and weigh tau each. sum w = 1 always.
             sum Var = sum over the tail of p_i (tau - p_i), tau = tail mass / (k - h).
             (E. Cohen et al., "Variance optimal sampling based estimation of subset sums", 2009, arXiv 0803.0473.)
gumbel       Keep the k largest of log p_i + Gumbel noise (sampling without replacement) and weigh by the inclusion
             probability given the (k+1)-th key kappa: w_i = p_i / (1 - exp(-p_i exp(-kappa))). Unbiased, uncorrelated;
             sum w is 1 only on average. Var(w_i) = E[p_i^2 (1 / pi_i(kappa) - 1)].
             (W. Kool, H. van Hoof, M. Welling, "Stochastic beams and where to find them", 2019, arXiv 1903.06059.)
             Neither renormalising these weights nor a softmax of the perturbed keys would be unbiased.
multinomial  k draws with replacement, w_i = n_i / k. sum w = 1; sum Var = (1 - sum p^2) / k.
             ("Sparse Logit Sampling", 2025, arXiv 2503.16870: RS-KD.)
topk         The k likeliest, a baseline: deterministic, and BIASED towards them (its error does not average out over
             positions). Useful for losses that are not linear in p, with the rest of the mass in one bucket.

All work on a chunk of positions (`blocks.Distributions`); the noise of a row is keyed by seed, sample and position.
They define what is kept; on a GPU `kernels.choose` does the same in two launches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.blocks import BLOCK, Distributions, gather_blocks, largest
from lowbit.distill.noise import Lane, Noise, Places
from lowbit.errors import ConfigError
from lowbit.models.lm_head import token_chunks

MARGIN = 1e-9
"""Relative slack of comparisons with tau, so that equal logits are treated alike whatever rounding does."""


@dataclass(frozen=True)
class Kept:
    """What is kept of C positions, before it is rounded for storage."""

    ids: Tensor
    """int64 [C, k]; the first `named` of a row carry a weight of their own, likeliest first where they are exact;
    the id of an empty entry is any."""
    weights: Tensor
    """FP64 [C, k], in the order of `ids`; 0 where the entry is empty."""
    named: Tensor
    """int64 [C]: entries with a weight of their own. The others (varopt's tail) share `rest` equally."""
    rest: Tensor
    """FP64 [C]: probability outside the named entries where those are exact (varopt, topk); 0 elsewhere."""


@dataclass(frozen=True)
class Chosen:
    """Targets of C positions with what else is stored of them."""

    kept: Kept
    entropy: Tensor
    """FP64 [C]: of the whole distribution, in nats."""
    lse: Tensor
    """FP64 [C]: of the transformed logits; not finite where they are not."""

    @staticmethod
    def empty(rows: int, targets: int, device: torch.device) -> "Chosen":
        """Room for targets to be written into."""

        def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        ids, named = numbers(rows, targets, dtype=torch.int64), numbers(rows, dtype=torch.int64)
        return Chosen(Kept(ids, numbers(rows, targets), named, numbers(rows)), numbers(rows), numbers(rows))

    def __getitem__(self, rows: slice) -> "Chosen":
        return Chosen(Kept(*(t[rows] for t in vars(self.kept).values())), self.entropy[rows], self.lse[rows])

    def to(self, device: torch.device | str) -> "Chosen":
        """On another device."""
        kept = Kept(*(tensor.to(device) for tensor in vars(self.kept).values()))
        return Chosen(kept, self.entropy.to(device), self.lse.to(device))

    @staticmethod
    def cat(parts: Sequence["Chosen"]) -> "Chosen":
        """Chunks put together."""
        kept = zip(*(vars(part.kept).values() for part in parts), strict=True)
        entropy, lse = torch.cat([part.entropy for part in parts]), torch.cat([part.lse for part in parts])
        return Chosen(Kept(*(torch.cat(same) for same in kept)), entropy, lse)


Sampler = Callable[[Distributions, int, Noise, Places], Kept]


def sampler(estimator: Estimator) -> Sampler:
    """The function that keeps k targets of each position: (distributions, k, noise, places) -> Kept."""
    return {
        Estimator.varopt: varopt,
        Estimator.gumbel: gumbel,
        Estimator.multinomial: multinomial,
        Estimator.topk: topk,
    }[estimator]


def check_targets(estimator: Estimator, targets: int, vocab_size: int) -> None:
    """Raises ConfigError for a number of targets that this estimator cannot keep from this vocabulary."""
    least = 4 if estimator is Estimator.gumbel else 1
    most = 255 if estimator is Estimator.multinomial else min(255, vocab_size - 1)
    if not least <= targets <= most:
        raise ConfigError(
            f"cache.targets={targets}: cache.estimator={estimator.value} keeps {least} to {most} targets of a "
            f"vocabulary of {vocab_size}"
        )


def varopt(p: Distributions, k: int, noise: Noise, places: Places) -> Kept:
    """Exact head and systematic threshold sampling of the tail. Consumes `p`: the head is hidden in it."""
    log_p, ids = p.largest(k)
    head = log_p.exp()  # FP64 [C, k], falling
    before = head.cumsum(dim=1) - head
    left = torch.arange(k, 0, -1, device=head.device, dtype=torch.float64)  # slots left when h = 0, 1, ... are taken
    tau = (1 - before) / left  # [C, k]: the threshold with a head of h = column
    below = head < tau * (1 - MARGIN)
    below[:, -1] = True  # one slot at least is the tail's; it may have a single item left, drawn with certainty
    named = below.int().argmax(dim=1)  # [C]: the first h whose next item lies below its threshold
    slot = torch.arange(k, device=head.device)
    exact = slot < named[:, None]
    p.hide(ids, exact)
    rest = p.mass.sum(dim=1)
    tail = k - named
    step = rest / tail
    u = noise.uniform(places, Lane.TARGETS, 1)  # [C, 1]
    points = ((slot - named[:, None]).clamp_(min=0) + u) * step[:, None]
    ids = torch.where(exact, ids, p.pick(points))
    return Kept(ids, torch.where(exact, head, step[:, None]), named, rest)


def gumbel(p: Distributions, k: int, noise: Noise, places: Places) -> Kept:
    """Gumbel top-k with rank conditioning."""
    keys = torch.cat([_keys(p, noise, places, rows) for rows in _pieces(p)])  # [C, B * 64]
    block_max = keys.view(len(keys), -1, BLOCK).amax(dim=2)
    found, ids = largest(block_max, lambda blocks: gather_blocks(keys, blocks), k + 1)
    kappa = found[:, k:].double()
    ids = ids[:, :k].clamp(max=p.vocab_size - 1)
    log_p = p.log_probability(ids)
    # 1 - exp(-p exp(-kappa)); kappa = -inf where fewer than k + 1 tokens have any probability: all are kept, exactly.
    inclusion = -torch.expm1(-torch.exp(log_p - kappa))
    weights = torch.where(found[:, :k] == float("-inf"), 0.0, log_p.exp() / inclusion)
    every = torch.full_like(p.lse, k, dtype=torch.int64)
    return Kept(ids, weights, every, torch.zeros_like(p.lse))


def _keys(p: Distributions, noise: Noise, places: Places, rows: slice) -> Tensor:
    """log p + Gumbel noise of some rows, FP32 [c, B * 64]; -inf where p = 0.

    The noise is -log E with E = -log(1 - u) exponential, so that small E, which decide, have all 32 bits of u.
    """
    z = p.whole(rows)
    u = noise.words(places[rows], Lane.TARGETS, z.shape[1]).float().add_(0.5).mul_(2.0**-32)
    exponential = torch.log1p(u.clamp_(max=1 - 2.0**-24).neg_()).neg_()
    return z - p.lse[rows, None].float() - exponential.log_()


def _pieces(p: Distributions) -> Iterator[slice]:
    """Rows whose random words exist at once: they take sixteen times the memory of BF16 logits."""
    numbers = 1 << 21 if p.lse.device.type == "cpu" else 1 << 25
    return token_chunks(len(p.lse), max(1, numbers // (p.mass.shape[1] * BLOCK)))


def multinomial(p: Distributions, k: int, noise: Noise, places: Places) -> Kept:
    """k independent draws; equal ones become one entry with their share of the draws. Entries are sorted by id."""
    total = p.mass.sum(dim=1, keepdim=True)
    ids = p.pick(noise.uniform(places, Lane.TARGETS, k) * total).sort(dim=1).values  # [C, k]
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    entry = first.cumsum(dim=1) - 1  # [C, k]: which entry each draw belongs to
    counts = torch.zeros_like(p.lse[:, None].expand(ids.shape)).contiguous()
    counts.scatter_add_(1, entry, torch.ones_like(counts))
    unique = torch.zeros_like(ids).scatter_(1, entry, ids)
    return Kept(unique, counts / k, entry[:, -1] + 1, torch.zeros_like(p.lse))


def topk(p: Distributions, k: int, noise: Noise, places: Places) -> Kept:
    """The k likeliest with their exact probabilities; `rest` is everything else. Biased as a forward-KL target."""
    log_p, ids = p.largest(k)
    p.hide(ids, torch.ones_like(ids, dtype=torch.bool))
    every = torch.full_like(p.lse, k, dtype=torch.int64)
    return Kept(ids, log_p.exp(), every, p.mass.sum(dim=1))
