"""The packed product against the emulation's: a BF16 copy of the same numbers, and an ordinary product.

`python packed_cases.py FORMAT` runs it in Triton's interpreter (TRITON_INTERPRET=1), where there is no GPU.
"""

import sys

import torch
from attention_cases import mend_interpreter
from torch import Tensor

from lowbit.infer.arrangement import arranged
from lowbit.infer.kernels.packed import Shape, begin_product
from lowbit.infer.kernels.unfinished import finish
from lowbit.quant.quantise import quantise
from lowbit.quant.spec import FP8_ROW, MXFP8, NVFP4, NVFP4_46, NVFP4_ROW, QuantSpec

SPECS = {spec.name: spec for spec in (NVFP4_46, NVFP4, NVFP4_ROW, MXFP8, FP8_ROW)}


CUTS = (
    *(Shape(1, 1, 1, 8, 3), Shape(1, 2, 1, 4), Shape(1, 4, 8, 4), Shape(2, 2, 8, 4, 3), Shape(1, 1, 8, 4, 3, splits=2)),
    *(Shape(1, 4, 16, 4, splits=4), Shape(2, 4, 16, 4, 3), Shape(1, 8, 16, 8, splits=3), Shape(1, 2, 16, 4, 2)),
    *(Shape(1, 4, 32, 4), Shape(1, 4, 64, 4, splits=2)),
)
"""Ways to cut a product: the usual ones of many rows of weights or many columns, and others."""


def compare(spec: QuantSpec, x: Tensor, weight: Tensor, device: str, asm: bool, shape: Shape | None = None) -> None:
    """x [rows, in] BF16, weight [out, in] FP32. Without assembly the result stays FP32."""
    made = quantise(weight, spec)
    after = made.after()
    data, scales = (None if part is None else part.to(device) for part in arranged(made.pack(), len(weight)))
    assert data is not None
    outer = None if after is None else after.to(device)
    dtype = torch.bfloat16 if asm else torch.float32
    got = finish(begin_product(x.to(device), data, scales, outer, asm, dtype, shape)).cpu()
    expected = x.double() @ made.operand().double().t()
    expected = expected if after is None else expected * after.double().t()
    assert got.dtype is dtype
    relative = 2**-8 if asm else 1e-5
    size = x.double().abs() @ made.operand().double().abs().t() * (1.0 if after is None else after.double().t())
    assert bool(((got.double() - expected).abs() <= relative * expected.abs() + 4e-6 * size).all())


def weights(rows: int, columns: int) -> Tensor:
    """Of very different sizes, so that all scales and subnormal codes occur; a row of zeros."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight[:, ::7] *= 1e-2
    weight[rows // 2] = 0.0
    return weight


if __name__ == "__main__":
    mend_interpreter()
    spec = SPECS[sys.argv[1]]
    for rows, columns, width in ((1, 48, 128), (13, 128, 384), (16, 64, 512), (33, 16, 128), (3, 48, 2048)):
        compare(spec, torch.randn(rows, width).bfloat16(), weights(columns, width), "cpu", False)
    for x in torch.eye(128).bfloat16().split(16):
        compare(spec, x, weights(48, 128), "cpu", False)
    for cut in CUTS if spec in (NVFP4_46, MXFP8) else CUTS[:1]:  # those of four bits, and of eight, are cut alike
        compare(spec, torch.randn(max(1, cut.x_rows - 1), 640).bfloat16(), weights(144, 640), "cpu", False, cut)
    print("compared", spec.name)
