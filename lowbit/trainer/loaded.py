"""A run opened for use: its checkpoint, tokenizer, model and data."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowbit.configs.nearest import nearest_path
from lowbit.configs.schema import PrecisionConfig, RunConfig
from lowbit.configs.stored import load_config
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.data.tokenizer import Tokenizer, load_tokenizer
from lowbit.errors import CheckpointError
from lowbit.models.hf.config import is_hf_folder
from lowbit.models.layers import weights_and_state
from lowbit.models.transformer import Transformer
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.engine import load_tensors
from lowbit.trainer.files import CONFIG
from lowbit.trainer.hardware import compute_dtype, pick_device
from lowbit.trainer.identity import differences, shorten
from lowbit.trainer.imported import begin_from, config_of, require_newest, require_vocabulary, tokenizer_of
from lowbit.trainer.lora import plain_weights
from lowbit.trainer.precision import RunPrecision
from lowbit.trainer.stabilise import Stabilisers

logger = logging.getLogger("lowbit")


@dataclass(frozen=True)
class LoadedRun:
    """A run opened for use."""

    run_dir: Path
    config: RunConfig
    model: Transformer
    tokenizer: Tokenizer
    step: int
    data_was: Mapping[str, Any] | None = None
    """What its checkpoint remembers of the data it was trained on (`Dataset.describe`)."""


def load_run(
    run_dir: Path, checkpoint: str = "latest", device: str = "auto", precision: PrecisionConfig | None = None
) -> LoadedRun:
    """Open a run's checkpoint for generation or evaluation, in `precision`, or else in what it was trained in.

    A Hugging Face folder is opened like the run that would have made it.

    Raises:
        CheckpointError: there is no run or no readable checkpoint.
    """
    if is_hf_folder(run_dir):
        require_newest(run_dir, checkpoint)
        return _load_hf(run_dir, device, precision)
    if not (run_dir / CONFIG).is_file():
        raise CheckpointError(f"{run_dir} is not a run's folder: it has no {CONFIG}{nearest_path(str(run_dir))}")
    config = load_config(run_dir / CONFIG)
    if precision is not None:
        config = replace(config, precision=precision)
    store = CheckpointStore(run_dir / "checkpoints", config.checkpoint, logger.warning)
    snapshot = store.load(checkpoint, weights_only=True)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    where = pick_device(device)
    model = build_model(config, tokenizer.vocab_size, compute_dtype(config.precision, where), where)
    saved = snapshot.meta.get("precision") if precision is None else None
    precise, stabilisers = RunPrecision(config, model), Stabilisers(config.precision, model)
    precise.resume(saved, snapshot.step)
    load_tensors(weights_and_state(model), plain_weights(snapshot))
    stabilisers.resume(snapshot.stabilisers)
    return LoadedRun(run_dir, config, model, tokenizer, snapshot.step, snapshot.meta["identity"]["data"])


def _load_hf(folder: Path, device: str, precision: PrecisionConfig | None) -> LoadedRun:
    config = config_of(folder)
    if precision is not None:
        config = replace(config, precision=precision)
    tokenizer = tokenizer_of(folder)
    require_vocabulary(folder, config.model, tokenizer)
    where = pick_device(device)
    model = build_model(config, tokenizer.vocab_size, compute_dtype(config.precision, where), where)
    RunPrecision(config, model)
    begin_from(folder, model)
    return LoadedRun(folder, config, model, tokenizer, 0)


def shown_path(path: Path) -> str:
    """A path as people want to type it: relative to the working directory when it lies inside."""
    resolved, here = path.resolve(), Path.cwd()
    return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)


def build_model(config: RunConfig, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Transformer:
    """The model on `device`, weights not yet set."""
    with torch.device("meta"):
        model = Transformer(config.model, vocab_size, dtype)
    return model.to_empty(device=device)


def dataset_of(run: LoadedRun) -> Dataset:
    """The data a run was trained on, packed again if its shards are gone; a warning says when they have changed."""
    data = prepare_data(run.config.data, logger.info)
    if run.data_was is not None and (changed := differences("data", run.data_was, data.describe())):
        logger.warning(
            "the data are not those that %s was trained on (%s): what is held out now may have been trained on then",
            run.run_dir,
            shorten(changed),
        )
    return data
