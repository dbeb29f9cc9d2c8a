"""`lowbit report` of a real pipeline, and of a real sweep, as a reader sees it: in headless Chromium."""

import re
import shutil
from pathlib import Path

import browser
import pytest
from pipeline_runs import lowbit, place

pytestmark = [browser.needed, pytest.mark.slow]


def words(page: Path) -> str:
    """What stands in the page once its script has run, without a network."""
    done = browser.chromium(page, "--dump-dom", "--host-resolver-rules=MAP * ~NOTFOUND")
    assert not browser.complaints(done), done.stderr
    assert not re.search(r'(src|href)="(?!#|data:)', done.stdout), "nothing is loaded, nothing leads away"
    shown = re.sub(r"<(script|style)\b.*?</\1>", "", done.stdout, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", shown).split())


def test_a_pipelines_page(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    code, out, err = lowbit(tmp_path, "report", "runs/pipeline", "--out", "page")
    assert code == 0, err
    browser.require_both_themes(tmp_path / "page.html")
    text = words(tmp_path / "page.html")
    for stage in ("pretrain", "distill", "rl"):
        assert stage in text and stage in out
    for part in ("What was learned", "Speed", "Precision", "Sampler against trainer", "Samples", "Settings"):
        assert part.lower() in text.lower(), part


@pytest.mark.exhaustive
def test_a_sweeps_page(tmp_path: Path) -> None:
    """It is there at the sweep's end; the failed job is named on it, with its settings and its reason."""
    settings = [
        "preset=quick", "device=cpu", "data=files", "data.sources.files.path=corpus", "data.tokenizer.kind=bytes",
        "data.held_out=0.1", "data.sequence_length=32", "data.pack_workers=1", "max_steps=4", "logging.every_steps=1",
        "evaluation.sample_tokens=0",
    ]  # fmt: skip
    code, out, err = lowbit(place(tmp_path), "pretrain", "-m", *settings, "optim.lr=1e-3,1e30,3e-3")
    assert code == 1 and "1 of 3 jobs failed: job 1 (optim.lr=1e+30)" in err
    assert [line.split()[0] for line in out.splitlines() if re.match(r"[0-2]  ", line)] == ["0", "2"]
    [page] = tmp_path.glob("multirun/pretrain/*/report.html")
    browser.require_both_themes(page)
    text = words(page)
    assert "Failed: job 1 (optim.lr=1e+30): step 2: loss " in text
    (tmp_path / "again").mkdir()
    code, again, err = lowbit(tmp_path, "report", str(page.parent.relative_to(tmp_path)), "--out", "again/page")
    assert code == 0, err
    table = [line for line in out.splitlines() if re.match(r"[0-2] ", line)]
    assert table and all(line in again for line in table), "one piece of code compares them"
