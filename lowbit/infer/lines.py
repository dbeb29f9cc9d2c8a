"""The lines of a sampler's slots on the device, which decoding steps read and move on by themselves.

A line is int64 numbers:

    [token to be read, tokens stored, length of the prompt (0: nobody's), line of its noise, table of blocks ...]
"""

from typing import NamedTuple

from torch import Tensor

TOKEN, STORED, PROMPT, NOISE, TABLE = range(5)
"""Columns."""


class Begun(NamedTuple):
    """What a step makes of its rows' lines, one new token each."""

    places: Tensor
    """int64 [rows]: where its keys go."""
    rope: tuple[Tensor, Tensor]
    """FP32 [rows, 1, 1, D]: its rotary tables."""
    noise: Tensor
    """FP64 [rows]."""
