"""Loss, divergence and calibration against FP64 on whole distributions, and ECE on cases with a known answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lowbit.configs.schema_distill import DistillConfig
from lowbit.data.dataset import Dataset
from lowbit.distill.calibration import BINS, calibration_bins, compare, ece
from lowbit.distill.teacher import Teacher
from lowbit.models.transformer import Transformer


def test_a_calibrated_and_an_overconfident_predictor() -> None:
    """Confidence .8 right in 80% and in 60% of 1000 cases; one bin, so ECE is the difference."""
    log_s = torch.log(torch.tensor([[0.8, 0.1, 0.1]])).expand(1000, -1)
    keep = torch.ones(1000, dtype=torch.bool)
    for right, expected in ((800, 0.0), (600, 0.2)):
        targets = torch.tensor([0] * right + [1] * (1000 - right))
        assert ece(calibration_bins(log_s, targets, keep)) == pytest.approx(expected, abs=1e-6)
    keep[:500] = False
    bins = calibration_bins(log_s, torch.zeros(1000, dtype=torch.int64), keep)
    assert bins[0].sum() == 500 and ece(bins) == pytest.approx(0.2)
    assert calibration_bins(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), keep[-2:])[0, BINS - 1] == 2


def test_against_whole_distributions(teacher: Teacher, dataset: Dataset, distillation: DistillConfig) -> None:
    student = Transformer(replace(distillation.model, layers=1, width=16), dataset.tokenizer.vocab_size)
    student.init_weights(5)
    found = compare(student, teacher.model, dataset.validation_batches(4, 300))
    sums, count, same, confidences = np.zeros(2), 0, 0, []
    for batch in dataset.validation_batches(1, 300):
        z = [
            (m(batch.tokens, batch.visibility)[0] @ m.head_weight.t())[:, : m.vocab_size].detach().double()
            for m in (student, teacher.model)
        ]
        keep = batch.weights[0] > 0
        log_s, log_p = (F.log_softmax(x, dim=1)[keep] for x in z)
        target = batch.targets[0][keep]
        sums += [float(F.nll_loss(log_s, target, reduction="sum")), float((log_p.exp() * (log_p - log_s)).sum())]
        same += int((log_s.argmax(1) == log_p.argmax(1)).sum())
        confidences += [(float(c.exp()), int(g == t)) for c, g, t in zip(*log_s.max(1), target, strict=True)]
        count += len(target)
    assert found.tokens == count
    assert found.loss == pytest.approx(sums[0] / count, rel=1e-5)
    assert found.kl == pytest.approx(sums[1] / count, rel=1e-4)
    assert found.agreement == pytest.approx(same / count)
    c, right = np.array(confidences).T
    place = np.minimum((c * BINS).astype(int), BINS - 1)
    expected = sum(abs(c[place == b].sum() - right[place == b].sum()) for b in range(BINS)) / count
    assert found.ece == pytest.approx(expected, abs=1e-6)
    assert found.excess == pytest.approx(c.mean() - right.mean(), abs=1e-6)
