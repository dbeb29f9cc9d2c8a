"""What a linear policy accepts, refuses and says."""

from dataclasses import replace

import pytest

from lowbit.errors import ConfigError
from lowbit.quant import spec as S
from lowbit.quant.policy import BF16, HIGH, Alignment, Kept, LinearPolicy, Operand, ProductPolicy, Signs

NVFP4_46, EDEN, MXFP8 = Operand(S.NVFP4_POW2_46), Operand(S.NVFP4_POW2_EDEN), Operand(S.MXFP8)
IN_EDEN = ProductPolicy(EDEN, EDEN, 128)


@pytest.mark.parametrize("rotation", [1, 8, 32, 64, 256, -16])
def test_rotations_of_other_sizes_are_refused(rotation: int) -> None:
    with pytest.raises(ConfigError, match=f"rotation={rotation}: choose 0, 16 or 128"):
        ProductPolicy(MXFP8, MXFP8, rotation)


def test_a_rotation_without_a_quantised_operand_is_refused() -> None:
    with pytest.raises(ConfigError, match="rotation=16 of a product without a quantised operand changes nothing"):
        ProductPolicy(rotation=16)
    ProductPolicy(MXFP8, BF16, 16)


@pytest.mark.parametrize("rotation", [0, 128])
def test_fixed_signs_are_a_vector_of_sixteen(rotation: int) -> None:
    with pytest.raises(ConfigError, match=f"fixed signs are a vector of 16, and rotation={rotation}"):
        ProductPolicy(MXFP8, MXFP8, rotation, Signs.FIXED)
    ProductPolicy(MXFP8, MXFP8, 16, Signs.FIXED)


@pytest.mark.parametrize("rotation", [0, 16])
def test_eden_needs_its_rotation(rotation: int) -> None:
    for left, right in ((EDEN, BF16), (BF16, EDEN), (EDEN, EDEN)):
        with pytest.raises(ConfigError, match=r"NVFP4_POW2_EDEN: MS-EDEN is unbiased only under rotation=128"):
            ProductPolicy(left, right, rotation)


@pytest.mark.parametrize("product", ["dgrad", "wgrad"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_biased_quantiser_in_a_gradient_is_refused_unless_allowed(product: str, side: str) -> None:
    biased = {product: ProductPolicy(**{side: NVFP4_46})}
    with pytest.raises(ConfigError, match=f"{product}: NVFP4_POW2_46 chooses its scale after rounding"):
        LinearPolicy(**biased)
    assert LinearPolicy(**biased, allow_bias=True).quantised
    assert LinearPolicy(fprop=ProductPolicy(NVFP4_46, NVFP4_46)).quantised


@pytest.mark.parametrize(
    ("policy", "kept", "bits"),
    [
        (LinearPolicy(), Kept.INPUT, 16),
        (LinearPolicy(ProductPolicy(NVFP4_46, NVFP4_46), IN_EDEN, IN_EDEN), Kept.FORWARD, 4.75),
        (LinearPolicy(ProductPolicy(NVFP4_46, NVFP4_46)), Kept.FORWARD, 4.75),
        (LinearPolicy(ProductPolicy(BF16, NVFP4_46)), Kept.INPUT, 16),
        (LinearPolicy(HIGH, IN_EDEN, IN_EDEN), Kept.TRANSPOSED, 4.75),
        (LinearPolicy(ProductPolicy(MXFP8, MXFP8), HIGH, HIGH, Alignment.ORIGINAL), Kept.INPUT, 16),
        (
            LinearPolicy(*[ProductPolicy(MXFP8, MXFP8)] * 3, Alignment.ORIGINAL),
            Kept.TRANSPOSED,
            8.25,
        ),
    ],
)
def test_what_is_kept(policy: LinearPolicy, kept: Kept, bits: float) -> None:
    assert policy.kept is kept
    assert policy.kept_operand.bits == bits


def test_summaries() -> None:
    policy = LinearPolicy(ProductPolicy(NVFP4_46, BF16), HIGH, IN_EDEN)
    assert policy.summary == (
        "fprop NVFP4_POW2_46 x BF16, dgrad BF16, wgrad NVFP4_POW2_EDEN x NVFP4_POW2_EDEN rotated 128"
    )


def test_policies_are_values() -> None:
    assert LinearPolicy(HIGH, IN_EDEN) == LinearPolicy(ProductPolicy(), ProductPolicy(EDEN, EDEN, 128))
    split = LinearPolicy(ProductPolicy(MXFP8, MXFP8), mean_split=True)
    assert len({LinearPolicy(), LinearPolicy(HIGH, HIGH, HIGH), split, replace(split, mean_split=False)}) == 3


def test_a_mean_split_without_a_quantised_input_is_refused() -> None:
    for useless in ({}, {"fprop": ProductPolicy(BF16, NVFP4_46)}, {"dgrad": IN_EDEN}):
        with pytest.raises(ConfigError, match="neither fprop nor wgrad quantises it: set mean_split=false"):
            LinearPolicy(**useless, mean_split=True)
    LinearPolicy(fprop=ProductPolicy(MXFP8, BF16), mean_split=True)
    LinearPolicy(wgrad=IN_EDEN, alignment=Alignment.ORIGINAL, mean_split=True)
