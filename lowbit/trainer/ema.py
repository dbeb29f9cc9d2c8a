"""An exponential moving average of the weights, evaluated beside them.

    average <- decay * average + (1 - decay) * weight        after every optimizer step, in FP32

It starts at the weights it is built from, so that it needs no bias correction, and costs one more copy of the weights
on the device. Averages are kept by fully qualified name; a weight shared under two names is averaged once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowbit.errors import CheckpointError


class Ema:
    """Moving average of a model's parameters; `decay` in [0, 1), 0.999 averages over about 1000 steps."""

    def __init__(
        self,
        weights: nn.Module | Mapping[str, Tensor],
        decay: float,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        """`weights`: a model, or master weights by name (a rank's parts of them). `refresh` is called when they have
        been exchanged, and makes the model compute with them."""
        named = weights.named_parameters() if isinstance(weights, nn.Module) else weights.items()
        self.decay = decay
        self._refresh = refresh
        self._weights = {name: weight.detach() for name, weight in named}
        self._average = {name: weight.to(torch.float32, copy=True) for name, weight in self._weights.items()}
        self._swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now; call it once after each optimizer step."""
        self._refuse_swapped("update")
        weights = [weight.to(torch.float32) for weight in self._weights.values()]
        torch._foreach_lerp_(list(self._average.values()), weights, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model hold the averages inside the `with` block; afterwards, also after an error, its own weights.

        Values are exchanged in place, tensor by tensor: addresses stay, which compiled code and captured graphs rely
        on, and no more than one tensor's size of extra memory is needed.
        """
        self._refuse_swapped("swap")
        done: list[str] = []
        self._swapped = True
        try:
            for name in self._weights:
                self._exchange(name)
                done.append(name)
            self._refresh()
            yield
        finally:
            for name in done:
                self._exchange(name)
            self._refresh()
            self._swapped = False

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        weight, average = self._weights[name], self._average[name]
        kept = weight.clone()
        weight.copy_(average)
        average.copy_(kept)

    def _refuse_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(f"cannot {what} the moving average while the model holds it: leave swapped() first")

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages, FP32, by fully qualified name. They are the live tensors, not copies."""
        self._refuse_swapped("read")
        return dict(self._average)

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over saved averages; CheckpointError when names or shapes differ from the model's."""
        self._refuse_swapped("load")
        for name in sorted(self._average.keys() ^ tensors.keys()):
            where = "checkpoint" if name in self._average else "model"
            raise CheckpointError(f"moving average: {name} is missing in the {where}; another run_name starts anew")
        for name, average in self._average.items():
            if tensors[name].shape != average.shape:
                got, want = tuple(tensors[name].shape), tuple(average.shape)
                raise CheckpointError(f"moving average: {name} has shape {got} in the checkpoint, {want} in the model")
        for name, average in self._average.items():
            average.copy_(tensors[name])
