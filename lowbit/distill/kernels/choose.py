"""The estimators of `lowbit.distill.estimators` on a GPU: one program a row, which reads what `statistics` left.

The order that `Distributions.largest` has, falling logits and equal ones by rising id, is total. So the items taken so
far are those not after the last one, the *cut* (z, id), and nothing has to be marked:

    taken(z, id)  =  z > cut.z  or  z = cut.z and id <= cut.id

A round takes the greatest of what is left: the block with the greatest maximum, its 64 logits (from the caches, as the
pass before has just read them), the greatest of those beyond the cut. Then block maximum and mass are made anew from
the same 64 numbers. varopt stops at the first item below its threshold, usually long before k. A draw finds its block
in a running sum over block masses, its token in a running sum over 64. All sums over blocks are FP64.

A program may take ROWS rows at once, which repeats a round until each is done: that is for Triton's interpreter, whose
time goes by operations whatever their size. With one row in one warp nothing is exchanged between warps.
"""

from dataclasses import dataclass
from functools import cached_property

import triton
import triton.language as tl
from torch import Tensor

from lowbit.configs.schema_distill import Estimator
from lowbit.distill.estimators import MARGIN, Chosen
from lowbit.distill.kernels.numbers import BLOCK, HIDDEN, TARGETS, block_uniform, gumbel_keys, transformed, uniform
from lowbit.distill.kernels.statistics import TILE, statistics
from lowbit.distill.noise import Places

SLACK = tl.constexpr(1 - MARGIN)
BEYOND = tl.constexpr(1 - 2.0**-50)
VAROPT, GUMBEL, MULTINOMIAL, TOPK = (tl.constexpr(n) for n in range(4))
_NUMBERS = {
    Estimator.varopt: VAROPT,
    Estimator.gumbel: GUMBEL,
    Estimator.multinomial: MULTINOMIAL,
    Estimator.topk: TOPK,
}


