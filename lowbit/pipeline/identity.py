"""Is this stage the one that was made? Its settings and inputs as digests, and where they differ, in words.

Settings that do not change what a stage makes (where logs go, how often it saves and evaluates, on which device) are
left out, and so are paths of weights, of tokenizers and of caches: what lies at them counts, by its SHA-256. Paths of
documents and of problems are settings, and what lies at them counts too. A function of rewards counts by its name.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.configs.schema import CheckpointConfig, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.stored import flatten, plain
from lowbit.configs.strict import show
from lowbit.errors import CheckpointError
from lowbit.trainer.checkpoint import CheckpointStore
from lowbit.trainer.imported import tokenizer_of
from lowbit.trainer.snapshot import read_manifest
from lowbit.trainer.tensorfile import hash_file

NOT_RESULT = (
    "run_name", "device", "resume", "resume_allow", "init_from", "logging", "checkpoint", "evaluation",
    "data.cache_dir", "data.prefetch", "data.pack_workers", "data.tokenizer.path",
    "algorithm.reference", "teacher.path", "cache.more",
    "engine.processes", "engine.rank_timeout_seconds",
)  # fmt: skip
"""Settings, or sections, that do not decide a stage's result; an input's path is stood for by its digest."""
WEIGHTS = "model.safetensors"
INPUTS = {
    "tokenizer": "the tokenizer",
    "data": "the documents",
    "task": "the problems",
    "weights": "the weights it begins from",
    "reference": "the reference's weights",
    "teacher": "the teacher's weights",
    "caches": "the caches in cache.more",
}
SHOWN = 4


def deciding(config: RunConfig) -> dict[str, Any]:
    """A configuration's settings that decide what the run makes, by dotted key."""
    teacher = ("teacher.model", "teacher.max_steps") if isinstance(config, DistillConfig) else ()
    left_out = tuple(f"{key}." for key in (*NOT_RESULT, *teacher))
    return {key: value for key, value in flatten(plain(config)).items() if not f"{key}.".startswith(left_out)}


def weights_of(folder: Path, checkpoint: str = "latest") -> str:
    """SHA-256 of the weights in a run's checkpoint, or of those of a Hugging Face folder, read and compared.

    `checkpoint` is the newest, or one as `CheckpointStore.load` takes it.

    Raises CheckpointError: there are none, or they are not what was written.
    """
    if checkpoint != "latest":
        own = folder / "checkpoints" / checkpoint
        path = own if own.is_dir() else Path(checkpoint)
        if path.name.startswith("step_"):
            return _checked(path)
        return weights_of(path.parent if path.name == "checkpoints" else path)
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig())
    paths = store.list()
    if not paths:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no checkpoint")
        whole = "".join(f"{file.name} {hash_file(file).sha256}\n" for file in files)
        return hashlib.sha256(whole.encode()).hexdigest()
    return _checked(paths[-1])


def _checked(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's weights."""
    known = read_manifest(checkpoint).files[WEIGHTS]
    if hash_file(checkpoint / WEIGHTS) != known:
        raise CheckpointError(f"{checkpoint / WEIGHTS} is not what was written: its SHA-256 differs from its manifest")
    return known.sha256


def tokenizer_digest(folder: Path) -> str:
    """Of the tokenizer in a run's folder, or in one of Hugging Face. Raises DataError, as `imported.tokenizer_of`."""
    return tokenizer_of(folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder).digest


def differences(run: RunConfig, was: Mapping[str, Any], inputs: tuple[Mapping[str, str], Mapping[str, str]]) -> str:
    """How a run differs from one of those settings, and its inputs (the second ones) from those it had, in words.

    Empty where nothing differs. A key that a later version of lowbit added was at its default.
    """
    was = deciding(type(run)()) | dict(was)
    now = deciding(run)
    changed = [f"{key} was {show(was.get(key))}, is {show(now[key])}" for key in now if was.get(key) != now[key]]
    more = f", and {len(changed) - SHOWN} more settings" if len(changed) > SHOWN else ""
    given, taken = inputs
    others = [f"{INPUTS[key]} changed" for key in dict.fromkeys((*given, *taken)) if given.get(key) != taken.get(key)]
    return ", ".join(others + changed[:SHOWN]) + more
