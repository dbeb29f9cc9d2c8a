"""A token of each row from its logits, in two launches: Triton kernels for sampling at a temperature from all tokens.

As written (`sampling.py`) that is some thirty kernels, several of which read all logits. Here

    sums    one program a row and CHUNK tokens: the greatest logit m, and sum exp((l - m) / T) of each BLOCK of tokens
    draw    one program a row: puts the chunks together, finds the block that the noise falls into, then the token

Sums are FP64, so that the inversion is as fine as the noise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels import MOST_TOKENS
from lowbit.infer.kernels.chain import chained, let_next, wait

BLOCK, CHUNK = 256, 2048


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    logits, greatest, sums, row_stride, V, temperature, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr
):
    wait(CHAINED)
    let_next(CHAINED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    EACH: tl.constexpr = CHUNK // BLOCK
    block, inside = tl.arange(0, EACH), tl.arange(0, BLOCK)
    token = chunk * CHUNK + block[:, None] * BLOCK + inside[None, :]
    logit = tl.load(logits + row * row_stride + token, mask=token < V, other=float("-inf"))
    most = tl.max(tl.max(logit, axis=1), axis=0)
    # The greatest of what is not a number is left out of `most`; the sum has it.
    scaled = tl.where(logit == logit, float("-inf"), logit)
    scaled = tl.where(most == float("-inf"), scaled, tl.div_rn(logit - most, temperature))
    chunks = tl.num_programs(1)
    tl.store(greatest + row * chunks + chunk, most)
    tl.store(sums + (row * chunks + chunk) * EACH + block, tl.sum(tl.exp(scaled).to(tl.float64), axis=1))


@triton.jit
def _first_beyond(weight, threshold, index, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first index with a positive weight at which the running sum exceeds the threshold, else the last positive."""
    upto = tl.cumsum(weight, axis=0)
    first = tl.min(tl.where((weight > 0) & (upto > threshold), index, SIZE), axis=0)
    last = tl.max(tl.where(weight > 0, index, 0), axis=0)
    found = tl.minimum(first, last)
    before = tl.sum(tl.where(index == found, upto - weight, 0.0), axis=0)
    return found, before


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits, greatest, sums, noise, values, row_stride, V, chunks, temperature,
    BLOCK: tl.constexpr, EACH: tl.constexpr, BLOCKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    let_next(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    there = block < chunks * EACH
    most = tl.load(greatest + row * chunks + block // EACH, mask=there, other=float("-inf"))
    above = tl.max(most, axis=0)
    weight = tl.load(sums + row * chunks * EACH + block, mask=there, other=0.0)
    share = tl.where(most == float("-inf"), 0.0, tl.exp(tl.div_rn(most - above, temperature)))
    weight = weight * share.to(tl.float64)
    total = tl.sum(weight, axis=0)
    threshold = tl.load(noise + row) * total
    chosen, before = _first_beyond(weight, threshold, block, BLOCKS)

    inside = tl.arange(0, BLOCK)
    token = chosen * BLOCK + inside
    logit = tl.load(logits + row * row_stride + token, mask=token < V, other=float("-inf"))
    scaled = tl.div_rn(logit - above, temperature)
    found, _ = _first_beyond(tl.exp(scaled).to(tl.float64), threshold - before, inside, BLOCK)
    logprob = tl.sum(tl.where(inside == found, scaled, 0.0), axis=0).to(tl.float64) - tl.log(total)
    # A number that is none, or infinite, makes the sum none: the caller looks for that.
    logprob = tl.where(total == total, logprob, total)
    tl.store(values + row * 2, (chosen * BLOCK + found).to(tl.float64))
    tl.store(values + row * 2 + 1, logprob.to(tl.float32).to(tl.float64))


def draw(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Token ids and their log-probabilities, FP64 [rows, 2].

    Args:
        logits: FP32 [rows, V], the numbers of a row next to each other. V up to MOST_TOKENS: a program holds the sums
            of a row.
        noise: FP64 [rows] in [0, 1). temperature: above 0.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and vocab <= MOST_TOKENS
    values = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
    if rows == 0:
        return values
    chunks = triton.cdiv(vocab, CHUNK)
    each = CHUNK // BLOCK
    greatest = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, chunks * each, dtype=torch.float64, device=logits.device)
    _sums_kernel[(rows, chunks)](
        logits, greatest, sums, logits.stride(0), vocab, temperature, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4,
        **chained(logits.device),
    )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, greatest, sums, noise, values, logits.stride(0), vocab, chunks, temperature,
        BLOCK=BLOCK, EACH=each, BLOCKS=triton.next_power_of_2(chunks * each), num_warps=4, **chained(logits.device),
    )  # fmt: skip
    return values
