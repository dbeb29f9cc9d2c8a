"""The quantisers: `quantise` to codes, `fake_quantise` to the BF16 numbers that the codes stand for.

    x (BF16) -> pad -> blocks -> amax -> scales -> x * multiplier -> round to the element format

Both compute the same FP32 numbers on their grids (`Values`); `fake_quantise` skips the codes, and equals
pack -> unpack -> dequantise bit for bit. Nothing here depends on the data in Python, so everything compiles without a
graph break; the spec is a constant of the compiled code.

**Four over six** (J. Cook et al., arXiv 2512.02010): E2M1 has nothing between 4 and 6, so a block whose values crowd
just below its maximum does better with amax mapped to 4. Both scales are tried and each block keeps the one with the
smaller error (sum of squares or of magnitudes); equal errors keep 6. With bound 256 the larger scale, 1.5 times as
large, still fits E4M3. Choosing after rounding is biased, so gradients must not use it.

**Memory.** A weight that drifts can make its block's choice flip back and forth, which moves sixteen weights at once.
With `Memory` a block keeps the choice it had unless the other one's error is smaller by a margin (hysteresis).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.quant.bits import is_finite, read_bf16, tree_sum
from lowbit.quant.eden import corrected_scale, correction
from lowbit.quant.philox import Purpose, Stream
from lowbit.quant.quantised import Quantised, Values, spread, to_codes
from lowbit.quant.rounding import round_nearest, round_stochastic
from lowbit.quant.scales import inner_scale, one_level, outer_scale
from lowbit.quant.spec import EDEN, FOUR_OVER_SIX, OUTER_BLOCK, Outer, QuantSpec, Rounding, Scale


class Memory(NamedTuple):
    """What four over six remembers of the last time it quantised this tensor."""

    choice: Tensor
    """int8 [row blocks, column blocks]: 6 or 4, what amax was mapped to; 0 where nothing is remembered."""
    margin: float
    """The other choice is taken when its error is below (1 - margin) times the present one's; 1: never."""


def quantise(x: Tensor, spec: QuantSpec, stream: Stream | None = None) -> Quantised:
    """x [..., k] BF16 or FP32 (read as BF16), any strides -> codes and scales.

    `stream` gives the random words of a stochastic spec. For MS-EDEN, x is already rotated, in groups of 128
    (`hadamard`).

    Raises: ValueError for a stochastic spec without a stream, for x without a dimension; TypeError for types other than
    BF16, FP32.
    """
    return to_codes(quantise_values(x, spec, stream))


def fake_quantise(x: Tensor, spec: QuantSpec, stream: Stream | None = None) -> Tensor:
    """The BF16 tensor that quantising x and dequantising gives, of the shape of x. Raises: as `quantise`."""
    return quantise_values(x, spec, stream).dequantise()


def quantise_values(
    x: Tensor,
    spec: QuantSpec,
    stream: Stream | None = None,
    memory: Memory | None = None,
    amax: Tensor | None = None,
) -> Values:
    """As `quantise`, with FP32 numbers on their grids in place of codes.

    Args:
        memory: what four over six remembers; other roundings have no use for it.
        amax: FP32 scalar that takes the place of every block's largest magnitude: a static scale. One-level formats
            with FP32 scales only.

    Raises: as `quantise`; ValueError for `amax` and a spec that has no static scale.
    """
    return _values(x, spec, stream, memory, amax)[0]


def quantise_remembering(x: Tensor, spec: QuantSpec, memory: Memory | None = None) -> tuple[Values, Tensor]:
    """Four over six: the values, and each block's choice as `Memory.choice` holds it.

    Raises: ValueError for a spec of another rounding; as `quantise`.
    """
    values, four = _values(x, spec, None, memory, None)
    if four is None:
        raise ValueError(f"{spec.name} has no choice between four and six")
    return values, torch.where(four, 4, 6).to(torch.int8).reshape(four.shape[0], four.shape[2])


def _values(
    x: Tensor, spec: QuantSpec, stream: Stream | None, memory: Memory | None, static: Tensor | None
) -> tuple[Values, Tensor | None]:
    if spec.stochastic and stream is None:
        raise ValueError(f"{spec.name} with {spec.rounding.value} rounding needs a random stream")
    if x.ndim == 0:
        raise ValueError("a quantiser needs at least one dimension")
    blocks = _blocks(x, spec)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    if static is not None:
        if spec.scale is not Scale.FP32:
            raise ValueError(f"{spec.name} has no static scale: its blocks' scales are not FP32")
        amax = torch.where(is_finite(amax), static, amax)  # NaN still reaches the scale
    if spec.outer is Outer.NONE:
        scale, multiplier = one_level(amax, spec)
        return Values(_round(blocks * multiplier, spec, stream), scale, None, tuple(x.shape), spec), None
    return _two_level(blocks, amax, tuple(x.shape), spec, stream, memory)


