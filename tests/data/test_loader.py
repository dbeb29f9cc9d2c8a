"""Batches and their order, against the plainest possible reading of the same documents."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import write_corpus

from lowbit.configs.schema import DataConfig, SourceConfig, SourceKind, TokenizerConfig, TokenizerKind
from lowbit.data.batch import Batch
from lowbit.data.dataset import Dataset, prepare_data
from lowbit.data.loader import Cursor, Loader
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.models.visibility import causal

LENGTH = 64


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("data")
    write_corpus(root / "one", 40, seed=1)
    write_corpus(root / "two", 90, seed=2)
    return DataConfig(
        sources={
            "one": SourceConfig(kind=SourceKind.files, path=str(root / "one"), weight=1.0),
            "two": SourceConfig(kind=SourceKind.files, path=str(root / "two"), weight=2.5),
        },
        tokenizer=TokenizerConfig(kind=TokenizerKind.bytes),
        sequence_length=LENGTH,
        held_out=0.2,
        cache_dir=str(root / "cache"),
        shard_tokens=4_000,
        pack_workers=1,
    )


@pytest.fixture(scope="module")
def dataset(config: DataConfig) -> Dataset:
    return prepare_data(config, lambda _: None)


@pytest.fixture
def loader(dataset: Dataset) -> Iterator[Callable[..., Loader]]:
    made: list[Loader] = []

    def make(**settings: object) -> Loader:
        values: dict[str, object] = {"seed": 3, "sequences_at": lambda _: 12, "micro_batch": 3, "prefetch": 0}
        made.append(Loader(dataset, **{**values, **settings}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def rows(steps: list[list[Batch]]) -> list[tuple[int, ...]]:
    """Every row of every micro-batch as tokens and last target."""
    return [
        (*tokens.tolist(), int(targets[-1]))
        for step in steps
        for batch in step
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True)
    ]


def whole(dataset: Dataset, source: int, split: str = "train") -> list[int]:
    stream = getattr(dataset.sources[source].packed, split)
    return [int(t) for t in stream.read(0, len(stream))]


def test_an_epoch_is_every_sequence_once_and_epochs_differ(dataset: Dataset, loader: Callable[..., Loader]) -> None:
    single = Loader(dataset, seed=3, sequences_at=lambda _: 1, micro_batch=1, prefetch=0)
    expected = []
    for source in range(2):
        tokens = whole(dataset, source)
        count = (len(tokens) - 1) // LENGTH
        expected.append(sorted(tuple(tokens[q * LENGTH : (q + 1) * LENGTH + 1]) for q in range(count)))
    seen: list[list[tuple[int, ...]]] = [[], []]
    for sample in range(int(3.6 * max(map(len, expected)) * 1.6)):
        source = int(dataset.mixture.locate(np.array([sample]))[0][0])
        seen[source] += rows([single.next_step()])
    for source in range(2):
        n = len(expected[source])
        assert len(seen[source]) >= 2 * n
        first, second = seen[source][:n], seen[source][n : 2 * n]
        assert sorted(first) == sorted(second) == expected[source]
        assert first != second and first != expected[source]
    assert single.epochs() == {s.name: pytest.approx(len(seen[i]) / s.sequences) for i, s in enumerate(dataset.sources)}


def naive_visibility(tokens: list[int], starts: set[int], first: int) -> tuple[list[int], list[int]]:
    """Limit and position, token by token."""
    limit, position, depth = [], [], 0
    for i in range(len(tokens)):
        depth = 0 if (first + i in starts or i == 0) else depth + 1
        position.append(depth)
        end = next((j for j in range(i + 1, len(tokens)) if first + j in starts), len(tokens))
        limit.append(end)
    return limit, position


def test_tokens_targets_and_visibility(dataset: Dataset) -> None:
    for source in range(2):
        tokens = whole(dataset, source)
        starts = set(dataset.sources[source].packed.train.documents.tolist())
        count = dataset.sources[source].sequences
        sequence = np.arange(count)
        batch = dataset.training_batch(np.full(count, source), sequence)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.weights.dtype == torch.float32 and batch.valid_tokens == count * LENGTH
        assert batch.weights.eq(1).all()
        assert batch.tokens.flatten().tolist() == tokens[: count * LENGTH]
        assert batch.targets.flatten().tolist() == tokens[1 : count * LENGTH + 1]
        seen = batch.visibility
        assert seen is not None
        seen.validate()
        for q in range(0, count, 3):
            limit, position = naive_visibility(tokens[q * LENGTH : (q + 1) * LENGTH], starts, q * LENGTH)
            assert seen.start[q].tolist() == list(range(LENGTH))
            assert seen.limit[q].tolist() == limit
            assert seen.position[q].tolist() == position


def test_attention_never_crosses_a_document(dataset: Dataset) -> None:
    """The design's rule, spelled out: key j is visible to query i iff both are in one document and j <= i."""
    batch = dataset.training_batch(np.array([1]), np.array([2]))
    stream = dataset.sources[1].packed.train
    document = np.searchsorted(stream.documents, 2 * LENGTH + np.arange(LENGTH), side="right")
    assert batch.visibility is not None
    start, limit = batch.visibility.start[0].numpy(), batch.visibility.limit[0].numpy()
    i, j = np.mgrid[:LENGTH, :LENGTH]
    assert np.array_equal((start[j] <= i) & (i < limit[j]), (document[i] == document[j]) & (j <= i))


