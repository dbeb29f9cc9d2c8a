"""Four over six against a brute force in FP64 and against values that its authors' package wrote."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import cast, to_bf16

from lowbit.quant import spec as S
from lowbit.quant.quantise import quantise_values
from lowbit.quant.spec import Outer, QuantSpec, Rounding

RULES = [Rounding.FOUR_OVER_SIX_MSE, Rounding.FOUR_OVER_SIX_MAE]


def golden_input() -> torch.Tensor:
    """BF16 [32, 128], the same with every numpy: sums of a linear congruential generator's bytes, nearly Gaussian."""
    state, numbers = 1, []
    for _ in range(32 * 128):
        total = 0
        for _ in range(8):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            total += (state >> 40) % 4096 - 2048
        numbers.append(total / 4096)
    return torch.tensor(numbers).reshape(32, 128).bfloat16()


def golden(rule: str) -> torch.Tensor:
    """Element x block scale, FP64 [32, 128]; `make golden` writes the file and checks it."""
    file = Path(__file__).with_name("golden_four_over_six.json")
    return torch.tensor(json.loads(file.read_text(encoding="utf-8"))[rule], dtype=torch.float64).reshape(32, 128)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
def test_the_authors_package_chooses_the_same(rule: Rounding) -> None:
    v = quantise_values(golden_input(), replace(S.NVFP4_46, rounding=rule))
    assert torch.equal((v.elements * v.scale).double().reshape(32, 128), golden(rule.value.rsplit("_", 1)[-1]))
    six = quantise_values(golden_input(), replace(S.NVFP4, bound=256.0))
    changed = (v.scale != six.scale).double().mean().item()
    assert 0.1 < changed < 0.9


def test_the_authors_package_rounds_six_alone_to_the_same() -> None:
    v = quantise_values(golden_input(), S.NVFP4)
    assert torch.equal((v.elements * v.scale).double().reshape(32, 128), golden("static_6"))


def brute_force(units: np.ndarray, amax: np.ndarray, rule: Rounding) -> tuple[np.ndarray, np.ndarray]:
    """units [..., 16] = x / outer in FP64, exact -> chosen scales and elements; equal errors take 6."""
    results = []
    for target in (6.0, 4.0):
        scale = cast((amax / target).astype(np.float32), "E4M3").astype(np.float64)
        scale = np.where(scale == 0, 2.0**-9, scale)
        inverse = (np.float32(1) / scale.astype(np.float32))[..., None]
        elements = cast(units.astype(np.float32) * inverse, "E2M1").astype(np.float64)
        error = elements * scale[..., None] - units
        results.append((scale, elements, (error**2 if rule is RULES[0] else np.abs(error)).sum(-1)))
    (s6, q6, e6), (s4, q4, e4) = results
    return np.where(e4 < e6, s4, s6), np.where((e4 < e6)[..., None], q4, q6)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.value)
def test_brute_force_in_fp64_chooses_the_same(rule: Rounding) -> None:
    """With power-of-two outer scales every difference and square is exact: all blocks agree, near ties included."""
    rng = np.random.default_rng(0)
    x = to_bf16(np.concatenate([rng.standard_normal((512, 512)), rng.standard_t(2, (512, 512))]).astype(np.float32))
    v = quantise_values(torch.from_numpy(x), replace(S.NVFP4_POW2_46, rounding=rule))
    assert v.outer is not None
    outer = v.outer.double().reshape(1024, 4).numpy()
    amax128 = np.abs(x).reshape(1024, 4, 128).max(-1).astype(np.float64)
    np.testing.assert_array_equal(outer, np.exp2(np.ceil(np.log2(amax128 / 1536))))
    units = x.astype(np.float64).reshape(1024, 4, 8, 16) / outer[..., None, None]
    scale, elements = brute_force(units, np.abs(units).max(-1), rule)
    np.testing.assert_array_equal(v.scale.reshape(scale.shape).numpy(), scale)
    np.testing.assert_array_equal(v.elements.reshape(elements.shape).numpy(), elements)


@pytest.mark.parametrize("spec", [S.NVFP4_46, S.NVFP4_POW2_46, replace(S.NVFP4_46, block=(16, 16))])
def test_no_block_is_worse_than_with_six_alone(spec: QuantSpec) -> None:
    x = torch.randn(256, 512).bfloat16()

    def error(spec: QuantSpec) -> torch.Tensor:
        v = quantise_values(x, spec)
        assert v.outer is not None
        outer = v.outer.repeat_interleave(8, 2) if spec.outer is Outer.BLOCK_POW2 else v.outer
        exact = v.elements.double() * v.scale.double() * outer.double()
        return ((exact - x.double().reshape(256 // spec.block[0], spec.block[0], 32, 16)) ** 2).sum((1, 3))

    both, six = error(spec), error(replace(spec, rounding=Rounding.NEAREST))
    assert (both <= six * (1 + 1e-6)).all()
    assert both.sum() < six.sum()


def test_equal_errors_keep_six() -> None:
    """A block of +-6 is exact with scale 1 and with scale 1.5 (as +-4)."""
    x = torch.full((1, 128), 6.0)
    x[0, 64:] = 1536.0
    for spec in (S.NVFP4_46, S.NVFP4_POW2_46):
        v = quantise_values(x, spec)
        assert v.elements.abs().unique().tolist() == [6.0]
        assert torch.equal(v.dequantise().float(), x)
