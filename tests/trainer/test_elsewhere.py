"""A run opened from another folder than it was started in, and after its data changed."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.configs.paths import with_absolute_paths
from lowbit.configs.schema import RunConfig, SourceConfig, SourceKind, TokenizerConfig, TokenizerKind
from lowbit.trainer.loaded import dataset_of, load_run
from lowbit.trainer.run import pretrain


@pytest.mark.parametrize("path", ["text", "text/*.txt"])
@pytest.mark.parametrize("kind", [TokenizerKind.bytes, TokenizerKind.bpe])
def test_relative_paths_mean_the_folder_of_the_start(
    tiny_run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    kind: TokenizerKind,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "text").mkdir(parents=True)
    there.mkdir()
    for i in range(12):
        (here / "text" / f"{i}.txt").write_text(f"document {i}: " + f"{i} and {i * i}, " * 40, encoding="utf-8")
    monkeypatch.chdir(here)
    tokenizer = TokenizerConfig(kind=kind, vocab_size=270)
    source = SourceConfig(kind=SourceKind.files, path=path)
    data = replace(tiny_run.data, sources={"text": source}, tokenizer=tokenizer, cache_dir="data", held_out=0.3)
    pretrain(replace(tiny_run, data=data, max_steps=1), Path("run"))
    packed = sorted((here / "data").rglob("*"))
    monkeypatch.chdir(there)
    again = dataset_of(load_run(here / "run", device="cpu"))
    assert again.val_tokens and not list(there.iterdir()) and sorted((here / "data").rglob("*")) == packed
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (here / "text" / "more.txt").write_text("one more document, which was not there before " * 9, encoding="utf-8")
    dataset_of(load_run(here / "run", device="cpu"))
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "are not those that" in said and "data.sources.text.content: " in said and "\n" not in said


def test_only_what_is_a_path_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    sources = {
        "docs": SourceConfig(),
        "hub": SourceConfig(kind=SourceKind.huggingface, path="someone/stories"),
        "disk": SourceConfig(kind=SourceKind.huggingface, path="saved"),
        "home": SourceConfig(kind=SourceKind.files, path="~/a/**/*.md"),
    }
    data = with_absolute_paths(replace(RunConfig(), data=replace(RunConfig().data, sources=sources))).data
    assert {name: source.path for name, source in data.sources.items()} == {
        "docs": "",
        "hub": "someone/stories",
        "disk": str(tmp_path / "saved"),
        "home": str(Path.home() / "a/**/*.md"),
    }
    assert data.tokenizer.path == "" and data.cache_dir == str(tmp_path / "data")
    assert with_absolute_paths(replace(RunConfig(), data=data)).data == data


@pytest.mark.parametrize("kind", [SourceKind.files, SourceKind.conversations])
def test_a_tilde_is_the_home_folder(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: SourceKind
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home / "text", here):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    lines = [f'{{"text": "document {i}: {i * i} and more of it, until there is enough"}}\n' for i in range(60)]
    (home / "text" / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    source = SourceConfig(kind=kind, path="~/text")
    tokenizer = TokenizerConfig(kind=TokenizerKind.bpe, vocab_size=270)
    data = replace(tiny_run.data, sources={"text": source}, tokenizer=tokenizer, cache_dir="~/packed", held_out=0.3)
    pretrain(replace(tiny_run, data=data, max_steps=1), Path("run"))
    assert (home / "packed" / "packed").is_dir() and (home / "packed" / "tokenizers").is_dir()
    assert [path.name for path in here.iterdir()] == ["run"]
    assert load_run(here / "run", device="cpu").config.data.cache_dir == str(home / "packed")
