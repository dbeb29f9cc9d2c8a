"""What tests of whole pipelines share."""

from pathlib import Path

import pytest
from pipeline_runs import SETTINGS, lowbit, place


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which an uninterrupted pipeline has run, as a real process; nobody changes what is in it."""
    cwd = place(tmp_path_factory.mktemp("whole"))
    code, out, err = lowbit(cwd, "pipeline", *SETTINGS)
    assert code == 0, err
    (cwd / "out.txt").write_text(out)
    return cwd
