"""Transformer Engine: our policies as its recipes, and a layer that computes through its `Linear`.

| policy | recipe |
|---|---|
| FP8_TENSOR in all six places | `Float8CurrentScaling`, E4M3 throughout |
| 1x128 for X and dY, 128x128 for W | `Float8BlockScaling` |
| MXFP8 in all six places | `MXFP8BlockScaling`, E4M3 |
| NVFP4; W may be 16x16, dY stochastic, wgrad rotated by 16 with fixed signs | `NVFP4BlockScaling` |
| one of these forward, BF16 backward | the same with `backward_override`: `dequantized` or `high_precision` |

All quantise the originals (`Alignment.ORIGINAL`). A recipe is described here by its class's name and its fields, so
that nothing of Transformer Engine is needed to map; tests compare with its own classes, field by field. Its defaults
can be changed by environment variables: every field that matters is given, and what cannot be given is checked.

`TeLinear` keeps our FP32 master weight and hands it over rounded to BF16, as every quantiser here reads it. dW comes
back in BF16, and then becomes FP32: less precise than this project's own layers, whose dW leaves its product in FP32.
It is run without `torch.compile`.

Run by this project: the mapping and its checks. Kernels: see docs/RESULTS.md for what was run where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.errors import in_a_line
from lowbit.models.layers import Linear
from lowbit.quant.backends.base import Device, Sizes, bind, dotted
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import EMULATED, Alignment, LinearPolicy, Operand, ProductPolicy, Signs
from lowbit.quant.spec import (
    FP8_BLOCK,
    FP8_BLOCK_2D,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    NVFP4_46,
    NVFP4_ROW,
    NVFP4_SR,
    QuantSpec,
)

NAME = "te"
ROW_MULTIPLE = {"MXFP8BlockScaling": 32, "Float8BlockScaling": 128, "NVFP4BlockScaling": 128}
"""Of tokens; 16 for others. Rows of zeros are added, which change neither the products nor any maximum."""
FEATURE_MULTIPLE = {"MXFP8BlockScaling": 32, "Float8BlockScaling": 128, "NVFP4BlockScaling": 16}
CAPABILITY = {
    "Float8CurrentScaling": (8, 9),
    "Float8BlockScaling": (9, 0),
    "MXFP8BlockScaling": (10, 0),
    "NVFP4BlockScaling": (10, 0),
}
"""The least that the recipe's kernels need."""


@dataclass(frozen=True)
class Recipe:
    """A recipe of `transformer_engine.common.recipe`, as data."""

    cls: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What its constructor is given; formats by name."""
    expected: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of fields that it must have then."""

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in self.fields.items())
        return f"{self.cls}({given})"

    def build(self) -> Any:
        """The recipe itself. Raises ImportError where there is no Transformer Engine, ValueError if it is not what was
        asked for."""
        module = import_module("transformer_engine.common.recipe")
        given = {k: getattr(module.Format, v) if k.endswith("_format") else v for k, v in self.fields.items()}
        recipe = getattr(module, self.cls)(**given)
        for name, wanted in self.expected.items():
            for key, value in wanted.items():
                found = getattr(getattr(recipe, name), key)
                if found != value:
                    raise ValueError(
                        f"{self.cls}.{name}.{key} is {found} and should be {value}: an NVTE_ variable of the "
                        "environment changes it"
                    )
        return recipe


def recipe_of(policy: LinearPolicy) -> Recipe | None:
    """The recipe that computes what the policy says, whatever its backends; None if there is none."""
    policy = bind(policy, EMULATED, EMULATED, EMULATED)
    backward = _backward(policy)
    if backward is None or policy.mean_split:
        return None
    left, right = policy.fprop.left.spec, policy.fprop.right.spec
    if policy.fprop.rotation or left is None or right is None:
        return None
    whole = backward == ""
    fields: dict[str, Any] = {"fp8_format": "E4M3", "backward_override": backward or None}
    if left == right == FP8_TENSOR and (not whole or _everywhere(policy, FP8_TENSOR, FP8_TENSOR, FP8_TENSOR)):
        scales = dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), _EXACT_SCALES)
        return Recipe("Float8CurrentScaling", {"use_power_2_scales": False, **fields}, scales)
    if (left, right) == (FP8_BLOCK, FP8_BLOCK_2D) and (
        not whole or _everywhere(policy, FP8_BLOCK, FP8_BLOCK_2D, FP8_BLOCK)
    ):
        blocks = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
        scales = dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), _POWERS_OF_TWO)
        return Recipe("Float8BlockScaling", {"use_f32_scales": False, **blocks, **fields}, scales)
    if left == right == MXFP8 and (not whole or _everywhere(policy, MXFP8, MXFP8, MXFP8)):
        return Recipe("MXFP8BlockScaling", {"margin": 0, "enable_2d_quantization": False, **fields})
    return _nvfp4(policy, backward)


