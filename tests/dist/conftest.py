"""The helpers beside these tests are modules of their own, because the processes that tests start import them too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def muon_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process as in the ranks (`nearness.exact_muon`)."""
    from lowbit.trainer import muon

    monkeypatch.setattr(muon, "fast_bf16", lambda device: False)
