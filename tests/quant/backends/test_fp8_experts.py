"""FP8 products of all experts at once: each expert's rows against FP64, the layer against its emulation, the choice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema import MatrixBackend, ModelConfig, MoeConfig, PrecisionConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import GroupedLinear
from lowbit.models.transformer import Transformer
from lowbit.quant import grouped_products
from lowbit.quant.apply import apply_policy, candidates
from lowbit.quant.backends import fp8_grouped
from lowbit.quant.backends.base import Device, Sizes, bind
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.backends.fp8_grouped import check, multiply_rows, refuses
from lowbit.quant.grouped import LowbitGroupedLinear, keys_of
from lowbit.quant.grouped_products import policy_of, policy_text
from lowbit.quant.philox import make_clock
from lowbit.quant.policy import EMULATED, LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.quantise import quantise
from lowbit.quant.resolve import resolve
from lowbit.quant.spec import FP8_ROW

H200 = Device("cuda", (9, 0), (13, 0), "H200")
NATIVE = bind(PRESETS["fp8_row"], "fp8", "fp8", EMULATED)
LOADS = [[0, 1, 31, 33], [17, 0, 0, 0], [0, 0, 0, 16], [300, 200, 100, 7]]
IN, OUT = 96, 32


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where rows of FP8 matrices can be scaled: PyTorch 2.13 can on a CPU, and Hopper."""
    found = torch.device(request.param)
    if found.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("grouped FP8 products are for compute capability 9.0")
    if found.type == "cpu":
        one = torch.zeros(16, 16).to(torch.float8_e4m3fn)
        try:
            torch._scaled_mm(one, one.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
        except (RuntimeError, ValueError):
            pytest.skip("this PyTorch does not scale rows of FP8 on the CPU")
    return found


def ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(device)


def off(found: Tensor, wanted: Tensor) -> float:
    """Error relative to the norm."""
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


@pytest.mark.parametrize("counts", LOADS, ids=str)
def test_each_expert_multiplies_its_own_rows(counts: list[int], device: torch.device) -> None:
    x = torch.randn(sum(counts), IN, device=device) * torch.randn(sum(counts), 1, device=device).exp2()
    weights = [torch.randn(len(counts), n, IN, device=device) for n in (OUT, 48)]
    for weight, found in zip(weights, multiply_rows(x, weights, ends(counts, device)), strict=True):
        left, right = (quantise(m, FP8_ROW).dequantise().double() for m in (x, weight.flatten(0, 1)))
        groups = zip(left.split(counts), right.split(weight.shape[1]), strict=True)
        assert found.dtype is torch.bfloat16
        assert off(found, torch.cat([rows @ matrix.t() for rows, matrix in groups])) < 6e-3


def test_no_rows_and_other_sizes(device: torch.device) -> None:
    weight, nothing = torch.randn(4, OUT, IN, device=device), ends([0, 0, 0, 0], device)
    assert multiply_rows(weight.new_empty(0, IN), [weight], nothing)[0].shape == (0, OUT)
    with pytest.raises(ValueError, match="multiples of 16: k=40"):
        multiply_rows(weight.new_empty(3, 40), [weight[:, :, :40]], nothing)


def layers(policy: LinearPolicy, experts: int, device: torch.device) -> list[LowbitGroupedLinear]:
    """gate and up."""
    found = []
    for name in ("gate", "up"):
        plain = GroupedLinear(experts, IN, OUT)
        plain.weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        keys = keys_of(1, name, experts).to(device)
        found.append(LowbitGroupedLinear.of(plain.to(device), policy, keys, make_clock().to(device), name))
    return found


@pytest.mark.parametrize("counts", [*LOADS, [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("wanted_of", ["both", "input", "weight", "none"])
def test_a_layer_agrees_with_its_emulation(counts: list[int], wanted_of: str, device: torch.device) -> None:
    """Products by the order of their sums, the weight's gradient to the bit: it is emulated either way."""
    x = torch.randn(sum(counts), IN, device=device).bfloat16()
    grads = [torch.randn(sum(counts), OUT, device=device).bfloat16() for _ in range(2)]
    made = []
    for policy in (PRESETS["fp8_row"], NATIVE):
        gate, up = layers(policy, len(counts), device)
        for layer in (gate, up):
            layer.weight.requires_grad_(wanted_of in ("both", "weight"))
        leaf = x.clone().requires_grad_(wanted_of in ("both", "input"))
        outputs = gate.project_together(leaf, ends(counts, device), [up])
        if wanted_of != "none":
            torch.autograd.backward(outputs, grads)
        made.append((*outputs, leaf.grad, gate.weight.grad, up.weight.grad))
    for i, (emulated, native) in enumerate(zip(*made, strict=True)):
        assert (emulated is None) == (native is None)
        if emulated is None:
            continue
        assert emulated.shape == native.shape and emulated.dtype == native.dtype
        if i < 3 and emulated.numel():
            assert off(native, emulated) < 6e-3
        elif i >= 3:
            assert torch.equal(native, emulated)


def test_the_check_passes_and_finds_what_is_wrong(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check.cache_clear()
    assert check(device) is None
    good = fp8_grouped.fp8_grouped_product
    wrong = [
        lambda a, b, sa, sb, o, fast: good(a, b.flip(0), sa, sb, o, fast),
        lambda a, b, sa, sb, o, fast: good(a, b, sa, sb.flip(1).contiguous(), o, fast),
        lambda a, b, sa, sb, o, fast: good(a, b, sa, sb, o - 1, fast),
        lambda *_: 1 / 0,
    ]
    for product in wrong:
        check.cache_clear()
        monkeypatch.setattr(fp8_grouped, "fp8_grouped_product", product)
        assert check(device) is not None
    monkeypatch.setattr(fp8_grouped, "fp8_grouped_product", good)
    check.cache_clear()


def test_the_check_compares_codes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One code of thousands shows in no product's norm."""
    good = fp8_grouped.quantise_both

    def wrong(x: Tensor, *specs: Any) -> Any:
        made = good(x, *specs)
        assert made[0] is not None
        made[0].codes[2, 3] ^= 1
        return made

    check.cache_clear()
    monkeypatch.setattr(fp8_grouped, "quantise_both", wrong)
    assert check(device) == "its FP8_ROW codes are not the reference's"
    check.cache_clear()


def test_dgrad_copies_the_weights_in_bf16_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    def watched(x: Tensor, weights: Sequence[Tensor], *rest: Any, **settings: Any) -> list[Tensor]:
        seen.extend((w.dtype, w.is_contiguous()) for w in weights)
        return multiply_rows(x, weights, *rest, **settings)

    monkeypatch.setattr(grouped_products, "multiply_rows", watched)
    layer = layers(NATIVE, 4, device)[0]
    x = torch.randn(64, IN, device=device).bfloat16().requires_grad_()
    layer(x, ends([0, 1, 30, 33], device)).sum().backward()
    assert seen == [(torch.float32, True), (torch.bfloat16, True)], "fprop reads the master, dgrad its transposes"


def test_a_backend_that_is_named_takes_no_experts_and_says_what_would() -> None:
    for name in (MatrixBackend.fp8, MatrixBackend.te):
        with pytest.raises(ConfigError, match="no backend multiplies all three products of experts") as caught:
            Chooser(H200, torch.bfloat16, name).bind_experts("blocks.0.up", PRESETS["fp8_row"], Sizes(IN, OUT))
        assert "precision.backend=auto would take what there is" in str(caught.value)


def test_the_policy_that_an_operator_gets_has_the_backend() -> None:
    found = policy_of(policy_text(NATIVE))
    assert (found.fprop, found.dgrad, found.wgrad) == (NATIVE.fprop, NATIVE.dgrad, NATIVE.wgrad)


def test_what_is_refused() -> None:
    sizes, bf16 = Sizes(IN, OUT), torch.bfloat16
    assert refuses(PRESETS["fp8_row"], sizes, H200, bf16) is None
    for name in ("fp8_tensor", "fp8_block", "nvfp4", "mxfp8", "int8", "fp8_w8a16"):
        assert "or emulated, not" in str(refuses(PRESETS[name], sizes, H200, bf16)), name
    row = PRESETS["fp8_row"]
    assert "compute capability 9, not 10.0" in str(refuses(row, sizes, replace(H200, capability=(10, 0)), bf16))
    assert "not cpu" in str(refuses(row, sizes, Device("cpu"), bf16))
    assert "in=88" in str(refuses(row, Sizes(88, OUT), H200, bf16))
    assert "BF16" in str(refuses(row, sizes, H200, torch.float32))
    assert "split mean" in str(refuses(replace(row, mean_split=True), sizes, H200, bf16))


def experts_model() -> Transformer:
    moe = MoeConfig(experts=4, top_k=2, expert_width=48, shared=1)
    model = Transformer(ModelConfig(layers=1, width=32, heads=2, kv_heads=1, moe=moe), 60)
    model.init_weights(1)
    return model


def test_a_model_on_hopper_gets_it_and_the_report_says_so() -> None:
    model = experts_model()
    chooser = Chooser(H200, torch.bfloat16, MatrixBackend.auto)
    policy = resolve(PrecisionConfig(forward="fp8_row", backward="fp8_row"))
    report = apply_policy(model, policy, seed=1, chooser=chooser)
    experts = [m for m in candidates(model).values() if isinstance(m, LowbitGroupedLinear)]
    assert len(experts) == 3 and all(layer.policy == NATIVE for layer in experts)
    assert "wgrad emulated: no FP8 product sums over the rows of each expert" in report.table()
