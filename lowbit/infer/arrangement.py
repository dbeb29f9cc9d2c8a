"""How packed weights lie in memory for the kernel that multiplies by them (`kernels.packed`).

Every thread's codes come in one read, a warp's next to each other, and the eight 4-bit codes of two words of 32 bits
each lie where few instructions make numbers of them (`kernels.lanes`). Of words A (row r) and B (row r + 8), numbers 0
to 7 of each row, with bit 0 to 2 of a code for its magnitude, bit 3 for its sign:

    numbers 0, 1     magnitude at bits 6 and 22 of the row's own word, sign at 15 and 31
    numbers 2, 3     magnitude at 0 and 16, sign at 9 and 25
    numbers 4, 5     magnitude at 10 and 26, sign at 19 and 3
    C = A & SHARED | (B >> 2) & ~SHARED:
    numbers 6, 7     of row r magnitude at 2 and 18, sign at 11 and 27; of row r + 8 at 12 and 28, 21 and 5

Scales of blocks of 16 become bytes E5M3, exponent + 10 above three bits, in which all of them are normal numbers. Zero
is none of them: the codes of such a block, all of them zeros, say it.
"""

from functools import cache

import torch
from torch import Tensor

from lowbit.quant.quantised import Packed

TILE_ROWS = 16
"""Rows of a packed weight that lie together; their number is a multiple of it."""
SHARED = 0x60306030
"""Bits of A that belong to none of numbers 0 to 5 of its row."""
PIECE = 1 << 22
"""Bytes of codes that are laid down at once, which takes some twenty times as many."""


def arranged(packed: Packed, rows: int) -> tuple[Tensor, Tensor | None]:
    """Codes uint8 [rows / 16, steps, 1024] and scales of blocks uint8 [rows / 16, steps, 128 (4 bits) or 32 (8)].

    Args:
        packed: a weight [rows, width] of 4 bits with blocks of 16, or of 8 with blocks of 32 or without (no scales).
        rows: a multiple of 16; what is stored beyond them is padding.
    """
    data, bits = packed.data[:rows].view(torch.uint8), packed.spec.element.bits
    scales = packed.scales[:rows] if packed.scales.dtype is torch.uint8 else None
    if bits == 8:
        return _whole_bytes(data), None if scales is None else _two_a_row(scales)
    assert scales is not None
    zero = scales[:, :, None] == 0
    data = data.view(*scales.shape, 8).masked_fill(zero, 0).flatten(1)
    table = _e5m3().to(scales.device)
    parts = torch.split(data, max(1, PIECE // data.shape[1] // TILE_ROWS) * TILE_ROWS)
    return torch.cat([_half_bytes(part) for part in parts]), _four_a_group(table[scales.int()])


def _whole_bytes(data: Tensor) -> Tensor:
    """Bytes of a word: numbers 0, 2, 1, 3."""
    # [tiles, half, 8 r, steps, word, 4 j, pairs, of a pair]: a word has the first of all pairs, then the second
    codes = data.view(len(data) // TILE_ROWS, 2, 8, -1, 4, 4, 2, 2)
    return codes.permute(0, 3, 1, 2, 5, 4, 7, 6).flatten(2)


def _half_bytes(data: Tensor) -> Tensor:
    """Words A of all threads, then words B."""
    # [tiles, half, 8 r, steps, word, 4 j, byte of two numbers] -> [half, byte, tiles, steps, 8 r, 4 j, word]
    codes = data.view(len(data) // TILE_ROWS, 2, 8, -1, 4, 4, 4).permute(1, 6, 0, 3, 2, 5, 4).int()
    first, second = codes & 15, codes >> 4

    def own(half: int) -> Tensor:
        word = _placed(first[half, 0], 6, 15) | _placed(second[half, 0], 22, 31)
        word |= _placed(first[half, 1], 0, 9) | _placed(second[half, 1], 16, 25)
        return word | _placed(first[half, 2], 10, 19) | _placed(second[half, 2], 26, 3)

    both = _placed(first[0, 3], 2, 11) | _placed(second[0, 3], 18, 27)
    both |= _placed(first[1, 3], 12, 21) | _placed(second[1, 3], 28, 5)
    words = torch.stack((own(0) | both & SHARED, own(1) | (both & ~SHARED) << 2), dim=2)
    return words.view(torch.uint8).flatten(2)


def _placed(code: Tensor, magnitude: int, sign: int) -> Tensor:
    """Codes int32 with their bits 0 to 2 and bit 3 at these places."""
    return (code & 7) << magnitude | (code >> 3) << sign


def _four_a_group(scales: Tensor) -> Tensor:
    """[rows, blocks] -> 8 r, groups of j, half, word."""
    tiles = len(scales) // TILE_ROWS
    return scales.view(tiles, 2, 8, -1, 4, 2).permute(0, 3, 2, 5, 1, 4).flatten(2).contiguous()


def _two_a_row(scales: Tensor) -> Tensor:
    """[rows, blocks] -> 8 r, half, block."""
    tiles = len(scales) // TILE_ROWS
    return scales.view(tiles, 2, 8, -1, 2).permute(0, 3, 2, 1, 4).flatten(2).contiguous()


@cache
def _e5m3() -> Tensor:
    """By a byte E4M3 (of a scale: not negative, no NaN), the byte E5M3; uint8 [256]."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    mantissa, exponent = torch.frexp(values)  # value = mantissa 2**exponent, mantissa in [0.5, 1)
    codes = torch.where(values > 0, (exponent - 1 + 10) * 8 + (16 * mantissa - 8).to(torch.int32), 0)
    return torch.cat((codes, torch.zeros(129, dtype=codes.dtype))).to(torch.uint8)
