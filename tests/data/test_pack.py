"""Packing: the same bytes however it is done, and nothing half-done readable as whole."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from packing import config_for, contents, pack_corpus, small_parts, write_corpus

from lowbit.data import pack
from lowbit.data.shards import MANIFEST, open_packed
from lowbit.data.sources import list_source, read_documents
from lowbit.data.storage import atomic_write, folder_lock
from lowbit.data.tokenizer import bytes_tokenizer, train_bpe
from lowbit.data.worker import held_out_key
from lowbit.errors import ConfigError, DataError

SCRIPT = Path(__file__).with_name("packing.py")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("_PART_BYTES", "_PARTS_A_SIZE", "_WORKER_BYTES"):
        monkeypatch.setattr(pack, name, getattr(pack, name))  # put back after the test
    small_parts()
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def start(corpus: Path, cache: Path, workers: int = 1, **options: object) -> "subprocess.Popen[str]":
    command = [sys.executable, str(SCRIPT), str(corpus), str(cache), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload, no-any-return]


def test_streams_hold_every_document_with_its_separator(corpus: Path, tmp_path: Path) -> None:
    """Oracle: tokenize and split one by one."""
    config = config_for(corpus, tmp_path / "cache")
    packed = pack_corpus(config)
    tokenizer = bytes_tokenizer()
    expected: dict[str, list[int]] = {"train": [], "val": []}
    starts: dict[str, list[int]] = {"train": [0], "val": [0]}
    for text in read_documents(list_source("mine", config.sources["mine"])):
        side = "val" if held_out_key(text.encode()) / 2**64 < 0.1 else "train"
        expected[side] += [tokenizer.eot_id, *tokenizer.encode(text)]
        starts[side].append(len(expected[side]))
    for side, stream in (("train", packed.train), ("val", packed.val)):
        assert stream.read(0, len(stream)).tolist() == expected[side]
        assert stream.documents.tolist() == starts[side]
        assert stream.text_bytes == len(expected[side]) - len(starts[side]) + 1
        assert all(s <= 5000 for s in np.diff(stream.starts))
    assert 20 < len(starts["val"]) < 120  # a tenth of 600
    assert len(packed.train.shards) > 3


def test_any_number_of_workers_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe(read_documents(list_source("x", config_for(corpus, tmp_path).sources["mine"])), 380)
    found = []
    for workers in (1, 2, 3):
        config = config_for(corpus, tmp_path / f"cache{workers}", workers)
        packed = pack_corpus(config, tokenizer)
        found.append(contents(packed.folder))
        assert not list(packed.folder.glob("part-*")) and not list(packed.folder.glob(".*"))
    assert found[0] == found[1] == found[2]


def test_reused_when_nothing_changed(corpus: Path, tmp_path: Path) -> None:
    config = config_for(corpus, tmp_path / "cache")
    first = pack_corpus(config)
    times = {p.name: p.stat().st_mtime_ns for p in first.folder.iterdir()}
    assert pack_corpus(config).digest == first.digest
    assert {p.name: p.stat().st_mtime_ns for p in first.folder.iterdir()} == times
    (corpus / "new.txt").write_text("one more document")
    assert pack_corpus(config).folder != first.folder


def test_a_touched_source_gives_the_same_content(corpus: Path, tmp_path: Path) -> None:
    config = config_for(corpus, tmp_path / "cache")
    first = pack_corpus(config)
    os.utime(corpus / "a.jsonl")
    second = pack_corpus(config)
    assert second.folder != first.folder and second.digest == first.digest


@pytest.mark.parametrize(
    ("parts", "workers"),
    [(9, 2), *(pytest.param(*both, marks=pytest.mark.exhaustive) for both in [(1, 1), (1, 2), (9, 1)])],
)
def test_killed_and_started_again(corpus: Path, tmp_path: Path, workers: int, parts: int) -> None:
    reference = contents(pack_corpus(config_for(corpus, tmp_path / "reference")).folder)
    cache = tmp_path / "cache"
    process = start(corpus, cache, workers)
    deadline = time.monotonic() + 280
    while len(list(cache.glob("packed/*/part-*.npz"))) < parts:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = (p for p in (cache / "packed").iterdir() if p.is_dir())
    assert not (folder / MANIFEST).exists()
    with pytest.raises(DataError, match="not finished"):
        open_packed(folder)
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "packing processes outlive their parent"
        time.sleep(0.01)
    (folder / ".train-00099-0.bin.1.tmp").write_bytes(b"half")
    kept = {p: p.stat().st_mtime_ns for p in folder.glob("train-0000[0-9]-*") if _record(p).exists()}
    assert kept
    again = start(corpus, cache, workers)
    assert again.wait(280) == 0, again.stdout
    assert contents(folder) == reference
    assert {p: p.stat().st_mtime_ns for p in kept} == kept


def _record(shard: Path) -> Path:
    return shard.with_name(f"part-{shard.name.split('-')[1]}.npz")


def _children(pid: int) -> list[int]:
    """Direct children of a process that run packing workers."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(p) for p in path.read_text().split()] if path.exists() else []


