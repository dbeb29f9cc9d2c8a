"""A small corpus and a packing process that tests kill, starve or race: `python packing.py CORPUS CACHE WORKERS`."""

import hashlib
import random
import sys
from pathlib import Path

from lowbit.configs.schema import DataConfig, SourceConfig, SourceKind
from lowbit.data import pack
from lowbit.data.shards import PackedSource
from lowbit.data.sources import list_source
from lowbit.data.tokenizer import Tokenizer, bytes_tokenizer
from lowbit.data.verified import STAMPS
from lowbit.errors import DataError


def write_corpus(folder: Path, documents: int = 600, seed: int = 0) -> None:
    """JSON lines and text files, about 1 kB a document."""
    noise = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "Straße", "東京", "🙂", "\\n", "0.5"]
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{i} " + " ".join(noise.choices(words, k=noise.randint(1, 300))) for i in range(documents)]
    half = documents // 2
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in texts[:half]), encoding="utf-8")
    for i, text in enumerate(texts[half:]):
        (folder / f"b{i:04d}.txt").write_text(text, encoding="utf-8")


def small_parts() -> None:
    """Many small parts, and several processes even for a small corpus."""
    pack._PART_BYTES, pack._PARTS_A_SIZE, pack._WORKER_BYTES = 8_000, 10**9, 10_000


def config_for(corpus: Path, cache: Path, workers: int = 1, **settings: object) -> DataConfig:
    source = SourceConfig(kind=SourceKind.files, path=str(corpus))
    values: dict[str, object] = {"sources": {"mine": source}, "shard_tokens": 5_000, "held_out": 0.1, **settings}
    return DataConfig(cache_dir=str(cache), pack_workers=workers, **values)  # type: ignore[arg-type]


def pack_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> PackedSource:
    listing = list_source("mine", config.sources["mine"])
    return pack.pack_source(listing, tokenizer or bytes_tokenizer(), config, lambda text: print(text, flush=True))


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, but the machine's own time stamps."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != STAMPS}


if __name__ == "__main__":
    small_parts()
    try:
        pack_corpus(config_for(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
    except DataError as error:
        print(f"DataError: {error}", flush=True)
        sys.exit(1)
