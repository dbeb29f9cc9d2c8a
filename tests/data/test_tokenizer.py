"""Tokenizers: text comes back, bytes are counted exactly, the same text trains the same tokenizer."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.data.tokenizer import END_OF_TEXT, Tokenizer, bytes_tokenizer, load_tokenizer, train_bpe
from lowbit.errors import ConfigError, DataError

TEXTS = [
    "def add(a, b):\n    return a + b\n" * 3,
    "Die Straße, naïve café, 東京 🙂 العربية\r\n\ttab  two spaces 12345 3.14",
    "the cat sat on the mat; the rat sat on the cat. " * 5,
]
BPE = train_bpe(TEXTS, 300)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@settings(deadline=None, max_examples=100)
@given(text=UNICODE, which=st.sampled_from([BPE, bytes_tokenizer()]))
def test_round_trip_and_exact_bytes(text: str, which: Tokenizer) -> None:
    ids = which.encode(text)
    assert which.decode(ids) == text
    assert which.decode_bytes(ids) == text.encode()
    assert int(which.token_bytes()[ids].sum()) == len(text.encode())
    assert which.eot_id not in ids and all(0 <= i < which.vocab_size for i in ids)


def test_the_separator_written_in_a_text_is_text() -> None:
    for tokenizer in (BPE, bytes_tokenizer()):
        text = f"before {END_OF_TEXT} after"
        ids = tokenizer.encode(text)
        assert tokenizer.eot_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes()[tokenizer.eot_id] == 0
        assert tokenizer.decode([tokenizer.eot_id]) == ""


def test_batch_is_one_by_one() -> None:
    assert BPE.encode_batch(TEXTS) == [BPE.encode(t) for t in TEXTS]


def test_training_is_the_same_in_another_process() -> None:
    program = (
        "import json,sys\nfrom lowbit.data.tokenizer import train_bpe\n"
        "print(train_bpe(json.load(sys.stdin), 300).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(TEXTS),
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {BPE.digest}


def test_save_and_load(tmp_path: Path) -> None:
    BPE.save(tmp_path / "a")
    loaded = load_tokenizer(tmp_path / "a")
    assert loaded.digest == BPE.digest and loaded.eot_id == BPE.eot_id
    assert loaded.encode(TEXTS[1]) == BPE.encode(TEXTS[1])
    BPE.save(tmp_path / "a")
    other = train_bpe(TEXTS, 270)
    other.save(tmp_path / "a")
    assert load_tokenizer(tmp_path / "a").digest == other.digest
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["lowbit.json", "tokenizer.json"]
    bytes_tokenizer().save(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").digest == bytes_tokenizer().digest
    assert bytes_tokenizer().digest != BPE.digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        BPE.save(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "file"]


def test_transformers_reads_the_folder_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    BPE.save(tmp_path)
    other = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert other.encode(TEXTS[1], add_special_tokens=False) == BPE.encode(TEXTS[1])


def _wordpieces(path: Path, eot: str = "</s>") -> None:
    """A SentencePiece-like tokenizer: spaces as U+2581, unknown characters spelled in bytes."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    for piece in ["▁", "a", "b", "c", "e", "ab", "▁ab", "é", "\n", ".", "h", "t", "th", "the", "▁the"]:
        vocab[piece] = len(vocab)
    merges = [("a", "b"), ("▁", "ab"), ("t", "h"), ("th", "e"), ("▁", "the")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(eot, special=True)])
    backend.save(str(path))


def test_sentencepiece_like_bytes_are_exact(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    _wordpieces(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path)
    text = "the ab é 東 the.\n🙂  end"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())
    assert not recwarn.list
    assert tokenizer.eot == "</s>"


def test_a_lossy_tokenizer_warns(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocab = {"[UNK]": 0, "[SEP]": 1, "the": 2, "end": 3, "##s": 4}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match="approximate"):
        load_tokenizer(tmp_path).token_bytes()


def test_saved_truncation_and_padding_do_not_cut_documents(tmp_path: Path) -> None:
    content = json.loads(BPE.definition or b"")
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "t.json").encode(TEXTS[0]) == BPE.encode(TEXTS[0])


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size=200"):
        train_bpe(TEXTS, 200)
    with pytest.raises(DataError, match="too small for a vocabulary of 5000"):
        train_bpe(TEXTS, 5000)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a Hugging Face tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer at .*tokeniser\.json; did you mean 'tokenizer\.json'"):
        load_tokenizer(tmp_path / "tokeniser.json")
    BPE.save(tmp_path)
    with pytest.raises(DataError, match="no token '<eos>'"):
        load_tokenizer(tmp_path, eot="<eos>")
    bytes_tokenizer().save(tmp_path / "bytes")
    with pytest.raises(DataError, match=f"separated by '{re.escape(END_OF_TEXT)}', not by '<eos>'"):
        load_tokenizer(tmp_path / "bytes", eot="<eos>")
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text + " ")
    with pytest.raises(DataError, match="edited"):
        load_tokenizer(tmp_path)


def test_a_damaged_note_is_written_anew(tmp_path: Path) -> None:
    bytes_tokenizer().save(tmp_path / "t")
    (tmp_path / "t" / "lowbit.json").write_text("{")
    bytes_tokenizer().save(tmp_path / "t")
    assert load_tokenizer(tmp_path / "t").digest == bytes_tokenizer().digest