_EXACT_SCALES = {"power_2_scale": False, "amax_epsilon": 0.0}
_POWERS_OF_TWO = {"power_2_scale": True, "amax_epsilon": 0.0}


def _backward(policy: LinearPolicy) -> str | None:
    """`backward_override`: empty for a quantised backward; None for what it cannot be."""
    quantised = policy.dgrad.quantised, policy.wgrad.quantised
    aligned = policy.alignment is Alignment.ALIGNED
    if any(quantised):
        return "" if all(quantised) and not aligned else None
    return "dequantized" if aligned else "high_precision"


def _everywhere(policy: LinearPolicy, x: QuantSpec, w: QuantSpec, dy: QuantSpec) -> bool:
    """Whether X, W and dY have these formats in every product, without rotations."""
    wanted = ProductPolicy(Operand(dy), Operand(w)), ProductPolicy(Operand(dy), Operand(x))
    return (policy.dgrad, policy.wgrad) == wanted


def _nvfp4(policy: LinearPolicy, backward: str) -> Recipe | None:
    left, right = policy.fprop.left.spec, policy.fprop.right.spec
    if right not in (NVFP4, NVFP4_2D, NVFP4_46) or left not in (NVFP4, NVFP4_ROW, NVFP4_46):
        return None
    dy, wgrad = policy.dgrad.left.spec, policy.wgrad
    rotated = wgrad.rotation == 16 and wgrad.signs is Signs.FIXED
    sixes = {(False, False): "none", (False, True): "weights", (True, False): "activations", (True, True): "all"}
    four_over_six = sixes[left == NVFP4_46, right == NVFP4_46]
    if backward == "":
        plain = dy in (NVFP4, NVFP4_SR) and left == NVFP4 and four_over_six == "none"
        same = policy.dgrad == ProductPolicy(Operand(dy), Operand(right))
        turned = wgrad == ProductPolicy(Operand(dy), Operand(NVFP4), wgrad.rotation, wgrad.signs)
        if not (plain and same and turned) or (wgrad.rotation and not rotated):
            return None
    stochastic = backward == "" and dy == NVFP4_SR
    rotates = backward == "" and rotated
    squares = right == NVFP4_2D
    fields = {
        "disable_rht": not rotates,
        "disable_stochastic_rounding": not stochastic,
        "disable_2d_quantization": not squares,
        "row_scaled_activation": left == NVFP4_ROW,
        "nvfp4_4over6": four_over_six,
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MSE",
        "backward_override": backward or None,
    }
    expected = {
        "fp4_quant_fwd_inp": {"random_hadamard_transform": rotates, "stochastic_rounding": False},
        "fp4_quant_fwd_weight": {"random_hadamard_transform": False, "fp4_2d_quantization": squares},
        "fp4_quant_bwd_grad": {"random_hadamard_transform": rotates, "stochastic_rounding": stochastic},
    }
    return Recipe("NVFP4BlockScaling", fields, expected)


@cache
def missing() -> str | None:
    """Why Transformer Engine cannot be used here; None: it can."""
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # a package without its libraries raises anything
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"Transformer Engine cannot be imported ({text}): pip install 'lowbit[te]'"
    return None