@pytest.mark.parametrize("micro_batch", [1, 7])
def test_validation_counts_every_held_out_token_once(dataset: Dataset, micro_batch: int) -> None:
    batches = list(dataset.validation_batches(micro_batch))
    found = []
    for batch in batches:
        assert batch.tokens.shape == (micro_batch, LENGTH)
        seen = batch.visibility or causal(micro_batch, LENGTH)  # None: every row is one whole piece of a document
        seen.validate()
        found += batch.targets[batch.weights > 0].tolist()
        assert batch.valid_tokens == int(batch.weights.sum())
        padding = batch.weights == 0
        index = torch.arange(LENGTH, dtype=torch.int32).expand_as(batch.tokens)
        assert torch.equal(seen.limit[padding], index[padding] + 1)  # sees itself, seen by nobody else
        real_end = (batch.weights > 0).sum(1, keepdim=True).expand_as(index)
        assert (seen.limit <= real_end)[~padding].all()
    expected = whole(dataset, 0, "val")[1:] + whole(dataset, 1, "val")[1:]
    assert sorted(found) == sorted(expected) and len(found) == dataset.val_tokens - 2
    again = list(dataset.validation_batches(micro_batch))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))


def test_validation_budget_takes_a_share_of_each_source(dataset: Dataset) -> None:
    budget = 14 * LENGTH
    batches = list(dataset.validation_batches(2, budget))
    assert 0 < sum(b.valid_tokens for b in batches) <= budget
    everything = rows([list(dataset.validation_batches(2))])
    assert set(rows([batches])) <= set(everything)
    assert list(dataset.validation_batches(1, 1))  # at least a sequence


def test_without_document_mask_attention_is_causal(dataset: Dataset, config: DataConfig) -> None:
    import dataclasses

    plain = prepare_data(dataclasses.replace(config, document_mask=False), lambda _: None)
    batch = plain.training_batch(np.array([0]), np.array([1]))
    assert batch.visibility is None and plain.fingerprint == dataset.fingerprint
    assert torch.equal(batch.tokens, dataset.training_batch(np.array([0]), np.array([1])).tokens)


def test_batches_say_where_their_documents_begin(loader: Callable[..., Loader]) -> None:
    """Made in the loader's thread, for a kernel that cannot ask the rule on its device."""
    ahead = loader(micro_batch=2, prefetch=2)
    found = [batch.visibility for _ in range(10) for batch in ahead.next_step()]
    packed = [seen for seen in found if seen is not None]
    assert packed, "the others are plain causal"
    for seen in packed:
        assert seen.ends is not None and seen.sizes is not None
        first = (seen.position == 0).flatten().nonzero().flatten()
        assert torch.equal(seen.ends[: len(first)].long(), first) and int(seen.sizes[0]) >= len(first)
        assert (seen.ends[len(first) :] == 2 * LENGTH).all()


def test_what_is_sent_ahead_is_the_next_step(loader: Callable[..., Loader]) -> None:
    """Whenever it is asked for; a cursor taken meanwhile is that of the steps given out."""
    plain = loader()
    wanted = [rows([plain.next_step()]) for _ in range(6)]
    ahead = loader(prefetch=3)
    ahead.send_ahead(torch.device("cpu"))  # nothing is prepared yet
    for step in range(3):
        assert rows([ahead.next_step()]) == wanted[step]
        while ahead._sent is None:  # until the thread has made one
            ahead.send_ahead(torch.device("cpu"))
        sent = ahead._sent
        ahead.send_ahead(torch.device("cpu"))
        assert ahead._sent is sent
    cursor = ahead.cursor
    assert cursor.sample == 36 and ahead.next_step()[0] is sent
    other = loader(prefetch=3)
    other.seek(cursor)
    assert rows([other.next_step()]) == wanted[3]
    ahead.close()
    assert [rows([ahead.next_step()]) for _ in range(2)] == wanted[4:]
    while ahead._sent is None:
        ahead.send_ahead(torch.device("cpu"))
    ahead.seek(cursor)
    assert rows([ahead.next_step()]) == wanted[3]
    ahead.close()
    assert ahead._sent is None