@triton.jit
def _block_logits(row_ptr, block, columns, vocab, softcap, temperature, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of blocks [R] and their transformed logits, [R, 64] each."""
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logit = tl.load(row_ptr[:, None] + column, column < columns, HIDDEN)
    return column, transformed(logit, column, vocab, softcap, temperature, SOFTCAP, TEMPERED)


@triton.jit
def _no_cut(ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A cut that leaves everything."""
    return tl.full((ROWS,), float("inf"), tl.float32), tl.full((ROWS,), -1, tl.int32)


@triton.jit
def _left(z, column, cut_z, cut_id):  # type: ignore[no-untyped-def]
    """Which of z [R, 64] lie beyond the cut."""
    return (z < cut_z[:, None]) | ((z == cut_z[:, None]) & (column > cut_id[:, None]))


@triton.jit
def _mass_of(z, lse, wanted):  # type: ignore[no-untyped-def]
    """FP64 probabilities of transformed logits [R, 64], zero where not wanted."""
    return tl.where(wanted, tl.exp(z.to(tl.float64) - lse[:, None]), 0.0)


@triton.jit
def _head(  # type: ignore[no-untyped-def]
    row_ptr, at, there, most, mass, lse, ids, weights, blocks, columns, vocab, softcap, temperature,
    ESTIMATOR: tl.constexpr, K: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """Takes the head (varopt) or K items (topk): how many [R], the cut, the mass of each block without them."""
    index = tl.arange(0, most.shape[1])[None, :]
    ROWS: tl.constexpr = lse.shape[0]
    cut_z, cut_id = _no_cut(ROWS)
    before, named, active = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.int32), there
    LIMIT: tl.constexpr = K if ESTIMATOR == TOPK else K - 1  # one slot at least is varopt's tail's
    h = 0
    while (h < LIMIT) & (tl.max(active.to(tl.int32), axis=0) > 0):
        value, block = tl.max(most, axis=1, return_indices=True)
        block = tl.minimum(block, blocks - 1)
        p = tl.exp(value.to(tl.float64) - lse)
        if ESTIMATOR == VAROPT:  # tau = (1 - before) / slots left
            active = active & (p >= (1 - before) / (K - h) * SLACK)
        column, z = _block_logits(row_ptr, block, columns, vocab, softcap, temperature, SOFTCAP, TEMPERED)
        found, place = tl.max(tl.where(_left(z, column, cut_z, cut_id), z, HIDDEN), axis=1, return_indices=True)
        item = tl.minimum(block * BLOCK + place, vocab - 1)
        cut_z, cut_id = tl.where(active, found, cut_z), tl.where(active, item, cut_id)
        left = _left(z, column, cut_z, cut_id)
        here = active[:, None] & (index == block[:, None])
        most = tl.where(here, tl.max(tl.where(left, z, HIDDEN), axis=1)[:, None], most)
        mass = tl.where(here, tl.sum(_mass_of(z, lse, left), axis=1)[:, None], mass)
        tl.store(ids + at + h, item.to(tl.int64), active)
        tl.store(weights + at + h, p, active)
        before += tl.where(active, p, 0.0)
        named += active.to(tl.int32)
        h += 1
    return named, cut_z, cut_id, mass


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    row_ptr, point, upto, mass, lse, cut_z, cut_id, blocks, columns, vocab, softcap, temperature,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """The items at cumulative masses `point` [R], among those beyond the cut: int32 [R] (`Distributions.pick`)."""
    index = tl.arange(0, mass.shape[1])[None, :]
    point = tl.minimum(point, tl.max(upto, axis=1) * BEYOND)
    block = tl.minimum(tl.sum((upto <= point[:, None]).to(tl.int32), axis=1), blocks - 1)
    within = point - tl.sum(tl.where(index == block[:, None], upto - mass, 0.0), axis=1)
    column, z = _block_logits(row_ptr, block, columns, vocab, softcap, temperature, SOFTCAP, TEMPERED)
    q = _mass_of(z, lse, _left(z, column, cut_z, cut_id))
    place = tl.sum((tl.cumsum(q, axis=1) <= within[:, None]).to(tl.int32), axis=1)
    # A rounding error beyond the block's sum: its last item that has any probability.
    last = tl.max(tl.where(q > 0, tl.arange(0, BLOCK)[None, :], 0), axis=1)
    return tl.minimum(block * BLOCK + tl.minimum(place, last), vocab - 1)


@triton.jit
def _without_replacement(  # type: ignore[no-untyped-def]
    row_ptr, at, there, most, sample, position, key, lse, ids, weights, blocks, columns, vocab, softcap, temperature,
    K: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """gumbel: the K greatest keys and, by the next one, their weights. most: each block's greatest key, [R, B]."""
    index, slot = tl.arange(0, most.shape[1])[None, :], tl.arange(0, SLOTS)[None, :]
    inside = tl.arange(0, BLOCK)[None, :]
    ROWS: tl.constexpr = lse.shape[0]
    cut_key, cut_id = _no_cut(ROWS)
    log_p, kappa = tl.zeros((ROWS, SLOTS), tl.float64), tl.zeros((ROWS,), tl.float64)
    for s in range(K + 1):
        block = tl.minimum(tl.max(most, axis=1, return_indices=True)[1], blocks - 1)
        column, z = _block_logits(row_ptr, block, columns, vocab, softcap, temperature, SOFTCAP, TEMPERED)
        u = block_uniform(sample, position, key, block)
        keys = gumbel_keys(z, u)
        cut_key, place = tl.max(
            tl.where(_left(keys, column, cut_key, cut_id), keys, HIDDEN), axis=1, return_indices=True
        )
        cut_id = tl.minimum(block * BLOCK + place, vocab - 1)
        following = tl.max(tl.where(_left(keys, column, cut_key, cut_id), keys, HIDDEN), axis=1)
        most = tl.where(index == block[:, None], following[:, None], most)
        tl.store(ids + at + s, cut_id.to(tl.int64), there & (s < K))
        own = tl.where(cut_key == HIDDEN, HIDDEN, tl.max(tl.where(inside == place[:, None], z, HIDDEN), axis=1))
        kappa = own.to(tl.float64) - lse
        log_p = tl.where(slot == s, kappa[:, None], log_p)
        chance = tl.max(tl.where(inside == place[:, None], u, 0.0), axis=1).to(tl.float64)
        kappa = kappa - tl.log(-tl.log(1 - chance))
    weight = tl.where(log_p == HIDDEN, 0.0, tl.exp(log_p) / _inclusion(log_p, kappa))
    tl.store(weights + at[:, None] + slot, weight, there[:, None] & (slot < K))


@triton.jit
def _inclusion(log_p, kappa):  # type: ignore[no-untyped-def]
    """1 - exp(-p exp(-kappa)), FP64 [R, K]; 1 where kappa is -inf. A series where the difference would cancel."""
    x = tl.exp(log_p - kappa[:, None])
    series = x * (1 - x * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120)))))
    return tl.where(x < 0.004, series, 1 - tl.exp(-x))


