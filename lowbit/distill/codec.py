"""Kept targets as bits: about two bytes a target, and no bias from rounding.

A sample's record is a string of bits, least significant first in little-endian 32-bit words: one header a position,
all T of them first, then the bodies in order. With I bits an id (17 for 128k tokens) a position is

    header   count n (bits of k + 1) | implied (1) | id width wc - base (4) | id width wp - base (4) | entropy (12)
             n = k + 1: the next token is not learned; no body
    body     implied:    id (I), code of the rest (8)                    0 or 1 entry
             coded:      distance from the id before (wc), code (8)      n entries, by rising id
             plain:      distance from the id before (wp)                varopt: the other k - n - implied; else none

where base = max(0, I - 15). Codes are logarithms: code c stands for exp(top - c / 16), 255 for zero, top = 0 (gumbel,
whose weights may exceed one: 4); multinomial's codes are the counts n_i. A weight between two levels is rounded to one
of them at random so that its expectation is the weight. The entropy is a multiple of 1/256 nat, rounded likewise.

varopt and topk store exact probabilities and the `rest` outside them, and all sums to one: so one of them need not be
stored, and it is the greatest, where an error is relatively smallest. If that is the likeliest token, it is the implied
entry and the rest has a code; else the rest is implied. varopt's plain entries share the rest equally.
Which one is implied depends on the probabilities, never on how they are rounded: the expectation stays exact.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.estimators import Kept
from lowbit.distill.noise import Lane, Noise, Places

LEVELS_A_NAT = 16
ZERO = 255
ENTROPY_BITS, ENTROPY_STEP = 12, 1 / 256
CODE_BITS, WIDTH_BITS = 8, 4
_WORD = 32


@dataclass(frozen=True)
class Layout:
    """What the bits mean; every field is in the cache's manifest."""

    estimator: Estimator
    targets: int
    vocab_size: int

    @property
    def id_bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def base(self) -> int:
        """Width that the width code 0 stands for."""
        return max(0, self.id_bits - (1 << WIDTH_BITS) + 1)

    @property
    def count_bits(self) -> int:
        return self.empty.bit_length()

    @property
    def empty(self) -> int:
        """The count that says that a position has no targets."""
        return self.targets + 1

    @property
    def header_bits(self) -> int:
        return self.count_bits + 1 + 2 * WIDTH_BITS + ENTROPY_BITS

    @property
    def most_bits(self) -> int:
        """Bits of the longest possible position."""
        return self.header_bits + (self.targets + 1) * (self.id_bits + CODE_BITS)

    def levels(self, device: torch.device | str = "cpu") -> Tensor:
        """FP32 [256]: the weight that each code stands for; not to be written to."""
        return _levels(self, torch.device(device))


@lru_cache(maxsize=64)
def _levels(layout: Layout, device: torch.device) -> Tensor:
    """Once a device: a copy to a GPU waits for all that the GPU has to do."""
    code = torch.arange(256, dtype=torch.float64)
    if layout.estimator is Estimator.multinomial:
        levels = code / layout.targets
    else:
        top = 4.0 if layout.estimator is Estimator.gumbel else 0.0
        levels = torch.exp(top - code / LEVELS_A_NAT)
        levels[ZERO] = 0.0
    return levels.float().to(device)


@dataclass(frozen=True)
class Decoded:
    """Targets of B samples of T positions."""

    ids: Tensor
    """int64 [B, T, k], all in the vocabulary; 0 where the weight is 0."""
    weights: Tensor
    """FP32 [B, T, k]; NaN where damaged bits gave an id outside of the vocabulary: nothing is learned from it."""
    entropy: Tensor
    """FP32 [B, T]: the teacher's entropy in nats, an unbiased rounding."""


# Rounding -----------------------------------------------------------------------------------------------------


def round_weights(layout: Layout, weights: Tensor, u: Tensor) -> Tensor:
    """Codes int64 of weights FP64, with uniform numbers FP64 of the same shape: E[level of code] = weight."""
    if layout.estimator is Estimator.multinomial:
        return torch.round(weights * layout.targets).to(torch.int64)
    levels = layout.levels(weights.device).double()
    above = ((torch.log(levels[0]) - torch.log(weights)) * LEVELS_A_NAT).floor().clamp_(0, ZERO - 1)
    above = above.nan_to_num(nan=0.0).to(torch.int64)  # of a NaN the maker of the cache complains
    high, low = levels[above], levels[above + 1]
    return above + (u * (high - low) >= weights - low)


