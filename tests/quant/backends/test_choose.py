"""Which backend a layer gets on which device, what the report says, and that a backend which is wrong is not used."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema import MatrixBackend, ModelConfig, PrecisionConfig, PrecisionSwitch
from lowbit.errors import ConfigError
from lowbit.models.layers import Linear
from lowbit.models.transformer import Transformer
from lowbit.quant import spec as S
from lowbit.quant.apply import apply_policy, lowbit_layers, report_policy, set_stage
from lowbit.quant.backends import NATIVE, choose, selftest
from lowbit.quant.backends.base import UNKNOWN, Device, Sizes, bind, describe_device
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.backends.fp8 import Fp8
from lowbit.quant.backends.measured import Measured, loses
from lowbit.quant.backends.selftest import Trial, difference
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.quantised import Quantised
from lowbit.quant.resolve import resolve
from lowbit.quant.spec import QuantSpec

CPU = torch.device("cpu")
HOPPER = Device("cuda", (9, 0), (13, 0), "NVIDIA H200")
ADA = Device("cuda", (8, 9), (12, 8), "NVIDIA L4")
AMPERE = Device("cuda", (8, 0), (13, 0), "NVIDIA A100")
BLACKWELL = Device("cuda", (10, 0), (13, 0), "NVIDIA B200")
LARGE = Sizes(4096, 4096)
AUTO = MatrixBackend.auto

E, F, T = "emulated", "fp8", "torch_blocks"
CHOICES = [  # preset, device, backends of fprop, dgrad, wgrad
    ("fp8_tensor", HOPPER, (F, F, F)),
    ("fp8_row", HOPPER, (F, F, F)),
    ("fp8_block", HOPPER, (F, F, F)),
    ("fp8_tensor", ADA, (F, F, F)),
    ("fp8_row", ADA, (F, F, E)),
    ("fp8_block", ADA, (E, E, E)),
    ("fp8_tensor", BLACKWELL, (F, F, F)),
    ("fp8_row", BLACKWELL, (F, F, E)),
    ("fp8_block", BLACKWELL, (E, E, E)),
    ("fp8_tensor", AMPERE, (E, E, E)),
    ("fp8_tensor", Device("cpu"), (E, E, E)),
    ("fp8_tensor", UNKNOWN, (E, E, E)),
    ("fp8_w8a16", HOPPER, (E, E, E)),
    ("mxfp8", HOPPER, (E, E, E)),
    ("mxfp8", BLACKWELL, (T, T, T)),
    ("nvfp4_nvidia", BLACKWELL, (T, T, T)),
    ("nvfp4_quartet2", BLACKWELL, (T, T, T)),
    ("nvfp4_tetrajet", BLACKWELL, (E, E, E)),
    ("nvfp4", BLACKWELL, (E, E, E)),
    ("int8", HOPPER, (E, E, E)),
    ("bf16", HOPPER, (E, E, E)),
]


def backends(policy: LinearPolicy) -> tuple[str, str, str]:
    return policy.fprop.backend, policy.dgrad.backend, policy.wgrad.backend


@pytest.mark.parametrize(
    ("preset", "device", "wanted"), CHOICES, ids=[f"{c[0]}-{c[1].name or c[1].kind}" for c in CHOICES]
)
def test_what_each_device_multiplies(preset: str, device: Device, wanted: tuple[str, str, str]) -> None:
    found = Chooser(device, wanted=AUTO).bind("a layer", PRESETS[preset], LARGE)
    assert backends(found.policy) == wanted
    assert bind(found.policy, E, E, E) == PRESETS[preset], "the numbers are those of the preset"
    assert (
        Chooser(device, wanted=MatrixBackend.emulated).bind("a layer", PRESETS[preset], LARGE).policy == PRESETS[preset]
    )


REASONS = [
    ("fp8_tensor", AMPERE, "fprop, dgrad, wgrad emulated: compute capability 8.0 has no FP8 tensor cores"),
    ("fp8_row", ADA, "wgrad emulated: row-wise FP8 gives FP32, which wgrad needs, on compute capability 9.0"),
    ("fp8_block", BLACKWELL, "128-wide FP8 blocks on compute capability 9.0"),
    ("mxfp8", HOPPER, "PyTorch multiplies MXFP8 on compute capability 10, and this is 9.0"),
    ("nvfp4", HOPPER, "fprop emulated: no tensor core multiplies NVFP4_POW2_46 x NVFP4_POW2_46"),
    ("mxfp8", BLACKWELL, "torch_blocks: never run by this project"),
]


@pytest.mark.parametrize(("preset", "device", "reason"), REASONS, ids=[r[2][:40] for r in REASONS])
def test_the_reason_is_given(preset: str, device: Device, reason: str) -> None:
    assert reason in "\n".join(Chooser(device, wanted=AUTO).bind("a layer", PRESETS[preset], LARGE).remarks)


def test_only_a_backend_that_was_checked_is_said_to_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lowbit plan` checks nothing."""
    remark = "torch_blocks: never run by this project"
    assert Chooser(BLACKWELL, wanted=AUTO).bind("a layer", PRESETS["mxfp8"], LARGE).remarks == (remark,)
    monkeypatch.setattr(choose, "check", lambda *_: None)
    checked = Chooser(BLACKWELL, wanted=AUTO, target=CPU).bind("a layer", PRESETS["mxfp8"], LARGE)
    assert checked.remarks == (f"{remark}; it passed its start-up check here",)