@triton.jit
def _merged(drawn, at, there, ids, weights, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """multinomial: stores different ids of the draws int32 [R, SLOTS] (beyond K: none, the largest int32) in rising
    order, each with its share of the draws; how many."""
    NONE: tl.constexpr = 0x7FFFFFFF
    entries = tl.zeros((drawn.shape[0],), tl.int32)
    last = entries - 1
    for s in range(K):
        following = tl.min(tl.where(drawn > last[:, None], drawn, NONE), axis=1)
        found = following != NONE
        count = tl.sum((drawn == following[:, None]).to(tl.int32), axis=1)
        tl.store(ids + at + s, tl.where(found, following, 0).to(tl.int64), there)
        tl.store(weights + at + s, tl.where(found, count, 0).to(tl.float64) / K, there)
        entries += found.to(tl.int32)
        last = following
    return entries


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(  # type: ignore[no-untyped-def]
    logits, greatest, total, moment, keys, sample, position, key, ids, weights, named_ptr, rest_ptr, entropy_ptr,
    lse_ptr, rows, blocks, row_stride, columns, vocab, softcap, temperature,
    ESTIMATOR: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    row = tl.minimum(row, rows - 1).to(tl.int64)
    row_ptr = logits + row * row_stride
    at = row * K
    index = tl.arange(0, BLOCKS)[None, :]
    place = row[:, None] * blocks + index
    inside = index < blocks
    most = tl.load(greatest + place, inside, HIDDEN)
    high = most.to(tl.float64)
    top = tl.max(most, axis=1).to(tl.float64)
    sums = tl.load(total + place, inside, 0.0).to(tl.float64)
    lse = top + tl.log(tl.sum(tl.exp(high - top[:, None]) * sums, axis=1))
    share = tl.exp(high - lse[:, None])
    mass = share * sums
    below = tl.where(share > 0, high - lse[:, None], 0.0)
    moments = tl.load(moment + place, inside, 0.0).to(tl.float64)
    tl.store(lse_ptr + row, lse, there)
    tl.store(entropy_ptr + row, -tl.sum(mass * below + share * moments, axis=1), there)

    here, t = tl.load(sample + row), tl.load(position + row)
    named, rest = tl.full((ROWS,), K, tl.int32), tl.zeros((ROWS,), tl.float64)
    if ESTIMATOR == GUMBEL:
        most = tl.load(keys + place, inside, HIDDEN)
        _without_replacement(
            row_ptr, at, there, most, here, t, key, lse, ids, weights, blocks, columns, vocab, softcap, temperature,
            K, SLOTS, SOFTCAP, TEMPERED,
        )  # fmt: skip
    elif ESTIMATOR == MULTINOMIAL:
        cut_z, cut_id = _no_cut(ROWS)
        upto = tl.cumsum(mass, axis=1)
        whole = tl.sum(mass, axis=1)
        slot = tl.arange(0, SLOTS)[None, :]
        drawn = tl.zeros((ROWS, SLOTS), tl.int32) + 0x7FFFFFFF
        for s in range(K):
            point = uniform(here, t, key, tl.zeros((ROWS,), tl.int32) + s, TARGETS) * whole
            item = _pick(
                row_ptr, point, upto, mass, lse, cut_z, cut_id, blocks, columns, vocab, softcap, temperature,
                SOFTCAP, TEMPERED,
            )  # fmt: skip
            drawn = tl.where(slot == s, item[:, None], drawn)
        named = _merged(drawn, at, there, ids, weights, K)
    else:
        named, cut_z, cut_id, mass = _head(
            row_ptr, at, there, most, mass, lse, ids, weights, blocks, columns, vocab, softcap, temperature,
            ESTIMATOR, K, SOFTCAP, TEMPERED,
        )  # fmt: skip
        rest = tl.sum(mass, axis=1)
        if ESTIMATOR == VAROPT:
            step = rest / (K - named)
            u = uniform(here, t, key, tl.zeros((ROWS,), tl.int32), TARGETS)
            upto = tl.cumsum(mass, axis=1)
            for s in range(tl.min(named, axis=0), K):
                item = _pick(
                    row_ptr, (tl.maximum(s - named, 0) + u) * step, upto, mass, lse, cut_z, cut_id, blocks, columns,
                    vocab, softcap, temperature, SOFTCAP, TEMPERED,
                )  # fmt: skip
                tl.store(ids + at + s, item.to(tl.int64), there & (s >= named))
                tl.store(weights + at + s, step, there & (s >= named))
    tl.store(named_ptr + row, named.to(tl.int64), there)
    tl.store(rest_ptr + row, rest, there)


@dataclass(frozen=True)
class Chooser:
    """Chooses targets of chunks of positions in two launches; has no state."""

    estimator: Estimator
    targets: int
    vocab_size: int
    softcap: float | None = None
    temperature: float = 1.0
    rows: int = 1
    """Of a program."""
    tile: int = TILE
    """Blocks of a program of the first pass."""

    @property
    def blocks(self) -> int:
        """A power of two, and not less than a warp's threads: a running sum over one number ends the compiler."""
        blocks: int = triton.next_power_of_2(triton.cdiv(self.vocab_size, BLOCK.value))
        return max(32, blocks)

    @property
    def warps(self) -> int:
        """Of a program: a thread holds at most 16 blocks."""
        return max(1, min(8, self.blocks // 512))

    @cached_property
    def constants(self) -> dict[str, int | bool]:
        """What the second kernel is compiled for."""
        return {
            "ESTIMATOR": _NUMBERS[self.estimator].value,
            "K": self.targets,
            "SLOTS": triton.next_power_of_2(self.targets),
            "BLOCKS": self.blocks,
            "ROWS": self.rows,
            "SOFTCAP": self.softcap is not None,
            "TEMPERED": self.temperature != 1.0,
        }

    def __call__(self, logits: Tensor, places: Places, key: Tensor, out: Chosen) -> None:
        """Targets of logits [C, columns], any floating type, into `out`; key int64 [2]: `Noise.key`.

        Nothing is written into the logits. Where they are not finite, out.lse is not, and the ids are some.
        """
        rows, columns = logits.shape
        if rows == 0:
            return
        gumbel = self.estimator is Estimator.gumbel
        stats = statistics(logits, self.vocab_size, self.softcap, self.temperature, places, key, gumbel, self.tile)
        kept = out.kept
        assert all(tensor.is_contiguous() for tensor in (*vars(kept).values(), out.entropy, out.lse))
        choose_kernel[(triton.cdiv(rows, self.rows),)](
            logits, stats[0], stats[1], stats[2], stats[2 + gumbel], places.sample, places.position, key,
            kept.ids, kept.weights, kept.named, kept.rest, out.entropy, out.lse,
            rows, stats.shape[2], logits.stride(0), columns, self.vocab_size, self.softcap or 1.0, self.temperature,
            **self.constants, num_warps=self.warps, enable_fp_fusion=False,
        )  # fmt: skip
