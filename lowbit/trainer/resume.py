"""Which checkpoint a run goes on from, and whether it may: asked before its data are made.

A changed setting is told in a second: `check_settings` compares what a checkpoint remembers of its tokenizer, model and
settings of the data (`data_settings`) with what was given now. Only what the documents themselves can tell (edited
files) is left to `identity.check_same`, once tokenizer and shards are there.

The record is the checkpoint's own, not `config.yaml` beside it: that file says how the folder's last start was
configured, which a run that was killed early, or went back to an earlier checkpoint, need not have got anywhere with.
"""

from collections.abc import Mapping
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
from lowbit.configs.stored import plain
from lowbit.configs.strict import build
from lowbit.data.mixture import Mixture
from lowbit.data.readers import TEXT_SUFFIXES
from lowbit.data.sources import list_source
from lowbit.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer, trained_here
from lowbit.errors import CheckpointError, ConfigError
from lowbit.models.transformer import Transformer
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot
from lowbit.trainer.identity import differences, refuse

CHOICES = {
    SourceKind.python_docs: ("max_documents",),
    SourceKind.files: ("max_documents", "text_field", "document_bytes"),
    SourceKind.huggingface: ("max_documents", "text_field", "path", "subset", "split"),
    SourceKind.conversations: ("max_documents",),
}
"""The settings of a source that decide what it takes, wherever its files lie, by its kind."""


def open_snapshot(resume: str, store: CheckpointStore) -> Snapshot | None:
    """The checkpoint that `resume` (auto, none or a path) names; None for a fresh start."""
    place = _place(resume, store)
    return None if place is None else store.load("latest" if resume == "auto" else resume)


def check_settings(config: RunConfig, store: CheckpointStore) -> None:
    """Refuse to go on with settings that make another tokenizer, other data or another model than the run had.

    What the checkpoint does not remember (an older version wrote it) is not compared.

    Raises:
        CheckpointError: they do, and `resume_allow` does not say so; or `resume` names nothing to go on from.
    """
    place = _place(config.resume, store)
    meta = None if place is None else store.peek(place)
    if meta is None:
        return
    identity, given = meta["identity"], _given_tokenizer(config.data)
    settings = meta.get("settings") or {}
    tokens = _tokenizer_differences(meta, settings.get("tokenizer", {}), config.data, given)
    data = _data_differences(settings.get("data"), identity["data"], config.data)
    model = differences("model", identity["model"], plain(config.model))
    found: dict[ResumeDifference, list[str]] = {
        ResumeDifference.tokenizer: tokens,
        ResumeDifference.data: tokens + data,  # other tokens are other data
        ResumeDifference.model: model,
    }
    if any(found.values()):
        now = config.data.tokenizer.vocab_size if given is None else given.vocab_size
        refuse(found, config.resume_allow, _loads(identity["model"], meta["vocab_size"], config.model, now))


def data_settings(config: DataConfig) -> dict[str, Any]:
    """What a checkpoint remembers of the settings that decide which tokens are trained on, and in which sequences."""
    weights = [source.weight for source in config.sources.values()]  # of a run from rewards there are none
    shares = Mixture(weights).shares if weights else []
    sources = zip(config.sources.items(), shares, strict=True)
    tokenizer = config.tokenizer
    return {
        "tokenizer": {"kind": str(tokenizer.kind), "train_bytes": tokenizer.train_bytes},
        "data": {
            "sequence_length": config.sequence_length,
            "document_mask": config.document_mask,
            "held_out": config.held_out,
            "shard_tokens": config.shard_tokens,
            "sources": {name: {"share": round(share, 6)} | _chosen(source) for (name, source), share in sources},
        },
    }


def fits(snapshot: Snapshot, model: ModelConfig, vocab_size: int) -> bool:
    """Whether a checkpoint's weights have the names and shapes of a model's."""
    wanted = _shapes(model, vocab_size)
    return all(name in snapshot.model and snapshot.model[name].shape == shape for name, shape in wanted.items())


