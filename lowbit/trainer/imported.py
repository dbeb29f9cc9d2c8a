"""Models that were not trained here: Hugging Face folders opened like runs, and weights to begin a run from."""

from pathlib import Path

from lowbit.configs.schema import DataConfig, ModelConfig, RunConfig, TokenizerConfig, TokenizerKind
from lowbit.configs.stored import load_config
from lowbit.data.tokenizer import Tokenizer, load_tokenizer
from lowbit.errors import CheckpointError, DataError
from lowbit.models.hf.config import Family, is_hf_folder, read_config
from lowbit.models.hf.load import load_weights
from lowbit.models.layers import state_buffers, weights_and_state
from lowbit.models.transformer import Transformer
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.engine import load_tensors
from lowbit.trainer.files import CONFIG
from lowbit.trainer.lora import plain_weights


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


def beginning(path: Path) -> tuple[ModelConfig, TokenizerConfig]:
    """Model and tokenizer that a run with `init_from=path` begins with.

    Raises:
        CheckpointError: `path` is neither a run's folder nor a Hugging Face model.
    """
    if is_hf_folder(path):
        model = read_config(path).model
        require_vocabulary(path, model, tokenizer_of(path))
        return model, TokenizerConfig(kind=TokenizerKind.file, path=str(path))
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"init_from={path} is neither the folder of a run nor of a Hugging Face model")
    config = load_config(path / CONFIG)
    if config.data.tokenizer.kind is TokenizerKind.bytes:
        return config.model, config.data.tokenizer
    return config.model, TokenizerConfig(kind=TokenizerKind.file, path=str(path / "tokenizer"))


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
        elif not model.config.moe.bias_rate:
            raise CheckpointError(
                f"init_from={path}: its routers have biases, which model.moe.bias_rate=0 would leave out: give it a "
                "rate, however small"
            )
        load_weights(path, begin)
        return 0
    config = load_config(path / CONFIG)
    snapshot = CheckpointStore(path / "checkpoints", config.checkpoint).load(weights_only=True)
    load_tensors(weights_and_state(model), plain_weights(snapshot))
    return snapshot.step
