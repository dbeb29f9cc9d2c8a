"""The Triton kernel that makes FP8 codes, in Triton's interpreter, against the same in PyTorch.

The interpreter casts to FP8 wrongly, so that the kernel rounds by integer arithmetic there; the cast itself is tested
on a GPU (`test_backends_gpu`).
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

COMPARE = """
import itertools, torch
from dataclasses import replace
from lowbit.quant import spec as S
from lowbit.quant.backends import fp8_codes as fc
from lowbit.quant.backends.fp8_kernel import launch, launch_rows

torch.set_num_threads(1)
torch.manual_seed(0)
formats = dict(tensor=S.FP8_TENSOR, row=S.FP8_ROW, block=S.FP8_BLOCK, square=S.FP8_BLOCK_2D)
count = 0
for (rows, columns), dtype, lies in itertools.product(((17, 40), (130, 200)), (torch.bfloat16, torch.float32), (0, 1)):
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-20, 20, (rows, 1)).float())
    x[0, :16], x[-1, -1], x[1, 2] = 0, 3e38, 1e-40
    if rows > 128:
        x[129, 3], x[5, 130] = float("nan"), float("inf")
    x = x.to(dtype)
    x = x.t().contiguous().t() if lies else x
    for kind, spec in formats.items():
        m = mt = x.new_empty(0, dtype=torch.float32)
        if kind == "tensor":
            m = mt = fc._given(x, (0, 1), spec, None)[1]
        elif kind == "row":
            m, mt = fc._given(x, (1,), spec, None)[1], fc._given(x, (0,), spec, None)[1].t()
        for forward, transposed in ((True, True), (True, False), (False, True)):
            found, wanted = (fc._allocate(x, kind, forward, transposed) for _ in range(2))
            for tensor in found:
                tensor.fill_(7)
            launch(x, m, mt, kind, *found, integer=True)
            for want, matrix, by, at in ((forward, x, m, 0), (transposed, x.t(), mt, 1)):
                if want:
                    fc.plain(matrix, by, kind, wanted[at], wanted[2 + at])
            for a, b in zip(found[:2], wanted[:2]):
                same = (a == b) | ((a & 127 == 127) & (b & 127 == 127))
                assert same.all(), (rows, columns, dtype, lies, kind, forward, transposed)
            for a, b in zip(found[2:], wanted[2:]):
                assert ((a == b) | (a.isnan() & b.isnan())).all(), (rows, columns, dtype, lies, kind)
            count += 1
    if lies:
        continue
    for spec in (S.FP8_ROW, replace(S.FP8_ROW, scale=S.Scale.POWER_OF_TWO)):
        scale, multiplier = fc._given(x, (1,), spec, None)
        codes, _, _, _ = fc._allocate(x, "row", True, False)
        fc.plain(x, multiplier, "row", codes, codes)
        found, scales = launch_rows(x, spec.scale is S.Scale.POWER_OF_TWO, codes.shape[1], integer=True)
        assert ((found == codes) | ((found & 127 == 127) & (codes & 127 == 127))).all(), (rows, columns, dtype)
        assert scales.shape == scale.shape and ((scales == scale) | (scales.isnan() & scale.isnan())).all()
        count += 1
print("compared", count)
"""


@pytest.mark.slow
def test_the_kernel_makes_the_codes_of_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "compared 104", done.stderr[-2000:]
