"""How keys and values are stored: as they are, or in 8 bits with a scale a token and head.

    amax = max |x| over a head's D numbers,  scale = amax / L,  code = round(x * (L / amax)),  L = 127, or 448 for E4M3

A scale for each token and head depends on nothing else in the batch. What attention reads is the code times the scale,
in a prefill too: so that a token's output is the same whether the keys before it were computed just now or found in the
cache. FP8's cast is to E4M3, nearest even; no number exceeds 448.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class KvFormat(StrEnum):
    """Of keys and values in the cache."""

    auto = "auto"
    """The compute type."""
    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"
    int8 = "int8"


_DTYPES = {
    KvFormat.fp32: torch.float32,
    KvFormat.bf16: torch.bfloat16,
    KvFormat.fp8: torch.float8_e4m3fn,
    KvFormat.int8: torch.int8,
}
_LARGEST = {KvFormat.fp8: 448.0, KvFormat.int8: 127.0}


@dataclass(frozen=True)
class KvCodec:
    """Between numbers and what is stored of them."""

    dtype: torch.dtype
    largest: float | None
    """Of a code; None where there are no scales."""

    @classmethod
    def of(cls, fmt: KvFormat, compute_dtype: torch.dtype) -> "KvCodec":
        """For a format's name."""
        return cls(_DTYPES.get(fmt, compute_dtype), _LARGEST.get(fmt))

    @property
    def token_bytes(self) -> float:
        """Of one number; the scale (4 bytes a head) apart."""
        return self.dtype.itemsize

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [..., D] -> (codes [..., D], FP32 scales [...] or None)."""
        if self.largest is None:
            return x.to(self.dtype), None
        x = x.float()
        amax = x.abs().amax(-1)
        # Divided by and into a tensor: PyTorch multiplies by an inverse where one of the two is a number.
        largest = torch.full_like(amax, self.largest)
        inverse = torch.where(amax > 0, largest / amax, 0.0)
        scaled = (x * inverse[..., None]).clamp(-self.largest, self.largest)
        codes = (scaled.round() if self.dtype is torch.int8 else scaled).to(self.dtype)
        return codes, amax / largest

    def decode(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The numbers that codes stand for, in `dtype`."""
        if scales is None:
            return codes.to(dtype)
        return (codes.float() * scales[..., None]).to(dtype)

    def through(self, x: Tensor) -> Tensor:
        """x as the cache will give it back."""
        codes, scales = self.encode(x)
        return self.decode(codes, scales, x.dtype)