def _blocks(x: Tensor, spec: QuantSpec) -> Tensor:
    """x [..., k] -> FP32 holding BF16 numbers, [row blocks, rows a block, column blocks, columns a block].

    Padded with zeros to whole blocks; an empty tensor to one block, so that nothing below meets an empty one.
    """
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    block_rows, block_columns = spec.block[0] or max(rows, 1), spec.block[1] or max(columns, 1)
    matrix = read_bf16(x).reshape(rows, columns)
    padding = (0, _missing(columns, max(spec.column_multiple, block_columns)), 0, _missing(rows, block_rows))
    if any(padding):
        matrix = F.pad(matrix, padding)
    return matrix.reshape(matrix.shape[0] // block_rows, block_rows, matrix.shape[1] // block_columns, block_columns)


def _missing(size: int, multiple: int) -> int:
    """How much to add to `size` for a positive multiple of `multiple`."""
    return -size % multiple if size else multiple


def _round(y: Tensor, spec: QuantSpec, stream: Stream | None) -> Tensor:
    if spec.rounding is not Rounding.STOCHASTIC:
        return round_nearest(y, spec.element)
    assert stream is not None
    return round_stochastic(y, spec.element, stream.halves(Purpose.ELEMENTS, y.numel()).reshape(y.shape))


def _two_level(
    x: Tensor, amax: Tensor, shape: tuple[int, ...], spec: QuantSpec, stream: Stream | None, memory: Memory | None
) -> tuple[Values, Tensor | None]:
    """E4M3 block scales under an outer scale, and which blocks took four where there is a choice.

    x in blocks, amax [row blocks, 1, column blocks, 1].
    """
    outer, inverse = outer_scale(_outer_amax(amax, spec), spec)
    by_block, inverse_by_block = outer, inverse
    if spec.outer in (Outer.BLOCK, Outer.BLOCK_POW2):
        by_block, inverse_by_block = spread(outer, amax.shape[2]), spread(inverse, amax.shape[2])
    exact = spec.outer is Outer.BLOCK_POW2
    scaled = x * inverse_by_block if exact else x  # what the multiplier applies to
    # x in units of the outer scale: 8 significant bits in FP32, or exact in FP64
    units = scaled if exact else x.double() * inverse_by_block.double()

    scale, multiplier = inner_scale(amax, by_block, inverse_by_block, spec, spec.target)
    y = scaled * multiplier
    elements = _round(y, spec, stream)
    four = None
    if spec.rounding in FOUR_OVER_SIX:
        scale4, multiplier4 = inner_scale(amax, by_block, inverse_by_block, spec, 4.0)
        elements4 = round_nearest(scaled * multiplier4, spec.element)
        error4, error6 = _error(elements4 * scale4, units, spec), _error(elements * scale, units, spec)
        four = error4 < error6 if memory is None else _stick(error4, error6, memory)
        elements, scale = torch.where(four, elements4, elements), torch.where(four, scale4, scale)
    elif spec.rounding in EDEN:
        assert stream is not None
        if spec.rounding is Rounding.MS_EDEN:
            factor = correction(units, (elements * scale).to(units.dtype))
        else:
            factor = correction(y.double(), elements.double())
        noise = stream.halves(Purpose.SCALES, scale.numel()).reshape(scale.shape)
        scale = corrected_scale(scale, factor, noise)
    return Values(elements, scale, outer, shape, spec), four


def _stick(error4: Tensor, error6: Tensor, memory: Memory) -> Tensor:
    """Which blocks take four: those that did and still may, and those whose six has become too bad."""
    before, keep = memory.choice.reshape(error4.shape), 1.0 - memory.margin
    taken = torch.where(before == 4, ~(error6 < keep * error4), error4 < keep * error6)
    return torch.where(before == 0, error4 < error6, taken)


def _outer_amax(amax: Tensor, spec: QuantSpec) -> Tensor:
    """The largest magnitude under each outer scale: [1, 1, 1, 1], [rows, 1, 1, 1] or [rows, 1, groups, 1]."""
    if spec.outer is Outer.TENSOR:
        return amax.amax().reshape(1, 1, 1, 1)
    if spec.outer is Outer.ROW:
        return amax.amax(2, keepdim=True)
    rows, _, blocks, _ = amax.shape
    groups = blocks * spec.block[1] // OUTER_BLOCK
    return amax.reshape(rows, 1, groups, blocks // groups).amax(3, keepdim=True)


def _error(value: Tensor, units: Tensor, spec: QuantSpec) -> Tensor:
    """Each block's error, summed by halving over its columns, then its rows: [row blocks, 1, column blocks, 1]."""
    difference = value.to(units.dtype) - units
    mse = spec.rounding is Rounding.FOUR_OVER_SIX_MSE
    total = tree_sum(difference * difference if mse else difference.abs())
    return tree_sum(total.transpose(1, 3)).transpose(1, 3)
