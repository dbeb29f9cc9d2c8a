"""Which checkpoint a run goes on from, and that a run that may not is refused before its data are made."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_runs

from lowbit.configs.schema import (
    DataConfig,
    ResumeDifference,
    RunConfig,
    SourceConfig,
    SourceKind,
    TokenizerConfig,
    TokenizerKind,
)
from lowbit.configs.stored import to_yaml
from lowbit.data.tokenizer import train_bpe
from lowbit.errors import CheckpointError
from lowbit.trainer import run as run_module
from lowbit.trainer.files import CONFIG
from lowbit.trainer.resume import data_settings
from lowbit.trainer.run import pretrain

VOCABULARY = 264


def _tokens(config: RunConfig, **changes: object) -> RunConfig:
    tokenizer = replace(config.data.tokenizer, **changes)  # type: ignore[arg-type]
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def _data(config: RunConfig, **changes: object) -> RunConfig:
    return replace(config, data=replace(config.data, **changes))  # type: ignore[arg-type]


def _source(config: RunConfig, **changes: object) -> RunConfig:
    return _data(config, sources={"files": replace(config.data.sources["files"], **changes)})  # type: ignore[arg-type]


def _other_file(config: RunConfig) -> RunConfig:
    folder = Path(config.data.cache_dir) / "other"
    train_bpe(["abab " * 300], 258).save(folder)
    return _tokens(config, kind=TokenizerKind.file, path=str(folder))


def _wider(config: RunConfig) -> RunConfig:
    return _tokens(replace(config, model=replace(config.model, mlp_width=64)), vocab_size=270)


SECOND = SourceConfig(kind=SourceKind.files, path=".")
CHANGES: dict[str, tuple[Callable[[RunConfig], RunConfig], str]] = {
    "a larger vocabulary": (
        lambda c: _tokens(c, vocab_size=270),
        r"data\.tokenizer\.vocab_size: 264 in the checkpoint, 270 now.*\[tokenizer,data\]",
    ),
    "a tokenizer of less text": (
        lambda c: _tokens(c, train_bytes=99),
        r"data\.tokenizer\.train_bytes: 50000000 in .*, 99 now.*\[tokenizer,data\]",
    ),
    "bytes": (
        lambda c: _tokens(c, kind=TokenizerKind.bytes),
        r"data\.tokenizer\.digest: .*\[tokenizer,data\]",
    ),
    "a file": (_other_file, r"data\.tokenizer\.digest: .*\[tokenizer,data\]"),
    "more held out": (lambda c: _data(c, held_out=0.3), r"data\.held_out: 0\.1 in .*, 0\.3 now.*\[data\]"),
    "longer": (lambda c: _data(c, sequence_length=64), r"data\.sequence_length: 32 .*\[data\]"),
    "unmasked": (lambda c: _data(c, document_mask=False), r"data\.document_mask: true .*\[data\]"),
    "fewer documents": (
        lambda c: _source(c, max_documents=50),
        r"data\.sources\.files\.max_documents: null .*\[data\]",
    ),
    "a second source": (
        lambda c: _data(c, sources={**c.data.sources, "more": SECOND}),
        r"run: data\.sources\.files\.share: 1\.0 in the checkpoint, 0\.5 now; "
        r"data\.sources\.more\.kind: absent in the checkpoint, \"files\" now\. .*\[data\]",
    ),
    "another model": (
        lambda c: replace(c, model=replace(c.model, rope=replace(c.model.rope, theta=5e5))),
        r"model\.rope\.theta: .*\[model\]",
    ),
    "another shape too": (_wider, r"mlp_width: 48 .* other shapes: start anew"),
    "anew": (lambda c: replace(c, resume="none"), r"already holds checkpoints and resume=none"),
    "from nowhere": (
        lambda c: replace(c, resume=c.data.cache_dir),
        r"^resume=.*: .* is neither a checkpoint nor .* holds step_",
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A finished run with a tokenizer of its own; its folder. Nobody changes what is in it."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_runs.tiny_run(tiny_runs.make_corpus(folder / "corpus"), folder / "data")
    tokenizer = TokenizerConfig(kind=TokenizerKind.bpe, vocab_size=VOCABULARY)
    config = replace(config, max_steps=2, data=replace(config.data, tokenizer=tokenizer))
    pretrain(config, folder / "run")
    return config, folder / "run"


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained, packed or opened."""

    def prepare_data(config: DataConfig, report: Callable[[str], None]) -> None:
        raise AssertionError("data were prepared")

    monkeypatch.setattr(run_module, "prepare_data", prepare_data)


@pytest.mark.parametrize("change", CHANGES)
def test_other_settings_are_refused_before_the_data_are_made(
    trained: tuple[RunConfig, Path], no_data: None, change: str
) -> None:
    make, message = CHANGES[change]
    config, run_dir = trained
    with pytest.raises(CheckpointError, match=message) as caught:
        pretrain(replace(make(config), max_steps=3), run_dir)
    assert "\n" not in str(caught.value)


def test_what_is_offered_is_enough(trained: tuple[RunConfig, Path], no_data: None) -> None:
    config, run_dir = trained
    other = replace(_tokens(config, vocab_size=270), max_steps=3)
    with pytest.raises(CheckpointError, match=r"vocab_size.*\[tokenizer,data\]"):
        pretrain(replace(other, resume_allow=[ResumeDifference.tokenizer]), run_dir)
    allowed = replace(other, resume_allow=[ResumeDifference.tokenizer, ResumeDifference.data])
    with pytest.raises(AssertionError, match="data were prepared"):
        pretrain(allowed, run_dir)


