"""A run small enough to train in a second."""

from pathlib import Path

import pytest
import tiny_runs

from lowbit.configs.schema import RunConfig


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 documents of different lengths."""
    return tiny_runs.make_corpus(tmp_path / "corpus")


@pytest.fixture
def tiny_run(corpus: Path, tmp_path: Path) -> RunConfig:
    """See `tiny_runs.tiny_run`."""
    return tiny_runs.tiny_run(corpus, tmp_path / "data")