def round_entropy(entropy: Tensor, u: Tensor) -> Tensor:
    """Multiples int64 of ENTROPY_STEP, unbiased."""
    return torch.floor(entropy / ENTROPY_STEP + u).clamp_(0, (1 << ENTROPY_BITS) - 1).to(torch.int64)


# Encoding -----------------------------------------------------------------------------------------------------


def encode(
    layout: Layout, kept: Kept, entropy: Tensor, noise: Noise, places: Places, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fields of C positions: (values, widths), int64 [C, 2 k + 2] each, the header first; see the module.

    Positions where `counted` (bool [C]) is false, whose next token is not learned, keep a header alone.
    """
    k, device = layout.targets, kept.ids.device
    slot = torch.arange(k, device=device)
    u = noise.uniform(places, Lane.WEIGHTS, k + 1)
    exact = layout.estimator in (Estimator.varopt, Estimator.topk)
    named = slot < kept.named[:, None]
    implied = (kept.named > 0) & (kept.weights[:, 0] >= kept.rest) & exact
    coded = named & ~(implied[:, None] & (slot == 0))
    plain = ~named if layout.estimator is Estimator.varopt else torch.zeros_like(named)
    count = coded.sum(dim=1)
    codes = round_weights(layout, kept.weights, u[:, 1:])
    coded_delta, coded_width, order = _distances(layout, kept.ids, coded)
    plain_delta, plain_width, _ = _distances(layout, kept.ids, plain)
    codes = codes.gather(1, order)
    header, shift = count if counted is None else torch.where(counted, count, layout.empty), layout.count_bits
    for value, bits in (
        (implied.long(), 1),
        (coded_width - layout.base, WIDTH_BITS),
        (plain_width - layout.base, WIDTH_BITS),
        (round_entropy(entropy, noise.uniform(places, Lane.ENTROPY, 1)[:, 0]), ENTROPY_BITS),
    ):
        header = header | value << shift
        shift += bits
    rest_code = round_weights(layout, kept.rest, u[:, 0])
    first = kept.ids[:, 0] | rest_code << layout.id_bits
    values = [header[:, None], first[:, None], coded_delta | codes << coded_width[:, None], plain_delta]
    widths = [
        torch.full_like(header, layout.header_bits)[:, None],
        (implied * (layout.id_bits + CODE_BITS))[:, None],
        torch.where(slot < count[:, None], coded_width[:, None] + CODE_BITS, 0),
        torch.where(slot < plain.sum(dim=1)[:, None], plain_width[:, None], 0),
    ]
    if counted is not None:
        widths[1:] = [torch.where(counted[:, None], width, 0) for width in widths[1:]]
    return torch.cat(values, dim=1), torch.cat(widths, dim=1)


def _distances(layout: Layout, ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Wanted ids of each row sorted, as differences from the one before (the first from 0), then rubbish: int64 [C, k].

    Also the width that holds every difference, int64 [C], and where each sorted entry came from, int64 [C, k].
    """
    order = torch.where(wanted, ids, 1 << layout.id_bits).argsort(dim=1, stable=True)
    ids = ids.gather(1, order)
    delta = ids.diff(dim=1, prepend=torch.zeros_like(ids[:, :1]))
    slot = torch.arange(ids.shape[1], device=ids.device)
    delta = torch.where(slot < wanted.sum(dim=1)[:, None], delta, 0)
    powers = 1 << torch.arange(layout.id_bits, device=ids.device)
    width = torch.searchsorted(powers, delta.amax(dim=1), right=True)  # bits of the greatest difference
    return delta, width.clamp_(min=layout.base), order


def pack(values: Tensor, widths: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Fields of whole samples, [samples * T, F] as `encode` gives them -> (words int64 [W], words of each sample [S]).

    Each sample starts at a word of its own.
    """
    fields = values.shape[1]
    value = values.view(samples, -1, fields)
    width = widths.view(samples, -1, fields)
    value = torch.cat([value[:, :, 0], value[:, :, 1:].flatten(1)], dim=1)  # headers first
    width = torch.cat([width[:, :, 0], width[:, :, 1:].flatten(1)], dim=1)
    end = width.cumsum(dim=1)
    sizes = (end[:, -1] + _WORD - 1) // _WORD
    start = (sizes.cumsum(0) - sizes) * _WORD
    at = (start[:, None] + end - width).flatten()
    shifted = torch.where(width > 0, value, 0).flatten() << at % _WORD
    words = torch.zeros(int(sizes.sum()) + 1, dtype=torch.int64, device=values.device)
    words.index_add_(0, at // _WORD, shifted & 0xFFFFFFFF)
    words.index_add_(0, (at // _WORD + 1).clamp_(max=len(words) - 1), shifted >> _WORD)
    return words[:-1], sizes


# Decoding -----------------------------------------------------------------------------------------------------


def decode(layout: Layout, words: Tensor, starts: Tensor, length: int) -> Decoded:
    """Targets of B samples: words int32 [W] as stored, first word of each sample int64 [B], T = `length`."""
    device, k = words.device, layout.targets
    words = torch.cat([words, words.new_zeros(1)]).long() & 0xFFFFFFFF
    position = torch.arange(length, device=device)
    start = starts[:, None] * _WORD
    header = _field(words, start + position * layout.header_bits, layout.header_bits)  # [B, T]
    count, header = header & (1 << layout.count_bits) - 1, header >> layout.count_bits
    there = count != layout.empty
    count = torch.where(there, count, 0)
    implied, header = header & 1 & there, header >> 1
    wc, header = (header & 15) + layout.base, header >> WIDTH_BITS
    wp, h = (header & 15) + layout.base, header >> WIDTH_BITS
    plain = (k - count - implied) * there if layout.estimator is Estimator.varopt else torch.zeros_like(count)
    implied_bits = implied * (layout.id_bits + CODE_BITS)
    body = implied_bits + count * (wc + CODE_BITS) + plain * wp
    at = start + length * layout.header_bits + body.cumsum(dim=1) - body  # [B, T]

    slot = torch.arange(k, device=device)
    implied, count, plain, wc, wp = (x[:, :, None] for x in (implied, count, plain, wc, wp))
    is_implied = slot < implied
    is_coded = (slot >= implied) & (slot < implied + count)
    is_plain = (slot >= implied + count) & (slot < implied + count + plain)
    offset = torch.where(
        is_coded,
        (slot - implied) * (wc + CODE_BITS),
        torch.where(is_plain, count * (wc + CODE_BITS) + (slot - implied - count) * wp, 0),
    )
    offset = torch.where(is_implied, 0, offset + implied_bits[:, :, None])
    bits = torch.where(is_coded, wc, torch.where(is_plain, wp, torch.where(is_implied, layout.id_bits, 0)))
    field = _field(words, at[:, :, None] + offset, bits + CODE_BITS)  # [B, T, k]
    value = field & (1 << bits) - 1
    code = field >> bits

    delta = torch.where(is_implied, 0, value)
    total = delta.cumsum(dim=2)
    coded_sum = torch.where(is_coded, delta, 0).sum(dim=2, keepdim=True)
    ids = torch.where(is_implied, value, torch.where(is_plain, total - coded_sum, torch.where(is_coded, total, 0)))
    level = layout.levels(device)[code]
    coded = torch.where(is_coded, level, 0.0)
    if layout.estimator in (Estimator.varopt, Estimator.topk):
        left = 1 - coded.sum(dim=2, keepdim=True)  # what the implied one and the rest have together
        rest = torch.where(implied > 0, torch.where(is_implied, level, 0.0).sum(dim=2, keepdim=True), left)
        coded = torch.where(is_implied, left - rest, coded)
        coded = torch.where(is_plain, rest / plain.clamp(min=1), coded)
    wrong = ids >= layout.vocab_size
    return Decoded(ids.masked_fill(wrong, 0), coded.masked_fill(wrong, torch.nan), h.float() * ENTROPY_STEP)


def _field(words: Tensor, at: Tensor, width: Tensor | int) -> Tensor:
    """The integers of `width` bits (up to 32) at bit positions `at`. Positions beyond the end give rubbish."""
    index = (at // _WORD).clamp(max=len(words) - 2)
    pair = words[index] | words[index + 1] << _WORD
    return pair >> (at % _WORD) & (1 << width) - 1
