"""Writes golden_four_over_six.json with mit-han-lab's `fouroversix` 1.0.5, the authors' own package.

`make golden` builds the package, runs this and says whether the file is what it was. The rules: four over six by
squared and by absolute error, and six alone, which leaves room for block scales up to 448 instead of 256.
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
    for rule, largest in (("mse", 6 * 256), ("mae", 6 * 256), ("static_6", 6 * 448)):
        quantised = quantize_to_fp4(x, QuantizationConfig(scale_rule=rule, backend=QuantizeBackend.pytorch))
        values = fouroversix.dequantize(quantised, torch.float32)
        units = values.double() * largest / x.abs().amax().double()  # element x block scale: multiples of 2**-10
        golden[rule] = [round(v * 1024) / 1024 for v in units.flatten().tolist()]
        assert (units.flatten() - torch.tensor(golden[rule], dtype=torch.float64)).abs().max() < 1e-3
    Path(__file__).with_name("golden_four_over_six.json").write_text(
        json.dumps(golden, separators=(",", ":")), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
