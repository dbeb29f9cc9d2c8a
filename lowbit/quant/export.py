"""Quantised weights in the layout of compressed-tensors, which transformers and others read.

    NVFP4  nvfp4-pack-quantized  weight_packed uint8 [out, in / 2] (two E2M1 codes a byte, the even column in the low
                                 half), weight_scale E4M3 [out, in / 16], weight_global_scale FP32 [1], the reciprocal
                                 of our outer scale: value = code * weight_scale / weight_global_scale
    MXFP8  mxfp8-quantized       weight E4M3 [out, in], weight_scale uint8 [out, in / 32], E8M0: value = code *
                                 2^(weight_scale - 127)

What is quantised is the weight rounded to BF16, by the quantisers of `nvfp4_w4a16` (four over six) and `mxfp8_w8a16`,
with two differences in NVFP4: layers that a server fuses into one product (q, k, v; gate, up) share their global scale,
because it has one for all; and that scale is a power of two, so that every value is a BF16 number, in whatever order a
reader multiplies. Activations stay in BF16.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from lowbit.errors import CheckpointError
from lowbit.quant.packing import pack_codes
from lowbit.quant.quantise import quantise
from lowbit.quant.quantised import Quantised
from lowbit.quant.spec import MXFP8, NVFP4_46, QuantSpec


class WeightFormat(StrEnum):
    """Formats of exported weights."""

    nvfp4 = "nvfp4"
    mxfp8 = "mxfp8"


SPECS: dict[WeightFormat, QuantSpec] = {WeightFormat.nvfp4: NVFP4_46, WeightFormat.mxfp8: MXFP8}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of a block that servers multiply together, by their names in Hugging Face's files."""
LAYOUTS = {WeightFormat.nvfp4: "nvfp4-pack-quantized", WeightFormat.mxfp8: "mxfp8-quantized"}


def check_width(name: str, width: int, fmt: WeightFormat) -> None:
    """Raise CheckpointError, naming the layer, when a row of so many numbers is no whole number of blocks."""
    block = SPECS[fmt].block[1]
    if width % block:
        raise CheckpointError(
            f"{name}: its rows of {width} numbers are no whole blocks of {block}, as {fmt} needs: "
            "--format bf16 would work"
        )


def stored_bytes(rows: int, columns: int, fmt: WeightFormat) -> dict[str, int]:
    """Bytes of each tensor that a weight [rows, columns] becomes, by the end of its name."""
    if fmt is WeightFormat.nvfp4:
        scales = rows * columns // 16
        return {"weight_packed": rows * columns // 2, "weight_scale": scales, "weight_global_scale": 4}
    return {"weight": rows * columns, "weight_scale": rows * columns // 32}


def stored(weights: Sequence[Tensor], fmt: WeightFormat) -> list[dict[str, Tensor]]:
    """Weights [out, in] of layers that are fused when they run -> the tensors that each becomes, by name's end."""
    together = quantise(torch.cat([*(weight.float() for weight in weights), *_ceiling(weights, fmt)]), SPECS[fmt])
    results = []
    begin = 0
    for weight in weights:
        rows = slice(begin, begin + len(weight))
        results.append(_tensors(together, rows, fmt))
        begin += len(weight)
    return results


def _ceiling(weights: Sequence[Tensor], fmt: WeightFormat) -> list[Tensor]:
    """A row whose greatest number makes the outer scale, greatest / (bound * target), the next power of two."""
    if fmt is not WeightFormat.nvfp4:
        return []
    spec = SPECS[fmt]
    whole = spec.bound * spec.target  # 1536: with any power of two still a BF16 number
    amax = max(float(weight.bfloat16().abs().max()) for weight in weights)
    exponent = min(max(math.ceil(math.log2(amax / whole)), -126), 117) if amax > 0 else 0  # finite, and so its inverse
    return [torch.full((1, weights[0].shape[1]), whole * 2.0**exponent, device=weights[0].device)]


def _tensors(whole: Quantised, rows: slice, fmt: WeightFormat) -> dict[str, Tensor]:
    codes, scales = whole.codes[rows], whole.scales[rows]
    if fmt is WeightFormat.mxfp8:
        return {"weight": codes.contiguous().view(torch.float8_e4m3fn), "weight_scale": scales.contiguous()}
    assert whole.outer is not None
    return {
        "weight_packed": pack_codes(codes, 4).contiguous(),
        "weight_scale": scales.contiguous().view(torch.float8_e4m3fn),
        "weight_global_scale": (1.0 / whole.outer.double()).float().reshape(1),
    }


class FusedLayers:
    """Layers that a server multiplies together, quantised together when the first of their tensors is wanted."""

    def __init__(self, weights: Mapping[str, Tensor], fmt: WeightFormat) -> None:
        """`weights`: [out, in] each, by names that end in .weight. Raises CheckpointError, as `check_width`."""
        self.weights, self._format = weights, fmt
        self.sizes: dict[str, int] = {}
        """Bytes of the tensors that are stored, by name."""
        for name, weight in weights.items():
            check_width(name, weight.shape[1], fmt)
            sizes = stored_bytes(weight.shape[0], weight.shape[1], fmt)
            self.sizes |= {_renamed(name, end): size for end, size in sizes.items()}
        self._made: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        """One of the stored tensors; each may be taken once. Raises CheckpointError for a weight that is not finite."""
        if not self._made:
            for weight_name, weight in self.weights.items():
                if not weight.isfinite().all():
                    what = f"NaN or infinity, which {self._format} cannot store"
                    raise CheckpointError(f"{weight_name} holds {what}: export an earlier checkpoint")
            made = stored([weight.cpu() for weight in self.weights.values()], self._format)
            for weight_name, tensors in zip(self.weights, made, strict=True):
                self._made |= {_renamed(weight_name, end): tensor for end, tensor in tensors.items()}
        return self._made.pop(name)


def _renamed(name: str, end: str) -> str:
    return f"{name.removesuffix('.weight')}.{end}"


class WeightEncoder:
    """Quantises the matrices of the layers; embedding and head stay as they are (`hf.save.Encoder`)."""

    def __init__(self, fmt: WeightFormat) -> None:
        self._format = fmt

    def layers(self, parts: Mapping[str, Tensor]) -> list[FusedLayers]:
        """What to quantise, of all tensors of a file. Raises CheckpointError, as `check_width`."""
        groups: dict[str, dict[str, Tensor]] = {}
        for name, part in parts.items():
            stem, _, kind = name.removesuffix(".weight").rpartition(".")
            if ".layers." in name and part.dim() == 2:
                key = next((f"{stem}.{'+'.join(fused)}" for fused in FUSED if kind in fused), name)
                groups.setdefault(key, {})[name] = part
        return [FusedLayers(weights, self._format) for weights in groups.values()]

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config`, with the linear layers that stay as they are."""
        return quantization_config(self._format, ignored)


def quantization_config(fmt: WeightFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a `config.json`. ignore: linear layers that stay in BF16."""
    nvfp4 = fmt is WeightFormat.nvfp4
    weights: Mapping[str, Any] = {
        "num_bits": 4 if nvfp4 else 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if nvfp4 else "group",
        "group_size": 16 if nvfp4 else 32,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
        "zp_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": LAYOUTS[fmt],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUTS[fmt],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
