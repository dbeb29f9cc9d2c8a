"""One pass over a chunk's logits: what `lowbit.distill.blocks` keeps of each block of 64 columns.

Blocks of all rows form one list, of which a program takes TILE: a short vocabulary fills programs as well as a long
one. With `gumbel` the greatest key of each block, logit plus noise, comes out as well; its noise is made in
registers, where the PyTorch path stores eight bytes a logit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.distill.kernels.numbers import BLOCK, HIDDEN, block_uniform, exp_below, gumbel_keys, transformed
from lowbit.distill.noise import Places

TILE, WARPS = 64, 4
"""4,096 logits a program, 32 a thread: four loads of 16 bytes are under way at once, and 32 registers do (sm_90)."""


@triton.jit(do_not_specialize=["count"])
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits, greatest, total, moment, keys, sample, position, key, count, blocks, row_stride, columns, vocab,
    softcap, temperature, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, GUMBEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = n < count
    row, block = n // blocks, n % blocks
    inside = tl.arange(0, BLOCK)
    column = block[:, None] * BLOCK + inside[None, :]
    first = row.to(tl.int64) * row_stride + block * BLOCK
    logit = tl.load(logits + (first[:, None] + inside[None, :]), there[:, None] & (column < columns), HIDDEN)
    z = transformed(logit, column, vocab, softcap, temperature, SOFTCAP, TEMPERED)
    most = tl.max(z, axis=1)
    # Where e is zero, z may be -inf; so far below nothing of a product with it is left anyway.
    below = tl.maximum(z - tl.where(most == HIDDEN, 0.0, most)[:, None], -128.0, propagate_nan=tl.PropagateNan.ALL)
    e = exp_below(below)
    tl.store(greatest + n, most, there)
    tl.store(total + n, tl.sum(e, axis=1), there)
    tl.store(moment + n, tl.sum(e * below, axis=1), there)
    if GUMBEL:
        at, t = tl.load(sample + row, there, 0), tl.load(position + row, there, 0)
        tl.store(keys + n, tl.max(gumbel_keys(z, block_uniform(at, t, key, block)), axis=1), there)


def statistics(
    logits: Tensor,
    vocab_size: int,
    softcap: float | None,
    temperature: float,
    places: Places,
    key: Tensor,
    gumbel: bool,
    tile: int = TILE,
) -> Tensor:
    """FP32 [3 or 4, C, blocks]: greatest z, sum of e = exp(z - greatest), sum of e (z - greatest), greatest Gumbel key.

    Args:
        logits: [C, columns >= vocab_size] of any floating type, a row's next to each other.
        key: int64 [2], `Noise.key`; it and places are read for Gumbel keys only.
    """
    assert logits.stride(1) == 1
    rows, columns = logits.shape
    blocks = triton.cdiv(vocab_size, BLOCK.value)
    out = torch.empty(3 + gumbel, rows, blocks, dtype=torch.float32, device=logits.device)
    count = rows * blocks
    assert count < 1 << 31
    if count:
        statistics_kernel[(triton.cdiv(count, tile),)](
            logits, out[0], out[1], out[2], out[2 + gumbel], places.sample, places.position, key, count, blocks,
            logits.stride(0), columns, vocab_size, softcap or 1.0, temperature,
            SOFTCAP=softcap is not None, TEMPERED=temperature != 1.0, GUMBEL=gumbel, TILE=tile, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
