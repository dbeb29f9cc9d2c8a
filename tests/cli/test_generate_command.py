"""`lowbit generate` prints whole characters only, and in the end the whole text."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.cli.generate import generate, pieces
from lowbit.configs.schema import ModelConfig, RunConfig
from lowbit.data.tokenizer import bytes_tokenizer
from lowbit.errors import ConfigError
from lowbit.infer import embedded
from lowbit.infer.requests import Request
from lowbit.trainer import loaded as loading


def decode(ids: list[int]) -> str:
    """The bytes tokenizer's decoder: an id is a byte; a cut character is U+FFFD."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\ufffd"), max_size=40))
def test_characters_come_whole_and_as_soon_as_they_are_whole(text: str) -> None:
    tokens = list(text.encode("utf-8"))
    assert list(pieces(tokens, decode)) == list(text)


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_come_out_as_the_decoder_says(tokens: list[int]) -> None:
    assert "".join(pieces(tokens, decode)) == decode(tokens)


@pytest.mark.parametrize(("text", "cut"), [("naïve", 3), ("東京", 2), ("🙂", 3)])
def test_a_character_left_open_is_shown_at_the_end(text: str, cut: int) -> None:
    tokens = list(text.encode("utf-8"))[:cut]
    assert "".join(pieces(tokens, decode)) == decode(tokens)
    assert decode(tokens).endswith("\ufffd")


def test_a_decoder_that_looks_at_neighbours() -> None:
    """SentencePiece-like: a word's leading space shows only when something stands before it."""
    words = ["▁the", "▁cat", "s"]

    def spelled(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").lstrip()

    assert list(pieces([0, 1, 2], spelled)) == ["the", " cat", "s"]
    assert list(pieces([1, 2], spelled, prompt=[0])) == [" cat", "s"], "the space between prompt and answer"


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    longest = 0

    def watched(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    text = "naïve 東京 🙂 " * 50
    assert "".join(pieces(text.encode("utf-8"), watched)) == text
    assert longest <= 8, "the last character and the one in the making, 4 bytes each"


def test_text_is_printed_while_it_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    seen = []

    class Stub:
        def __init__(self, *arguments: object, **settings: object) -> None: ...

        def stream(self, request: Request, *arguments: object, **settings: object) -> Iterator[int]:
            for token in b"abc":
                seen.append(printed.getvalue())
                yield token

    loaded = SimpleNamespace(model=None, tokenizer=bytes_tokenizer(), config=RunConfig())
    monkeypatch.setattr(loading, "load_run", lambda *arguments: loaded)
    monkeypatch.setattr(embedded, "EmbeddedSampler", Stub)
    monkeypatch.setattr(sys, "stdout", printed)
    generate(Path("run"), prompt="x", top_k=None)
    assert seen == ["x", "xa", "xab"] and printed.getvalue() == "xabc\n"


def test_a_prompt_longer_than_the_model_and_more_tokens_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Stub:
        def __init__(self, *arguments: object, **settings: object) -> None: ...

        def stream(self, request: Request, *arguments: object, **settings: object) -> Iterator[int]:
            asked.append(request.max_new_tokens)
            return iter(b"abc")

    config = RunConfig(model=ModelConfig(max_sequence=8))
    loaded = SimpleNamespace(model=None, tokenizer=bytes_tokenizer(), config=config)
    monkeypatch.setattr(loading, "load_run", lambda *arguments: loaded)
    monkeypatch.setattr(embedded, "EmbeddedSampler", Stub)
    generate(Path("run"), prompt="123456", top_k=None)
    assert asked == [1], "the separator, six bytes, and one more"
    with pytest.raises(ConfigError, match=r"8 tokens.*max_sequence=8.*shorten the prompt"):
        generate(Path("run"), prompt="1234567", top_k=None)


def test_a_prompt_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    for prompt in ("-", "caf\udce9"):  # from standard input, and as Python reads such an argument
        with pytest.raises(ConfigError, match="not UTF-8"):
            generate(Path("run"), prompt=prompt, top_k=None)
