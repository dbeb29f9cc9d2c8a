"""A run as a Hugging Face folder, and a Hugging Face folder as a run.

Export needs no model in memory: a checkpoint's tensors are mapped from its file and rounded one shard at a time.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.configs.paths import with_absolute_paths
from lowbit.configs.schema import RunConfig
from lowbit.configs.stored import load_config, save_config
from lowbit.data.tokenizer import Tokenizer, load_tokenizer
from lowbit.errors import CheckpointError, DataError
from lowbit.models.hf.config import is_hf_folder
from lowbit.models.hf.load import load_model, parameter_shapes, read_weights
from lowbit.models.hf.parity import compare
from lowbit.models.hf.save import SHARD_BYTES, save_model
from lowbit.quant.export import WeightEncoder, WeightFormat
from lowbit.trainer.checkpoint import CheckpointStore, Snapshot
from lowbit.trainer.files import CONFIG
from lowbit.trainer.imported import config_of, require_newest, require_vocabulary, tokenizer_of
from lowbit.trainer.lora import plain_weights

logger = logging.getLogger("lowbit")

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""What stands beside a tokenizer.json: kept by an import, written again by an export."""


@dataclass(frozen=True)
class Weights:
    """FP32 master weights on the CPU, and what belongs to them."""

    config: RunConfig
    tokenizer: Tokenizer
    tensors: Mapping[str, Tensor]
    step: int
    side_files: dict[str, str]


def open_weights(path: Path, checkpoint: str = "latest", *, averaged: bool = False) -> Weights:
    """The weights of a run's checkpoint, or of a Hugging Face folder.

    Args:
        averaged: the moving average instead of the weights themselves.

    Raises:
        CheckpointError: there are none.
    """
    if is_hf_folder(path):
        if averaged:
            raise CheckpointError(f"{path} is a Hugging Face folder and has no moving average")
        require_newest(path, checkpoint)
        config, tokenizer = config_of(path), tokenizer_of(path)
        require_vocabulary(path, config.model, tokenizer)
        shapes = parameter_shapes(config.model, tokenizer.vocab_size)
        return Weights(config, tokenizer, dict(read_weights(path, shapes)), 0, _side_files(path))
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} is neither the folder of a run nor of a Hugging Face model")
    config = load_config(path / CONFIG)
    store = CheckpointStore(path / "checkpoints", config.checkpoint, logger.warning)
    snapshot = store.load(checkpoint, weights_only=True)
    if averaged and snapshot.ema is None:
        raise CheckpointError(f"{path} keeps no moving average: it was trained with optim.ema_decay=null")
    plain = plain_weights(snapshot)
    tensors = {**plain, **(snapshot.ema or {})} if averaged else plain  # state has no average
    places = [path / "tokenizer", Path(config.data.tokenizer.path or path)]
    side_files = next((found for place in places if (found := _side_files(place))), {})
    return Weights(config, load_tokenizer(path / "tokenizer"), tensors, snapshot.step, side_files)


def _side_files(folder: Path) -> dict[str, str]:
    files = {name: folder / name for name in SIDE_FILES}
    return {name: _text(path) for name, path in files.items() if path.is_file()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} cannot be read: it is no UTF-8 text; copy it again, or delete it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def export(weights: Weights, out: Path, fmt: str, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `weights` as a Hugging Face folder `out`; the files that hold tensors. fmt: bf16, fp32, nvfp4 or mxfp8.

    Raises: CheckpointError, as `save_model`; a layer whose rows the format cannot cut into blocks.
    """
    quantised = fmt in list(WeightFormat)
    return save_model(
        out,
        weights.config.model,
        weights.tensors,
        weights.tokenizer.vocab_size,
        dtype="bf16" if quantised else fmt,
        eos_id=weights.tokenizer.eot_id,
        json_files=tokenizer_files(weights),
        shard_bytes=shard_bytes,
        encoder=WeightEncoder(WeightFormat(fmt)) if quantised else None,
    )


def tokenizer_files(weights: Weights) -> dict[str, Any]:
    """The files of the tokenizer, and when generation ends."""
    tokenizer = weights.tokenizer
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer.hugging_face().decode("utf-8"),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eot,
            "model_max_length": weights.config.model.max_sequence,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"eos_token_id": tokenizer.eot_id},
    }
    return files | weights.side_files


def import_folder(folder: Path, run_dir: Path) -> RunConfig:
    """Write a Hugging Face folder as a run at step 0: config.yaml, tokenizer/, checkpoints/.

    Raises:
        CheckpointError: it cannot be read or is a run itself, or `run_dir` is in use or cannot be written.
        DataError: its tokenizer, or a file beside that, cannot be read.
    """
    if (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is a run already: copy it, or begin from it with init_from={folder}")
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise CheckpointError(f"{run_dir} exists and is not empty: choose another folder, or delete it")
    weights = open_weights(folder)
    try:
        _write_run(weights, run_dir)
    except OSError as error:
        raise CheckpointError(f"{run_dir} cannot be written: {error.strerror or error}") from error
    return weights.config


def _write_run(weights: Weights, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    weights.tokenizer.save(run_dir / "tokenizer")
    for name, text in weights.side_files.items():
        (run_dir / "tokenizer" / name).write_text(text, encoding="utf-8")
    identity = {"tokenizer": weights.tokenizer.digest, "data": None, "model": asdict(weights.config.model)}
    meta = {"identity": json.loads(json.dumps(identity)), "vocab_size": weights.tokenizer.vocab_size}
    store = CheckpointStore(run_dir / "checkpoints", weights.config.checkpoint, logger.warning)
    store.save(Snapshot(0, dict(weights.tensors), {}, meta=meta))
    store.wait()
    save_config(with_absolute_paths(weights.config), run_dir / CONFIG)


def check_export(folder: Path, tolerance: float = 1e-4) -> str:
    """Compare what `transformers` computes from a folder with what we do, in FP32; a line that says how close it is.

    Raises:
        CheckpointError: something differs by more than `tolerance`, times the greatest logit where that exceeds 1.
        ConfigError: `transformers` is not installed.
    """
    tokenizer = tokenizer_of(folder)
    model = load_model(folder, tokenizer.vocab_size, torch.float32)
    generator = torch.Generator().manual_seed(0)
    length = min(64, model.config.max_sequence)
    parity = compare(model, folder, torch.randint(0, tokenizer.vocab_size, (2, length), generator=generator))
    parity.require(tolerance * max(1.0, parity.scale))
    return f"transformers computes the same: logits to {parity.logits:.1e}, of at most {parity.scale:.3g}"
