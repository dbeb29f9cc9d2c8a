"""Error feedback: what rounding took from this step's gradient is added to the next one.

Each rank remembers y - decoded(y) of what it sent, where y is the gradient plus what it remembered before; in an
all-reduce the owner of a share does the same with the sum that it sends (the double form of Tang et al.,
"DoubleSqueeze", 2019). Over many steps nothing is lost. It costs 4 bytes a parameter, in an all-reduce another
4 / ranks, a decoding of what was just encoded, and 3 dB in each single step, so it is off unless asked for: at 6 bits
rounding to nearest alone trains as well; at 4 bits and below it matters.
"""

import torch
from torch import Tensor

from lowbit.comm.codec import Codec


class Feedback:
    """Residuals of one tensor that is all-reduced again and again. Made by `TwoHop.feedback`."""

    def __init__(self, sent: Tensor, pieces: list[tuple[int, int]], owned: list[tuple[int, int]]) -> None:
        """
        Args:
            sent: FP32 [n], what this rank lost of each number so far; changed in place.
            pieces: [begin, end) of the pieces that follow each other. owned: in each, of this rank's share.
        """
        self._sent, self._pieces, self._shares = sent, pieces, owned
        self._owned = [sent.new_zeros(end - begin) for begin, end in owned]
        self.numel = sent.numel()

    def sent(self, piece: int) -> Tensor:
        """What this rank lost of a piece that it sent, a view."""
        begin, end = self._pieces[piece]
        return self._sent[begin:end]

    def owned(self, piece: int) -> Tensor:
        """What it lost of its share's sum."""
        return self._owned[piece]

    def spread(self) -> Tensor:
        """[n]: what was lost of sums, zero where another rank owns them."""
        whole = torch.zeros_like(self._sent)
        for residual, (begin, end) in zip(self._owned, self._shares, strict=True):
            whole[begin:end] = residual
        return whole

    def take(self, whole: Tensor) -> None:
        """This rank's shares of what was lost of sums, [n]."""
        for residual, (begin, end) in zip(self._owned, self._shares, strict=True):
            residual.copy_(whole[begin:end])


def encode_with_residual(codec: Codec, x: Tensor, rows: int, per_row: int, residual: Tensor) -> Tensor:
    """x [n], of which the first m are no padding, plus residual [m], as `rows` messages; the residual becomes what they
    lost.
    """
    wanted = x.to(torch.float32, copy=True)
    used = wanted[: residual.numel()]
    used += residual
    messages = codec.encode_rows(wanted, rows, per_row)
    decoded = torch.empty_like(wanted)
    codec.decode_rows(messages, per_row, decoded)
    lost = used - decoded[: used.numel()]
    residual.copy_(torch.where(lost.isfinite(), lost, 0.0))  # an overflow must not stay for ever
    return messages