def test_an_error_ahead_is_raised_where_the_step_is_asked_for(loader: Callable[..., Loader]) -> None:
    later = loader(sequences_at=lambda s: 12 if s == 0 else 10, prefetch=8)
    later.next_step()
    for _ in range(100):
        later.send_ahead(torch.device("cpu"))
    assert later._sent is None
    with pytest.raises(ConfigError, match=r"batch\.sequences=10"):
        later.next_step()


def test_rank_blocks_make_up_the_step(loader: Callable[..., Loader]) -> None:
    reference = loader(micro_batch=12)
    ranks = [loader(micro_batch=3, world=2, rank=r) for r in range(2)]
    for _ in range(5):
        expected = rows([reference.next_step()])
        parts = [one.next_step() for one in ranks]
        assert [len(p) for p in parts] == [2, 2]
        assert rows(parts) == expected


@settings(deadline=None, max_examples=15)
@given(stop=st.integers(0, 24), prefetch=st.sampled_from([0, 3]), pair=st.sampled_from([(1, 6), (4, 3), (2, 1)]))
def test_resume_on_another_world_size(dataset: Dataset, stop: int, prefetch: int, pair: tuple[int, int]) -> None:
    """Save at any step at world 2 with micro_batch 3 and resume elsewhere: one global order of samples."""
    plan = lambda s: 12 if s < 120 else 24  # noqa: E731 - a batch warm-up
    reference = Loader(dataset, seed=5, sequences_at=plan, micro_batch=1, prefetch=0)
    expected = [rows([reference.next_step()]) for _ in range(stop + 8)]
    ranks = [
        Loader(dataset, seed=5, sequences_at=plan, micro_batch=3, rank=r, world=2, prefetch=prefetch) for r in (0, 1)
    ]
    for step in range(stop):
        assert rows([one.next_step() for one in ranks]) == expected[step]
    saved = ranks[0].cursor.as_dict()
    assert saved == ranks[1].cursor.as_dict()
    for one in ranks:
        one.close()
    world, micro_batch = pair
    resumed = [
        Loader(dataset, seed=99, sequences_at=plan, micro_batch=micro_batch, rank=r, world=world, prefetch=prefetch)
        for r in range(world)
    ]
    for one in resumed:
        one.seek(Cursor.from_dict(saved))
    for step in range(stop, stop + 8):
        assert rows([one.next_step() for one in resumed]) == expected[step]
    assert [one.cursor for one in resumed] == [reference.cursor] * world
    for one in resumed:
        one.close()