def test_where_there_is_no_gpu_nothing_is_remarked() -> None:
    for device in (Device("cpu"), UNKNOWN):
        for policy in PRESETS.values():
            assert Chooser(device, wanted=AUTO).bind("a layer", policy, LARGE).remarks == ()


def test_a_named_backend_takes_everything_or_is_an_error() -> None:
    chooser = Chooser(HOPPER, wanted=MatrixBackend.fp8)
    assert backends(chooser.bind("a layer", PRESETS["fp8_row"], LARGE).policy) == (F, F, F)
    assert chooser.bind("a layer", LinearPolicy(), LARGE).policy == LinearPolicy()
    mixed = replace(PRESETS["fp8_row"], wgrad=PRESETS["mxfp8"].wgrad)
    wanted = r"precision.backend=fp8: blocks.0.mlp.up: wgrad: it does not take MXFP8 x MXFP8; precision.backend=auto"
    with pytest.raises(ConfigError, match=wanted):
        chooser.bind("blocks.0.mlp.up", mixed, LARGE)
    with pytest.raises(ConfigError, match=r"fprop: compute capability 8\.0 has no FP8"):
        Chooser(AMPERE, wanted=MatrixBackend.fp8).bind("a layer", PRESETS["fp8_row"], LARGE)
    with pytest.raises(ConfigError, match="fprop: FP8 tensor cores are in GPUs"):
        Chooser(Device("cpu"), wanted=MatrixBackend.fp8).bind("a layer", PRESETS["fp8_row"], LARGE)
    with pytest.raises(ConfigError, match=r"torch_blocks: a layer: fprop: PyTorch multiplies MXFP8 on .* this is 9\.0"):
        Chooser(HOPPER, wanted=MatrixBackend.torch_blocks).bind("a layer", PRESETS["mxfp8"], LARGE)
    with pytest.raises(
        ConfigError, match=r"precision\.backend=te: a layer: MXFP8BlockScaling needs compute capability"
    ):
        Chooser(HOPPER, wanted=MatrixBackend.te).bind("a layer", PRESETS["mxfp8"], LARGE)


def test_sizes_that_are_padded_are_named() -> None:
    found = Chooser(HOPPER, wanted=AUTO).bind("a layer", PRESETS["fp8_row"], Sizes(72, 4096))
    assert found.remarks == ("padded to a multiple of 16 for fp8: in=72",)


# Layers that FP8 would slow down ------------------------------------------------------------------------------

TABLE = (
    Measured("H200", "tensor", 1024, 4096, 16384, 0.8),
    Measured("H200", "tensor", 2048, 8192, 16384, 1.3),
    Measured("H200", "row", 2048, 2048, 16384, 0.9),
)


