"""Writes golden_four_over_six.json with mit-han-lab's `fouroversix` 1.0.5, the authors' own package.

It needs its own build: SKIP_CUDA_BUILD=1 pip install --no-deps --no-build-isolation fouroversix==1.0.5
Run: python tests/quant/write_golden_four_over_six.py
"""

import json
from pathlib import Path

import fouroversix
import torch
from fouroversix import QuantizationConfig, QuantizeBackend, quantize_to_fp4
from test_four_over_six import golden_input


def main() -> None:
    x = golden_input()
    golden: dict[str, list[float]] = {}
    for rule in ("mse", "mae"):
        quantised = quantize_to_fp4(x, QuantizationConfig(scale_rule=rule, backend=QuantizeBackend.pytorch))
        values = fouroversix.dequantize(quantised, torch.float32)
        units = values.double() * 1536 / x.abs().amax().double()  # element x block scale: multiples of 2**-10
        golden[rule] = [round(v * 1024) / 1024 for v in units.flatten().tolist()]
        assert (units.flatten() - torch.tensor(golden[rule], dtype=torch.float64)).abs().max() < 1e-3
    Path(__file__).with_name("golden_four_over_six.json").write_text(
        json.dumps(golden, separators=(",", ":")), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
