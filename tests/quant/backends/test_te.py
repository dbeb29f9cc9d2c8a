"""Our policies as Transformer Engine's recipes, against its own classes where they are installed.

The meta package (`pip install transformer-engine importlib-metadata`, 1.2 MB) holds them; its kernels are not needed.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lowbit.configs.schema import MatrixBackend
from lowbit.errors import ConfigError
from lowbit.quant import spec as S
from lowbit.quant.backends import te
from lowbit.quant.backends.base import Device, Sizes, bind
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.policy import Alignment, LinearPolicy, Operand, ProductPolicy, Signs
from lowbit.quant.presets import PRESETS, product

HOPPER = Device("cuda", (9, 0), (13, 0), "NVIDIA H200")
BLACKWELL = Device("cuda", (10, 0), (13, 0), "NVIDIA B200")
LARGE = Sizes(4096, 4096)


def forward_of(name: str, alignment: Alignment) -> LinearPolicy:
    """The forward of a preset with a BF16 backward."""
    return LinearPolicy(fprop=PRESETS[name].fprop, alignment=alignment)


NVIDIA = PRESETS["nvfp4_nvidia"]
PLAIN = ProductPolicy(Operand(S.NVFP4), Operand(S.NVFP4))
NO_SR = replace(NVIDIA, dgrad=product(S.NVFP4, S.NVFP4_2D), wgrad=product(S.NVFP4, S.NVFP4, 16, Signs.FIXED))
CASES: dict[str, tuple[LinearPolicy, dict[str, Any]]] = {
    # Each field as its own class holds it; enums by name.
    "fp8_tensor": (
        PRESETS["fp8_tensor"],
        {
            "cls": "Float8CurrentScaling",
            "fp8_format": "E4M3",
            "backward_override": None,
            "fp8_quant_fwd_inp.power_2_scale": False,
            "fp8_quant_fwd_weight.power_2_scale": False,
            "fp8_quant_bwd_grad.power_2_scale": False,
            "fp8_quant_bwd_grad.amax_epsilon": 0.0,
            "fp8_gemm_fprop.use_split_accumulator": False,
            "fp8_gemm_dgrad.use_split_accumulator": True,
            "fp8_gemm_wgrad.use_split_accumulator": True,
        },
    ),
    "fp8_block": (
        PRESETS["fp8_block"],
        {
            "cls": "Float8BlockScaling",
            "fp8_format": "E4M3",
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
            "fp8_quant_fwd_inp.power_2_scale": True,
            "fp8_quant_fwd_weight.power_2_scale": True,
            "fp8_quant_bwd_grad.power_2_scale": True,
            "fp8_quant_fwd_inp.amax_epsilon": 0.0,
            "backward_override": None,
        },
    ),
    "mxfp8": (
        PRESETS["mxfp8"],
        {
            "cls": "MXFP8BlockScaling",
            "fp8_format": "E4M3",
            "margin": 0,
            "enable_2d_quantization": False,
            "backward_override": None,
        },
    ),
    "nvfp4_nvidia": (
        NVIDIA,
        {
            "cls": "NVFP4BlockScaling",
            "fp4_format": "E2M1",
            "fp8_format": "E4M3",
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
            "backward_override": None,
            "fp4_quant_fwd_inp.random_hadamard_transform": True,
            "fp4_quant_fwd_inp.stochastic_rounding": False,
            "fp4_quant_fwd_inp.fp4_2d_quantization": False,
            "fp4_quant_fwd_weight.random_hadamard_transform": False,
            "fp4_quant_fwd_weight.stochastic_rounding": False,
            "fp4_quant_fwd_weight.fp4_2d_quantization": True,
            "fp4_quant_bwd_grad.random_hadamard_transform": True,
            "fp4_quant_bwd_grad.stochastic_rounding": True,
            "fp4_quant_bwd_grad.fp4_2d_quantization": False,
        },
    ),
    "nvfp4_nearest": (NO_SR, {"cls": "NVFP4BlockScaling", "fp4_quant_bwd_grad.stochastic_rounding": False}),
    "nvfp4_plain": (
        LinearPolicy(PLAIN, PLAIN, PLAIN, Alignment.ORIGINAL),
        {
            "cls": "NVFP4BlockScaling",
            "fp4_quant_fwd_inp.random_hadamard_transform": False,
            "fp4_quant_bwd_grad.random_hadamard_transform": False,
            "fp4_quant_fwd_weight.fp4_2d_quantization": False,
            "fp4_quant_bwd_grad.stochastic_rounding": False,
        },
    ),
    "nvfp4_forward": (
        forward_of("nvfp4_nvidia", Alignment.ALIGNED),
        {
            "cls": "NVFP4BlockScaling",
            "backward_override": "dequantized",
            "fp4_quant_fwd_inp.random_hadamard_transform": False,
            "fp4_quant_fwd_weight.fp4_2d_quantization": True,
        },
    ),
    "four_over_six_forward": (
        forward_of("nvfp4_quartet2", Alignment.ORIGINAL),
        {
            "cls": "NVFP4BlockScaling",
            "backward_override": "high_precision",
            "nvfp4_4over6": "all",
            "nvfp4_4over6_e4m3_use_256": "all",
            "nvfp4_4over6_err_mode": "MSE",
            "fp4_quant_fwd_weight.fp4_2d_quantization": False,
        },
    ),
    "row_scaled_forward": (
        LinearPolicy(fprop=product(S.NVFP4_ROW, S.NVFP4)),
        {"cls": "NVFP4BlockScaling", "row_scaled_activation": True, "backward_override": "dequantized"},
    ),
    "mxfp8_forward": (
        forward_of("mxfp8", Alignment.ALIGNED),
        {"cls": "MXFP8BlockScaling", "backward_override": "dequantized"},
    ),
    "fp8_block_forward": (
        forward_of("fp8_block", Alignment.ALIGNED),
        {"cls": "Float8BlockScaling", "backward_override": "dequantized"},
    ),
}

REAL = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from lowbit.quant.backends import te
from test_te import CASES

def plain(value):
    return getattr(value, "name", value)

found = {}
for name, (policy, fields) in CASES.items():
    recipe = te.recipe_of(policy).build()
    values = {"cls": type(recipe).__name__}
    for field in fields:
        if field != "cls":
            value = recipe
            for part in field.split("."):
                value = getattr(value, part)
            values[field] = plain(value)
    found[name] = values
print(json.dumps(found))
"""


