"""A model of ours as a Hugging Face folder in a stock architecture, for `AutoModelForCausalLM` and everything like it.

The FP32 masters are rounded to the type asked for, once, to nearest even; rows that only pad our vocabulary are left
out, so that no software can predict them, while rows that an imported checkpoint had stay.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig
from lowbit.errors import CheckpointError
from lowbit.models.cost import mup_ratio
from lowbit.models.hf.config import Family
from lowbit.models.hf.describe import family_of, write_config
from lowbit.models.hf.folder import write_folder
from lowbit.models.hf.names import HEAD, IN_FP32, file_names

SHARD_BYTES = 5 * 10**9
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TABLES = ("embedding.weight", "head.weight")


class Encoded(Protocol):
    """Matrices of a file that are stored as other tensors."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The matrices, by the names they would have."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of the tensors stored in their place, by name."""
        ...

    def take(self, name: str) -> Tensor:
        """One of those tensors; each is asked for once."""
        ...


class Encoder(Protocol):
    """A way to store weights in few bits."""

    def layers(self, parts: Mapping[str, Tensor]) -> Sequence[Encoded]:
        """What to store otherwise, of all tensors of a file."""
        ...

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        ignored: linear layers that are not stored so. A tied head is one of them, although no tensor is its own.
        """
        ...


def save_model(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    vocab_size: int,
    *,
    dtype: str = "bf16",
    eos_id: int | None = None,
    json_files: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    encoder: Encoder | None = None,
) -> list[Path]:
    """Write config.json, weights and `json_files` (those of the tokenizer) into a new folder.

    Args:
        weights: FP32 masters and state by our names. vocab_size: tokens of the tokenizer. dtype: a key of `DTYPES`.
        encoder: stores some of the matrices in few bits.

    Raises:
        CheckpointError: no stock architecture computes this model, or nothing reads it in few bits; the folder is in
            use or cannot be written.
    """
    if encoder is not None and config.moe.experts:  # transformers 5 puts experts together, with one scale a row
        raise CheckpointError(
            f"model.moe.experts={config.moe.experts}: transformers does not read experts that are quantised in blocks: "
            "--format bf16 would work"
        )
    rows = config.vocab_rows or vocab_size
    kind = DTYPES[dtype]
    parts = parts_of(config, weights, rows)
    types = {name: torch.float32 if IN_FP32.fullmatch(name) else kind for name in parts}
    sizes = {name: part.numel() * types[name].itemsize for name, part in parts.items()}
    content = write_config(config, rows, str(kind).removeprefix("torch."), eos_id)
    encoded: dict[str, Encoded] = {}  # by the names of the tensors that are stored
    if encoder is not None:
        for layers in encoder.layers(parts):
            encoded |= dict.fromkeys(layers.sizes, layers)
            sizes = {name: size for name, size in sizes.items() if name not in layers.weights} | dict(layers.sizes)
        linear = {HEAD} | {name for name, part in parts.items() if ".layers." in name and part.dim() == 2}
        taken = {name for layers in encoded.values() for name in layers.weights}
        content["quantization_config"] = encoder.config(sorted(n.removesuffix(".weight") for n in linear - taken))

    def make(name: str) -> Tensor:
        return encoded[name].take(name) if name in encoded else parts[name].to("cpu", types[name]).contiguous()

    return write_folder(folder, sizes, make, {"config.json": content, **(json_files or {})}, shard_bytes)


def parts_of(config: ModelConfig, weights: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The tensors of the file by their names there: views of our weights."""
    family = family_of(config)
    parts: dict[str, Tensor] = {}
    for name, weight in weights.items():
        source = weight.detach()[:rows] if name in TABLES else weight.detach()
        if name == "final_norm.weight":  # where muP's factor on the hidden states finds a place
            source = source * mup_ratio(config)
        if source.dim() < 3:
            parts[file_names(family, name)[0]] = source
        else:
            parts |= zip(file_names(family, name, len(source)), source.unbind(), strict=True)
    if family is Family.dots1 and not config.moe.bias_rate:
        routers = [name for name in weights if name.endswith("mlp.router.weight")]
        biases = [file_names(family, name.replace(".weight", ".bias"))[0] for name in routers]
        parts |= {bias: torch.zeros(config.moe.experts) for bias in biases}
    return parts
