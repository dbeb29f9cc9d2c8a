"""Stored bits as targets on a GPU: `lowbit.distill.codec.decode` in two kernels where PyTorch takes 140.

    places    a program a sample goes through its headers, which lie side by side, and adds up the lengths of bodies
    targets   an entry is one field, whose place in the row follows from its slot; ids are sums along the row

Reading is part of every training step, and a small model's step is as long as its launches.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.codec import CODE_BITS, ENTROPY_STEP, WIDTH_BITS, Decoded, Layout

WARPS = 4
AT_ONCE = 512
"""Headers that a program of the first kernel reads together."""
CODE, WIDTH, WIDTHS = tl.constexpr(CODE_BITS), tl.constexpr(WIDTH_BITS), tl.constexpr((1 << WIDTH_BITS) - 1)
ENTROPY_UNIT = tl.constexpr(ENTROPY_STEP)


@triton.jit
def _field(words, count, at, bits, there):  # type: ignore[no-untyped-def]
    """int32 of `bits` bits (up to 31) at bit positions `at`, int64; zeros where not there or behind the end."""
    index = at // 32
    low = tl.load(words + index, there & (index < count), 0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + index + 1, there & (index + 1 < count), 0).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (((low | (high << 32)) >> (at % 32).to(tl.uint64)) & ((1 << bits.to(tl.uint64)) - 1)).to(tl.int32)


@triton.jit
def _header(  # type: ignore[no-untyped-def]
    header, K: tl.constexpr, VAROPT: tl.constexpr, BASE: tl.constexpr, COUNT_BITS: tl.constexpr
):
    """Entries with a code, whether one is implied, plain entries, widths of both, the entropy's code."""
    count = header & ((1 << COUNT_BITS) - 1)
    there = count != K + 1
    count = tl.where(there, count, 0)
    implied = tl.where(there, (header >> COUNT_BITS) & 1, 0)
    wc = ((header >> (COUNT_BITS + 1)) & WIDTHS) + BASE
    wp = ((header >> (COUNT_BITS + 1 + WIDTH)) & WIDTHS) + BASE
    plain = tl.where(there, K - count - implied, 0) if VAROPT else tl.zeros_like(count)
    return count, implied, plain, wc, wp, header >> (COUNT_BITS + 1 + 2 * WIDTH)


@triton.jit(do_not_specialize=["count"])
def places_kernel(  # type: ignore[no-untyped-def]
    words, starts, headers, places, count, length,
    K: tl.constexpr, VAROPT: tl.constexpr, ID_BITS: tl.constexpr, BASE: tl.constexpr, COUNT_BITS: tl.constexpr,
    HEADER_BITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + sample) * 32
    body = start + length * HEADER_BITS
    for first in range(0, length, AT_ONCE):
        t = first + tl.arange(0, AT_ONCE)
        there = t < length
        bits = tl.zeros((AT_ONCE,), tl.int32) + HEADER_BITS
        header = _field(words, count, start + t.to(tl.int64) * HEADER_BITS, bits, there)
        coded, implied, plain, wc, wp, _ = _header(header, K, VAROPT, BASE, COUNT_BITS)
        size = tl.where(there, implied * (ID_BITS + CODE) + coded * (wc + CODE) + plain * wp, 0)
        tl.store(headers + sample * length + t, header, there)
        tl.store(places + sample * length + t, body + tl.cumsum(size, axis=0) - size, there)
        body += tl.sum(size, axis=0)


