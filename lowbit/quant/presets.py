"""The recipes that have a name: what a linear layer's three products compute in.

Read `left x right` as the two factors of a product (see `policy`); R16 and R128 are random Hadamard rotations of both.

| name | fprop X x W | dgrad dY x W^T | wgrad dY^T x X^T | backward reads | source |
|---|---|---|---|---|---|
| bf16 | - | - | - | | |
| fp8_tensor, fp8_row | FP8 x FP8, one scale a tensor or a row | same | same | originals | |
| fp8_block | 1x128 x 128x128 | 1x128 x 128x128 | 1x128 x 1x128 | originals | arXiv 2412.19437 |
| mxfp8 | MXFP8 x MXFP8 | same | same | originals | arXiv 2506.08027 |
| nvfp4_nvidia | NVFP4 x 16x16 NVFP4 | SR x 16x16 | R16 fixed: SR x nearest | originals | arXiv 2509.25149 |
| nvfp4_tetrajet | nearest x nearest | R16: SR x SR | R16: SR x SR | aligned | arXiv 2510.27527 |
| nvfp4_quartet2 | four over six, both | R128: MS-EDEN, both | R128: MS-EDEN, both | aligned | arXiv 2601.22813 |
| nvfp4 | four over six, both | R128: MS-EDEN, both | R128: MS-EDEN, both | aligned | this project |
| int8 | INT8 x INT8 | - | - | aligned | |
| nvfp4_w4a16, mxfp8_w8a16, fp8_w8a16 | BF16 x quantised | - | - | aligned | |

What tells ours, `nvfp4`, from its nearest relative `nvfp4_quartet2`: the outer scale is a power of two for each 128
numbers, so a row is quantised alike whatever else is in the batch, dequantised values fit BF16 exactly, and no pass
over the whole tensor is needed for its maximum; and MS-EDEN's correction weighs what it should (`eden`): no bias that
can be told from zero in place of -5.7e-4.

`nvfp4_tetrajet` keeps the published rounding of the block scale, which clips the largest element where the scale was
rounded down: -0.27% an operand. Transformer Engine's rule, in `nvfp4_nvidia`, does the same.

The weight-only recipes are what a server computes that stores weights in few bits; a trainer that must match it
quantises those weights alike and nothing else. `nvfp4_w4a16` has one FP32 scale a tensor, the layout that servers
read, and four over six, which needs nothing of them.
"""

from lowbit.quant.policy import Alignment, LinearPolicy, Operand, ProductPolicy, Signs
from lowbit.quant.spec import (
    FP8_BLOCK,
    FP8_BLOCK_2D,
    FP8_ROW,
    FP8_TENSOR,
    INT8_ROW,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    NVFP4_46,
    NVFP4_EDEN_PUBLISHED,
    NVFP4_POW2_46,
    NVFP4_POW2_EDEN,
    NVFP4_SR,
    NVFP4_TETRAJET,
    NVFP4_TETRAJET_SR,
    QuantSpec,
)


def product(
    left: QuantSpec | None, right: QuantSpec | None, rotation: int = 0, signs: Signs = Signs.FRESH
) -> ProductPolicy:
    """A product of these formats; None is BF16."""
    return ProductPolicy(Operand(left), Operand(right), rotation, signs)


def uniform(spec: QuantSpec) -> LinearPolicy:
    """Every operand in one format, quantised from the originals: the recipe of the 8-bit formats."""
    same = product(spec, spec)
    return LinearPolicy(same, same, same, Alignment.ORIGINAL)


def four_bit(forward: QuantSpec, backward: QuantSpec, rotation: int) -> LinearPolicy:
    """One format forward, one unbiased rotated format backward, of the dequantised forward operands."""
    gradient = product(backward, backward, rotation)
    return LinearPolicy(product(forward, forward), gradient, gradient, Alignment.ALIGNED)


def forward_only(left: QuantSpec | None, right: QuantSpec | None) -> LinearPolicy:
    """A quantised forward; a BF16 backward on its dequantised operands (the straight-through gradient)."""
    return LinearPolicy(fprop=product(left, right))


PRESETS: dict[str, LinearPolicy] = {
    "bf16": LinearPolicy(),
    "fp8_tensor": uniform(FP8_TENSOR),
    "fp8_row": uniform(FP8_ROW),
    "fp8_block": LinearPolicy(
        product(FP8_BLOCK, FP8_BLOCK_2D),
        product(FP8_BLOCK, FP8_BLOCK_2D),
        product(FP8_BLOCK, FP8_BLOCK),
        Alignment.ORIGINAL,
    ),
    "mxfp8": uniform(MXFP8),
    "nvfp4_nvidia": LinearPolicy(
        product(NVFP4, NVFP4_2D),
        product(NVFP4_SR, NVFP4_2D),
        product(NVFP4_SR, NVFP4, 16, Signs.FIXED),
        Alignment.ORIGINAL,
    ),
    "nvfp4_tetrajet": four_bit(NVFP4_TETRAJET, NVFP4_TETRAJET_SR, 16),
    "nvfp4_quartet2": four_bit(NVFP4_46, NVFP4_EDEN_PUBLISHED, 128),
    "nvfp4": four_bit(NVFP4_POW2_46, NVFP4_POW2_EDEN, 128),
    "int8": forward_only(INT8_ROW, INT8_ROW),
    "nvfp4_w4a16": forward_only(None, NVFP4_46),
    "mxfp8_w8a16": forward_only(None, MXFP8),
    "fp8_w8a16": forward_only(None, FP8_ROW),
}
"""By name; the last three quantise weights only."""
