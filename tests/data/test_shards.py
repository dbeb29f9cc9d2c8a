"""Opening packed folders: at once, and never a damaged one."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from packing import config_for, pack_corpus, write_corpus

from lowbit.data import shards, verified
from lowbit.data.shards import MANIFEST, open_packed
from lowbit.data.tokenizer import bytes_tokenizer
from lowbit.data.verified import STAMPS, write_stamps
from lowbit.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", 100)
    return pack_corpus(config_for(tmp_path / "corpus", tmp_path / "cache")).folder


def test_any_stretch_across_shards(folder: Path) -> None:
    stream = open_packed(folder).train
    whole = np.concatenate([np.fromfile(folder / s, dtype="<u2") for s in stream.shards])
    assert len(stream) == len(whole) and len(stream.shards) > 5
    for start, stop in [(0, 1), (4999, 5001), (0, len(whole)), (4000, 17_000), (len(whole) - 3, len(whole)), (7, 7)]:
        assert np.array_equal(stream.read(start, stop), whole[start:stop]) if stop > start else True
    begins = np.flatnonzero(whole == bytes_tokenizer().eot_id)
    for start, stop in [(0, 300), (4_000, 9_000), (int(begins[3]), int(begins[5])), (int(begins[3]) + 1, len(whole))]:
        expected = sorted({0, *(int(b) - start for b in begins if start < b < stop)})
        assert stream.boundaries(start, stop).tolist() == expected


def test_truncated(folder: Path) -> None:
    path = folder / "train-00000-1.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match=r"train-00000-1\.bin is truncated .*delete the folder .*pack it anew"):
        open_packed(folder)


@pytest.mark.parametrize("name", ["train-00000-0.bin", "val-00000-0.bin", "train.documents"])
def test_edited(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[8] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name} was edited or damaged"):
        open_packed(folder)


def test_edited_behind_the_clock_is_found_by_verify(folder: Path) -> None:
    path = folder / "train-00000-0.bin"
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    open_packed(folder)
    with pytest.raises(DataError, match="edited or damaged"):
        open_packed(folder, verify=True)


def test_missing_file_and_manifest(folder: Path) -> None:
    (folder / "val-00000-0.bin").unlink()
    with pytest.raises(DataError, match=r"val-00000-0\.bin is missing"):
        open_packed(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*manifest\.json"):
        open_packed(folder)
    (folder / MANIFEST).write_text('{"format": 99}')
    with pytest.raises(DataError, match="not of format 1"):
        open_packed(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(DataError, match="not packed, or not finished"):
        open_packed(folder)


@pytest.mark.parametrize("field", ["train", "dtype", "tokenizer_digest", "vocab_size", "content_sha256", "val.shards"])
@pytest.mark.parametrize("damage", ["missing", "odd"])
def test_an_edited_manifest(folder: Path, field: str, damage: str) -> None:
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    *parents, last = field.split(".")
    place = manifest[parents[0]] if parents else manifest
    place.pop(last)
    if damage == "odd":
        place[last] = [None]
    path.write_text(json.dumps(manifest))
    if damage == "odd" and field in ("tokenizer_digest", "content_sha256"):
        return  # any value may stand there; the first is compared with the tokenizer's
    with pytest.raises(DataError, match=r"manifest\.json was edited or damaged.*pack it anew"):
        open_packed(folder)


def test_a_copy_is_verified_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copy)  # new modification times
    read: list[Path] = []
    whole = verified.file_sha256
    monkeypatch.setattr(verified, "file_sha256", lambda p: read.append(p) or whole(p))
    assert open_packed(copy).digest == open_packed(folder).digest
    assert len(read) == len(shards.expected_files(shards.read_manifest(copy)))
    read.clear()
    open_packed(copy)
    assert not read


def test_another_tokenizer_or_a_smaller_vocabulary(folder: Path) -> None:
    tokenizer = bytes_tokenizer()
    open_packed(folder, tokenizer)
    tokenizer.vocab_size = 200
    with pytest.raises(DataError, match=r"holds token id 2\d\d, beyond the vocabulary of 200"):
        open_packed(folder, tokenizer)
    tokenizer.digest = "0" * 64
    with pytest.raises(DataError, match="packed with another tokenizer"):
        open_packed(folder, tokenizer)


def test_many_shards_take_few_file_descriptors(folder: Path) -> None:
    stream = open_packed(folder).train
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        for start in range(0, len(stream), 1000):
            stream.read(start, start + 1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 256


def test_a_billion_tokens_open_at_once(tmp_path: Path) -> None:
    """Sparse files: 10**9 tokens in 500 shards, 1.4 million documents."""
    shard, count, documents = 2_000_000, 500, 1_400_000
    part = {"tokens": shard, "sha256": "", "max_id": 9}
    train = {"tokens": shard * count, "documents": documents, "bytes": 1, "documents_sha256": ""}
    train["shards"] = [{**part, "file": f"t{i}.bin"} for i in range(count)]
    val = {**train, "tokens": shard, "documents": 1, "shards": [{**part, "file": "v.bin"}]}
    for entry in [*train["shards"], *val["shards"]]:  # type: ignore[misc]
        with (tmp_path / entry["file"]).open("wb") as file:
            file.truncate(shard * 2)
    np.linspace(0, shard * count, documents + 1).astype("<i8").tofile(tmp_path / "train.documents")
    np.array([0, shard], "<i8").tofile(tmp_path / "val.documents")
    manifest = {"format": 1, "dtype": "<u2", "vocab_size": 257, "content_sha256": "", "train": train, "val": val}
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "tokenizer_digest": bytes_tokenizer().digest}))
    names = [p.name for p in tmp_path.iterdir() if p.name not in (MANIFEST, STAMPS)]
    write_stamps(tmp_path, names)
    began = time.process_time()
    packed = open_packed(tmp_path, bytes_tokenizer())
    packed.train.read(999_999_000, 1_000_000_000)
    packed.train.boundaries(999_999_000, 1_000_000_000)
    assert time.process_time() - began < 0.5
