"""Numbers of teacher distributions in Triton: transformed logits, the noise of a row, functions that Triton lacks.

As in `lowbit.distill.blocks` and `noise`, up to the last bits of FP32 exponentials and logarithms. Compile what uses
this with `enable_fp_fusion=False`: a key of one token has to come out the same wherever it is computed.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from lowbit.distill import blocks
from lowbit.distill.noise import Lane
from lowbit.quant.kernels.triton_numbers import INTERPRETED, philox
from lowbit.quant.philox import MASK

BLOCK, HIDDEN = tl.constexpr(blocks.BLOCK), tl.constexpr(blocks.HIDDEN)
LOW_WORD, TARGETS = tl.constexpr(MASK), tl.constexpr(int(Lane.TARGETS))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    if INTERPRETED:
        t = tl.exp(-2 * tl.abs(x).to(tl.float64))
        size = ((1 - t) / (1 + t)).to(tl.float32)
        value = tl.where(x < 0, -size, size)
    else:
        value = libdevice.tanh(x)
    return value


@triton.jit
def exp_below(x):  # type: ignore[no-untyped-def]
    """exp(x) for FP32 x <= 0, zero below 2**-126: the processor's power of two alone, with no care for smaller ones."""
    power = x * 1.4426950408889634
    if INTERPRETED:
        value = tl.exp2(power)
    else:
        value = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, True, 1)
    return value


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    """log(x) for FP32 x > 0, to 3e-7 of its size, or of one: the processor's logarithm."""
    if INTERPRETED:
        value = tl.log2(x)
    else:
        value = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return value * 0.6931471805599453


@triton.jit
def _exponential(u):  # type: ignore[no-untyped-def]
    """-log(1 - u) for FP32 u in [0, 1), to 3e-6 of its size: a series where the difference would round u away."""
    series = tl.fma(u, tl.fma(u, tl.fma(u, tl.fma(u, u * 0 + 1 / 5, 1 / 4), 1 / 3), 1 / 2), 1.0) * u
    return tl.where(u < 1 / 16, series, -_log(1 - u))


@triton.jit
def transformed(  # type: ignore[no-untyped-def]
    logit, column, vocab, softcap, temperature, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr
):
    """FP32 softcap * tanh(logit / softcap) / temperature; -inf from column `vocab` on."""
    z = logit.to(tl.float32)
    if SOFTCAP:
        z = tl.where(z == HIDDEN, z, softcap * _tanh(tl.div_rn(z, softcap)))
    if TEMPERED:
        z = tl.div_rn(z, temperature)
    return tl.where(column < vocab, z, HIDDEN)


@triton.jit
def four_words(sample, position, key, index, LANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words 4 i to 4 i + 3 of `Noise.words`, uint32 like `index`, whose shape sample and position broadcast to."""
    c0 = index.to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = zero + (sample & LOW_WORD).to(tl.uint32)
    c2 = zero + position.to(tl.uint32)
    c3 = zero + (((sample >> 32) << 8) | LANE).to(tl.uint32)
    k0, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    return philox(c0, c1, c2, c3, zero + k0, zero + k1)


@triton.jit
def uniform(sample, position, key, index, LANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`Noise.uniform` at word `index` of each row: FP64 like index."""
    w0, w1, w2, w3 = four_words(sample, position, key, index // 4, LANE)
    which = index % 4
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def block_uniform(sample, position, key, block):  # type: ignore[no-untyped-def]
    """The numbers behind the Gumbel noise of blocks [N] at samples and positions [N]: FP32 [N, 64], below 1."""
    COUNT: tl.constexpr = block.shape[0]
    index = block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    w0, w1, w2, w3 = four_words(sample[:, None], position[:, None], key, index, TARGETS)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (COUNT, BLOCK))
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def gumbel_keys(z, u):  # type: ignore[no-untyped-def]
    """Transformed logits with Gumbel noise, FP32."""
    return z - _log(_exponential(u))
