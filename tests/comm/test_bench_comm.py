"""The benchmark's own parts: links that are as slow as they should be, bytes that are counted as they leave."""

import json
import subprocess
import sys
from pathlib import Path

import bench_comm
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


@pytest.mark.dist
@pytest.mark.slow
def test_two_hops_beside_the_backend(tmp_path: Path) -> None:
    """Over gloo: the loopback device carried what is counted, and a message is as long as its codec says."""
    out = tmp_path / "nccl.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    command += ["nccl", "--sizes", "1", "4", "--kinds", "squinch", "--pieces", "1", "2", "--repeats", "1"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert [row["MB in BF16"] for row in rows] == [1] * 4 + [4] * 4
    assert [row["way"] for row in rows[4:]] == ["gloo fp32", "gloo bf16", "squinch in 1", "squinch in 2"]
    for row in rows:
        if "wire ms" in row:
            assert row["bytes/value"] == pytest.approx(0.75, rel=1e-2)  # 6 bits a value, half of them away, two hops
            assert row["on lo"] >= row["bytes/value"]  # other tests may send meanwhile
            assert min(row["wire ms"], row["coding ms"], row["predicted"]) > 0 and 0 <= row["hidden"] <= 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("link --ranks 2,1", "--ranks: '1': give a whole number from 2 on"),
        ("link --ranks two", "--ranks: 'two'"),
        ("codec --values -5", "--values: '-5': give a whole number from 1 on"),
        ("auto --repeats 0", "--repeats: '0'"),
        ("link --chunk -1", "--chunk: '-1'"),
        ("nccl --kinds squinch,nope", "--kinds: 'nope': give some of fp32, bf16"),
        ("nccl --sizes 0", "--sizes: '0'"),
        ("link --rates 1gbit,fast", "--rates: network='fast': give a link's rate"),
    ],
)
def test_wrong_arguments_are_named(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_comm.py", *words.split()])
    with pytest.raises(SystemExit):
        bench_comm.main()
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_says_why_namespaces_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in str(shaped_network.why_not())


def test_a_bucket_is_one_piece_on_a_gpu() -> None:
    """Of DeepSpeed's usual size, 50 million values and what fills them up; a CPU cuts it."""
    for ranks in (2, 4, 8, 64):
        assert len(pieces(50_000_000, piece_length(ranks, on_gpu=True))) == 1
        assert len(pieces(50_000_000, piece_length(ranks, on_gpu=False))) > 10
