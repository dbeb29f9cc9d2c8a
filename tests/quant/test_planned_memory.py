"""What a plan says of low-bit layers' memory, against the tensors that autograd saves and that OsciReset holds."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.configs.compose import compose
from lowbit.configs.schema import (
    ComputeDtype,
    MlpKind,
    ModelConfig,
    MoeConfig,
    OptimizerKind,
    OsciDetector,
    OsciResetConfig,
    PrecisionConfig,
    PrecisionRule,
    Recompute,
    StabiliserConfig,
)
from lowbit.models.cost import LowBit, training_memory
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy, assign, candidates
from lowbit.quant.memory import low_bit_memory
from lowbit.quant.presets import PRESETS
from lowbit.quant.resolve import resolve
from lowbit.quant.stabilisers.masters import whole_masters
from lowbit.quant.stabilisers.oscireset import OsciReset
from lowbit.trainer.plan import low_bit_phases, plan

DENSE = ModelConfig(layers=2, width=128, heads=4, kv_heads=2, mlp_width=384, max_sequence=256)
MOE = replace(DENSE, moe=MoeConfig(experts=4, top_k=2, expert_width=128, shared=1, first_dense=1))
SEQUENCES, LENGTH = 2, 256


def model_of(config: ModelConfig, precision: PrecisionConfig) -> Transformer:
    """BF16 activations, as on a GPU."""
    model = Transformer(config, 64, torch.bfloat16)
    model.init_weights(1)
    apply_policy(model, resolve(precision), seed=1, dtype="bf16", device="CPU")
    return model


def saved_bytes(model: Transformer) -> int:
    """Of distinct storages that autograd keeps for a backward pass, the parameters' apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, 64, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def planned(config: ModelConfig, precision: PrecisionConfig) -> LowBit:
    with torch.device("meta"):
        layers = candidates(Transformer(config, 1))
    return low_bit_memory(config, layers, assign(resolve(precision).training(), layers), precision.stabilisers)


def difference(config: ModelConfig, precision: PrecisionConfig) -> tuple[int, int]:
    """Bytes that low-bit layers take out of the saved tensors: as measured, and as the plan counts."""
    real = saved_bytes(model_of(config, PrecisionConfig())) - saved_bytes(model_of(config, precision))
    shape: tuple[Any, ...] = (config, 64, SEQUENCES, LENGTH, 2, Recompute.none, OptimizerKind.adamw)
    plain, low = training_memory(*shape), training_memory(*shape, planned(config, precision))
    estimate = plain.activations + plain.rounded_weights - low.activations - low.rounded_weights
    return real, estimate


RECIPES = [name for name, policy in PRESETS.items() if policy.quantised]
CASES = [(MlpKind.swiglu, name, ()) for name in RECIPES]
CASES += [(MlpKind.relu2, name, () if name == "nvfp4" else pytest.mark.exhaustive) for name in RECIPES]


@pytest.mark.parametrize(("mlp", "name"), [pytest.param(mlp, name, marks=marks) for mlp, name, marks in CASES])
def test_the_saved_tensors_of_each_recipe(mlp: MlpKind, name: str) -> None:
    real, estimate = difference(replace(DENSE, mlp=mlp), PrecisionConfig(forward=name, backward=name))
    assert estimate == pytest.approx(real, rel=0.03), (real, estimate)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_the_saved_tensors_of_experts(name: str) -> None:
    real, estimate = difference(MOE, PrecisionConfig(forward=name, backward=name))
    assert estimate == pytest.approx(real, rel=0.1), (real, estimate)


def test_an_input_that_a_sibling_reads_in_high_precision_stays() -> None:
    rules = [PrecisionRule(r".*attention\.k", "bf16"), PrecisionRule(r".*mlp\.up", "mxfp8")]
    precision = PrecisionConfig(forward="nvfp4", backward="nvfp4", rules=rules)
    low, all_low = planned(DENSE, precision), planned(DENSE, replace(precision, rules=[]))
    assert all_low.dropped == DENSE.layers * (2 * DENSE.width + DENSE.mlp_width)
    assert all_low.dropped - low.dropped == DENSE.layers * DENSE.width
    assert low.packed - all_low.packed == DENSE.layers * DENSE.width * (4.75 + 8.25) / 8, "v's copy and up's"
    real, estimate = difference(DENSE, precision)
    assert estimate == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_nvidia", "mxfp8"])
@pytest.mark.parametrize("detector", OsciDetector)
@pytest.mark.parametrize("hysteresis", [0.0, 0.1])
def test_the_windows_of_oscireset(name: str, detector: OsciDetector, hysteresis: float) -> None:
    settings = OsciResetConfig(enabled=True, detector=detector, start=0.0, period=4, window=2, hysteresis=hysteresis)
    precision = PrecisionConfig(
        compute=ComputeDtype.bf16, forward=name, stabilisers=StabiliserConfig(oscireset=settings)
    )
    model = model_of(DENSE, precision)
    osci = OsciReset(settings, lambda: whole_masters(model))
    osci.after_step(4, 0.0)
    held = 0
    for window in osci._windows.values():
        tensors = [getattr(window, f.name) for f in fields(window) if f.name != "flips"]
        held += sum(t.numel() * t.element_size() for t in tensors if t is not None)
    held += sum(m.layer.choice.numel() for m in whole_masters(model) if m.layer.choice is not None)
    assert held > 0 and planned(DENSE, precision).windows == held


def test_a_plan_takes_the_precision_that_needs_most_and_shares_windows_out() -> None:
    def made(*settings: str, ranks: int = 1) -> Any:
        return plan(compose(["preset=gpu", *settings]), 4096, memory_bytes=80 * 2**30, ranks=ranks)

    plain, low = made("precision=bf16"), made("precision=nvfp4")
    both = made("precision=nvfp4", "precision.switch=[{at: 0.9, forward: bf16, backward: bf16}]")
    assert low.memory.total < both.memory.total == plain.memory.total
    assert low.memory.activations < plain.memory.activations and low.memory.rounded_weights > 0
    assert low.largest_micro_batch["none"] > plain.largest_micro_batch["none"] == both.largest_micro_batch["none"]
    reset = "precision.stabilisers.oscireset.enabled=true"
    watched = made("precision=nvfp4", reset)
    assert watched.memory.windows > 12 * watched.parameters.hidden_matrices
    assert watched.memory.total - low.memory.total == watched.memory.windows
    shared = made("precision=nvfp4", reset, "engine=deepspeed", "engine.zero_stage=1", ranks=4)
    assert shared.memory.windows == -(-watched.memory.windows // 4)
    assert low_bit_phases(compose(["precision=bf16"])) == [LowBit()]