def test_another_process_has_the_same_order(config: DataConfig, loader: Callable[..., Loader]) -> None:
    import json
    from dataclasses import asdict

    program = """
import json, sys, hashlib
from lowbit.configs.schema import *
from lowbit.data.dataset import prepare_data
from lowbit.data.loader import Loader
c = json.load(sys.stdin)
c["sources"] = {k: SourceConfig(**{**v, "kind": SourceKind.files}) for k, v in c["sources"].items()}
c["tokenizer"] = TokenizerConfig(kind=TokenizerKind.bytes)
data = prepare_data(DataConfig(**c), lambda _: None)
loader = Loader(data, seed=3, sequences_at=lambda s: 12, micro_batch=3, prefetch=2)
print(json.dumps([b.tokens.tolist() for _ in range(4) for b in loader.next_step()]))
loader.close()
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(asdict(config)),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7"},
    )
    mine = loader()
    assert json.loads(result.stdout) == [b.tokens.tolist() for _ in range(4) for b in mine.next_step()]


def test_seeds_give_different_orders(loader: Callable[..., Loader]) -> None:
    assert rows([loader(seed=1).next_step()]) != rows([loader(seed=2).next_step()])


def test_resume_far_away_takes_no_time(dataset: Dataset, loader: Callable[..., Loader]) -> None:
    far = loader(prefetch=2)
    began = time.monotonic()
    far.seek(Cursor(10**7, 3, dataset.fingerprint))
    step = far.next_step()
    assert time.monotonic() - began < 2
    assert far.cursor.sample == 10**7 + 12 and len(step) == 4
    source, sequence = far._order.locate(np.arange(10**7, 10**7 + 3))
    assert torch.equal(step[0].tokens, dataset.training_batch(source, sequence).tokens)


def test_nothing_runs_before_the_first_step_and_close_stops_it(loader: Callable[..., Loader]) -> None:
    def threads() -> int:
        return sum(t.name == "lowbit-loader" for t in threading.enumerate())

    one = loader(prefetch=2)
    one.seek(one.cursor)
    assert threads() == 0
    first = rows([one.next_step()])
    assert threads() == 1
    one.close()
    one.close()
    assert threads() == 0
    rest = rows([one.next_step()])
    fresh = loader()
    assert [first, rest] == [rows([fresh.next_step()]), rows([fresh.next_step()])]


def test_an_exception_in_the_background_reaches_the_caller(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Batch:
        raise OSError("disk gone")

    one = Loader(dataset, seed=1, sequences_at=lambda _: 2, micro_batch=1, prefetch=3)
    monkeypatch.setattr(dataset, "training_batch", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            one.next_step()
    assert one.cursor.sample == 0
    one.close()


def test_errors(dataset: Dataset, loader: Callable[..., Loader]) -> None:
    with pytest.raises(ConfigError, match=r"batch\.sequences=10 .* multiple of 6, for example 6 or 12"):
        loader(sequences_at=lambda _: 10, world=2).next_step()
    with pytest.raises(ConfigError, match=r"for example 6$"):
        loader(sequences_at=lambda _: 2, world=2).next_step()
    with pytest.raises(ConfigError, match="rank=2"):
        loader(rank=2, world=2)
    with pytest.raises(CheckpointError, match="belongs to data 0000"):
        loader().seek(Cursor(0, 1, "0" * 64))
    with pytest.raises(ConfigError, match=r"batch\.sequences=10"):
        later = loader(sequences_at=lambda s: 12 if s == 0 else 10, prefetch=8)
        later.next_step()
        later.next_step()


def test_too_little_text(config: DataConfig) -> None:
    import dataclasses

    with pytest.raises(DataError, match=r"'one' has \d+ training tokens, and one sequence needs 1000001"):
        prepare_data(dataclasses.replace(config, sequence_length=1_000_000), lambda _: None)
    with pytest.raises(ConfigError, match="sequence_length=0"):
        prepare_data(dataclasses.replace(config, sequence_length=0), lambda _: None)
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        prepare_data(dataclasses.replace(config, sources={}), lambda _: None)


def test_the_fingerprint_names_what_shapes_the_order(config: DataConfig, dataset: Dataset) -> None:
    import dataclasses

    def fingerprint(**changes: object) -> str:
        return prepare_data(dataclasses.replace(config, **changes), lambda _: None).fingerprint  # type: ignore[arg-type]

    assert fingerprint() == dataset.fingerprint
    assert fingerprint(pack_workers=2, prefetch=0) == dataset.fingerprint
    two = dataclasses.replace(config.sources["two"], weight=9.0)
    others = {
        fingerprint(sequence_length=32),
        fingerprint(held_out=0.3),
        fingerprint(sources={**config.sources, "two": two}),
        fingerprint(sources={"one": config.sources["one"]}),
    }
    assert len(others) == 4 and dataset.fingerprint not in others
    text = dataset.describe()
    assert text["sources"]["two"]["share"] == pytest.approx(2.5 / 3.5, abs=1e-6) and text["sequence_length"] == LENGTH
    elsewhere = {name: dataclasses.replace(s, max_documents=10**6) for name, s in config.sources.items()}
    packed_again = prepare_data(dataclasses.replace(config, sources=elsewhere), lambda _: None)
    assert packed_again.sources[0].packed.folder != dataset.sources[0].packed.folder
    assert packed_again.describe() == text, "the same content, wherever it is packed, is the same data"


def test_trigram_baseline_reads_the_right_documents(dataset: Dataset) -> None:
    from lowbit.data.trigram import TrigramModel

    def texts(split: str) -> list[bytes]:
        streams = [getattr(s.packed, split) for s in dataset.sources]
        return [bytes(s.document(i).astype(np.uint8)) for s in streams for i in range(len(s.documents) - 1)]

    model = TrigramModel()
    model.add(texts("train"))
    expected = model.bits(texts("val")) / sum(map(len, texts("val")))
    assert dataset.trigram_bpb() == pytest.approx(expected, rel=1e-12)
    assert 0.5 < expected < dataset.trigram_bpb(max_bytes=500) < 8.5


def test_trained_tokenizer_never_sees_held_out_documents(tmp_path: Path) -> None:
    """Only the held-out document holds this word often enough to become a token."""
    from lowbit.data.worker import held_out_key

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    secret = next(t for i in range(999) if held_out_key((t := f"{i} " + "xylophone " * 500).encode()) / 2**64 < 0.2)
    others = [f"{i} the cat sat on the mat and the rat ran; " * 5 for i in range(200)]
    for i, text in enumerate([secret, *(t for t in others if held_out_key(t.encode()) / 2**64 >= 0.2)]):
        (corpus / f"{i:03}.txt").write_text(text)
    made = prepare_data(
        DataConfig(
            sources={"c": SourceConfig(kind=SourceKind.files, path=str(corpus))},
            tokenizer=TokenizerConfig(vocab_size=280),
            held_out=0.2,
            sequence_length=8,
            cache_dir=str(tmp_path / "cache"),
            pack_workers=1,
        ),
        lambda _: None,
    )
    assert len(made.tokenizer.encode("xylophone")) >= 8 and len(made.tokenizer.encode("the")) == 1
    assert made.tokenizer.decode_bytes(made.sources[0].packed.val.document(0).tolist()) == secret.encode()


def test_a_configured_tokenizer_must_fit(tmp_path: Path, config: DataConfig) -> None:
    import dataclasses

    path = str(tmp_path / "bpe")
    wanted = TokenizerConfig(vocab_size=300, path=path)
    first = prepare_data(dataclasses.replace(config, tokenizer=wanted), lambda _: None)
    assert first.tokenizer.vocab_size == 300
    said: list[str] = []
    loaded = TokenizerConfig(kind=TokenizerKind.file, path=path)
    second = prepare_data(dataclasses.replace(config, tokenizer=loaded), said.append)
    assert second.fingerprint == first.fingerprint and not any("training" in s and "BPE" in s for s in said)
    with pytest.raises(DataError, match=r"has 300 tokens, not data\.tokenizer\.vocab_size=310"):
        prepare_data(dataclasses.replace(config, tokenizer=dataclasses.replace(wanted, vocab_size=310)), said.append)
    for foreign in (tmp_path / "bpe" / "tokenizer.json", tmp_path / "foreign"):
        (tmp_path / "foreign").mkdir(exist_ok=True)
        (tmp_path / "foreign" / "tokenizer.json").write_text("somebody's")
        theirs = dataclasses.replace(wanted, path=str(foreign))
        with pytest.raises(ConfigError, match=r"not trained here.*data\.tokenizer\.kind=file"):
            prepare_data(dataclasses.replace(config, tokenizer=theirs), said.append)
    assert (tmp_path / "foreign" / "tokenizer.json").read_text() == "somebody's"
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path is empty"):
        prepare_data(dataclasses.replace(config, tokenizer=TokenizerConfig(kind=TokenizerKind.file)), lambda _: None)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "'c' is empty"), (b"bad \xff", r"000\.txt is not UTF-8: byte 0xff at offset 4")],
)
def test_bad_text_is_named_while_a_tokenizer_is_trained(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "000.txt").write_bytes(content)
    source = SourceConfig(kind=SourceKind.files, path=str(tmp_path / "000.txt"))
    with pytest.raises(DataError, match=message):
        prepare_data(DataConfig(sources={"c": source}, cache_dir=str(tmp_path / "cache")), lambda _: None)


@pytest.mark.gpu
def test_pinned_batches(loader: Callable[..., Loader]) -> None:
    plain, pinned = loader(), loader(pin=True, prefetch=4)
    masked = 0
    for a, b in ((a, b) for _ in range(40) for a, b in zip(plain.next_step(), pinned.next_step(), strict=True)):
        assert b.tokens.is_pinned() and b.weights.is_pinned()
        moved = b.to("cuda")
        assert torch.equal(moved.tokens.cpu(), a.tokens) and torch.equal(moved.targets.cpu(), a.targets)
        if a.visibility is None:  # every row is one whole piece of a document
            assert moved.visibility is None
            continue
        assert b.visibility is not None and b.visibility.limit.is_pinned() and moved.visibility is not None
        assert torch.equal(moved.visibility.limit.cpu(), a.visibility.limit)
        masked += 1
    assert masked