@triton.jit(do_not_specialize=["count"])
def targets_kernel(  # type: ignore[no-untyped-def]
    words, headers, places, levels, ids, weights, entropy, count, rows,
    K: tl.constexpr, VAROPT: tl.constexpr, ID_BITS: tl.constexpr, BASE: tl.constexpr, COUNT_BITS: tl.constexpr,
    VOCAB: tl.constexpr, EXACT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    coded, implied, plain, wc, wp, h = _header(tl.load(headers + row, inside, K + 1), K, VAROPT, BASE, COUNT_BITS)
    slot = tl.arange(0, SLOTS)[None, :]
    behind = slot - implied[:, None]  # among those behind the implied one
    is_implied = slot < implied[:, None]
    is_coded = (behind >= 0) & (behind < coded[:, None])
    is_plain = (behind >= coded[:, None]) & (behind < (coded + plain)[:, None])
    there = (is_implied | is_coded | is_plain) & inside[:, None]
    bits = tl.where(is_implied, ID_BITS, tl.where(is_coded, wc[:, None], wp[:, None]))
    field = wc[:, None] + CODE
    offset = tl.where(is_coded, behind * field, coded[:, None] * field + (behind - coded[:, None]) * wp[:, None])
    offset = tl.where(is_implied, 0, (implied * (ID_BITS + CODE))[:, None] + offset)
    found = _field(words, count, tl.load(places + row, inside, 0)[:, None] + offset, bits + CODE, there)
    value = found & ((1 << bits) - 1)

    delta = tl.where(is_coded | is_plain, value, 0)
    total = tl.cumsum(delta, axis=1)
    before = tl.sum(tl.where(is_coded, delta, 0), axis=1)
    id = tl.where(is_implied, value, tl.where(is_plain, total - before[:, None], tl.where(is_coded, total, 0)))
    level = tl.load(levels + (found >> bits), is_implied | is_coded, 0.0)
    weight = tl.where(is_coded, level, 0.0)
    if EXACT:
        left = 1 - tl.sum(weight, axis=1)  # what the implied one and the rest have together
        rest = tl.where(implied > 0, tl.sum(tl.where(is_implied, level, 0.0), axis=1), left)
        weight = tl.where(is_implied, (left - rest)[:, None], weight)
        share = tl.div_rn(rest, tl.maximum(plain, 1).to(tl.float32))
        weight = tl.where(is_plain, share[:, None], weight)
    weight = tl.where(id < VOCAB, weight, float("nan"))
    id = tl.where(id < VOCAB, id, 0)
    at = row[:, None].to(tl.int64) * K + slot
    kept = inside[:, None] & (slot < K)
    tl.store(ids + at, id.to(tl.int64), kept)
    tl.store(weights + at, weight, kept)
    tl.store(entropy + row, h.to(tl.float32) * ENTROPY_UNIT, inside)


@dataclass(frozen=True)
class Decoder:
    """Targets of a layout's bits; has no state."""

    layout: Layout
    entries: int = 128
    """Entries of a program: rows times the power of two that holds a row's."""

    @cached_property
    def constants(self) -> dict[str, int | bool]:
        """What both kernels are compiled for."""
        layout = self.layout
        return {
            "K": layout.targets,
            "VAROPT": layout.estimator is Estimator.varopt,
            "ID_BITS": layout.id_bits,
            "BASE": layout.base,
            "COUNT_BITS": layout.count_bits,
        }

    @cached_property
    def target_constants(self) -> dict[str, int | bool]:
        """What the second one is compiled for besides."""
        slots = max(2, triton.next_power_of_2(self.layout.targets))
        return {
            "VOCAB": self.layout.vocab_size,
            "EXACT": self.layout.estimator in (Estimator.varopt, Estimator.topk),
            "SLOTS": slots,
            "ROWS": max(1, self.entries // slots),
        }

    def __call__(self, words: Tensor, starts: Tensor, length: int) -> Decoded:
        """See `codec.decode`."""
        samples, k, device = len(starts), self.layout.targets, words.device
        headers = torch.empty(samples, length, dtype=torch.int32, device=device)
        places = torch.empty(samples, length, dtype=torch.int64, device=device)
        ids = torch.empty(samples, length, k, dtype=torch.int64, device=device)
        weights = torch.empty(samples, length, k, dtype=torch.float32, device=device)
        entropy = torch.empty(samples, length, dtype=torch.float32, device=device)
        out = Decoded(ids, weights, entropy)
        if headers.numel() == 0:
            return out
        places_kernel[(samples,)](
            words, starts, headers, places, len(words), length,
            **self.constants, HEADER_BITS=self.layout.header_bits, AT_ONCE=AT_ONCE, num_warps=WARPS,
        )  # fmt: skip
        grid = (triton.cdiv(headers.numel(), self.target_constants["ROWS"]),)
        targets_kernel[grid](
            words, headers, places, self.layout.levels(device), ids, weights, entropy, len(words), headers.numel(),
            **self.constants, **self.target_constants, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return out
