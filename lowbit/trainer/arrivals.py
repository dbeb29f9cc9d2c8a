"""Which parameters get a gradient in every micro-batch, on every rank: what reductions in buckets rely on.

Ranks reduce gradients in buckets as they come, and buckets match only when every parameter has a gradient everywhere.
Experts that no token chose, or a branch that a batch does not take, have none. The first step tells.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from lowbit.errors import ConfigError
from lowbit.trainer.distributed import Ranks


class Arrivals:
    """Counts, during the first step, the micro-batches in which each parameter gets a gradient."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.micro_batches = 0
        """How many this rank has had; whoever runs them counts."""
        self._ranks = ranks
        self._counts = dict.fromkeys(parameters, 0)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._counter(name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items()
        ]

    def _counter(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            self._counts[name] += 1

        return arrived

    def judge(self) -> bool:
        """The first step's backward passes are over: whether some parameter had no gradient in some micro-batch.

        Every step then fills up with zeros and reduces after its backward passes. Called on all ranks.

        Raises:
            ConfigError: one had none at all. In one process it stays as it is, and ZeRO would still decay it.
        """
        for hook in self._hooks:
            hook.remove()
        *counts, micro_batches = self._ranks.sum([*self._counts.values(), self.micro_batches])
        for name, count in zip(self._counts, counts, strict=True):
            if count == 0:
                raise ConfigError(
                    f"parameter {name} got no gradient on any rank: one process leaves it alone, but several would "
                    "decay it; take it out of the model, or train it"
                )
        return any(count != micro_batches for count in counts)
