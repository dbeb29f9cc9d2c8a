"""`lowbit data` and `lowbit tokenizer`, as a user runs them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowbit.cli.data import app as data_app
from lowbit.cli.tokenizer import app as tokenizer_app
from lowbit.errors import ConfigError, DataError

SETTINGS = ["data=files", "data.tokenizer.vocab_size=280", "data.sequence_length=32", "data.held_out=0.2"]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    for i in range(30):
        Path(f"corpus/{i}.txt").write_text(f"{i}: the cat sat on the mat and the rat sat on the cat. " * 4)
    return [*SETTINGS, "data.sources.files.path=corpus"]


def run(app: object, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.output


def test_pack_then_inspect(settings: list[str]) -> None:
    output = run(data_app, "pack", *settings)
    assert "ready:" in output and "files: 100.0% of samples" in output
    output = run(data_app, "inspect", "data", "--verify")
    assert "30 files" in output and "every file matches" in output and "uint8" not in output
    shard = next(Path("data/packed").glob("files-*/train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        run(data_app, "inspect", "data")
    with pytest.raises(DataError, match="no packed data in corpus"):
        run(data_app, "inspect", "corpus")


def test_conversations_are_inspected(settings: list[str]) -> None:
    lines = [f'{{"prompt": "how many {i}? ", "answers": ["{i}", "{i + 1}"]}}\n' for i in range(20)]
    Path("chats.jsonl").write_text("".join(lines))
    chats = ["data.sources.chats.kind=conversations", "data.sources.chats.path=chats.jsonl"]
    run(data_app, "pack", *settings, *chats)
    output = run(data_app, "inspect", "data")
    assert "30 files" in output and "source       conversations" in output and " rows, " in output
    file = next(Path("data/packed").glob("chats-*/train-tokens.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"train-tokens.npy was edited or damaged"):
        run(data_app, "inspect", str(file.parent))


def test_train_then_show(settings: list[str]) -> None:
    assert "ready: 280 tokens" in run(tokenizer_app, "train", *settings, "data.tokenizer.path=bpe")
    output = run(tokenizer_app, "show", "bpe", "--text", "the cat é")
    assert "280 tokens" in output and "b'the'" in output and r"b'\xc3'" in output
    with pytest.raises(ConfigError, match="is not trained"):
        run(tokenizer_app, "train", *settings, "data.tokenizer.kind=bytes")
