"""Error feedback: what rounding took from this step's gradient is added to the next one.

Each rank remembers, for its part of the tensor, y - decoded(y) of what it sent, where y is the gradient plus what it
remembered before; the owner of a share does the same with the sum that it sends (the double form of Tang et al.,
"DoubleSqueeze", 2019). Over many steps nothing is lost. It costs 4 bytes a parameter, another 4 / ranks, a decoding of
what was just encoded, and 3 dB in each single step, so it is off unless asked for: at 6 bits rounding to nearest alone
trains as well; at 4 bits and below it matters.
"""

import torch
from torch import Tensor

from lowbit.comm.codec import Codec


class Feedback:
    """Residuals of one tensor that is reduced again and again. Made by `TwoHop.feedback`."""

    def __init__(self, sent: list[int], owned: list[int], device: torch.device) -> None:
        """Values that this rank sends, and that it owns, in each piece."""
        self.sent = [torch.zeros(n, dtype=torch.float32, device=device) for n in sent]
        self.owned = [torch.zeros(n, dtype=torch.float32, device=device) for n in owned]

    def state_tensors(self) -> dict[str, Tensor]:
        """FP32, this rank's own: they differ between ranks and belong in a checkpoint rank by rank."""
        return {"sent": torch.cat(self.sent), "owned": torch.cat(self.owned)}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` returned. Raises `ValueError` where the tensor was cut in another way."""
        for name, residuals in (("sent", self.sent), ("owned", self.owned)):
            lengths = [r.numel() for r in residuals]
            if state[name].numel() != sum(lengths):
                raise ValueError(
                    f"error feedback: {name} holds {state[name].numel()} values, this run needs {sum(lengths)}; "
                    f"start it from zeros after changing the number of ranks or the chunk size"
                )
            for residual, saved in zip(residuals, torch.split(state[name], lengths), strict=True):
                residual.copy_(saved)


def encode_with_residual(codec: Codec, x: Tensor, rows: int, per_row: int, residual: Tensor) -> Tensor:
    """x [n] plus residual [n], as `rows` messages; the residual becomes what they lost."""
    wanted = x.float() + residual
    messages = codec.encode_rows(wanted, rows, per_row)
    decoded = torch.empty_like(wanted)
    codec.decode_rows(messages, per_row, decoded)
    lost = wanted - decoded
    residual.copy_(torch.where(lost.isfinite(), lost, 0.0))  # an overflow must not stay for ever
    return messages
