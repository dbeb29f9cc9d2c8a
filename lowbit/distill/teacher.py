"""Whose distribution is distilled: a model opened for reading, and the digest by which caches know it."""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.configs.schema import EngineConfig, TeacherConfig
from lowbit.configs.stored import plain
from lowbit.data.batch import Batch
from lowbit.errors import ConfigError, DataError
from lowbit.models.transformer import Transformer
from lowbit.trainer.engine import wants_compile
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

    def require_tokenizer(self, digest: str, vocab_size: int) -> None:
        """Raises DataError when the data were tokenized otherwise than the teacher's, naming the remedy."""
        if digest != self.tokenizer:
            raise DataError(
                f"tokenizer: the teacher {self.source} has {self.tokenizer[:12]}, the data {digest[:12]}; train the "
                f"student on the teacher's: data.tokenizer.kind=file data.tokenizer.path={self.source}/tokenizer"
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
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"teacher.path={config.path}: {_what_is(path)}")
    run = load_run(path, config.checkpoint, str(device), precision=config.precision)
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


def _what_is(path: Path) -> str:
    if not path.is_dir():
        return "no such folder; give the folder of a run, for example runs/pretrain"
    if (path / "config.json").is_file():
        return "a Hugging Face model, which this version cannot open as a teacher; give the folder of a run"
    return "not the folder of a run: it has no config.yaml"


def weights_digest(model: Transformer) -> str:
    """SHA-256 of all parameters by name, as FP32 bytes: the same on every device."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().data.cast("B"))
    return digest.hexdigest()
