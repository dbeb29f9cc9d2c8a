"""What a batch is trained for: the one thing, with the batch source, that differs between pretraining,
the distilled student and the RL trainer.

An objective returns a *sum* over the batch's tokens, never a mean. The loop divides by the number of valid
tokens of the whole optimizer step (all micro-batches, all ranks), so that micro-batches with different numbers
of valid tokens weigh by their tokens: a mean of means would not be the gradient of any loss we report.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from lowbit.data.batch import Batch
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.transformer import Transformer


@dataclass(frozen=True)
class ObjectiveOutput:
    """Sums over one micro-batch."""

    loss_sum: Tensor
    """FP32 scalar to differentiate: the sum over valid tokens of everything trained for."""
    nll_sum: Tensor
    """FP32 scalar, detached: the sum of cross-entropies in nats, what `loss` reports."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """Further metrics by name, FP32 [2], detached: the sums of a quantity and of its square over the valid tokens.
    The loop reports the mean as NAME and its standard error as NAME_se."""


class Objective(Protocol):
    """Maps a model and a micro-batch to the sums that are trained for and reported."""

    def __call__(self, model: Transformer, batch: Batch) -> ObjectiveOutput: ...


def run_objective(objective: Objective, model: Transformer, batch: Batch) -> ObjectiveOutput:
    """An objective's output, with what the model itself trains for (its routers' losses) added to what is
    differentiated: every objective trains for it, none reports it."""
    out = objective(model, batch)
    auxiliary = model.take_auxiliary()
    return out if auxiliary is None else replace(out, loss_sum=out.loss_sum + auxiliary * batch.valid_tokens)


@dataclass(frozen=True)
class NextToken:
    """Next-token cross-entropy, with `z_loss * logsumexp(logits)**2` added to what is trained for."""

    z_loss: float = 0.0

    def __call__(self, model: Transformer, batch: Batch) -> ObjectiveOutput:
        hidden = model(batch.tokens, batch.visibility)  # [B, T, width]
        out = lm_head_loss(
            hidden.flatten(0, 1),
            model.head_weight,
            batch.targets.flatten(),
            batch.weights.flatten(),
            vocab_size=model.vocab_size,
            z_loss=self.z_loss,
            softcap=model.config.logit_softcap,
        )
        return ObjectiveOutput(out.loss_sum, out.nll_sum)
