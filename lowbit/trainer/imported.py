"""Models that were not trained here: Hugging Face folders opened like runs, and weights to begin a run from."""

from pathlib import Path
from typing import Any

import torch

from lowbit.configs.schema import DataConfig, ModelConfig, RunConfig, TokenizerConfig, TokenizerKind
from lowbit.configs.stored import flatten, load_config, plain
from lowbit.configs.strict import build, show
from lowbit.data.tokenizer import Tokenizer, load_tokenizer
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.models.hf.config import Family, is_hf_folder, read_config
from lowbit.models.hf.load import check_tensors, load_weights, parameter_shapes
from lowbit.models.layers import state_buffers, weights_and_state
from lowbit.models.transformer import Transformer
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.engine import load_tensors
from lowbit.trainer.files import CONFIG
from lowbit.trainer.lora import plain_weights
from lowbit.trainer.plan import planned_vocabulary


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises DataError, saying what to do where it has no tokenizer.json."""
    if not (folder / "tokenizer.json").is_file() and any(folder.glob("*.model")):
        raise DataError(
            f"{folder} has a SentencePiece tokenizer but no tokenizer.json: write one with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return load_tokenizer(folder)


def config_of(folder: Path) -> RunConfig:
    """The configuration of a run that would have made a Hugging Face folder: its model and tokenizer, else defaults."""
    model = read_config(folder).model
    tokenizer = TokenizerConfig(kind=TokenizerKind.file, path=str(folder))
    data = DataConfig(tokenizer=tokenizer, sequence_length=min(DataConfig().sequence_length, model.max_sequence))
    return RunConfig(run_name=model.name, model=model, data=data)


def require_vocabulary(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError when a tokenizer has more tokens than the model has rows."""
    rows = config.vocab_rows
    if rows is not None and tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens and the model {rows} embeddings: they do not "
            "belong together"
        )


def require_newest(folder: Path, checkpoint: str) -> None:
    """Raise CheckpointError when a checkpoint is asked for by name, of a Hugging Face folder."""
    if checkpoint != "latest":
        raise CheckpointError(
            f"checkpoint {checkpoint}: {folder} is a Hugging Face folder, which has no others; leave this out"
        )


def beginning(path: Path) -> tuple[ModelConfig, TokenizerConfig]:
    """Model and tokenizer that a run with `init_from=path` begins with.

    Raises:
        CheckpointError: `path` is neither a run's folder nor a Hugging Face model, or its tensors are not those of its
            config.json.
    """
    if is_hf_folder(path):
        model = read_config(path).model
        require_vocabulary(path, model, tokenizer_of(path))
        check_tensors(path)
        return model, TokenizerConfig(kind=TokenizerKind.file, path=str(path))
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"init_from={path} is neither the folder of a run nor of a Hugging Face model")
    config = load_config(path / CONFIG)
    if config.data.tokenizer.kind is TokenizerKind.bytes:
        return config.model, config.data.tokenizer
    return config.model, TokenizerConfig(kind=TokenizerKind.file, path=str(path / "tokenizer"))


def check_start(config: RunConfig) -> None:
    """Raise CheckpointError, naming the settings, when `init_from` has the weights of another model than the run's."""
    if not config.init_from:
        return
    path, now = Path(config.init_from).expanduser(), config.model
    start, _ = beginning(path)
    tokens = planned_vocabulary(config)
    shapes = _shapes(start, tokens)
    if _shapes(now, tokens) == shapes:
        if is_hf_folder(path):
            _require_biases(path, now)
        return
    was, wanted = flatten(plain(start)), flatten(plain(now))
    changed = [key for key in wanted if wanted[key] != was[key]]
    alone = [key for key in changed if _changed_shapes(start, key, wanted[key], tokens) != shapes]
    keys = alone or changed
    given = " ".join(f"model.{key}={show(wanted[key])}" for key in keys)
    there = " ".join(f"model.{key}={show(was[key])}" for key in keys)
    raise CheckpointError(f"{given}: the weights of init_from={path} are of another model ({there}); leave this out")


def _changed_shapes(model: ModelConfig, key: str, value: Any, tokens: int) -> dict[str, torch.Size] | None:
    """`_shapes` with one setting changed; None where that is no model."""
    tree = plain(model)
    *sections, last = key.split(".")
    section = tree
    for name in sections:
        section = section[name]
    section[last] = value
    try:
        return _shapes(build(ModelConfig, tree), tokens)
    except ConfigError:
        return None


def _shapes(model: ModelConfig, tokens: int) -> dict[str, torch.Size]:
    """Of all parameters; a router's bias is state, of which a fresh one begins at zero."""
    return {n: shape for n, shape in parameter_shapes(model, tokens).items() if not n.endswith("router.bias")}


def _require_biases(path: Path, model: ModelConfig) -> None:
    """Raise CheckpointError when a Hugging Face folder has biases of routers for which the model has no place."""
    if not model.moe.bias_rate and read_config(path).family is Family.dots1:
        raise CheckpointError(
            f"init_from={path}: its routers have biases, which model.moe.bias_rate=0 would leave out: give it a "
            "rate, however small"
        )


def begin_from(path: Path, model: Transformer) -> int:
    """Fill a fresh model with the weights of a run's newest checkpoint, or of a Hugging Face folder.

    Returns:
        The step of the checkpoint; 0 for a Hugging Face folder.

    Raises:
        CheckpointError: the weights are those of another model.
    """
    if is_hf_folder(path):
        begin = weights_and_state(model)
        if read_config(path).family is not Family.dots1:  # whose files have the routers' biases
            for name, buffer in state_buffers(model).items():
                buffer.zero_()
                del begin[name]
        _require_biases(path, model.config)
        load_weights(path, begin)
        return 0
    config = load_config(path / CONFIG)
    snapshot = CheckpointStore(path / "checkpoints", config.checkpoint).load(weights_only=True)
    load_tensors(weights_and_state(model), plain_weights(snapshot))
    return snapshot.step