@pytest.mark.parametrize(
    ("sizes", "scales", "device", "slow"),
    [
        (Sizes(1024, 4096), "tensor", HOPPER, True),
        (Sizes(4096, 1024), "tensor", HOPPER, True),
        (Sizes(512, 2048), "tensor", HOPPER, True),
        (Sizes(1024, 8192), "tensor", HOPPER, False),
        (Sizes(2048, 8192), "tensor", HOPPER, False),
        (Sizes(2048, 2048), "row", HOPPER, True),
        (Sizes(512, 512), "block", HOPPER, False),
        (Sizes(512, 512), "tensor", ADA, False),
    ],
)
def test_a_layer_within_a_measured_one_that_lost_loses(sizes: Sizes, scales: str, device: Device, slow: bool) -> None:
    assert (loses(device, scales, sizes, TABLE) is not None) is slow


def test_a_layer_that_loses_stays_in_bf16_and_is_said_to() -> None:
    small = Sizes(1024, 1024)
    found = Chooser(HOPPER, wanted=AUTO, table=TABLE).bind("a layer", PRESETS["fp8_tensor"], small)
    assert found.policy == LinearPolicy()
    assert found.remarks == ("BF16 in place of FP8, which is slower here (0.80x at 1024 x 4096, 16384 tokens)",)
    for unaffected in (
        Chooser(HOPPER, wanted=MatrixBackend.fp8, table=TABLE).bind("a layer", PRESETS["fp8_tensor"], small),
        Chooser(HOPPER, wanted=MatrixBackend.emulated, table=TABLE).bind("a layer", PRESETS["fp8_tensor"], small),
        Chooser(AMPERE, wanted=AUTO, table=TABLE).bind("a layer", PRESETS["fp8_tensor"], small),
        Chooser(HOPPER, wanted=AUTO, table=TABLE).bind("a layer", PRESETS["mxfp8"], small),
    ):
        assert unaffected.policy.quantised


# Start-up checks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken(Fp8):
    """The FP8 backend with something wrong."""

    what: str
    name: str = "fp8"  # type: ignore[misc]

    def factor(self, x: Tensor, spec: QuantSpec, *args: Any, **kwargs: Any) -> Quantised:
        made = super().factor(x, spec, *args, **kwargs)
        if self.what == "codes":
            made.codes[2, 3] ^= 1
        if self.what == "scales":
            made.scales.mul_(1.0000002)
        return made

    def factor_pair(self, x: Tensor, spec: QuantSpec, spec_t: QuantSpec, amax: Tensor | None = None) -> Any:
        pair = super().factor_pair(x, spec, spec_t, amax)
        if self.what == "transpose":
            pair[1].codes[:, :4] = 0
        return pair

    def multiply(self, left: Quantised, right: Quantised, out_dtype: torch.dtype, *args: Any, **kwargs: Any) -> Tensor:
        if self.what == "raises":
            raise RuntimeError("no kernel image\nsecond line")
        if self.what == "order of scales":
            left = replace(left, scales=left.scales.flip(0))
        y = super().multiply(left, right, torch.float32, *args, **kwargs)
        if self.what == "type":
            return y
        if self.what == "nan":
            y[0, 0] = float("nan")
        return (y * (1.01 if self.what == "product" else 1.0)).to(out_dtype)


TRIAL = Trial(S.FP8_TENSOR, S.FP8_TENSOR, torch.bfloat16, False)
ROWS = Trial(S.FP8_ROW, S.FP8_ROW, torch.float32, False)


def test_the_backend_passes_its_check() -> None:
    assert difference(NATIVE["fp8"], TRIAL, CPU) is None
    assert difference(NATIVE["fp8"], replace(TRIAL, out_dtype=torch.float32), CPU) is None


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("codes", "its FP8_TENSOR codes are not the reference's"),
        ("scales", "its FP8_TENSOR codes are not the reference's"),
        ("transpose", "its FP8_TENSOR codes of a transpose are not the reference's"),
        ("product", "its FP8_TENSOR x FP8_TENSOR differs from the reference by 1.0e-02 of its norm"),
        ("nan", "differs from the reference by nan"),
        ("type", "differs from the reference"),
        ("raises", "RuntimeError: no kernel image"),
    ],
)
def test_a_backend_that_is_wrong_is_found_out(what: str, says: str) -> None:
    found = difference(Broken(what), TRIAL, CPU)
    assert found is not None and says in found and "\n" not in found


