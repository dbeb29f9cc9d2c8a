"""Kept targets as bits on a GPU, the words of `lowbit.distill.codec`: `encode` and `pack` in two kernels.

    fields   an entry of a row is one field at most. Its place among the row's, and the id before it, are a count and a
             maximum over the entries with smaller ids: no sorting. Widths follow from the greatest difference.
    (PyTorch sums the lengths of bodies within samples, and those of samples)
    scatter  a field goes to its bit by adding it to one word or two; fields share no bit, so the order is no matter

The number of words is known to the device alone: the buffer holds the most there can be, and nobody waits.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.codec import CODE_BITS, ENTROPY_BITS, ENTROPY_STEP, LEVELS_A_NAT, WIDTH_BITS, ZERO, Layout
from lowbit.distill.estimators import Chosen
from lowbit.distill.kernels.numbers import uniform
from lowbit.distill.noise import Lane, Places

WARPS = 4
TOP_CODE = tl.constexpr(ZERO - 1)
CODE, WIDTH = tl.constexpr(CODE_BITS), tl.constexpr(WIDTH_BITS)
STEPS_A_NAT, ENTROPY_STEPS = tl.constexpr(LEVELS_A_NAT), tl.constexpr(1 / ENTROPY_STEP)
TOP_ENTROPY = tl.constexpr((1 << ENTROPY_BITS) - 1)
WEIGHTS, ENTROPY = tl.constexpr(int(Lane.WEIGHTS)), tl.constexpr(int(Lane.ENTROPY))


@triton.jit
def _code(weight, u, levels, MULTINOMIAL: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """`round_weights`: int32 codes of FP64 weights."""
    if MULTINOMIAL:
        code = (weight * K + 0.5).to(tl.int32)
    else:
        position = (tl.log(tl.load(levels)) - tl.log(weight)) * STEPS_A_NAT
        position = tl.minimum(tl.maximum(tl.floor(position), 0.0), TOP_CODE)
        above = tl.where(weight == weight, position, 0.0).to(tl.int32)
        high, low = tl.load(levels + above), tl.load(levels + above + 1)
        code = above + (u * (high - low) >= weight - low).to(tl.int32)
    return code


@triton.jit
def _bit_length(x, BASE: tl.constexpr, ID_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """BASE to ID_BITS."""
    length = tl.zeros_like(x) + BASE
    for i in tl.static_range(BASE, ID_BITS):
        length += ((x >> i) > 0).to(tl.int32)
    return length


@triton.jit
def _kinds(slot, named, implied, VAROPT: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which slots of a row have a code, and which are plain."""
    coded = (slot < named) & ((slot > 0) | (implied == 0)) & (slot < K)
    plain = (slot >= named) & (slot < K) & VAROPT
    return coded, plain


