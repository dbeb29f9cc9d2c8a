"""Weights of a Hugging Face folder into a model of ours, bit by bit: BF16, FP16 and FP32 are all exact in FP32.

Everything is compared before anything is read: a tensor that is missing, left over or of another shape is one error
that lists them. A tied head may be stored nevertheless, as long as it is the embedding.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig
from lowbit.errors import CheckpointError
from lowbit.models.hf.config import CONFIG, Family, read_config
from lowbit.models.hf.folder import TensorFolder
from lowbit.models.hf.names import HEAD, TABLE, file_names, surplus
from lowbit.models.layers import weights_and_state
from lowbit.models.transformer import Transformer

EXACT = (torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 5


def load_model(folder: Path, tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Transformer:
    """The model of a folder, on `device`, to compute in `dtype`. `tokens`: vocabulary of its tokenizer.

    Raises: CheckpointError, as `read_config` and `load_weights`.
    """
    config = read_config(folder)
    if tokens > config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokens} tokens and the model {config.vocab_size} embeddings: they do not "
            "belong together"
        )
    with torch.device("meta"):
        model = Transformer(config.model, tokens, dtype)
    model.to_empty(device=device)
    load_weights(folder, weights_and_state(model))
    return model


def check_tensors(folder: Path) -> None:
    """Raise CheckpointError when a folder's tensors are not those of its config.json; reads no weights."""
    config = read_config(folder)
    with TensorFolder(folder) as files:
        _matched(files, config.family, parameter_shapes(config.model, config.vocab_size))


def parameter_shapes(config: ModelConfig, tokens: int) -> dict[str, torch.Size]:
    """The parameters and the state of a model by name, without any memory."""
    with torch.device("meta"):
        return {name: t.shape for name, t in weights_and_state(Transformer(config, tokens)).items()}


@torch.no_grad()
def load_weights(folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Fill parameters and state, by our names, with the folder's weights. Raises CheckpointError."""
    for name, tensor in read_weights(folder, {name: p.shape for name, p in parameters.items()}):
        parameters[name].copy_(tensor)


def read_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of ours with its FP32 value from the folder, one in memory at a time.

    Args:
        shapes: of all parameters of the model, by our names.

    Raises:
        CheckpointError: the folder's tensors are not those of the model, of a type that FP32 does not hold, or not
            finite.
    """
    family = read_config(folder).family
    with TensorFolder(folder) as files:
        sources = _matched(files, family, shapes)
        if "head.weight" not in shapes:
            _require_tied(files)
        for name, tensors in sources.items():
            parts = [_exact(folder, source, files.read(source)) for source in tensors]
            yield name, parts[0] if len(shapes[name]) < 3 else torch.stack(parts)


def _matched(files: TensorFolder, family: Family, shapes: Mapping[str, torch.Size]) -> dict[str, list[str]]:
    """The tensors that make up each parameter, all of them there and of the right shape."""
    sources: dict[str, list[str]] = {}
    problems: list[str] = []
    there = set(files.names())
    for name, shape in shapes.items():
        sources[name] = file_names(family, name, shape[0] if len(shape) == 3 else 0)
        wanted = shape[1:] if len(shape) == 3 else shape
        for source in sources[name]:
            if source not in there:
                problems.append(f"{source} is missing")
            elif files.shape(source) != wanted:
                problems.append(f"{source} is {list(files.shape(source))}, {CONFIG} makes it {list(wanted)}")
    used = {source for listed in sources.values() for source in listed}
    if "head.weight" not in shapes:
        used.add(HEAD)  # tied, and yet stored
    problems += [f"{name} is not of this architecture" for name in surplus(there, used)]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{files.folder} does not hold the {family} model that its {CONFIG} describes: "
            f"{'; '.join(problems[:_SHOWN])}{more}"
        )
    return sources


def _require_tied(files: TensorFolder) -> None:
    if HEAD in files.names() and not torch.equal(files.read(HEAD), files.read(TABLE)):
        raise CheckpointError(
            f"{files.folder}: {HEAD} differs from {TABLE}, but {CONFIG} says tie_word_embeddings=true"
        )


def _exact(folder: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in EXACT:
        raise CheckpointError(
            f"{folder}: {name} is {str(tensor.dtype).removeprefix('torch.')}; only float32, bfloat16 and float16 "
            "weights are read"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(f"{folder}: {name} has a number that is not finite: copy or convert it again")
    return tensor.float()