def real_classes(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The fields of what `Recipe.build` makes, in a process where Transformer Engine's kernels are not looked for."""
    paths = json.dumps([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"NVTE_PROJECT_BUILDING": "1"} | environment
    return subprocess.run([sys.executable, "-c", REAL, paths], env=environment, capture_output=True, text=True)


needs_recipes = pytest.mark.skipif(
    find_spec("transformer_engine") is None,
    reason="Transformer Engine's recipes are not installed: pip install 'lowbit[te-recipes]'",
)


@needs_recipes
def test_each_field_of_the_recipes() -> None:
    done = real_classes({})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: fields for name, (_, fields) in CASES.items()}


@needs_recipes
def test_a_variable_of_the_environment_that_changes_a_recipe_is_found() -> None:
    done = real_classes({"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"})
    wanted = "Float8CurrentScaling.fp8_quant_fwd_inp.power_2_scale is True and should be False: an NVTE_ variable"
    assert wanted in done.stderr
    done = real_classes({"NVTE_BACKWARD_OVERRIDE": "dequantized", "NVTE_NVFP4_DISABLE_RHT": "1"})
    assert json.loads(done.stdout.splitlines()[-1])["nvfp4_nvidia"] == CASES["nvfp4_nvidia"][1], "given explicitly"


def test_the_mapping_says_what_the_classes_will_hold() -> None:
    """Without them: of the fields above, those that are given to the constructor."""
    for name, (policy, fields) in CASES.items():
        recipe = te.recipe_of(policy)
        assert recipe is not None and recipe.cls == fields["cls"], name
        for key, value in recipe.fields.items():
            assert fields.get(key, value) == value, (name, key)
        for key, values in recipe.expected.items():
            assert all(fields.get(f"{key}.{k}", v) == v for k, v in values.items()), (name, key)
        assert te.recipe_of(bind(policy, "te", "te", "te")) == recipe, "whatever its backends"


NONE = {
    "bf16": PRESETS["bf16"],
    "fp8_row": PRESETS["fp8_row"],
    "nvfp4": PRESETS["nvfp4"],
    "nvfp4_tetrajet": PRESETS["nvfp4_tetrajet"],
    "nvfp4_quartet2": PRESETS["nvfp4_quartet2"],
    "int8": PRESETS["int8"],
    "nvfp4_w4a16": PRESETS["nvfp4_w4a16"],
    "aligned": replace(PRESETS["mxfp8"], alignment=Alignment.ALIGNED),
    "mean split": replace(PRESETS["mxfp8"], mean_split=True),
    "mixed": replace(PRESETS["mxfp8"], wgrad=PRESETS["fp8_tensor"].wgrad),
    "half a backward": replace(PRESETS["mxfp8"], wgrad=LinearPolicy().wgrad),
    "rotated forward": replace(NVIDIA, fprop=product(S.NVFP4, S.NVFP4, 16)),
    "fresh signs": replace(NVIDIA, wgrad=product(S.NVFP4_SR, S.NVFP4, 16)),
    "rotated dgrad": replace(NVIDIA, dgrad=product(S.NVFP4_SR, S.NVFP4_2D, 16, Signs.FIXED)),
    "stochastic in one product": replace(NVIDIA, dgrad=product(S.NVFP4, S.NVFP4_2D)),
    "another W backward": replace(NVIDIA, dgrad=product(S.NVFP4_SR, S.NVFP4)),
    "E5M2": LinearPolicy(*[product(S.MXFP8_E5M2, S.MXFP8)] * 3, Alignment.ORIGINAL),
    "floor": LinearPolicy(*[product(S.MXFP8_FLOOR, S.MXFP8_FLOOR)] * 3, Alignment.ORIGINAL),
}


@pytest.mark.parametrize("name", NONE)
def test_what_no_recipe_computes(name: str) -> None:
    assert te.recipe_of(NONE[name]) is None
    if NONE[name].quantised:
        with pytest.raises(ConfigError, match=r"precision\.backend=te: a layer: no recipe of Transformer Engine"):
            Chooser(BLACKWELL, wanted=MatrixBackend.te).bind("a layer", NONE[name], LARGE)


def test_what_it_refuses() -> None:
    assert te.refuses(PRESETS["mxfp8"], LARGE, Device("cpu")) == "Transformer Engine needs a CUDA device"
    assert "needs compute capability 10.0, and this device has 9.0" in str(te.refuses(NVIDIA, LARGE, HOPPER))
    why = te.refuses(PRESETS["fp8_block"], Sizes(4096, 1000), HOPPER)
    assert why == "Float8BlockScaling needs out_features=1000 to be a multiple of 128"
    if te.missing() is not None:
        assert "pip install 'lowbit[te]'" in str(te.refuses(PRESETS["fp8_tensor"], LARGE, HOPPER))


def test_a_layer_whose_policy_names_no_te_is_an_ordinary_low_bit_layer() -> None:
    import torch

    from lowbit.models.layers import Linear
    from lowbit.quant.linear import LowbitLinear
    from lowbit.quant.philox import make_clock, make_key

    linear = Linear(32, 48)
    torch.nn.init.normal_(linear.weight)
    arguments = PRESETS["mxfp8"], make_key(0, "a layer"), make_clock()
    layer, plain = te.TeLinear.of(linear, *arguments), LowbitLinear.of(linear, *arguments)
    x = torch.randn(5, 32)
    assert torch.equal(layer(x), plain(x)) and list(layer.state_dict()) == ["weight"]
    layer.freeze(torch.float32)
    assert layer.frozen is not None
    layer.frozen, layer.policy = None, bind(PRESETS["mxfp8"], "te", "te", "te")
    layer.freeze(torch.float32)
    assert layer.frozen is None, "Transformer Engine quantises the weight itself"
