"""The arrangement of packed codes, read word by word: what tests hold `packed.arranged` against."""

import torch
from torch import Tensor


def by_column(data: Tensor, bits: int) -> Tensor:
    """uint8 [rows, bytes] as the kernel reads it -> codes in the order of their columns, packed low bits first."""
    run, per, mask = {4: 4, 8: 8}[bits], 16 // bits, (1 << bits) - 1
    words = data[:, ::2].int() | data[:, 1::2].int() << 8
    codes = torch.empty(len(data), words.shape[1] * per, dtype=torch.int32)
    for word in range(words.shape[1]):
        for number in range(per):
            column = word // run * run * per + number * run + word % run
            codes[:, column] = words[:, word] >> (bits * number) & mask
    return (codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes).to(torch.uint8)
