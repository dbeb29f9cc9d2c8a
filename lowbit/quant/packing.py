"""Codes in as few bytes as they need, and block scales in the order that tensor cores read them.

* 4 bits: two codes a byte, the first in the low nibble: codes 1, 2, 3, 4 -> bytes 0x21, 0x43.
* 6 bits: four codes a in three bytes, a0 | a1 << 6 | a2 << 12 | a3 << 18, the lowest byte first.
* 8 bits: the codes themselves.
* scales, layout 32_4_4: a [rows, columns] matrix of scale bytes is padded with zeros to multiples of 128 and 4 and cut
  into tiles of 128 x 4, row of tiles after row of tiles; within a tile of 512 bytes, the scale of row r and column c
  lies at (r % 32) * 16 + (r // 32) * 4 + c (NVIDIA cuBLAS, "1D block scaling factors layout").
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes, one a byte, [..., n] -> bytes, uint8 [..., n * bits / 8]; n even for 4 bits, a multiple of 4 for 6."""
    if bits == 8:
        return codes.view(torch.uint8)
    if bits == 4:
        pairs = codes.reshape(*codes.shape[:-1], -1, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4)
    fours = codes.reshape(*codes.shape[:-1], -1, 4).to(torch.int32)
    word = fours[..., 0] | fours[..., 1] << 6 | fours[..., 2] << 12 | fours[..., 3] << 18
    return torch.stack((word & 0xFF, word >> 8 & 0xFF, word >> 16), dim=-1).flatten(-2).to(torch.uint8)


def unpack_codes(data: Tensor, bits: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The inverse of `pack_codes`; `dtype` is that of the codes (int8 for INT8)."""
    if bits == 8:
        return data.view(dtype)
    if bits == 4:
        return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
    threes = data.reshape(*data.shape[:-1], -1, 3).to(torch.int32)
    word = threes[..., 0] | threes[..., 1] << 8 | threes[..., 2] << 16
    return torch.stack([word >> shift & 0x3F for shift in (0, 6, 12, 18)], dim=-1).flatten(-2).to(torch.uint8)


def swizzle(scales: Tensor) -> Tensor:
    """Scale bytes uint8 [rows, columns] -> 32_4_4, uint8 [padded rows * padded columns]."""
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle`, uint8 [rows, columns]."""
    tiles = scales.reshape((rows + 127) // 128, (columns + 3) // 4, 32, 4, 4)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape((rows + 127) // 128 * 128, -1)
    return matrix[:rows, :columns].contiguous()
