"""Conversation trees from JSON lines to rows: what is read, packed, batched and trained on; and every bad line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit.configs.schema import DataConfig, ModelConfig, SourceConfig, SourceKind, TokenizerConfig, TokenizerKind
from lowbit.data.conversations import PackedTrees, Piece, _write_rows, best_fit, parse
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.errors import DataError
from lowbit.models.lm_head import lm_head_nll
from lowbit.models.transformer import Transformer
from lowbit.models.trees import FlatTree

LENGTH = 48
EOT = 256


def _write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _lines(count: int = 30) -> list[object]:
    return [
        {"prompt": f"question {i}? ", "answers": [f"answer {i}.{k}" for k in range(1 + i % 3)]} for i in range(count)
    ] + [
        {
            "text": "a",
            "loss": False,
            "replies": [{"text": "bc"}, {"text": "d", "replies": [{"text": "e"}, {"text": "f"}]}],
        }
    ]


def _config(tmp_path: Path, path: Path, **changes: object) -> DataConfig:
    return replace(
        DataConfig(
            sources={"chats": SourceConfig(kind=SourceKind.conversations, path=str(path))},
            tokenizer=TokenizerConfig(kind=TokenizerKind.bytes),
            sequence_length=LENGTH,
            held_out=0.2,
            cache_dir=str(tmp_path / "data"),
        ),
        **changes,  # type: ignore[arg-type]
    )


def _prepare(tmp_path: Path, lines: list[object], **changes: object) -> Dataset:
    path = _write(tmp_path / "chats.jsonl", lines)
    return prepare_data(_config(tmp_path, path, **changes), lambda _: None)


def test_both_ways_to_write_a_tree() -> None:
    expected = Piece("q ", False, (Piece("a"), Piece("b")))
    assert parse('{"prompt": "q ", "answers": ["a", "b"]}', "x") == expected
    assert parse('{"text": "q ", "loss": false, "replies": [{"text": "a"}, {"text": "b"}]}', "x") == expected
    assert list(expected.texts()) == ["q ", "a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", 'is an object with "text"'),
        ('{"prompt": "q"}', '"prompt" goes with "answers"'),
        ('{"prompt": "q", "answers": []}', '"prompt" goes with "answers"'),
        ('{"prompt": "q", "answers": ["a"], "loss": true}', "and nothing else"),
        ('{"prompt": 3, "answers": ["a"]}', 'is an object with "text"'),
        ('{"text": "a", "reply": []}', "unknown 'reply'; a piece has text, loss and replies"),
        ('{"text": "a", "loss": 1}', '"loss" is true or false'),
        ('{"text": "a", "replies": {}}', '"replies" a list'),
        ('{"text": "a", "replies": [{"text": ""}]}', "ends in an empty text"),
        ('{"prompt": "a", "answers": ["b\\ud800"]}', "character 1 of a text is half of a surrogate pair"),
        (
            '{"text": "a", "replies": [' * 201 + '{"text": "b"}' + "]}" * 201,
            "more than 200 replies one below the other",
        ),
        (
            '{"text": "a", "replies": [' * 9999 + '{"text": "b"}' + "]}" * 9999,
            "more than 200 replies one below the other",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message) as error:
        prepare_data(_config(tmp_path, path), lambda _: None)
    assert "chats.jsonl line 1" in str(error.value) and "\n" not in str(error.value)


def test_rows_hold_whole_trees(tmp_path: Path) -> None:
    data = _prepare(tmp_path, _lines())
    packed = data.sources[0].packed
    assert isinstance(packed, PackedTrees)
    found: list[str] = []
    for stream in (packed.train, packed.val):
        for row in range(stream.rows):
            batch = data._batch([(stream, row)], 1)
            assert batch.visibility is not None
            used = int(stream.used[row])
            batch.visibility.validate(max_sequence=LENGTH, tree=True)
            tokens, targets = batch.tokens[0].tolist(), batch.targets[0].tolist()
            assert batch.valid_tokens == int(batch.weights.sum()) > 0 and not batch.weights[0, used:].any()
            # Each token's ancestors, by the visibility, spell its conversation so far; a leaf's, the whole of it.
            start, limit = batch.visibility.start[0].tolist(), batch.visibility.limit[0].tolist()
            for i in range(used):
                chain = [j for j in range(used) if start[j] <= i < limit[j]]
                assert [batch.visibility.position[0, j] for j in chain] == list(range(len(chain)))
                assert [targets[j] for j in chain[:-1]] == [tokens[j] for j in chain[1:]]
                if targets[i] == EOT:
                    assert tokens[chain[0]] == EOT
                    found.append(bytes(tokens[j] for j in chain[1:]).decode())
    expected = [f"question {i}? answer {i}.{k}" for i in range(30) for k in range(1 + i % 3)] + ["abc", "ade", "adf"]
    assert sorted(found) == sorted(expected)
    assert len(packed.train) + len(packed.val) == int(packed.train.used.sum() + packed.val.used.sum())
    reopened = prepare_data(_config(tmp_path, tmp_path / "chats.jsonl"), lambda _: None)
    assert reopened.fingerprint == data.fingerprint


def test_losses_are_those_of_each_conversation_alone(tmp_path: Path) -> None:
    data = _prepare(tmp_path, _lines())
    model = Transformer(ModelConfig(layers=2, width=32, heads=2, kv_heads=2, mlp_width=48, init_std=0.2), 257)
    model.init_weights(1)

    def total(tokens: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, seen: object) -> float:
        with torch.no_grad():
            hidden = model(tokens, seen).flatten(0, 1)  # type: ignore[arg-type]
            nll = lm_head_nll(hidden, model.head_weight, targets.flatten(), vocab_size=257)
        return float((nll * weights.flatten()).sum())

    packed = data.sources[0].packed
    sums = 0.0
    for stream in (packed.train, packed.val):
        for row in range(stream.rows):  # type: ignore[union-attr]
            batch = data._batch([(stream, row)], 1)
            sums += total(batch.tokens, batch.targets, batch.weights, batch.visibility)
    expected = 0.0
    for i in range(30):
        for k in range(1 + i % 3):
            prompt, answer = f"question {i}? ".encode(), f"answer {i}.{k}".encode()
            text = torch.tensor([EOT, *prompt, *answer, EOT])
            weights = torch.tensor([0.0] * len(prompt) + [1.0] * (len(answer) + 1))
            expected += total(text[None, :-1], text[1:], weights, None)
    for first, rest in ((1, "bc"), (1, "de"), (1, "df")):
        text = torch.tensor([EOT, *b"a", *rest.encode(), EOT])
        weights = torch.tensor([0.0] * first + [1.0] * (len(rest) + 1))
        if rest == "df":
            weights[first] = 0.0  # d was counted with e
        expected += total(text[None, :-1], text[1:], weights, None)
    assert sums == pytest.approx(expected, rel=1e-5)


def test_trees_longer_than_a_row_are_taken_apart_and_cut(tmp_path: Path) -> None:
    long = {"prompt": "p" * 20, "answers": ["a" * 20, "b" * 20, "c" * 60]}
    data = _prepare(tmp_path, [*_lines(6), long])
    packed = data.sources[0].packed
    rows = [stream.document(row) for stream in (packed.train, packed.val) for row in range(stream.rows)]  # type: ignore[union-attr]
    text = [bytes(t for t in row if t < 256).decode() for row in rows]
    assert sum("p" * 20 + "a" * 20 in t for t in text) == 1 and sum("p" * 20 + "b" * 20 in t for t in text) == 1
    assert sum("p" * 20 + "c" * 27 in t for t in text) == 1 and not any("c" * 28 in t for t in text)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ([5, 5, 3, 5, 6], r"limit\[0, 9\] = 11 of token 9 in row 0: lies beyond the end of its document"),
        ([5, 4, 3, 5, 5], r"limit\[0, 8\] = 10 of token 8 in row 0: ends behind that of a token it descends from"),
        ([5, 5, 2, 5, 5], r"limit\[0, 7\] = 7 of token 7 in row 0: must lie in token\+1"),
    ],
)
def test_a_rule_that_is_none_of_trees_is_not_written(tmp_path: Path, limit: list[int], message: str) -> None:
    """The second tree of a row; a packer's mistake would show as a strange loss and nothing else."""
    good, bad = (FlatTree([1] * 5, [2] * 5, [1.0] * 5, of, list(range(5))) for of in ([5] * 5, limit))
    config = DataConfig(sequence_length=12)
    _write_rows(tmp_path, "train", [[good, good]], 0, config)
    with pytest.raises(DataError, match=message):
        _write_rows(tmp_path, "val", [[good, bad]], 0, config)
    assert not list(tmp_path.glob("val*"))