def test_scales_in_another_order_are_found_out() -> None:
    found = difference(Broken("order of scales"), ROWS, CPU)
    assert found is not None


def test_what_fails_its_check_is_emulated_with_a_warning_or_an_error_if_it_was_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(NATIVE, "fp8", Broken("product"))  # type: ignore[arg-type]
    choose._warn.cache_clear()
    selftest.check.cache_clear()
    chooser = Chooser(HOPPER, wanted=AUTO, target=CPU)
    with caplog.at_level(logging.WARNING, "lowbit"):
        found = [chooser.bind(name, PRESETS["fp8_tensor"], LARGE) for name in ("a layer", "another")]
    assert [backends(f.policy) for f in found] == [(E, E, E)] * 2
    why = "fp8 failed its start-up check: its FP8_TENSOR x FP8_TENSOR differs from the reference by 1.0e-02 of its norm"
    assert found[0].remarks[0].endswith(f"emulated: {why}")
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and said[0] == f"FP8_TENSOR x FP8_TENSOR is emulated: {why}"
    with pytest.raises(ConfigError, match=r"precision\.backend=fp8: a layer: fprop: fp8 failed its start-up check"):
        Chooser(HOPPER, wanted=MatrixBackend.fp8, target=CPU).bind("a layer", PRESETS["fp8_tensor"], LARGE)
    monkeypatch.undo()
    selftest.check.cache_clear()
    assert backends(chooser.bind("a layer", PRESETS["fp8_tensor"], LARGE).policy) == (F, F, F)


# In a model ---------------------------------------------------------------------------------------------------

SMALL = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, mlp_width=48, max_sequence=64)


def test_the_choice_reaches_the_layers_the_report_and_later_phases() -> None:
    model = Transformer(SMALL, 60)
    model.init_weights(1)
    settings = PrecisionConfig(
        forward="fp8_tensor", backward="fp8_tensor", switch=[PrecisionSwitch(at=0.5, forward="nvfp4")]
    )
    policy = resolve(settings)
    chooser = Chooser(HOPPER, wanted=AUTO, table=(Measured("H200", "tensor", 32, 32, 64, 0.5),))
    planned = report_policy(model, policy, dtype="bf16", device="an H200", chooser=chooser)
    made = apply_policy(model, policy, seed=1, device="an H200", chooser=chooser)
    assert made == planned
    layers = lowbit_layers(model)
    assert backends(layers["blocks.0.mlp.up"].policy) == (F, F, F)
    assert layers["blocks.0.attention.q"].policy == LinearPolicy(), "it will be quantised later, and was exchanged"
    text = made.table()
    assert "native (fp8)" in text and made.runs == "native"
    assert "  BF16 in place of FP8, which is slower here (0.50x at 32 x 32, 64 tokens)" in text
    set_stage(model, policy.training([True]), chooser)
    assert backends(layers["blocks.0.mlp.up"].policy) == (E, F, F)
    assert backends(layers["blocks.0.attention.q"].policy) == (E, F, F)
    plain = Transformer(SMALL, 60)
    plain.init_weights(1)
    apply_policy(plain, policy, seed=1)
    assert {backends(layer.policy) for layer in lowbit_layers(plain).values()} == {(E, E, E)}


def test_a_layer_that_stays_in_bf16_throughout_is_not_exchanged() -> None:
    model = Transformer(SMALL, 60)
    chooser = Chooser(HOPPER, wanted=AUTO, table=(Measured("H200", "tensor", 9999, 9999, 64, 0.5),))
    policy = resolve(PrecisionConfig(forward="fp8_tensor", backward="fp8_tensor"))
    made = apply_policy(model, policy, seed=1, chooser=chooser)
    assert not lowbit_layers(model) and type(model.blocks[0].mlp.up) is Linear and not made.quantised
    assert "BF16 in all three products, native" in made.table() and "slower here" in made.table()


def test_a_device_is_described() -> None:
    assert describe_device(None) == describe_device(torch.device("meta")) == UNKNOWN
    assert describe_device(CPU) == Device("cpu")
    assert Chooser.on(CPU, torch.float32, AUTO, check=True).target is None