def _shapes(model: ModelConfig, vocab_size: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: weight.shape for name, weight in Transformer(model, vocab_size).named_parameters()}


def _loads(saved: Mapping[str, Any], saved_vocabulary: int, model: ModelConfig, vocab_size: int) -> bool:
    """Whether the weights of one model would load into the other."""
    try:
        was = build(ModelConfig, saved)
    except ConfigError:  # another version's, which this one cannot tell
        return True
    return _shapes(was, saved_vocabulary) == _shapes(model, vocab_size)


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
    try:
        return store.find(resume)
    except CheckpointError as error:
        raise CheckpointError(f"resume={resume}: {error}") from None


def _given_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer that a configuration names; None for one that is still to be trained on its documents."""
    given = config.tokenizer
    if given.kind is TokenizerKind.bytes:
        return bytes_tokenizer()
    if given.kind is TokenizerKind.file:
        return load_tokenizer(given.path, given.eot)
    return load_tokenizer(given.path) if given.path and trained_here(given.path) else None


def _tokenizer_differences(
    meta: Mapping[str, Any], settings: Mapping[str, Any], config: DataConfig, given: Tokenizer | None
) -> list[str]:
    """Between a checkpoint's tokenizer and the one that is given, or that the settings would train."""
    was: dict[str, Any]
    now: dict[str, Any]
    if given is not None:
        was, now = {"digest": meta["identity"]["tokenizer"]}, {"digest": given.digest}
    else:
        was, now = {"vocab_size": meta["vocab_size"]}, {"vocab_size": config.tokenizer.vocab_size}
        if settings.get("kind") == TokenizerKind.bpe:
            was["train_bytes"], now["train_bytes"] = settings["train_bytes"], config.tokenizer.train_bytes
    return differences("data", {"tokenizer": was}, {"tokenizer": now})


def _data_differences(was: Mapping[str, Any] | None, packed: Mapping[str, Any], config: DataConfig) -> list[str]:
    """Between the settings that a checkpoint remembers, beside what its data were as `packed`, and those of now."""
    if was is None:
        return []
    now = data_settings(config)["data"]
    was = {**data_settings(DataConfig())["data"], **was}  # what a later version added was at its default
    sizes = [max(source["train_tokens"], source["val_tokens"]) for source in packed.get("sources", {}).values()]
    if max(sizes, default=0) <= min(was["shard_tokens"], now["shard_tokens"]):  # one shard either way
        was["shard_tokens"] = now["shard_tokens"]
    then, here = was["sources"], now["sources"]
    sources = {name: _as_now(then[name], here[name], config.sources[name]) for name in then.keys() & here.keys()}
    lost, new = ({name: {"kind": some[name]["kind"]} for name in some.keys() - sources} for some in (then, here))
    return differences("data", {**was, "sources": sources | lost}, {**now, "sources": here | new})


def _as_now(was: Mapping[str, Any], now: Mapping[str, Any], source: SourceConfig) -> dict[str, Any]:
    """A source's settings then, with those of now in place of what makes no difference to its documents."""
    if was["kind"] != now["kind"]:
        return dict(was)
    same = {key for key in now if key not in was}  # what a later version added
    if None in (was.get("path"), now.get("path")):  # a local copy of the data set: its contents are compared later
        same.add("path")
    if source.kind is SourceKind.files and any(was[key] != now[key] for key in ("text_field", "document_bytes")):
        files = list_source("files", source).files
        texts = [file.size for file in files if file.name.endswith(TEXT_SUFFIXES)]
        if len(texts) == len(files):
            same.add("text_field")
        if max(texts, default=0) <= min(was["document_bytes"], now["document_bytes"]):
            same.add("document_bytes")
    return {**was, **{key: now[key] for key in same & now.keys()}}


def _chosen(source: SourceConfig) -> dict[str, Any]:
    """What a source takes; the path of a data set that lies here is not told (None)."""
    chosen = {"kind": str(source.kind)} | {name: getattr(source, name) for name in CHOICES[source.kind]}
    if "path" in chosen and Path(source.path).exists():
        chosen["path"] = None
    return chosen
