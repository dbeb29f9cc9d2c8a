"""What a decoding step begins and ends with, a launch each: Triton kernels over the slots' lines (`infer.lines`).

As written (`infer.graphs`, `infer.cache`, `models.rope`) that is two dozen operators of PyTorch.

    begin_step    lines -> where the new token's keys go, its rotary tables, and its noise
    end_step      lines, values drawn -> the drawn token is the next to be read, and one more is stored
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.infer.kernels.chain import chained, let_next, wait
from lowbit.infer.lines import NOISE, PROMPT, STORED, TABLE, TOKEN, Begun

_TOKEN, _STORED, _PROMPT, _NOISE, _TABLE = (tl.constexpr(i) for i in (TOKEN, STORED, PROMPT, NOISE, TABLE))


@triton.jit
def _begin_kernel(  # type: ignore[no-untyped-def]
    lines, noise, all_cos, all_sin, places, cos, sin, own_noise, line, noise_line, longest, blocks, positions,
    BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    wait(CHAINED)
    let_next(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lines += row * line
    stored, prompt = tl.load(lines + _STORED), tl.load(lines + _PROMPT)
    block = tl.load(lines + _TABLE + tl.minimum(stored // BLOCK, blocks - 1))
    tl.store(places + row, block * BLOCK + stored % BLOCK)
    drawn = tl.minimum(tl.maximum(stored + 1 - prompt, 0), longest - 1)
    tl.store(own_noise + row, tl.load(noise + tl.load(lines + _NOISE) * noise_line + drawn))
    d = tl.arange(0, WIDE)
    at = tl.minimum(stored, positions - 1) * D + d
    tl.store(cos + row * D + d, tl.load(all_cos + at, mask=d < D, other=0.0), mask=d < D)
    tl.store(sin + row * D + d, tl.load(all_sin + at, mask=d < D, other=0.0), mask=d < D)


def begin_step(lines: Tensor, noise: Tensor, rope: tuple[Tensor, Tensor], blocks: int, block: int) -> Begun:
    """See the module's docstring.

    Args:
        lines: int64 [rows, TABLE + at least `blocks`]. noise: FP64 [lines of noise, longest].
        rope: FP32, of every position that a row may have, D numbers each. blocks: of a row. block: tokens of one.
    """
    rows = len(lines)
    all_cos, all_sin = rope
    dim, device = all_cos.shape[-1], lines.device
    places = torch.empty(rows, dtype=torch.int64, device=device)
    own_noise = torch.empty(rows, dtype=noise.dtype, device=device)
    cos, sin = torch.empty(2, rows, 1, 1, dim, device=device)
    _begin_kernel[(rows,)](
        lines, noise, all_cos, all_sin, places, cos, sin, own_noise,
        lines.stride(0), noise.stride(0), noise.shape[1], blocks, all_cos.numel() // dim,
        BLOCK=block, D=dim, WIDE=triton.next_power_of_2(dim), num_warps=1, **chained(device),
    )  # fmt: skip
    return Begun(places, (cos, sin), own_noise)


@triton.jit
def _end_kernel(lines, values, line, CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    wait(CHAINED)
    let_next(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    lines += row * line
    tl.store(lines + _TOKEN, tl.load(values + row * 2).to(tl.int64))
    tl.store(lines + _STORED, tl.load(lines + _STORED) + tl.where(tl.load(lines + _PROMPT) > 0, 1, 0))


def end_step(lines: Tensor, values: Tensor) -> None:
    """lines int64 [rows, ...], values FP64 [rows, 2] of tokens and log-probabilities."""
    assert values.is_contiguous()
    _end_kernel[(len(lines),)](lines, values, lines.stride(0), num_warps=1, **chained(lines.device))
