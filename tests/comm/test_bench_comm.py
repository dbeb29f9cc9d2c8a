"""The benchmark's own parts: links that are as slow as they should be, bytes that are counted as they leave."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import shaped_network

from lowbit.comm.codecs import make_codec
from lowbit.comm.partition import piece_length, pieces, share

SCRIPT = Path(shaped_network.__file__).with_name("bench_comm.py")


def run(command: str, out: Path) -> list[dict[str, float | str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *command.split(), "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows: list[dict[str, float | str]] = json.loads(out.read_text())["rows"]
    return rows


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(bool(reason := shaped_network.why_not()), reason=str(reason))
def test_links_are_shaped_and_bytes_are_counted(tmp_path: Path) -> None:
    """Three ranks over 200 Mbit/s: no faster than the link, and headers on top of the counted bytes, no more."""
    n = 1_999_998
    rows = run(f"link --rates 200mbit --ranks 3 --kinds bf16,squinch --values {n} --repeats 2", tmp_path / "link.json")
    reduced = {row["gradients"]: row for row in rows if row["ZeRO"] == "0"}
    assert all(float(row["Mbit/s"]) < 225 for row in rows)  # a bucket lets 125 KB through unshaped
    squinch = reduced["squinch"]
    codec, length = make_codec("squinch"), piece_length(3, on_gpu=False)
    counted = sum(2 * 2 * codec.nbytes(share(b - a, 3, codec.align)) for a, b in pieces(n, length))
    assert float(squinch["counted"]) == pytest.approx(counted / n, rel=1e-6)
    assert 1 < float(squinch["bytes/param"]) / float(squinch["counted"]) < 1.1
    assert 2.6 < float(reduced["bf16"]["bytes/param"]) < 2.95
    assert not [line for line in subprocess.check_output(["ip", "netns"], text=True).split() if line.startswith("lb")]


@pytest.mark.slow
def test_codec_table(tmp_path: Path) -> None:
    rows = run("codec --device cpu --codecs squinch,bf16 --values 300000", tmp_path / "codec.json")
    ns = {(row["codec"], row["operation"]): float(row["ns/value"]) for row in rows}
    assert len(ns) == 3 * 3  # squinch, its reference, bf16
    assert ns["squinch", "encode"] * 3 < ns["squinch reference", "encode"]


def test_says_why_namespaces_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in str(shaped_network.why_not())


def test_a_bucket_is_one_piece_on_a_gpu() -> None:
    """Of DeepSpeed's usual size, 50 million values and what fills them up; a CPU cuts it."""
    for ranks in (2, 4, 8, 64):
        assert len(pieces(50_000_000, piece_length(ranks, on_gpu=True))) == 1
        assert len(pieces(50_000_000, piece_length(ranks, on_gpu=False))) > 10