def test_two_packers_at_once(corpus: Path, tmp_path: Path) -> None:
    reference = contents(pack_corpus(config_for(corpus, tmp_path / "reference")).folder)
    both = [start(corpus, tmp_path / "cache") for _ in range(2)]
    output = [process.communicate(timeout=280)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    (folder,) = (p for p in (tmp_path / "cache" / "packed").iterdir() if p.is_dir())
    assert contents(folder) == reference


def test_the_second_packer_waits_and_says_for_whom(corpus: Path, tmp_path: Path) -> None:
    config = config_for(corpus, tmp_path / "cache")
    listing = list_source("mine", config.sources["mine"])
    folder = pack.packed_folder(listing, bytes_tokenizer(), config)
    with folder_lock(folder, print):
        process = start(corpus, tmp_path / "cache")
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"waiting for process {os.getpid()} on" in line
        assert process.poll() is None and not (folder / MANIFEST).exists()
    assert process.wait(280) == 0
    assert (folder / MANIFEST).exists()
    process.stdout.close()


def test_full_disk(corpus: Path, tmp_path: Path) -> None:
    """A real full file system: fails with one line, leaves nothing half-written, and goes on when there is room."""
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    cache = tmp_path / "cache"
    cache.mkdir()
    run = f"{sys.executable} {SCRIPT} {corpus} {cache} 1"
    script = (
        f"mount -t tmpfs -o size=200k none {cache} && {run}; echo code $?; ls -a {cache}/packed/*/; "
        f"mount -o remount,size=50m {cache} && {run}; echo code $?; cp -r {cache}/packed/mine-*[!k] {tmp_path}/done"
    )
    result = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    first, second = result.stdout.split("code 1\n")
    assert "DataError: disk full while writing" in first and "No space left on device" in first
    assert "MB are needed" in first and "data.cache_dir" in first
    assert "part-00000.npz" in second and "manifest.json" not in second and ".tmp" not in second
    assert "code 0" in second, result
    reference = pack_corpus(config_for(corpus, tmp_path / "reference"))
    assert contents(tmp_path / "done") == contents(reference.folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_file_size_limit(corpus: Path, tmp_path: Path, workers: int) -> None:
    """A write that the kernel cuts short, in the process itself and in a worker."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    process = start(corpus, tmp_path / "cache", workers, preexec_fn=limit)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 1 and "DataError: cannot write" in output and "ulimit -f" in output, output
    assert "Traceback" not in output
    assert not list((tmp_path / "cache").glob("packed/*/.*")) and not list((tmp_path / "cache").rglob(MANIFEST))


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "x", [b"old"])

    def pieces() -> "list[bytes]":
        raise RuntimeError

    with pytest.raises(RuntimeError):
        atomic_write(tmp_path / "x", (pieces() for _ in range(1)))  # type: ignore[misc]
    assert (tmp_path / "x").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write .*; choose another place with data\.cache_dir"):
        pack_corpus(config_for(corpus, tmp_path / "cache"))


def test_a_bad_file_fails_the_packing_with_workers(corpus: Path, tmp_path: Path) -> None:
    (corpus / "zz.txt").write_bytes(b"fine until here \xff")
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"zz\.txt is not UTF-8: byte 0xff at offset 16"):
            pack_corpus(config_for(corpus, tmp_path / "cache", workers))
    assert not list((tmp_path / "cache").rglob(MANIFEST))


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(text)
    return folder


def test_duplicates_fall_on_the_same_side(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "c", [f"document {i % 40}" for i in range(200)])
    packed = pack_corpus(config_for(corpus, tmp_path / "cache", held_out=0.3))
    tokenizer = bytes_tokenizer()
    sides = [
        [tokenizer.decode(stream.document(i)) for i in range(len(stream.documents) - 1)]
        for stream in (packed.train, packed.val)
    ]
    assert not set(sides[0]) & set(sides[1])
    assert len(sides[0]) + len(sides[1]) == 200 and len(set(sides[0]) | set(sides[1])) == 40
    assert all(side.count(t) == 5 for side in sides for t in side)


@pytest.mark.parametrize("held_out", [1e-9, 0.999999999])
@pytest.mark.parametrize("documents", [2, 5])
def test_each_side_has_a_document(tmp_path: Path, held_out: float, documents: int) -> None:
    corpus = write_texts(tmp_path / "c", [f"document {i}" for i in range(documents)])
    packed = pack_corpus(config_for(corpus, tmp_path / "cache", held_out=held_out))
    sizes = [len(packed.train.documents) - 1, len(packed.val.documents) - 1]
    assert sorted(sizes) == [1, documents - 1] and sum(sizes) == documents
    assert (sizes[1] == 1) or held_out > 0.5


def test_empty_and_single_documents(tmp_path: Path) -> None:
    empty = write_texts(tmp_path / "empty", ["", ""])
    with pytest.raises(DataError, match=r"'mine' is empty: .*empty holds no text"):
        pack_corpus(config_for(empty, tmp_path / "cache"))
    copies = write_texts(tmp_path / "copies", ["the same"] * 3)
    with pytest.raises(DataError, match=r"only one document.*data\.sources\.mine\.document_bytes"):
        pack_corpus(config_for(copies, tmp_path / "cache"))


@pytest.mark.parametrize("settings", [{"held_out": 0.0}, {"held_out": 1.0}, {"shard_tokens": 0}])
def test_bad_settings(tmp_path: Path, settings: dict[str, float]) -> None:
    corpus = write_texts(tmp_path / "c", ["a", "b"])
    with pytest.raises(ConfigError, match=next(iter(settings))):
        pack_corpus(config_for(corpus, tmp_path / "cache", **settings))


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "c", ["a", "b"])
    tokenizer = bytes_tokenizer()
    tokenizer.vocab_size = 256  # the separator's id is 256
    with pytest.raises(DataError, match=r"gave id 256, beyond its vocabulary of 256"):
        pack_corpus(config_for(corpus, tmp_path / "cache"), tokenizer)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "c", ["a", "b", "c"])
    tokenizer = bytes_tokenizer()
    tokenizer.vocab_size, tokenizer.eot_id = 70_000, 69_999
    packed = pack_corpus(config_for(corpus, tmp_path / "cache"), tokenizer)
    assert packed.train.dtype == np.uint32 and packed.train.read(0, 1).tolist() == [69_999]


def test_a_source_that_changes_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_texts(tmp_path / "c", ["a", "b", "c"])
    whole = pack.read_documents

    def slow(listing):  # type: ignore[no-untyped-def]
        yield from whole(listing)
        (corpus / "000.txt").write_text("other")

    monkeypatch.setattr(pack, "read_documents", slow)
    with pytest.raises(DataError, match="changed while it was packed"):
        pack_corpus(config_for(corpus, tmp_path / "cache"))


def test_parts_grow_so_that_large_sources_make_few_files() -> None:
    sizes = [sum(map(len, part)) for part in pack._chunks("x" * 99_991 for _ in range(8_000))]
    assert 1 << 20 <= sizes[0] < (1 << 20) + 99_991
    assert max(sizes) < (32 << 20) + 99_991
    assert sum(sizes) == 8_000 * 99_991 and len(sizes) < 95
    assert sizes[:-1] == sorted(sizes[:-1]) or max(sizes[:16]) < min(sizes[16:32])


def test_a_script_without_a_main_guard_ends_with_an_error(tmp_path: Path) -> None:
    """Packing processes import the main script, which then packs again: it must not wait for itself."""
    write_corpus(tmp_path / "corpus")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from packing import config_for, pack_corpus, small_parts\n"
        "small_parts()\n"
        f"pack_corpus(config_for(Path({str(tmp_path / 'corpus')!r}), Path({str(tmp_path / 'data')!r}), workers=2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280)
    assert done.returncode != 0
    assert "__name__ == '__main__'" in done.stderr
