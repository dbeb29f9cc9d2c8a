"""The helpers beside these tests are modules of their own, because the processes that tests start import them too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def muon_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process as in the ranks (`nearness.exact_muon`)."""
    from nearness import in_fp32

    from lowbit.trainer import client_optimizer, muon

    for module in (muon, client_optimizer):
        monkeypatch.setattr(module, "product_dtype", in_fp32)
