"""Gather the source and documentation of every installed Python package: a corpus of some 10^8 tokens, no download.

    python scripts/installed_corpus.py OUT          # OUT/00.jsonl ... 31.jsonl, a document a line, field "text"
    lowbit pretrain data=files data.sources.files.path=OUT ...

Longer runs than the standard library has text for (scripts' quality figures) train on it. Documents are distinct, UTF-8
and of at most a megabyte; which file has which depends on their content alone.
"""

import argparse
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
MEGABYTE = 1 << 20
FILES = 32


def paths() -> Iterator[Path]:
    """Text files of the standard library and of what is installed beside it."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    for root in sorted(roots):
        for folder, _, names in os.walk(root):
            yield from (Path(folder, n) for n in names if n.endswith(SUFFIXES))


def document(path: Path) -> tuple[str, str] | None:
    """Hash and text of a file, if it is one for the corpus."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MEGABYTE else b""
        return (hashlib.sha256(data).hexdigest(), data.decode()) if data.strip() else None
    except (OSError, UnicodeDecodeError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        found = dict(d for d in pool.map(document, paths(), chunksize=256) if d)
    files = [(out / f"{i:02}.jsonl").open("w", encoding="utf-8") for i in range(FILES)]
    for key in sorted(found):
        files[int(key, 16) % FILES].write(json.dumps({"text": found[key]}) + "\n")
    for file in files:
        file.close()
    print(f"{out}: {len(found)} documents, {sum(map(len, found.values())) / 1e6:.0f} million characters")


if __name__ == "__main__":
    main()
