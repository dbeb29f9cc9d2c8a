"""The arrangement of packed codes and scales, read byte by byte: what tests hold `packed.arranged` against."""

import itertools

import torch
from torch import Tensor

from lowbit.quant.quantised import Packed, Quantised
from lowbit.quant.spec import FP8_ROW, MXFP8, NVFP4


def by_column(data: Tensor, bits: int) -> Tensor:
    """uint8 [tiles, steps, 1024] as the kernel reads it -> codes in the order of their columns, packed low bits first.

    The bytes of a word have, of 4 bits, numbers 0 and 2, 4 and 6, 1 and 3, 5 and 7; of 8 bits 0, 2, 1, 3.
    """
    tiles, steps, _ = data.shape
    numbers = 32 // bits
    codes = torch.full((16 * tiles, 16 * numbers * steps), -1, dtype=torch.int32)
    for half, r, j, word, byte in itertools.product(range(2), range(8), range(4), range(4), range(4)):
        found = data[:, :, (((half * 8 + r) * 4 + j) * 4 + word) * 4 + byte].int()  # [tiles, steps]
        if bits == 4:
            first, second = ((0, 2), (4, 6), (1, 3), (5, 7))[byte]
            held = {first: found & 15, second: found >> 4}
        else:
            held = {(0, 2, 1, 3)[byte]: found}
        for number, code in held.items():
            column = numbers * (4 * word + j) + number
            codes[half * 8 + r :: 16, column :: 16 * numbers] = code
    assert codes.min() >= 0, "every code is somewhere"
    return (codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes).to(torch.uint8)


def by_block(scales: Tensor) -> Tensor:
    """uint8 [tiles, steps, 128 or 32] -> [rows, blocks]."""
    tiles, steps, size = scales.shape
    each = size // 16  # blocks of a row in a step
    found = torch.zeros(16 * tiles, steps * each, dtype=torch.uint8)
    for half, r, block in itertools.product(range(2), range(8), range(each)):
        # Blocks of 16 columns: word block // 2 of threads 0 and 1 or 2 and 3
        at = ((r * 2 + block % 2) * 2 + half) * 4 + block // 2 if each == 8 else (r * 2 + half) * 2 + block
        found[half * 8 + r :: 16, block::each] = scales[:, :, at]
    return found


def held_numbers(width: int, data: Tensor, scales: Tensor | None, after: Tensor | None) -> Quantised:
    """What arranged codes and scales of weights [rows, width] stand for, read by the format's own decoder."""
    bits = 4 if width == data.shape[1] * 128 else 8
    spec = NVFP4 if bits == 4 else FP8_ROW if scales is None else MXFP8
    stored, outer = (after, None) if scales is None else (by_block(scales), after)
    assert stored is not None
    shape = (16 * len(data), width)
    blocks = (shape[0], stored.shape[1])
    return Packed(by_column(data, bits), stored, outer, shape, spec, blocks, False).unpack()
