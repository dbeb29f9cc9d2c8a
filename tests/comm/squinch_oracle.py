"""The 6-bit formats once more, from their descriptions: Python integers, fractions and FP64, one block at a time.

Nothing here is shared with the package. Slow on purpose: boundaries are compared as exact rational numbers.
"""

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

F32 = np.float32


@dataclass(frozen=True)
class Spec:
    ident: int
    block: int
    levels: int
    steps: int
    cubed: bool
    """Levels grow like q**1.5 (sq48) rather than q**2."""


SPECS = {
    "squinch": Spec(1, 8, 15, 4050, False),
    "sq48": Spec(2, 8, 15, 2074, True),
}


def is_at_least(i: int, q: int, spec: Spec, shrunk: bool) -> bool:
    """Whether i / steps (over 2**(-1/8) if shrunk) has level q or more: ratio**(1/p) >= (q - 1/2) / levels, exactly."""
    ratio, bound = Fraction(i, spec.steps), Fraction(2 * q - 1, 2 * spec.levels)
    if not spec.cubed:
        return ratio >= bound**2
    # ratio * 2**(1/8) >= bound**1.5, both sides to the 8th power
    return ratio**8 * (2 if shrunk else 1) >= bound**12


def level_of(i: int, spec: Spec, shrunk: bool = False) -> int:
    q = 0
    while q < spec.levels and is_at_least(i, q + 1, spec, shrunk):
        q += 1
    return q


def eighth_scale(s: int) -> F32:
    """2**(s/8) rounded to FP32."""
    with np.errstate(over="ignore"):
        return F32(2.0 ** (s / 8))


def position(q: int, spec: Spec, shrunk: bool = False) -> int:
    return math.floor(spec.steps * (q / spec.levels) ** 1.5 * (2**-0.125 if shrunk else 1.0) + 0.5)


def nearest_step(x: F32, reciprocal: F32, spec: Spec) -> int:
    """round-half-even of the FP32 product, by Python's own rounding of an exact value."""
    return min(spec.steps, round(Fraction(float(F32(abs(x)) * reciprocal))))


