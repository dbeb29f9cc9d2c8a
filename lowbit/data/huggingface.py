"""Data sets read by the Hugging Face `datasets` library, by hub name or by local path.

`datasets` is only the reader: it is asked for rows once, while packing, and training reads shards. Streaming, its
caches and its shuffling therefore never touch the order of training samples.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowbit.configs.nearest import did_you_mean
from lowbit.configs.schema import SourceConfig
from lowbit.data.readers import missing_field
from lowbit.errors import DataError


def dataset_identity(config: SourceConfig) -> str:
    """Hash of what would be read: the files of a data set saved on disk, or the resolved data files and revisions.

    Raises: DataError when there is no such data set, subset or split.
    """
    if not config.path:
        raise DataError("a huggingface source has no path: set it to a data set's hub name or local folder")
    if _saved_to_disk(config.path):
        root = Path(config.path)
        stats = [(p.relative_to(root).as_posix(), p.stat()) for p in sorted(root.rglob("*")) if p.is_file()]
        details: Any = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    else:
        import datasets

        try:
            builder = datasets.load_dataset_builder(config.path, name=config.subset)
        except Exception as error:
            raise _unreadable(config, error) from error
        files = builder.config.data_files or {}
        plain = config.split.isidentifier() and config.split != "all"  # "train[:10%]" and "a+b" are left to datasets
        if files and plain and config.split not in {str(k) for k in files}:
            raise DataError(
                f"data set {config.path!r} has no split {config.split!r}{did_you_mean(config.split, map(str, files))}"
            )
        details = [builder.config_id, {str(k): [[str(f) for f in v], v.origin_metadata] for k, v in files.items()}]
    text = json.dumps([Path(config.path).name, details], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def read_dataset(config: SourceConfig) -> Iterator[str]:
    """The documents of a data set, in its own order.

    Raises: DataError when it cannot be read or lacks `text_field`.
    """
    rows = _open(config)
    if rows.column_names is not None:
        if config.text_field not in rows.column_names:
            raise missing_field(config.text_field, rows.column_names, f"data set {config.path!r}")
        rows = rows.select_columns([config.text_field])
    row = 0
    try:
        for batch in rows.iter(batch_size=1000):
            if config.text_field not in batch:
                raise missing_field(config.text_field, batch, f"data set {config.path!r}")
            for text in batch[config.text_field]:
                if text is not None and not isinstance(text, str):
                    raise DataError(
                        f"data set {config.path!r} row {row}: field {config.text_field!r} holds "
                        f"{type(text).__name__}, not text; set text_field"
                    )
                row += 1
                if text:
                    yield text
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(config, error) from error


def _saved_to_disk(path: str) -> bool:
    folder = Path(path)
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _open(config: SourceConfig) -> Any:
    import datasets

    try:
        if not _saved_to_disk(config.path):
            return datasets.load_dataset(
                config.path, name=config.subset, split=config.split, streaming=config.streaming
            )
        rows = datasets.load_from_disk(config.path)
    except Exception as error:
        raise _unreadable(config, error) from error
    if isinstance(rows, datasets.DatasetDict):
        if config.split not in rows:
            raise DataError(f"data set {config.path!r} has no split {config.split!r}{did_you_mean(config.split, rows)}")
        rows = rows[config.split]
    return rows


def _unreadable(config: SourceConfig, error: Exception) -> DataError:
    """`datasets` and the hub client raise dozens of classes; the user needs the first line of any of them, and of what
    caused it where that says something else."""
    lines = [(str(e).strip() or type(e).__name__).splitlines()[0] for e in (error, error.__cause__) if e is not None]
    why = ": ".join(dict.fromkeys(lines))
    return DataError(f"cannot read data set {config.path!r} (subset {config.subset!r}, split {config.split!r}): {why}")
