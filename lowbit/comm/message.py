"""Where things lie in a message of the 6-bit formats: a header, then planes.

    bytes 0..15            header: "LQ", version, format, n as a 64-bit little-endian integer, four zero bytes
    exponents              sq48: a byte for each 4096 values, filled up with zeros to a multiple of 16 bytes
    scales   [blocks]      a byte for each block
    signs    [blocks]      bit i: value i is negative
    codes    [4 blocks]    value 2k of a block in the low half of byte k, value 2k + 1 in the high half

n is filled up with zeros to a multiple of 16 blocks, so that every plane begins at a multiple of 16 bytes and a kernel
can write it in whole words. Planes, not records of 6 bytes: neighbouring threads then write neighbouring bytes.
"""

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.comm.grid import SQ48, SQUINCH, TILE, Grid
from lowbit.errors import LowbitError

MAGIC = b"LQ"
VERSION = 1
HEADER = struct.Struct("<2sBBq4x")
BLOCKS_MULTIPLE = 16

_NAMES = {grid.ident: grid.name for grid in (SQUINCH, SQ48)}


@dataclass(frozen=True)
class Layout:
    """Byte offsets in the message of n values."""

    tiles: int
    """Exponent bytes in use; 0 for squinch."""
    blocks: int
    """Blocks, filled up to a multiple of 16."""
    scales: int
    first: int
    """Offset of the signs."""
    second: int
    """Offset of the codes."""
    nbytes: int

    exponents: int = HEADER.size


def layout(grid: Grid, n: int) -> Layout:
    """Layout of the message of n values."""
    unit = BLOCKS_MULTIPLE * grid.block
    blocks = BLOCKS_MULTIPLE * math.ceil(n / unit)
    tiles = 0 if grid is SQUINCH else math.ceil(n / TILE)
    scales = HEADER.size + 16 * math.ceil(tiles / 16)
    first = scales + blocks
    second = first + blocks
    return Layout(tiles, blocks, scales, first, second, second + 4 * blocks)


def header(grid: Grid, n: int) -> bytes:
    """The first 16 bytes."""
    return HEADER.pack(MAGIC, VERSION, grid.ident, n)


def header_words(grid: Grid, n: int) -> tuple[int, int]:
    """The header's first 12 bytes as a 32-bit and a 64-bit integer: what a kernel writes."""
    word, count = struct.unpack_from("<iq", header(grid, n))
    return int(word), int(count)


def check_header(grid: Grid, n: int, message: Tensor) -> None:
    """Raise `LowbitError` unless this is a message of n values in this format. Waits for the device."""
    expected = layout(grid, n).nbytes
    if message.dtype != torch.uint8 or message.numel() != expected:
        raise LowbitError(f"{grid.name}: a message of {n} values is {expected} bytes, got {message.numel()}")
    magic, version, ident, count = HEADER.unpack(bytes(message[: HEADER.size].tolist()))
    if magic != MAGIC:
        raise LowbitError(
            f"{grid.name}: not a gradient message (it begins with {magic!r}); do all ranks use one codec?"
        )
    if version != VERSION:
        raise LowbitError(
            f"{grid.name}: message of version {version}, ours is {VERSION}: run the same version of lowbit on all ranks"
        )
    if ident != grid.ident:
        sent = _NAMES.get(ident, f"format {ident}")
        raise LowbitError(f"{grid.name}: the message is in {sent}: set the same comm.kind on all ranks")
    if count != n:
        raise LowbitError(f"{grid.name}: the message holds {count} values, expected {n}: ranks differ in their tensors")
