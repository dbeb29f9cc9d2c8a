"""Sources: every format, the order of documents, and one clear error for each bad input."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lowbit.configs.schema import DataConfig, SourceConfig, SourceKind, TokenizerConfig, TokenizerKind
from lowbit.data.dataset import prepare_data
from lowbit.data.sources import list_source, read_documents
from lowbit.errors import DataError

DOCUMENTS = ["first\nline", "zweites: Straße", "третий 🙂", "x" * 5000]


def read(path: Path | str, **settings: Any) -> list[str]:
    config = SourceConfig(kind=SourceKind.files, path=str(path), **settings)
    return list(read_documents(list_source("mine", config)))


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=2)


def test_formats_agree(tmp_path: Path) -> None:
    import zstandard

    rows = [{"text": d, "id": i} for i, d in enumerate(DOCUMENTS)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    plain = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(plain))
    frames = zstandard.compress(plain[:5000]) + zstandard.compress(plain[5000:])  # as `cat a.zst b.zst` makes
    (tmp_path / "frames.jsonl.zst").write_bytes(frames)
    write_parquet(tmp_path / "a.parquet", {"text": DOCUMENTS})
    for name in ("a.jsonl", "a.jsonl.zst", "frames.jsonl.zst", "a.parquet"):
        assert read(tmp_path / name) == DOCUMENTS, name


def test_folder_glob_and_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.rst", ".hidden/e.txt", "f.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.md", "b.txt", "sub/c.py", "sub/d.rst"]
    assert read(tmp_path / "**" / "*.py") == ["sub/c.py"]
    assert read(tmp_path / "[ab].*") == ["a.md", "b.txt"]
    assert read(tmp_path, max_documents=3) == ["a.md", "b.txt", "sub/c.py"]


def test_python_docs_is_code_and_prose() -> None:
    listing = list_source("python_docs", SourceConfig())
    names = {f.name for f in listing.files}
    assert "json/decoder.py" in names and "pydoc_data/topics.py" in names
    assert not any({"test", "tests", "site-packages"} & set(n.split("/")) for n in names)
    documents = list(read_documents(listing))
    assert sum(len(d) for d in documents) > 5_000_000
    topics = Path(json.__file__).parents[1].joinpath("pydoc_data/topics.py").read_text()
    assert topics not in documents
    assert any(d.startswith('The "assert" statement') for d in documents)


def test_identity_follows_the_files(tmp_path: Path) -> None:
    def identity(**settings: Any) -> str:
        return list_source("mine", SourceConfig(kind=SourceKind.files, path=str(tmp_path), **settings)).identity

    (tmp_path / "a.txt").write_text("one")
    first = identity()
    assert identity() == first and identity(weight=2.0) == first
    assert identity(max_documents=1) != first
    (tmp_path / "b.txt").write_text("two")
    assert identity() != first


@pytest.mark.parametrize("text", ["a\nbb\nccc\ndddd\n" * 50, "é" * 333, "🙂\n" * 99, "no line end " * 20])
@pytest.mark.parametrize("limit", [7, 64, 100])
def test_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path, text: str, limit: int) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = read(tmp_path, document_bytes=limit)
    assert "".join(pieces) == text
    assert all(len(p.encode()) <= limit for p in pieces)
    if all(len(line.encode()) <= limit for line in text.splitlines(keepends=True)):
        assert all(p.endswith("\n") for p in pieces)


def test_a_text_that_just_fits_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\ncd\n")
    assert read(tmp_path, document_bytes=6) == ["ab\ncd\n"]
    assert read(tmp_path, document_bytes=5) == ["ab\n", "cd\n"]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "three"}\r\n\r\n{"text": null}\n{"text": ""}\n')
    assert read(tmp_path) == ["one\r\ntwo", "three"]


def test_reading_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    line = json.dumps({"text": "y" * 1000}) + "\n"
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(20_000):
            file.write(line)
    listing = list_source("mine", SourceConfig(kind=SourceKind.files, path=str(tmp_path)))
    tracemalloc.start()
    assert sum(1 for _ in read_documents(listing)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_not_utf8_names_file_and_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100 + b"\n" + b"caf\xe9\n")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8: byte 0xe9 at offset 104"):
        read(tmp_path)
    with pytest.raises(DataError, match="offset 104"):
        read(tmp_path, document_bytes=32)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl is not UTF-8: byte 0xff at offset 25"):
        read(tmp_path)


def test_missing_places(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    with pytest.raises(DataError, match=r"corpsu does not exist; did you mean 'corpus'\?"):
        read(tmp_path / "corpsu")
    with pytest.raises(DataError, match="'mine' is empty"):
        read(tmp_path / "corpus")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is neither a file nor a folder"):
        read(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"no .* file matches .*\*\.txt"):
        read(tmp_path / "*.txt")
    with pytest.raises(DataError, match=r"data\.sources\.mine\.path"):
        read("")
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(DataError, match=r"a\.pdf: its suffix is none of"):
        read(tmp_path / "a.pdf")


def test_missing_field_suggests_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"content": "a", "id": 1}])
    with pytest.raises(DataError, match=r"line 1 has no field 'contents'; did you mean 'content'\?"):
        read(tmp_path / "a.jsonl", text_field="contents")
    write_parquet(tmp_path / "a.parquet", {"body": ["a"], "id": [1]})
    with pytest.raises(DataError, match=r"a\.parquet has no field 'text'; there is 'body', 'id'"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 0: field 'id' holds int"):
        read(tmp_path / "a.parquet", text_field="id")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json}", "line 2 is not JSON"),
        (b"[1, 2]", "line 2 is a JSON list"),
        (b'{"text": 5}', "line 2: field 'text' holds int"),
        (b'{"text": "\\ud800"}', "line 2: character 0 .* surrogate"),
    ],
)
def test_broken_lines(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_truncated_archives(tmp_path: Path) -> None:
    import zstandard

    write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 100} for i in range(2000)])
    packed = zstandard.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "cut.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.zst"):
        read(tmp_path / "cut.jsonl.zst")
    (tmp_path / "bad.jsonl.zst").write_bytes(b"not zstd at all")
    with pytest.raises(DataError, match=r"bad\.jsonl\.zst"):
        read(tmp_path / "bad.jsonl.zst")
    write_parquet(tmp_path / "a.parquet", {"text": DOCUMENTS})
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.parquet"):
        read(tmp_path / "cut.parquet")


def read_hub(path: Path, **settings: Any) -> list[str]:
    config = SourceConfig(kind=SourceKind.huggingface, path=str(path), **settings)
    return list(read_documents(list_source("hub", config)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    write_parquet(folder / "train-0.parquet", {"text": DOCUMENTS, "n": list(range(4))})
    return folder


@pytest.mark.slow
def test_datasets_library_folder(hub: Path) -> None:
    assert read_hub(hub) == DOCUMENTS
    assert read_hub(hub, streaming=True) == DOCUMENTS
    assert read_hub(hub, streaming=True, max_documents=2) == DOCUMENTS[:2]
    with pytest.raises(DataError, match=r"no field 'txt'; did you mean 'text'\?"):
        read_hub(hub, text_field="txt")
    with pytest.raises(DataError, match="no split 'tran'; did you mean 'train'"):
        read_hub(hub, split="tran")
    with pytest.raises(DataError, match="field 'n' holds int"):
        read_hub(hub, text_field="n")
    broken = hub.parent / "broken"
    broken.mkdir()
    (broken / "a.jsonl").write_text('{"text": "x"}\n{"text": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot read data set .*: .*: .*JSON"):
        read_hub(broken)


@pytest.mark.slow
def test_datasets_saved_to_disk(hub: Path, tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": DOCUMENTS})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "several"))
    assert read_hub(tmp_path / "one") == DOCUMENTS
    assert read_hub(tmp_path / "several") == DOCUMENTS
    with pytest.raises(DataError, match="no split 'test'; there is 'train'"):
        read_hub(tmp_path / "several", split="test")
    with pytest.raises(DataError, match="cannot read data set"):
        read_hub(tmp_path / "nothing-here")


@pytest.mark.parametrize("tokenizer", [TokenizerKind.bytes, TokenizerKind.bpe])
@pytest.mark.parametrize("content", ["", " \n\t\u3000\n" * 40])
def test_nothing_but_white_space(content: str, tokenizer: TokenizerKind, tmp_path: Path) -> None:
    """Empty files and blank ones are told as what they are, whoever reads them first: trainer of tokens or packer."""
    for name in ("a.txt", "b.md", "c.txt"):
        (tmp_path / name).write_text(content, encoding="utf-8")
    config = DataConfig(
        sources={"mine": SourceConfig(kind=SourceKind.files, path=str(tmp_path))},
        tokenizer=TokenizerConfig(kind=tokenizer),
        cache_dir=str(tmp_path / "cache"),
    )
    what = "has nothing but white space" if content else "is empty"
    with pytest.raises(DataError, match=rf"data source 'mine' {what}: .*data\.sources\.mine\.path") as caught:
        prepare_data(config, lambda _: None)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_blank_documents_in_rows_and_among_others(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": " "}, {"text": "\n"}])
    with pytest.raises(DataError, match=r"'mine' has nothing but white space: .*a\.jsonl, in 2 documents; add text"):
        read(tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "b.jsonl", [{"text": " "}, {"text": "word"}, {"text": "\n"}])
    assert read(tmp_path / "b.jsonl") == [" ", "word", "\n"]