def test_best_fit() -> None:
    assert best_fit([5, 5, 5], 10) == [[0, 1], [2]]
    assert sorted(map(sorted, best_fit([7, 6, 4, 3], 10))) == [[0, 3], [1, 2]]
    sizes = np.random.default_rng(0).integers(1, 60, 500).tolist()
    rows = best_fit(sizes, 100)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(sizes[i] for i in row) <= 100 for row in rows)
    assert len(rows) < 1.05 * sum(sizes) / 100


def test_mixed_with_text_and_without_a_document_mask(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i} " * 20)
    path = _write(tmp_path / "chats.jsonl", _lines())
    config = _config(tmp_path, path, document_mask=False)
    text = SourceConfig(kind=SourceKind.files, path=str(tmp_path / "text"))
    data = prepare_data(replace(config, sources={**config.sources, "text": text}), lambda _: None)
    batch = data.training_batch(np.array([0, 1]), np.array([0, 0]))
    assert batch.visibility is not None
    batch.visibility.validate(tree=True)
    assert batch.visibility.limit[1].tolist() == [LENGTH] * LENGTH  # plain causal beside a tree
    assert batch.visibility.position[1].tolist() == list(range(LENGTH))
    assert data.training_batch(np.array([1, 1]), np.array([0, 1])).visibility is None
    assert sum(b.valid_tokens for b in data.validation_batches(2)) > 0 and 0 < data.trigram_bpb() < 8


