"""What the trainer minimises on a micro-batch of conversations, and the same forward pass for reading alone.

`moments` must have the same names on all micro-batches and ranks: what is measured follows from the configuration.
"""

import torch
from torch import Tensor

from lowbit.configs.schema_rl import AlgorithmConfig
from lowbit.data.batch import Batch
from lowbit.models.policy_head import PolicyOutput, lm_head_policy
from lowbit.models.transformer import Transformer
from lowbit.rl.batches import RlBatch
from lowbit.rl.losses import rl_loss
from lowbit.trainer.objective import ObjectiveOutput


def policy_of(model: Transformer, batch: Batch, index: Tensor, temperature: float) -> PolicyOutput:
    """Log-probability and entropy of the tokens at `index` [N] of the flattened targets: prompts pass no head."""
    hidden: Tensor = model(batch.tokens, batch.visibility)
    return lm_head_policy(
        hidden.flatten(0, 1)[index],
        model.head_weight,
        batch.targets.flatten()[index],
        vocab_size=model.vocab_size,
        temperature=temperature,
        softcap=model.config.logit_softcap,
    )


@torch.no_grad()
def read_logprobs(model: Transformer, batch: Batch, index: Tensor, temperature: float) -> Tensor:
    """The same for reading: log-probabilities FP32 [N], in the mode that the model trains in."""
    return policy_of(model, batch, index, temperature).logprob


class PolicyGradient:
    """The objective of `lowbit rl`."""

    def __init__(self, algorithm: AlgorithmConfig, temperature: float) -> None:
        self.algorithm = algorithm
        self.temperature = temperature
        self._largest: Tensor | None = None

    def __call__(self, model: Transformer, batch: Batch) -> ObjectiveOutput:
        assert isinstance(batch, RlBatch) and batch.index is not None and batch.drawn is not None
        out = policy_of(model, batch, batch.index, self.temperature)
        found = rl_loss(out.logprob, out.entropy, batch.drawn, self.algorithm)
        largest = found.largest_difference.detach()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        moments = {name: torch.stack([values.sum(), values.square().sum()]) for name, values in found.per_token.items()}
        policy_loss = found.loss_sum.detach()
        moments["policy_loss"] = torch.stack([policy_loss, policy_loss.square()])
        return ObjectiveOutput(found.loss_sum, -out.logprob.detach().sum(), moments)

    def take_largest(self) -> float:
        """Greatest |log pi - log mu| since the last call, on this rank."""
        largest, self._largest = self._largest, None
        return 0.0 if largest is None else float(largest)