class Oracle:
    def __init__(self, name: str, search: bool = True) -> None:
        self.spec = SPECS[name]
        self.name = name
        self.search = search
        self.tables = {
            shrunk: [level_of(i, self.spec, shrunk) for i in range(self.spec.steps + 1)] for shrunk in (False, True)
        }

    def ceil_eighth(self, m: F32) -> int:
        """The smallest s with FP32(2**(s/8)) >= m."""
        s = math.floor(8 * math.log2(float(m))) - 2
        while eighth_scale(s) < m:
            s += 1
        return s

    def near_eighth(self, m: F32) -> int:
        """The s nearest to 8 log2 m."""
        exact = 8 * math.log2(float(m))
        return math.floor(exact + 0.5)

    def encode(self, x: np.ndarray) -> bytes:
        spec, n = self.spec, len(x)
        blocks = 16 * -(-n // (16 * spec.block))
        padded = np.zeros(blocks * spec.block, F32)
        padded[:n] = x
        rows = padded.reshape(blocks, spec.block)
        scales, codes = [], []
        exponents: list[int] = []
        per_tile = 4096 // spec.block
        for b, row in enumerate(rows):
            finite = self.is_finite(row)
            m = F32(np.abs(row).max()) if finite else F32(0)
            if self.name == "squinch":
                scale, q = self.squinch_block(row, m)
            else:
                if b % per_tile == 0:
                    tile = rows[b : b + per_tile]
                    sizes = [F32(np.abs(r).max()) for r in tile if self.is_finite(r)]
                    exponents.append(self.tile_exponent(max(sizes, default=F32(0))))
                scale, q = self.eighth_block(row, m, exponents[-1])
            if not finite:
                scale, q = 255, [0] * spec.block
            scales.append(scale)
            negative = [int(math.copysign(1, v) < 0) if 0 < scale < 255 else 0 for v in row]
            codes.append((q, negative))
        out = b"LQ" + bytes([1, spec.ident]) + struct.pack("<q", n) + bytes(4)
        if self.name != "squinch":
            tiles = -(-n // 4096)
            out += bytes(e + 127 for e in exponents[:tiles]) + bytes(-tiles % 16)
        return out + bytes(scales) + self.pack(codes)

    def is_finite(self, row: np.ndarray) -> bool:
        """sq48 ends at 2**127.875."""
        return bool(np.isfinite(row).all() and (self.name == "squinch" or np.abs(row).max() <= eighth_scale(1023)))

    def pack(self, codes: list[tuple[list[int], list[int]]]) -> bytes:
        signs = bytes(sum(s << j for j, s in enumerate(negative)) for _, negative in codes)
        return signs + bytes(q[2 * k] + 16 * q[2 * k + 1] for q, _ in codes for k in range(4))

    def squinch_block(self, row: np.ndarray, m: F32) -> tuple[int, list[int]]:
        if m == 0:
            return 0, [0] * 8
        code = min(254, max(0, math.floor(6 * math.log(float(m)) + 129)))
        if code == 0:
            return 0, [0] * 8
        reciprocal = F32(4050 / math.exp((code - 128) / 6))
        return code, [self.tables[False][nearest_step(v, reciprocal, self.spec)] for v in row]

    def tile_exponent(self, m: F32) -> int:
        if m == 0:
            return -80
        s = min(1023, self.ceil_eighth(m) if self.search else self.near_eighth(m))
        return min(128, max(-80, math.ceil(s / 8)))

    def eighth_block(self, row: np.ndarray, m: F32, exponent: int) -> tuple[int, list[int]]:
        spec = self.spec
        if m == 0:
            return 0, [0] * spec.block
        s = self.ceil_eighth(m) if self.search else self.near_eighth(m)
        s = max(min(s, 1023), 8 * exponent - 253)
        reciprocal = F32(2.0 ** (12 - s / 8)) * F32(spec.steps / 4096)
        steps = [nearest_step(v, F32(reciprocal), spec) for v in row]
        q = [self.tables[False][i] for i in steps]
        byte = s - 8 * exponent + 254
        if self.search and byte > 1:
            shrunk = [self.tables[True][i] for i in steps]
            error = sum((i - position(k, spec)) ** 2 for i, k in zip(steps, q, strict=True))
            other = sum((i - position(k, spec, True)) ** 2 for i, k in zip(steps, shrunk, strict=True))
            if other < error:
                return byte - 1, shrunk
        return byte, q

    def decode(self, data: bytes, n: int) -> np.ndarray:
        """FP32 [n], each value one FP32 product."""
        spec = self.spec
        blocks = 16 * -(-n // (16 * spec.block))
        at = 16
        exponents = b""
        if self.name != "squinch":
            tiles = -(-n // 4096)
            exponents = data[at : at + tiles]
            at += 16 * -(-tiles // 16)
        scales = data[at : at + blocks]
        planes = data[at + blocks :]
        out = np.zeros(blocks * spec.block, F32)
        for b in range(blocks):
            q, negative = self.unpack(planes, b, blocks)
            for j in range(spec.block):
                out[b * spec.block + j] = self.value(q[j], negative[j], scales[b], exponents, b)
        return out[:n]

    def unpack(self, planes: bytes, b: int, blocks: int) -> tuple[list[int], list[int]]:
        codes = planes[blocks + 4 * b : blocks + 4 * b + 4]
        q = [v for c in codes for v in (c % 16, c // 16)]
        return q, [(planes[b] >> j) & 1 for j in range(8)]

    def value(self, q: int, negative: int, scale: int, exponents: bytes, b: int) -> F32:
        spec = self.spec
        if scale == 255:
            return F32(np.nan)
        if scale == 0:
            unit = F32(0)
        elif self.name == "squinch":
            unit = F32(math.exp((scale - 128) / 6) / 225)
        else:
            unit = eighth_scale(scale - 254 + 8 * (exponents[b // (4096 // spec.block)] - 127))
        level = F32((q / spec.levels) ** 1.5) if spec.cubed else F32(q * q)
        return F32(-(level * unit)) if negative else F32(level * unit)


def snr_db(x: np.ndarray, y: np.ndarray) -> float:
    """Signal over squared error, in decibels, FP64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2)))
