"""Which checkpoint a run goes on from, and whether it may: asked before its data are made.

A changed setting is told in a second: `check_settings` compares the configuration and the tokenizer in the folder that
the checkpoint comes from with what was given now. Only what the documents themselves can tell (edited files) is left to
`identity.check_same`, which compares the checkpoint's own record once tokenizer and shards are there.
"""

from pathlib import Path
from typing import Any

import torch

from lowbit.configs.schema import (
    DataConfig,
    ModelConfig,
    ResumeDifference,
    RunConfig,
    SourceConfig,
    SourceKind,
    TokenizerKind,
)
from lowbit.configs.stored import load_config, plain
from lowbit.data.mixture import Mixture
from lowbit.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.models.transformer import Transformer
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot
from lowbit.trainer.files import CONFIG
from lowbit.trainer.identity import differences, refuse


def open_snapshot(resume: str, store: CheckpointStore) -> Snapshot | None:
    """The checkpoint that `resume` (auto, none or a path) names; None for a fresh start."""
    place = _place(resume, store)
    return None if place is None else store.load("latest" if resume == "auto" else resume)


def check_settings(config: RunConfig, store: CheckpointStore) -> None:
    """Refuse to go on with settings that make another tokenizer, other data or another model than the run had.

    Where the run's configuration is missing or cannot be read nothing is compared.

    Raises:
        CheckpointError: they do, and `resume_allow` does not say so; or `resume` names nothing to go on from.
    """
    place = _place(config.resume, store)
    if place is None:
        return
    run_dir = next((folder for folder in (place, *place.parents[:2]) if (folder / CONFIG).is_file()), None)
    if run_dir is None:
        return
    try:
        saved, tokenizer = load_config(run_dir / CONFIG), load_tokenizer(run_dir / "tokenizer")
    except (ConfigError, DataError):
        return
    given = _given_tokenizer(config.data)
    tokens = _tokenizer_differences(saved.data, tokenizer, config.data, given)
    data = differences("data", _documents(saved.data), _documents(config.data))
    model = differences("model", plain(saved.model), plain(config.model))
    found: dict[ResumeDifference, list[str]] = {
        ResumeDifference.tokenizer: tokens,
        ResumeDifference.data: tokens + data,  # other tokens are other data
        ResumeDifference.model: model,
    }
    if any(found.values()):
        now = config.data.tokenizer.vocab_size if given is None else given.vocab_size
        loads = _shapes(saved.model, tokenizer.vocab_size) == _shapes(config.model, now)
        refuse(found, config.resume_allow, loads)


def fits(snapshot: Snapshot, model: ModelConfig, vocab_size: int) -> bool:
    """Whether a checkpoint's weights have the names and shapes of a model's."""
    wanted = _shapes(model, vocab_size)
    return all(name in snapshot.model and snapshot.model[name].shape == shape for name, shape in wanted.items())


def _shapes(model: ModelConfig, vocab_size: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: weight.shape for name, weight in Transformer(model, vocab_size).named_parameters()}


def _place(resume: str, store: CheckpointStore) -> Path | None:
    """The folder of the checkpoint, or of the checkpoints, to go on from; None for a fresh start."""
    if resume == "none":
        if store.list():
            raise CheckpointError(
                f"{store.folder} already holds checkpoints and resume=none would mix two runs: "
                "choose another run_name, or delete the folder"
            )
        return None
    if resume == "auto":
        return store.folder if store.list() else None
    return store.find(resume)


def _given_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer that a configuration names; None for one that is trained on its documents."""
    given = config.tokenizer
    if given.kind is TokenizerKind.bpe:
        return None
    return bytes_tokenizer() if given.kind is TokenizerKind.bytes else load_tokenizer(given.path, given.eot)


def _tokenizer_differences(
    saved: DataConfig, tokenizer: Tokenizer, config: DataConfig, given: Tokenizer | None
) -> list[str]:
    """Between a run's tokenizer and the one that is given, or that the settings would train."""
    was: dict[str, Any]
    now: dict[str, Any]
    if given is not None:
        was, now = {"digest": tokenizer.digest}, {"digest": given.digest}
    else:
        was, now = {"vocab_size": tokenizer.vocab_size}, {"vocab_size": config.tokenizer.vocab_size}
        if saved.tokenizer.kind is TokenizerKind.bpe:
            was["train_bytes"], now["train_bytes"] = saved.tokenizer.train_bytes, config.tokenizer.train_bytes
    return differences("data", {"tokenizer": was}, {"tokenizer": now})


def _documents(config: DataConfig) -> dict[str, Any]:
    """The settings that decide which documents are trained on, and how they are cut into sequences."""
    shares = Mixture([source.weight for source in config.sources.values()]).shares
    sources = zip(config.sources.items(), shares, strict=True)
    return {
        "sequence_length": config.sequence_length,
        "document_mask": config.document_mask,
        "held_out": config.held_out,
        "sources": {name: {"share": round(share, 6)} | _chosen(source) for (name, source), share in sources},
    }


def _chosen(source: SourceConfig) -> dict[str, Any]:
    """What a source takes, wherever its files lie now."""
    elsewhere = ("path",) if source.kind is not SourceKind.huggingface or Path(source.path).exists() else ()
    return {name: value for name, value in plain(source).items() if name not in ("weight", "streaming", *elsewhere)}
