"""Element formats: every code's value and every value's code, against ml_dtypes (C++) and gfloat (Python)."""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from oracles import FLOAT_FORMATS, GFLOAT, ML_DTYPES

from lowbit.quant.formats import E8M0, INT8, ElementFormat, decode, decode_e8m0, encode, encode_e8m0

floats = pytest.mark.parametrize("fmt", FLOAT_FORMATS, ids=lambda f: f.name)


def codes_of(fmt: ElementFormat) -> np.ndarray:
    return np.arange(1 << fmt.bits, dtype=np.uint8)


@floats
def test_every_code_decodes_as_ml_dtypes_and_gfloat_decode_it(fmt: ElementFormat) -> None:
    codes = codes_of(fmt)
    ours = decode(torch.from_numpy(codes), fmt).numpy()
    theirs = codes.view(ML_DTYPES[fmt.name]).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(ours)]))
    slow = np.array([gfloat.decode_float(GFLOAT[fmt.name], int(c)).fval for c in codes], dtype=np.float32)
    np.testing.assert_array_equal(ours, slow)


@floats
def test_encoding_a_decoded_code_gives_it_back(fmt: ElementFormat) -> None:
    codes = torch.from_numpy(codes_of(fmt))
    values = decode(codes, fmt)
    finite = values.isfinite()
    assert torch.equal(encode(values[finite], fmt), codes[finite])
    assert encode(torch.tensor([float("nan")]), fmt).item() == fmt.nan_code


@floats
def test_the_descriptor_says_what_ml_dtypes_says(fmt: ElementFormat) -> None:
    info = ml_dtypes.finfo(ML_DTYPES[fmt.name])
    assert fmt.max == float(info.max)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert (fmt.bits, fmt.mantissa_bits, fmt.exponent_bits) == (info.bits, info.nmant, info.nexp)
    values = decode(torch.from_numpy(codes_of(fmt)), fmt)
    assert bool(values.isinf().any()) == fmt.has_inf
    assert bool(values.isnan().any()) == fmt.has_nan


def test_int8_is_symmetric_twos_complement() -> None:
    values = torch.arange(-127, 128).float()
    codes = encode(values, INT8)
    assert codes.dtype == torch.int8
    assert torch.equal(codes, torch.arange(-127, 128).to(torch.int8))
    assert torch.equal(decode(codes, INT8), values)


def test_e8m0_codes_against_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    ours = decode_e8m0(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(ours, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    exponents = torch.arange(-140, 140)
    encoded = encode_e8m0(exponents, torch.ones_like(exponents, dtype=torch.bool))
    assert encoded.tolist() == [min(max(e + 127, 0), 254) for e in range(-140, 140)]
    assert encode_e8m0(torch.tensor([3]), torch.tensor([False])).item() == E8M0.nan_code