def refuses(policy: LinearPolicy, sizes: Sizes, device: Device) -> str | None:
    """Why a layer cannot go through Transformer Engine; None: it can."""
    recipe = recipe_of(policy)
    if recipe is None:
        return f"no recipe of Transformer Engine computes {policy.summary} of {policy.alignment.value} operands"
    if device.kind != "cuda":
        return "Transformer Engine needs a CUDA device"
    least = CAPABILITY[recipe.cls]
    if device.capability < least:
        return f"{recipe.cls} needs compute capability {dotted(least)}, and this device has {dotted(device.capability)}"
    multiple = FEATURE_MULTIPLE.get(recipe.cls, 16)
    for name, size in (("in_features", sizes.in_features), ("out_features", sizes.out_features)):
        if size % multiple:
            return f"{recipe.cls} needs {name}={size} to be a multiple of {multiple}"
    return missing()


@cache
def check(policy: LinearPolicy, device: torch.device) -> str | None:
    """What is wrong with a layer's output and gradients, against the emulation; None: nothing. Once a process.

    Formats that round to nearest must agree up to the products' sums; stochastic ones, whose noise is not ours, only
    so far that layout, scales and transposes are right.
    """
    stochastic = any(
        operand.spec is not None and operand.spec.stochastic
        for product in (policy.fprop, policy.dgrad, policy.wgrad)
        for operand in (product.left, product.right)
    )
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(256, size, generator=generator).bfloat16().to(device) for size in (384, 512))
    weight = torch.randn(512, 384, generator=generator).to(device)
    key, clock = make_key(0, "selftest").to(device), make_clock().to(device)
    results = []
    try:
        for kind, bound in ((LowbitLinear, policy), (TeLinear, bind(policy, NAME, NAME, NAME))):
            linear = Linear(384, 512).to(device)
            linear.weight.data.copy_(weight)
            layer = kind.of(linear, bound, key, clock)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.backward(dy)
            results.append((y.detach(), leaf.grad, layer.weight.grad))
    except Exception as error:  # whatever it raises: it cannot be used
        return in_a_line(error)
    for name, wanted, found in zip(("output", "dX", "dW"), *results, strict=True):
        assert wanted is not None and found is not None
        off = float((found.double() - wanted.double()).norm() / wanted.double().norm())
        if not off < (0.5 if stochastic else 1e-2):
            return f"its {name} differs from the emulation's by {off:.1e} of its norm"
    return None


class TeLinear(LowbitLinear):
    """A `LowbitLinear` whose products Transformer Engine computes while its policy says so (`Operand.backend`)."""

    def project_together(self, x: Tensor, others: Sequence[Linear]) -> tuple[Tensor, ...]:
        """See `LowbitLinear`. Each layer quantises its own copy of x."""
        if self.policy.fprop.backend != NAME:
            return super().project_together(x, others)
        return (self._through_engine(x), *(other(x) for other in others))

    def freeze(self, dtype: torch.dtype) -> None:
        """Nothing is held: Transformer Engine quantises the weight each time."""
        if self.policy.fprop.backend != NAME:
            super().freeze(dtype)

    def _through_engine(self, x: Tensor) -> Tensor:
        recipe = recipe_of(self.policy)
        assert recipe is not None
        engine = import_module("transformer_engine.pytorch")
        rows = x.reshape(-1, x.shape[-1])
        missing_rows = -rows.shape[0] % ROW_MULTIPLE.get(recipe.cls, 16)
        padded = F.pad(rows, (0, 0, 0, missing_rows)) if missing_rows else rows
        weight = {"weight": self.effective().to(torch.bfloat16)}
        with engine.autocast(enabled=True, recipe=_built(self.policy)):
            y: Tensor = torch.func.functional_call(self._engine_linear(), weight, (padded.to(torch.bfloat16),))
        return y[: rows.shape[0]].reshape(*x.shape[:-1], y.shape[-1]).to(x.dtype)

    def _engine_linear(self) -> Any:
        """Its `Linear` without a weight of its own; no submodule, so that names and state stay ours."""
        held = self.__dict__.get("_held_engine_linear")
        if held is None:
            engine = import_module("transformer_engine.pytorch")
            held = engine.Linear(
                self.in_features, self.out_features, bias=False, params_dtype=torch.bfloat16, device="meta"
            )
            self.__dict__["_held_engine_linear"] = held
        return held


@cache
def _built(policy: LinearPolicy) -> Any:
    """The recipe object of a policy, made once."""
    recipe = recipe_of(policy)
    assert recipe is not None
    return recipe.build()