@triton.jit
def fields_kernel(  # type: ignore[no-untyped-def]
    ids, weights, named_ptr, rest_ptr, entropy_ptr, sample, position, counted, key, levels, headers, values, offsets,
    lengths, rows, VAROPT: tl.constexpr, EXACT: tl.constexpr, MULTINOMIAL: tl.constexpr, K: tl.constexpr,
    SLOTS: tl.constexpr, PART: tl.constexpr, ID_BITS: tl.constexpr, BASE: tl.constexpr, COUNT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    row = tl.minimum(row, rows - 1)
    slot = tl.arange(0, SLOTS)[None, :]
    at = row[:, None].to(tl.int64) * K + slot
    inside = (slot < K) & (row[:, None] >= 0)
    id = tl.load(ids + at, inside, 0).to(tl.int32)
    weight = tl.load(weights + at, inside, 0.0)
    named = tl.load(named_ptr + row).to(tl.int32)
    rest, first = tl.load(rest_ptr + row), tl.load(weights + row.to(tl.int64) * K)
    implied = ((named > 0) & (first >= rest) & EXACT).to(tl.int32)
    coded, plain = _kinds(slot, named[:, None], implied[:, None], VAROPT, K)

    rank, before = tl.zeros((ROWS, SLOTS), tl.int32), tl.zeros((ROWS, SLOTS), tl.int32)
    for begin in range(0, K, PART):  # the entry's own kind, with a smaller id (or an equal one, if it comes first)
        other = begin + tl.arange(0, PART)[None, :]
        other_id = tl.load(ids + row[:, None].to(tl.int64) * K + other, (other < K) & (row[:, None] >= 0), 0)
        other_coded, other_plain = _kinds(other, named[:, None], implied[:, None], VAROPT, K)
        other_id, other = other_id.to(tl.int32)[:, None, :], other[:, None, :]
        smaller = (other_id < id[:, :, None]) | ((other_id == id[:, :, None]) & (other < slot[:, :, None]))
        same = (other_coded[:, None, :] & coded[:, :, None]) | (other_plain[:, None, :] & plain[:, :, None])
        smaller = smaller & same
        rank += tl.sum(smaller.to(tl.int32), axis=2)
        before = tl.maximum(before, tl.max(tl.where(smaller, other_id, 0), axis=2))
    delta = id - before
    wc = _bit_length(tl.max(tl.where(coded, delta, 0), axis=1), BASE, ID_BITS)
    wp = _bit_length(tl.max(tl.where(plain, delta, 0), axis=1), BASE, ID_BITS)
    count, plains = tl.sum(coded.to(tl.int32), axis=1), tl.sum(plain.to(tl.int32), axis=1)

    here, t = tl.load(sample + row), tl.load(position + row)
    none = tl.zeros((ROWS,), tl.int32)
    code = _code(weight, uniform(here[:, None], t[:, None], key, 1 + slot + none[:, None], WEIGHTS), levels,
                 MULTINOMIAL, K)  # fmt: skip
    rest_code = _code(rest, uniform(here, t, key, none, WEIGHTS), levels, MULTINOMIAL, K)
    entropy = tl.floor(tl.load(entropy_ptr + row) * ENTROPY_STEPS + uniform(here, t, key, none, ENTROPY))
    entropy = tl.where(entropy == entropy, tl.minimum(tl.maximum(entropy, 0.0), TOP_ENTROPY), 0.0).to(tl.int32)
    learned = tl.load(counted + row) != 0
    shift: tl.constexpr = COUNT_BITS + 1
    header = tl.where(learned, count, K + 1) | (implied << COUNT_BITS) | ((wc - BASE) << shift)
    header = header | ((wp - BASE) << (shift + WIDTH)) | (entropy << (shift + 2 * WIDTH))
    tl.store(headers + row, header, there)

    start = implied * (ID_BITS + CODE)
    field = wc + CODE
    offset = tl.where(coded, start[:, None] + rank * field[:, None], 0)
    offset = tl.where(plain, (start + count * field)[:, None] + rank * wp[:, None], offset)
    value = tl.where(coded, delta | (code << wc[:, None]), tl.where(plain, delta, 0))
    value = tl.where((slot == 0) & (implied[:, None] != 0), id | (rest_code[:, None] << ID_BITS), value)
    tl.store(offsets + at, offset, inside & there[:, None])
    tl.store(values + at, tl.where(learned[:, None], value, 0), inside & there[:, None])
    tl.store(lengths + row, tl.where(learned, start + count * field + plains * wp, 0), there)


@triton.jit
def _add_field(words, at, value, there):  # type: ignore[no-untyped-def]
    """Adds values of 31 bits at most (an id of the largest vocabulary has 18, a code 8) at bits `at`, int64."""
    shifted = value.to(tl.int64) << (at % 32)
    low, high = shifted & 0xFFFFFFFF, shifted >> 32
    tl.atomic_add(words + at // 32, low.to(tl.int32), there & (low != 0), sem="relaxed")
    tl.atomic_add(words + at // 32 + 1, high.to(tl.int32), there & (high != 0), sem="relaxed")


@triton.jit
def scatter_kernel(  # type: ignore[no-untyped-def]
    headers, values, offsets, lengths, ends, starts, words, rows, length, header_bits,
    K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    row = tl.minimum(row, rows - 1)
    slot = tl.arange(0, SLOTS)[None, :]
    start = tl.load(starts + row // length) * 32
    _add_field(words, start + (row % length) * header_bits, tl.load(headers + row), there)
    body = start + length * header_bits + tl.load(ends + row) - tl.load(lengths + row)
    at = row[:, None].to(tl.int64) * K + slot
    inside = there[:, None] & (slot < K)
    offset, value = tl.load(offsets + at, inside, 0), tl.load(values + at, inside, 0)
    _add_field(words, body[:, None] + offset, value, inside)


@dataclass(frozen=True)
class Encoder:
    """Bits of a layout's targets; has no state besides the levels of its codes."""

    layout: Layout
    levels: Tensor
    """FP64 [256] on the device."""
    entries: int = 128
    """Entries of a program: rows times the power of two that holds a row's. With more, registers spill."""

    @cached_property
    def constants(self) -> dict[str, int]:
        """What both kernels are compiled for."""
        slots = triton.next_power_of_2(self.layout.targets)
        return {"K": self.layout.targets, "SLOTS": slots, "ROWS": max(1, self.entries // max(16, slots))}

    @cached_property
    def field_constants(self) -> dict[str, int | bool]:
        """What the first one is compiled for besides."""
        layout, estimator = self.layout, self.layout.estimator
        return {
            "VAROPT": estimator is Estimator.varopt,
            "EXACT": estimator in (Estimator.varopt, Estimator.topk),
            "MULTINOMIAL": estimator is Estimator.multinomial,
            "PART": min(self.constants["SLOTS"], 16),
            "ID_BITS": layout.id_bits,
            "BASE": layout.base,
            "COUNT_BITS": layout.count_bits,
        }

    def __call__(
        self, chosen: Chosen, places: Places, key: Tensor, counted: Tensor, samples: int
    ) -> tuple[Tensor, Tensor]:
        """Targets of whole samples -> (words int32, of which the first are used; words of each sample int64 [S]).

        Args:
            key: int64 [2], `Noise.key`. counted: bool [C], as in `codec.encode`.
        """
        layout, kept = self.layout, chosen.kept
        rows, device = len(chosen.lse), chosen.lse.device
        length = rows // samples
        headers, lengths = torch.empty(2, rows, dtype=torch.int32, device=device)
        values, offsets = torch.empty(2, rows, layout.targets, dtype=torch.int32, device=device)
        words = torch.zeros(samples * -(-length * layout.most_bits // 32) + 1, dtype=torch.int32, device=device)
        grid = (triton.cdiv(rows, self.constants["ROWS"]),)
        fields_kernel[grid](
            kept.ids, kept.weights, kept.named, kept.rest, chosen.entropy, places.sample, places.position,
            counted.view(torch.uint8), key, self.levels, headers, values, offsets, lengths, rows,
            **self.constants, **self.field_constants, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        ends = lengths.view(samples, length).cumsum(dim=1, dtype=torch.int64)
        sizes = (ends[:, -1] + (length * layout.header_bits + 31)) // 32
        starts = sizes.cumsum(0) - sizes
        scatter_kernel[grid](
            headers, values, offsets, lengths, ends, starts, words, rows, length, layout.header_bits,
            **self.constants, num_warps=WARPS,
        )  # fmt: skip
        return words, sizes