def test_another_runs_checkpoint_is_compared_with_that_run(
    trained: tuple[RunConfig, Path], no_data: None, tmp_path: Path
) -> None:
    config, run_dir = trained
    other = _tokens(config, vocab_size=270)
    for path in (run_dir, run_dir / "checkpoints", run_dir / "checkpoints" / "step_00000002"):
        with pytest.raises(CheckpointError, match=r"vocab_size: 264"):
            pretrain(replace(other, resume=str(path)), tmp_path / "new")


def test_what_changes_nothing_is_no_difference(trained: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """The run's own tokenizer by its file, a moved corpus, a weight alone, another cache: it goes on."""
    config, run_dir = trained
    moved = tiny_runs.make_corpus(tmp_path / "moved")
    config = _source(config, path=str(moved), weight=3.0)
    config = _tokens(config, kind=TokenizerKind.file, path=str(run_dir / "tokenizer"))
    config = _data(config, cache_dir=str(tmp_path / "cache"), prefetch=0)
    assert pretrain(replace(config, resume=str(run_dir), max_steps=3), tmp_path / "new").step == 3


NO_CHANGES: dict[str, Callable[[RunConfig, Path], RunConfig]] = {
    "fields of files without fields": lambda c, _: _source(c, text_field="body", subset="a", split="b"),
    "cuts of files that are shorter": lambda c, _: _source(c, document_bytes=100_000),
    "one shard either way": lambda c, _: _data(c, shard_tokens=1_000_000),
    "a head's width, as it is": lambda c, _: replace(c, model=replace(c.model, head_dim=16)),
    "no windows, layer by layer": lambda c, _: replace(c, model=replace(c.model, windows=[0, 0])),
    "keys of their own, layer by layer": lambda c, _: replace(c, model=replace(c.model, kv_from=[0, 1])),
    "the bound of a training that was": lambda c, run_dir: _tokens(c, path=str(run_dir / "tokenizer"), train_bytes=9),
}


@pytest.mark.parametrize("change", NO_CHANGES)
def test_settings_without_effect_may_change(trained: tuple[RunConfig, Path], tmp_path: Path, change: str) -> None:
    config, run_dir = trained
    other = NO_CHANGES[change](replace(config, resume=str(run_dir), max_steps=3), run_dir)
    assert pretrain(other, tmp_path / "new").step == 3


def test_settings_with_an_effect_are_told_from_those_without(
    trained: tuple[RunConfig, Path], no_data: None, tmp_path: Path
) -> None:
    """The same settings as above, of files and shards that they do change."""
    config, run_dir = trained
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.jsonl").write_text('{"text": "a"}\n')
    (lines / "b.txt").write_text("line\n" * 100)
    for change, message in (
        (_source(config, path=str(lines), text_field="body"), r'text_field: "text" in .*, "body" now'),
        (_source(config, path=str(lines), document_bytes=200), r"document_bytes: 1048576 in .*, 200 now"),
        (_data(config, shard_tokens=1000), r"shard_tokens: 16777216 in .*, 1000 now"),
    ):
        with pytest.raises(CheckpointError, match=message):
            pretrain(replace(change, max_steps=3), run_dir)


def test_a_local_data_set_may_move_or_be_written_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "moved").mkdir()
    monkeypatch.chdir(tmp_path)

    def described(path: str) -> dict[str, Any]:
        data = DataConfig(sources={"a": SourceConfig(kind=SourceKind.huggingface, path=path)})
        return data_settings(data)["data"]["sources"]

    local = described(str(tmp_path / "set"))
    assert all(described(path) == local for path in ("set", "./set", "../" + tmp_path.name + "/set", "moved"))
    assert described("owner/name")["a"]["path"] == "owner/name"


def test_the_checkpoint_says_what_it_was_trained_with(trained: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Its folder's config.yaml may be another start's, that was killed before it saved; edited; or not there at all."""
    config, _ = trained
    run_dir = tmp_path / "run"
    pretrain(config, run_dir)
    other = _data(replace(config, model=replace(config.model, norm_eps=1e-3)), held_out=0.3, document_mask=False)
    for text in (to_yaml(other), "nonsense: [", None):
        if text is None:
            (run_dir / CONFIG).unlink()
        else:
            (run_dir / CONFIG).write_text(text)
        with pytest.raises(CheckpointError, match=r"held_out: 0\.1 in the checkpoint, 0\.3 now.*\[data,model\]"):
            pretrain(replace(other, resume=str(run_dir / "checkpoints"), max_steps=3), tmp_path / "new")
    (run_dir / CONFIG).write_text(to_yaml(other))
    assert pretrain(replace(config, max_steps=3), run_dir).step == 3


def test_a_run_without_documents_has_settings_too() -> None:
    assert data_settings(DataConfig(sources={}))["data"]["sources"] == {}


def test_a_damaged_newest_checkpoint_is_not_the_one_asked(
    trained: tuple[RunConfig, Path], no_data: None, tmp_path: Path
) -> None:
    config, run_dir = trained
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    newest = copy / "checkpoints" / "step_00000009"
    shutil.copytree(copy / "checkpoints" / "step_00000002", newest)
    (newest / "meta.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"held_out: 0\.1 in the checkpoint"):
        pretrain(replace(_data(config, held_out=0.3), max_steps=3), copy)


def test_a_checkpoint_of_an_earlier_version_is_asked_later(
    trained: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = trained
    monkeypatch.setattr(run_module, "data_settings", lambda _: None)
    pretrain(config, tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"document_mask.*\[data\]"):
        pretrain(replace(_data(config, document_mask=False), max_steps=3), tmp_path / "run")
    assert pretrain(replace(config, max_steps=3), tmp_path / "run").step == 3
