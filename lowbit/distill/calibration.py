"""How a student compares with its teacher and with the text: loss, divergence, calibration.

    KL(p || s)   over whole distributions, exact, in nats a token
    ECE          expected calibration error: predictions in equal bins by confidence, max_v s_v; the mean over the bins,
                 by their share of tokens, of |accuracy - mean confidence| (C. Guo et al., 2017, arXiv 1706.04599)
    excess       mean confidence - accuracy: positive is overconfident

A student of truncated targets becomes overconfident, because mass outside the k likeliest tokens is never asked for.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.data.batch import Batch
from lowbit.models.lm_head import default_chunk, lm_head_logits, token_chunks
from lowbit.models.transformer import Transformer

BINS = 15


@dataclass(frozen=True)
class Comparison:
    """Measures of a student on held-out text."""

    loss: float
    """Cross-entropy with the text, nats a token."""
    kl: float
    """KL(teacher || student), nats a token."""
    ece: float
    excess: float
    agreement: float
    """Share of tokens on which both find the same token likeliest."""
    tokens: int


@torch.no_grad()
def compare(student: Transformer, teacher: Transformer, batches: Iterable[Batch]) -> Comparison:
    """Measure `student` against `teacher` on batches; both are on one device and share a vocabulary."""
    device = student.head_weight.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nll, KL, agreement
    bins = torch.zeros(3, BINS, dtype=torch.float64, device=device)  # tokens, confidence, correct
    for batch in batches:
        here = batch.to(device)
        ours, theirs = (model(here.tokens, here.visibility).flatten(0, 1) for model in (student, teacher))
        targets, counted = here.targets.flatten(), here.weights.flatten() > 0
        for rows in token_chunks(len(targets), default_chunk(device.type, 2 * student.vocab_size)):
            log_s, log_p = _log_softmax(student, ours[rows]), _log_softmax(teacher, theirs[rows])
            keep = counted[rows]
            nll = -log_s.gather(1, targets[rows, None])[:, 0]
            kl = (log_p.exp() * (log_p - log_s)).sum(dim=1)
            same = log_s.argmax(dim=1) == log_p.argmax(dim=1)
            sums += torch.stack([torch.where(keep, x, 0).double().sum() for x in (nll, kl, same.float())])
            bins += calibration_bins(log_s, targets[rows], keep)
    tokens = float(bins[0].sum())
    loss, kl_mean, agreement = (sums / tokens).tolist()
    return Comparison(loss, kl_mean, ece(bins), float((bins[1] - bins[2]).sum()) / tokens, agreement, int(tokens))


def calibration_bins(log_s: Tensor, targets: Tensor, keep: Tensor) -> Tensor:
    """Log-probabilities [N, V], targets [N], which count [N] -> FP64 [3, BINS]: tokens, confidences, correct ones."""
    confidence, guess = log_s.max(dim=1)
    confidence = confidence.exp().double()
    place = (confidence * BINS).long().clamp_(max=BINS - 1)[keep]
    out = torch.zeros(3, BINS, dtype=torch.float64, device=log_s.device)
    for row, value in enumerate((torch.ones_like(confidence), confidence, (guess == targets).double())):
        out[row].index_add_(0, place, value[keep])
    return out


def ece(bins: Tensor) -> float:
    """Expected calibration error of `calibration_bins` added up."""
    return float((bins[1] - bins[2]).abs().sum() / bins[0].sum())


def _log_softmax(model: Transformer, hidden: Tensor) -> Tensor:
    logits = lm_head_logits(hidden, model.head_weight, vocab_size=model.vocab_size, softcap=model.config.logit_softcap)
    return logits.log_softmax(dim=1)
