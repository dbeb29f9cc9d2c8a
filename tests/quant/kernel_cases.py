"""The Triton quantisers against the PyTorch reference on the CPU, bit for bit, for every spec that they take.

`python kernel_cases.py` runs every case in Triton's interpreter (TRITON_INTERPRET=1), where there is no GPU.
"""

import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.quant.kernels import gpu, ops
from lowbit.quant.philox import Product, Side, Stream, make_clock, make_key
from lowbit.quant.spec import EDEN, FOUR_OVER_SIX, SPECS, VARIANTS, QuantSpec, Scale

STREAM = Stream(make_key(1, "a"), make_clock(3, 1, 2), Product.DGRAD, Side.RIGHT)
EXTRA = [VARIANTS[name] for name in ("MXFP8_SR", "NVFP4_POW2_46_MAE", "FP8_ROW_SR")]
TAKEN = {spec.name: spec for spec in (*SPECS.values(), *EXTRA) if gpu.takes(spec, 128)}


def rotations(spec: QuantSpec | None) -> tuple[int, ...]:
    """0: none. MS-EDEN is only ever used under 128."""
    return (128,) if spec is not None and spec.rounding in EDEN else (0, 16, 128)


def inputs(zeros: bool = True) -> Iterator[Tensor]:
    """BF16 and FP32, rows or columns next to each other, whole tiles and not, tiny to large, an outlier, zeros, NaN.

    Triton's interpreter sums -0 and -0 to 0, which rotated zeros show: it is spared them.
    """
    torch.manual_seed(0)
    for shape, dtype, by_column in (
        ((37, 200), torch.bfloat16, False),
        ((40, 256), torch.float32, True),
        ((1, 8), torch.float32, False),
        ((130, 144), torch.bfloat16, True),
        ((128, 128), torch.bfloat16, False),
        ((64, 256), torch.bfloat16, True),
    ):
        x = torch.randn(shape) * 2.0 ** torch.randint(-40, 20, (shape[0], 1))
        if zeros:
            x[0, 4:] = 0
        x[-1, -1] *= 1000
        if shape[0] == 37:
            x[3, 5], x[20, 150] = math.nan, -math.inf
        x = x.to(dtype)
        yield x.t().contiguous().t() if by_column else x


def compare(spec: QuantSpec | None, rotation: int, x: Tensor, device: str) -> None:
    """Raise AssertionError where operand, scales, codes or what unpacking gives differ in a bit.

    With what may be given beside x, too: a choice of four or six for each block, a part of a larger matrix as
    OutControl gives it; a range that is no BF16 number.
    """
    _compare(spec, rotation, x, device)
    if spec is not None and spec.rounding in FOUR_OVER_SIX:
        blocks = ops.padded_columns(-(-x.shape[1] // max(rotation, 1)) * max(rotation, 1), spec) // spec.block[1]
        rows = -(-x.shape[0] // spec.block[0])
        kept = torch.tensor([0, 4, 6], dtype=torch.int8)[torch.randint(0, 3, (rows, blocks + 3))]
        _compare(spec, rotation, x, device, choice=kept[:, :blocks])
    if spec is not None and spec.scale is Scale.FP32:
        _compare(spec, rotation, x, device, amax=torch.tensor(1.4987))


def _compare(
    spec: QuantSpec | None,
    rotation: int,
    x: Tensor,
    device: str,
    choice: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    signs = torch.where(torch.rand(rotation) < 0.5, -1.0, 1.0) if rotation else None
    padded = ops.padded_columns(ops.operand_width(x.shape[1], signs), spec)
    if not gpu.takes(spec, padded):
        return
    made = [ops.allocate(x, signs, spec, torch.bfloat16, True, spec is not None) for _ in range(2)]
    want = ops.reference(x, signs, spec, STREAM, choice, amax, torch.bfloat16, made[0])
    got = tuple(tensor.fill_(3).to(device) for tensor in made[1])
    key, clock = STREAM.key.to(device), STREAM.clock.to(device)
    signs = None if signs is None else signs.to(device)
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    if choice is not None:
        choice = torch.empty_strided(choice.shape, choice.stride(), dtype=choice.dtype, device=device).copy_(choice)
    amax = None if amax is None else amax.to(device)
    gpu.run_factor(moved, spec, signs, key, clock, ops.lane_of(STREAM), choice, amax, padded, got)  # type: ignore[arg-type]
    for name, a, b in zip(("operand", "after", "data", "scales", "outer"), want, got, strict=True):
        same_bits(f"{name} {tuple(x.shape)} rotation {rotation}", a, b)
    if spec is not None:
        back = torch.empty_like(got[0])
        gpu.run_unpack(got[2], got[3], got[4] if got[4].numel() else None, spec, padded, back)
        same_bits(f"unpacked {tuple(x.shape)} rotation {rotation}", want[0], back)


def same_bits(what: str, want: Tensor, got: Tensor) -> None:
    """NaN is NaN, whatever its sign and payload."""
    got = got.cpu()
    if want.is_floating_point():
        want, got = (torch.where(t.isnan(), math.nan, t) for t in (want, got))
    if want.numel():
        different = (want.contiguous().view(torch.uint8) != got.contiguous().view(torch.uint8)).sum().item()
        assert different == 0, f"{what}: {different} bytes of {want.numel() * want.element_size()} differ"


if __name__ == "__main__":
    for name, spec in [("BF16", None), *((n, TAKEN[n]) for n in sys.argv[1:] or TAKEN)]:
        for rotation in rotations(spec):
            for x in inputs(zeros=rotation == 0):
                compare(spec, rotation, x, "cpu")
        print(name)
