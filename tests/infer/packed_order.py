"""The arrangement of packed codes and scales, read byte by byte: what tests hold `packed.arranged` against."""

import itertools

import torch
from torch import Tensor

from lowbit.quant.quantised import Packed, Quantised
from lowbit.quant.spec import FP8_ROW, MXFP8, NVFP4

OF_OWN = ((6, 7, 8, 15), (22, 23, 24, 31), (0, 1, 2, 9), (16, 17, 18, 25), (10, 11, 12, 19), (26, 27, 28, 3))
"""Where the bits of the code of numbers 0 to 5 are in the word of their row."""
OF_BOTH = {
    (0, 6): ("B4", "B5", "A4", "B13"),
    (0, 7): ("B20", "B21", "A20", "B29"),
    (1, 6): ("B14", "A13", "A14", "A21"),
    (1, 7): ("B30", "A29", "A30", "A5"),
}
"""By half and number: where its bits are in words A (rows r) and B (rows r + 8)."""


def by_column(data: Tensor, bits: int) -> Tensor:
    """uint8 [tiles, steps, 1024] as the kernel reads it -> codes in the order of their columns, packed low bits first.

    The bytes of a word of 8 bits have numbers 0, 2, 1, 3.
    """
    tiles, steps, _ = data.shape
    numbers = 32 // bits
    codes = torch.full((16 * tiles, 16 * numbers * steps), -1, dtype=torch.int32)
    for half, r, j, word in itertools.product(range(2), range(8), range(4), range(4)):
        at = [(((h * 8 + r) * 4 + j) * 4 + word) * 4 for h in range(2)]
        words = [data[:, :, a : a + 4].contiguous().view(torch.int32)[..., 0] for a in at]  # [tiles, steps]
        for number in range(numbers):
            column = numbers * (4 * word + j) + number
            codes[half * 8 + r :: 16, column :: 16 * numbers] = _code(words, half, number, bits)
    assert codes.min() >= 0, "every code is somewhere"
    return (codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes).to(torch.uint8)


def _code(words: list[Tensor], half: int, number: int, bits: int) -> Tensor:
    if bits == 8:
        return words[half] >> 8 * (0, 2, 1, 3)[number] & 255
    if number < len(OF_OWN):
        places = [("AB"[half], bit) for bit in OF_OWN[number]]
    else:
        places = [(text[0], int(text[1:])) for text in OF_BOTH[half, number]]
    found = [(words["AB".index(word)] >> bit & 1) << i for i, (word, bit) in enumerate(places)]
    return found[0] | found[1] | found[2] | found[3]


def by_block(scales: Tensor) -> Tensor:
    """uint8 [tiles, steps, 128 or 32] -> [rows, blocks]: E4M3 of blocks of 16, which are held as E5M3; E8M0 of 32."""
    tiles, steps, size = scales.shape
    each = size // 16  # blocks of a row in a step
    found = torch.zeros(16 * tiles, steps * each, dtype=torch.uint8)
    for half, r, block in itertools.product(range(2), range(8), range(each)):
        # Blocks of 16 columns: word block // 2 of threads 0 and 1 or 2 and 3
        at = ((r * 2 + block % 2) * 2 + half) * 4 + block // 2 if each == 8 else (r * 2 + half) * 2 + block
        found[half * 8 + r :: 16, block::each] = scales[:, :, at]
    if each == 2:
        return found
    value = (8 + (found & 7).double()) / 8 * torch.exp2((found >> 3).double() - 10)
    return torch.where(found == 0, 0.0, value).to(torch.float8_e4m3fn).view(torch.uint8)


def held_numbers(width: int, data: Tensor, scales: Tensor | None, after: Tensor | None) -> Quantised:
    """What arranged codes and scales of weights [rows, width] stand for, read by the format's own decoder."""
    bits = 4 if width == data.shape[1] * 128 else 8
    spec = NVFP4 if bits == 4 else FP8_ROW if scales is None else MXFP8
    stored, outer = (after, None) if scales is None else (by_block(scales), after)
    assert stored is not None
    shape = (16 * len(data), width)
    blocks = (shape[0], stored.shape[1])
    return Packed(by_column(data, bits), stored, outer, shape, spec, blocks, False).unpack()
