"""One process that makes (a part of) a cache: `python make_cache.py config.yaml [shards before kill -9]`."""

import os
import signal
import sys
from pathlib import Path

import torch

from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.stored import load_config
from lowbit.data.dataset import prepare_data
from lowbit.distill import making
from lowbit.distill.making import CacheMaker
from lowbit.distill.teacher import open_teacher


def main() -> None:
    torch.set_num_threads(1)
    config = load_config(Path(sys.argv[1]), DistillConfig)
    if len(sys.argv) > 2:
        die_in_shard(int(sys.argv[2]))
    teacher = open_teacher(config.teacher, config.engine, torch.device("cpu"))
    data = prepare_data(config.data, lambda _: None)
    assert config.cache.tokens is not None
    CacheMaker(Path(config.cache.path), config, config.cache.tokens, teacher, data).make()


def die_in_shard(number: int) -> None:
    """Once so many shards are written: begin to write the next, and die halfway without a word."""
    write, count = making.write_shard, 0

    def dying(path: Path, words: list, *rest: object) -> object:  # type: ignore[type-arg]
        nonlocal count
        if count == number:
            path.with_name(f".{path.name}.{os.getpid()}.tmp").write_bytes(b"half a shard")
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return write(path, words, *rest)  # type: ignore[arg-type]

    making.write_shard = dying  # type: ignore[assignment]


if __name__ == "__main__":
    main()
