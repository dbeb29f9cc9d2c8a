"""Whose distribution is distilled: a model opened for reading, and the digest by which caches know it."""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.configs.schema import EngineConfig
from lowbit.configs.schema_distill import TeacherConfig
from lowbit.configs.stored import plain
from lowbit.data.batch import Batch
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.models.hf.config import is_hf_folder
from lowbit.models.transformer import Transformer
from lowbit.trainer.engine import wants_compile
from lowbit.trainer.files import CONFIG
from lowbit.trainer.hardware import device_name
from lowbit.trainer.loaded import load_run


@dataclass(frozen=True)
class Teacher:
    """A model that only answers."""

    model: Transformer
    tokenizer: str
    """Digest of its tokenizer."""
    description: dict[str, Any]
    """What a cache remembers of it: digest of the weights, model, precision."""
    source: str
    """Where it was opened, for people."""

    @property
    def tokenizer_path(self) -> Path:
        """Where its tokenizer is."""
        path = Path(self.source).expanduser()
        return path if is_hf_folder(path) else path / "tokenizer"

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states of a batch on the model's device, [B * T, width]: as in training, documents apart."""
        hidden: Tensor = self.model(batch.tokens, batch.visibility)
        return hidden.flatten(0, 1)

    def head_matrix(self) -> Tensor:
        """The LM head's weight with all its padding, in the compute type: [padded_vocab, width]."""
        return self.model.head_weight.detach().to(self.model.compute_dtype)

    @property
    def softcap(self) -> float | None:
        return self.model.config.logit_softcap

    def summary(self) -> str:
        """A few words about it."""
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        where, forward = device_name(self.model.head_weight.device), self.description["precision"]["forward"]
        products = "" if forward == "bf16" else f" with {forward} products"
        return f"{size:.1f} million parameters, {self.description['compute']}{products} on {where}"

    def require_length(self, length: int) -> None:
        """Raises ConfigError for sequences that are longer than the teacher takes."""
        longest = self.model.config.max_sequence
        if length > longest:
            raise ConfigError(
                f"data.sequence_length={length}: the teacher {self.source} takes {longest} tokens at most (its "
                f"model.max_sequence); data.sequence_length={longest} would work"
            )

    def require_tokenizer(self, digest: str, vocab_size: int) -> None:
        """Raises DataError when the data were tokenized otherwise than the teacher's, naming the remedy."""
        if digest != self.tokenizer:
            raise DataError(
                f"tokenizer: the teacher {self.source} has {self.tokenizer[:12]}, the data {digest[:12]}; train the "
                f"student on the teacher's: data.tokenizer.kind=file data.tokenizer.path={self.tokenizer_path}"
            )
        if self.model.vocab_size < vocab_size:
            raise DataError(
                f"vocab_size: the teacher {self.source} knows {self.model.vocab_size} tokens, the data {vocab_size}"
            )


def open_teacher(config: TeacherConfig, engine: EngineConfig, device: torch.device) -> Teacher:
    """Open the teacher that `config.path` names, in the precision that `config.precision` asks for.

    Raises: ConfigError when there is none at the path, CheckpointError when its checkpoint cannot be read.
    """
    path = Path(config.path).expanduser()
    try:
        there = (path / CONFIG).is_file() or is_hf_folder(path)
    except OSError as error:
        raise ConfigError(f"teacher.path={config.path}: cannot be read: {error.strerror or error}") from None
    if not there:
        what = "it is neither the folder of a run nor of a Hugging Face model" if path.is_dir() else "no such folder"
        raise ConfigError(f"teacher.path={config.path}: {what}; give one, for example runs/pretrain")
    try:
        run = load_run(path, config.checkpoint, str(device), precision=config.precision)
    except ConfigError as error:
        raise ConfigError(f"teacher: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"teacher.checkpoint={config.checkpoint}: {error}") from None
    model = run.model.eval().requires_grad_(False)
    if wants_compile(engine.compile, device):
        model.compile_blocks()
    architecture = asdict(replace(run.config.model, name=""))
    description = {
        "digest": weights_digest(model),
        "step": run.step,
        "model": architecture,
        "compute": str(model.compute_dtype).removeprefix("torch."),
        "precision": {key: plain(getattr(config.precision, key)) for key in ("forward", "define", "rules")},
    }
    return Teacher(model, run.tokenizer.digest, description, config.path)


def weights_digest(model: Transformer) -> str:
    """SHA-256 of all parameters by name, as FP32 bytes: the same on every device."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().data.cast("B"))
    return digest.hexdigest()
