"""Bits per byte on held-out documents.

    bpb = sum of -ln p(token) over held-out text / (ln 2 * bytes of that text)

Unlike a loss per token it does not depend on the tokenizer, so runs with different vocabularies, and the
byte-trigram baseline, compare on one scale. Targets that stand for no bytes (the end-of-text separator) are
left out of both sums. Validation runs in the training forward's own precision.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowbit.data.batch import Batch
from lowbit.models.lm_head import lm_head_nll
from lowbit.models.transformer import Transformer
from lowbit.trainer.distributed import ALONE, Ranks


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation measured."""

    bpb: float
    """Bits per byte of text."""
    loss: float
    """Nats per target token, separators included."""
    tokens: int
    """Target tokens read."""
    text_bytes: int
    """Bytes of text they stand for."""


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch], token_bytes: np.ndarray, ranks: Ranks = ALONE) -> Evaluation:
    """Measure `model` on `batches`; `token_bytes` [vocab] gives the bytes each token stands for.

    Several ranks have equally many batches each, and all get the result over all of them.
    """
    device = model.head_weight.device
    table = torch.as_tensor(token_bytes, device=device)  # [vocab]
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in batches:
        sums += _batch_sums(model, batch.to(device), table)
    nll, text_nll, tokens, text_bytes = ranks.sum(sums.tolist())  # the only wait for the device
    return Evaluation(
        bpb=text_nll / (math.log(2) * text_bytes) if text_bytes else math.nan,
        loss=nll / tokens if tokens else math.nan,
        tokens=int(tokens),
        text_bytes=int(text_bytes),
    )


def _batch_sums(model: Transformer, batch: Batch, table: Tensor) -> Tensor:
    """[nll, nll of text targets, targets, bytes] of one batch, FP64."""
    targets = batch.targets.flatten()  # [N]
    weights = batch.weights.flatten()  # [N]
    hidden = model(batch.tokens, batch.visibility).flatten(0, 1)  # [N, width]
    nll = lm_head_nll(
        hidden, model.head_weight, targets, vocab_size=model.vocab_size, softcap=model.config.logit_softcap
    )
    counted = weights > 0
    target_bytes = table[targets] * counted
    text = target_bytes > 0
    zero = nll.new_zeros(())
    return torch.stack(
        [
            torch.where(counted, nll, zero).double().sum(),
            torch.where(text, nll, zero).double().sum(),
            counted.double().sum(),
            target_bytes.double().sum(),
        ]
    )
