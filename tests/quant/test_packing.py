"""Packed storage: nibbles and the 32_4_4 scale layout against torchao, six-bit codes against Python integers, and
fake quantisation against pack -> unpack -> dequantise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import same_bits
from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from lowbit.quant.packing import pack_codes, swizzle, unpack_codes, unswizzle
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.quantise import fake_quantise, quantise
from lowbit.quant.spec import SPECS, QuantSpec, Scale


def stream() -> Stream:
    return Stream(make_key(0, "layer"), make_clock(), Product.WGRAD, Side.RIGHT)


def test_nibbles_low_first_as_torchao_packs_them() -> None:
    assert pack_codes(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist() == [0x21, 0x43]
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    packed = pack_codes(codes, 4)
    assert torch.equal(packed, pack_uint4(codes))
    assert torch.equal(unpack_codes(packed, 4), codes)
    assert torch.equal(unpack_codes(packed, 4), unpack_uint4(packed).reshape(codes.shape))
    wide = codes.numpy().astype(np.uint8)
    np.testing.assert_array_equal(packed.numpy(), wide[:, ::2] + 16 * wide[:, 1::2])


def test_four_six_bit_codes_are_a_little_endian_24_bit_number() -> None:
    codes = torch.randint(0, 64, (32, 64), dtype=torch.uint8)
    packed = pack_codes(codes, 6)
    assert packed.shape == (32, 48)
    for row, data in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << 6 * i for i, code in enumerate(row))
        assert bytes(data) == number.to_bytes(48, "little")
    bits = np.unpackbits(codes.numpy()[..., None], axis=-1, bitorder="little")[..., :6]
    np.testing.assert_array_equal(packed.numpy(), np.packbits(bits.reshape(32, -1), axis=-1, bitorder="little"))
    assert torch.equal(unpack_codes(packed, 6), codes)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 40))
def test_the_scale_layout_is_torchaos_and_the_formulas(rows: int, columns: int) -> None:
    scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    got = swizzle(scales)
    assert torch.equal(got, to_blocked(scales).reshape(-1))
    assert torch.equal(unswizzle(got, rows, columns), scales)
    assert torch.equal(from_blocked(got, -(-rows // 128) * 128, -(-columns // 4) * 4)[:rows, :columns], scales)
    wide = -(-columns // 4)
    for r, c in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)):
        at = (r // 128 * wide + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        assert got[at] == scales[r, c]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), max_size=2).flatmap(lambda lead: st.integers(1, 300).map(lambda k: (*lead, k))),
    seed=st.integers(0, 1 << 16),
    exponent=st.integers(-120, 110),
    half=st.booleans(),
)
def test_fake_is_pack_unpack_dequantise(
    spec: QuantSpec, shape: tuple[int, ...], seed: int, exponent: int, half: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    x = x.bfloat16() if half else x
    fake = fake_quantise(x, spec, stream())
    assert fake.shape == x.shape and fake.dtype == torch.bfloat16
    quantised = quantise(x, spec, stream())
    one_byte = spec.scale in (Scale.E8M0_UP, Scale.E8M0_FLOOR, Scale.E4M3_NEAREST, Scale.E4M3_UP)
    packed = quantised.pack(swizzled=one_byte and seed % 2 == 0)
    assert same_bits(packed.unpack().dequantise(), fake)
    assert same_bits(quantised.operand(), packed.unpack().operand())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_packed_bytes_are_the_bits_a_spec_states(spec: QuantSpec) -> None:
    packed = quantise(torch.randn(256, 4096), spec, stream()).pack()
    assert abs(packed.nbytes * 8 / (256 * 4096) - spec.bits) <= 32 * 256 / (256 * 4096) + 1e-9