def test_too_few_and_damaged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 1 conversations: training and validation need one each"):
        _prepare(tmp_path, _lines(0))
    data = _prepare(tmp_path, _lines())
    folder = data.sources[0].packed.folder
    file = folder / "train-tokens.npy"
    again = _config(tmp_path, tmp_path / "chats.jsonl")
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    with pytest.raises(DataError, match=r"train-tokens\.npy was edited or damaged"):
        prepare_data(again, lambda _: None)
    (folder / "trees.json").write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        prepare_data(again, lambda _: None)


def test_what_has_no_loss_in_a_row_is_left_out_and_nothing_left_is_an_error(tmp_path: Path) -> None:
    silent: list[object] = [{"text": f"nobody learns {i}", "loss": False} for i in range(20)]
    cut: list[object] = [{"prompt": f"{i}" + LENGTH * "q", "answers": ["late"]} for i in range(20)]
    said: list[str] = []
    path = _write(tmp_path / "chats.jsonl", [*_lines(), *silent, *cut])
    data = prepare_data(_config(tmp_path, path), said.append)
    assert sum(int(line.split()[2]) for line in said if "left out" in line) == 40
    for split in (data.sources[0].packed.train, data.sources[0].packed.val):
        for row in range(split.rows):  # type: ignore[union-attr]
            assert data._batch([(split, row)], 1).valid_tokens
    for lines in (silent, cut):
        with pytest.raises(DataError, match=r"none of \d+ conversations for (train|val) has text with a loss in"):
            _prepare(tmp_path, lines)


def test_max_documents_counts_conversations(tmp_path: Path) -> None:
    path = _write(tmp_path / "chats.jsonl", _lines())
    few = SourceConfig(kind=SourceKind.conversations, path=str(path), max_documents=5)
    data = prepare_data(_config(tmp_path, path, sources={"chats": few}), lambda _: None)
    ends = 0
    for split in (data.sources[0].packed.train, data.sources[0].packed.val):
        ends += sum(
            int((np.asarray(split.arrays["tokens"][r, : split.used[r]]) == EOT).sum()) for r in range(split.rows)
        )  # type: ignore[union-attr]
    assert ends == 5  # each tree begins with one
