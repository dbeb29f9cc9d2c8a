"""What a gradient codec is, and the plain ones: FP32, BF16 and integers with one scale a block.

A codec turns FP32 values into a message of bytes and back. The collective needs four more forms of the same two
operations, which a codec may do faster than one after the other: several messages cut from one tensor, several
messages written into one tensor, and the sum of the same values from every rank, decoded or encoded again.

The sum is part of the format: FP32, message 0 first, then message 1, ..., then one product with `factor` (1 / ranks for
a mean). Every implementation gives the same bits.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lowbit.comm.noise import Noise


class Codec(ABC):
    """`encode`, `decode` and `nbytes`; the other methods are made of them."""

    name: str
    bits: float
    """Bits a value in a long message."""
    align: int = 1
    """A share of a tensor should be a multiple of this many values, so that no message carries padding."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Length of the message that holds n values."""

    @abstractmethod
    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """x [n] FP32, BF16 or FP16 -> uint8 [nbytes(n)]. With noise: stochastic rounding, where the codec has it."""

    @abstractmethod
    def decode(self, message: Tensor, n: int) -> Tensor:
        """uint8 [nbytes(n)] -> FP32 [n]."""

    def encode_rows(self, x: Tensor, rows: int, per_row: int, noise: Noise | None = None) -> Tensor:
        """x [n], n <= rows * per_row, continued with zeros and cut into rows -> uint8 [rows, nbytes(per_row)]."""
        x = _padded(x, rows * per_row).view(rows, per_row)
        return torch.stack(
            [self.encode(x[r], noise.fork(r) if noise else None) for r in range(rows)]
            or [torch.empty(0, self.nbytes(per_row), dtype=torch.uint8, device=x.device)]
        )

    def decode_rows(self, messages: Tensor, per_row: int, out: Tensor) -> None:
        """messages [rows, nbytes(per_row)] -> out [n], of any float type: the inverse of `encode_rows`."""
        for r in range(messages.shape[0]):
            part = out[r * per_row : (r + 1) * per_row]
            if part.numel():
                part.copy_(self.decode(messages[r], per_row)[: part.numel()])

    def sum_decode(self, messages: Tensor, n: int, factor: float, out: Tensor | None = None) -> Tensor:
        """messages [ranks, nbytes(n)] -> FP32 [n]: their sum in the order of ranks, times factor."""
        total = self.decode(messages[0], n)
        for r in range(1, messages.shape[0]):
            total = total + self.decode(messages[r], n)
        if factor != 1.0:
            total = total * factor
        return total if out is None else out.copy_(total)

    def sum_encode(self, messages: Tensor, n: int, factor: float, noise: Noise | None = None) -> Tensor:
        """The same sum as one message, uint8 [nbytes(n)]."""
        return self.encode(self.sum_decode(messages, n, factor), noise)


def _padded(x: Tensor, n: int) -> Tensor:
    """x [m], m <= n -> [n], zeros at the end."""
    return x if x.numel() == n else torch.nn.functional.pad(x, (0, n - x.numel()))


class Fp32Codec(Codec):
    """FP32 itself: exact."""

    name = "fp32"
    bits = 32.0

    def nbytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        return x.float().contiguous().view(torch.uint8)

    def decode(self, message: Tensor, n: int) -> Tensor:
        return message[: 4 * n].view(torch.float32)

    def encode_rows(self, x: Tensor, rows: int, per_row: int, noise: Noise | None = None) -> Tensor:
        return self.encode(_padded(x, rows * per_row)).view(rows, 4 * per_row)


class Bf16Codec(Codec):
    """BF16, round to nearest even. Exact for tensors that are BF16 already."""

    name = "bf16"
    bits = 16.0

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        return x.bfloat16().contiguous().view(torch.uint8)

    def decode(self, message: Tensor, n: int) -> Tensor:
        return message[: 2 * n].view(torch.bfloat16).float()

    def encode_rows(self, x: Tensor, rows: int, per_row: int, noise: Noise | None = None) -> Tensor:
        return self.encode(_padded(x, rows * per_row)).view(rows, 2 * per_row)


class IntCodec(Codec):
    """Integers of 8 or 4 bits with an FP32 scale a block: largest magnitude -> 127 or 7, round to nearest even.

    For comparison: 8 bits and blocks of 2048 are what most compressed collectives send, 4 bits and blocks of 2048 is
    ZeRO++'s gradient format. A block with Inf or NaN decodes to NaN. Message: scales [blocks] FP32, then codes.
    """

    def __init__(self, bits: int = 8, block: int = 2048) -> None:
        if bits not in (4, 8) or block < 2 or block % 2:
            raise ValueError(f"integers of 4 or 8 bits in even blocks, not bits={bits}, block={block}")
        self.name = f"int{bits}" if block == 2048 else f"int{bits}_{block}"
        self.width, self.block = bits, block
        self.bits = bits + 32 / block
        self.align = block
        self.largest = (1 << (bits - 1)) - 1

    def blocks(self, n: int) -> int:
        return math.ceil(n / self.block)

    def nbytes(self, n: int) -> int:
        return self.blocks(n) * (4 + self.block * self.width // 8)

    def encode(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        blocks = self.blocks(x.numel())
        x = _padded(x.float(), blocks * self.block).view(blocks, self.block)
        largest = x.abs().amax(1) if blocks else x.new_zeros(0)
        finite = largest.isfinite()  # amax is NaN where a value is
        # By a tensor: a GPU divides by a number as it multiplies by its rounded inverse.
        scale = torch.where(finite, largest / torch.full_like(largest, self.largest), torch.nan)
        inverse = torch.where(finite & (largest > 0), self.largest / largest, 0.0)
        codes = (x * inverse[:, None]).round_().nan_to_num_(0.0).clamp_(-self.largest, self.largest).to(torch.int8)
        if self.width == 4:
            pairs = codes.view(blocks, self.block // 2, 2)
            codes = (pairs[..., 0] & 15) | (pairs[..., 1] << 4)
        return torch.cat([scale.view(torch.uint8).flatten(), codes.view(torch.uint8).flatten()])

    def decode(self, message: Tensor, n: int) -> Tensor:
        blocks = self.blocks(n)
        scale = message[: 4 * blocks].clone().view(torch.float32)
        codes = message[4 * blocks :].view(torch.int8).view(blocks, self.block * self.width // 8)
        if self.width == 4:
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], dim=-1).view(blocks, self.block)
        return (codes * scale[:, None]).flatten()[:n]
