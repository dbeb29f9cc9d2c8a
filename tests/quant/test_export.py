"""Exported weights read back by compressed-tensors itself, and by hand where it is not installed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.errors import CheckpointError
from lowbit.quant.export import SPECS, WeightEncoder, WeightFormat, check_width, quantization_config, stored
from lowbit.quant.quantise import fake_quantise

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _weights() -> list[Tensor]:
    return [torch.randn(48, 96) * 0.05, torch.randn(32, 96) * 0.2]


def _by_hand(tensors: dict[str, Tensor], fmt: WeightFormat) -> Tensor:
    """FP64 values, from the layout's description."""
    if fmt is WeightFormat.mxfp8:
        scale = 2.0 ** (tensors["weight_scale"].double() - 127)
        return tensors["weight"].double() * scale.repeat_interleave(32, dim=1)
    codes = torch.stack((tensors["weight_packed"] & 15, tensors["weight_packed"] >> 4), dim=-1).flatten(1).long()
    value = torch.tensor(E2M1, dtype=torch.float64)[codes & 7] * torch.where(codes > 7, -1, 1)
    scale = tensors["weight_scale"].double() / tensors["weight_global_scale"].double()
    return value * scale.repeat_interleave(16, dim=1)


@pytest.mark.parametrize("fmt", list(WeightFormat))
def test_the_stored_tensors_are_bf16_numbers_as_near_as_the_format_allows(fmt: WeightFormat) -> None:
    weights = _weights()
    preset = fake_quantise(torch.cat(weights), SPECS[fmt]).double()
    read = torch.cat([_by_hand(tensors, fmt) for tensors in stored(weights, fmt)])
    assert torch.equal(read, read.bfloat16().double()), "whatever the order of a reader's products"
    if fmt is WeightFormat.mxfp8:
        assert torch.equal(read, preset)
        return
    first, second = stored(weights, fmt)
    scale = first["weight_global_scale"]
    assert torch.equal(scale, second["weight_global_scale"]) and scale.log2().frac() == 0
    exact = torch.cat(weights).double()
    ours, theirs = (read - exact).square().mean(), (preset - exact).square().mean()
    assert ours < 1.03 * theirs, "a power of two costs next to nothing"


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-30, 1e-6, 1.0, 3000.0, 7e37])
def test_any_magnitude(magnitude: float) -> None:
    weight = torch.randn(16, 32) * magnitude
    (tensors,) = stored([weight], WeightFormat.nvfp4)
    read = _by_hand(tensors, WeightFormat.nvfp4)
    assert read.isfinite().all() and (read - weight.double()).norm() <= 0.12 * weight.double().norm()


@pytest.mark.parametrize("fmt", list(WeightFormat))
def test_compressed_tensors_reads_exactly_these_numbers(fmt: WeightFormat) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization_config(fmt, ["lm_head"]))
    (scheme,) = config.config_groups.values()
    reader: Any = compressors.BaseCompressor.get_value_from_registry(config.format)
    for tensors in stored(_weights(), fmt):
        read = reader.decompress(tensors, scheme)["weight"]
        assert read.dtype is torch.bfloat16 and torch.equal(read.double(), _by_hand(tensors, fmt))


def test_what_is_quantised_and_together_with_what() -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    parts = {f"model.layers.0.self_attn.{name}.weight": torch.ones(32, 32) for name in names}
    parts |= {f"model.layers.0.mlp.{name}.weight": torch.ones(32, 32) for name in ("gate_proj", "up_proj")}
    parts |= {"model.layers.0.input_layernorm.weight": torch.ones(32)}
    parts |= {"model.embed_tokens.weight": torch.ones(64, 32), "lm_head.weight": torch.ones(64, 32)}
    groups = [
        [name.split(".")[-2] for name in layers.weights] for layers in WeightEncoder(WeightFormat.nvfp4).layers(parts)
    ]
    assert groups == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"]]
    layers = WeightEncoder(WeightFormat.nvfp4).layers(parts)[0]
    taken = {name: layers.take(name) for name in layers.sizes}
    assert {name: tensor.nbytes for name, tensor in taken.items()} == layers.sizes
    assert taken["model.layers.0.self_attn.k_proj.weight_packed"].shape == (32, 16)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    check_width("a", 48, WeightFormat.nvfp4)
    with pytest.raises(
        CheckpointError, match="a: its rows of 48 numbers are no whole blocks of 32, as mxfp8 needs: --format bf16"
    ):
        check_width("a", 48, WeightFormat.mxfp8)


@pytest.mark.parametrize("fmt", list(WeightFormat))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(fmt: WeightFormat, bad: float) -> None:
    parts = {f"model.layers.0.mlp.{n}_proj.weight": torch.randn(64, 64) for n in ("gate", "up")}
    parts["model.layers.0.mlp.up_proj.weight"][3, 5] = bad
    (layers,) = WeightEncoder(fmt).layers(parts)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds NaN or infinity"):
        layers.take(next(iter(layers.sizes)))
