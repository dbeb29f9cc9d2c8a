"""Listening to low-bit layers during a pass: what goes into them, and which gradients come back.

For passes made for the purpose, outside of compiled code: while somebody listens, each layer's `project_together` is
covered by one that tells first. Afterwards the layers are what they were, and compiled code is as valid as before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from lowbit.models.layers import Linear
from lowbit.quant.linear import LowbitLinear

OnInput = Callable[[list[str], Tensor], None]
"""Names of the layers that read it together, and the input [..., in]."""
OnGradient = Callable[[str, Tensor], None]
"""A layer's name, and the gradient of its output [..., out]."""


@contextmanager
def listening(
    layers: Mapping[str, LowbitLinear], on_input: OnInput, on_gradient: OnGradient | None = None
) -> Iterator[None]:
    """Inside, `on_input` hears of every product of the layers (by name), and `on_gradient` when a backward passes."""
    names = {layer: name for name, layer in layers.items()}

    def tell(
        layer: LowbitLinear,
        compute: Callable[[Tensor, Sequence[Linear]], tuple[Tensor, ...]],
        x: Tensor,
        others: Sequence[Linear],
    ) -> tuple[Tensor, ...]:
        outputs = compute(x, others)
        together = [layer, *(o for o in others if isinstance(o, LowbitLinear) and layer.computes_as(o))]
        if len(together) <= len(others):  # each was called on its own, and has told
            return outputs
        if heard := [names[member] for member in together if member in names]:
            on_input(heard, x.detach())
        for member, y in zip(together, outputs, strict=True):
            if on_gradient is not None and member in names and y.requires_grad:
                y.register_hook(partial(on_gradient, names[member]))  # type: ignore[no-untyped-call]
        return outputs

    for layer in names:
        setattr(layer, "project_together", partial(tell, layer, layer.project_together))  # noqa: B010
    try:
        yield
    finally:
        for layer in names:
            delattr(layer, "project_together")
