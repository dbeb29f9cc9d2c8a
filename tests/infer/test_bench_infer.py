"""The benchmark runs, and its floor is what its docstring says."""

from pathlib import Path

import pytest
from bench_infer import PARTS, SHAPES, Load, floor_seconds, main

SMALL = ["--shape", "small", "--rows", "4", "--new", "3", "--prompt", "5", "--group", "2", "--repeats", "1"]


@pytest.mark.parametrize("part", [part for part in PARTS if part != "cuts"])
def test_it_runs(part: str, tmp_path: Path) -> None:
    rows = main([part, *SMALL, "--precisions", "bf16", "nvfp4_w4a16", "--out", str(tmp_path / "out.json")])
    assert rows and (tmp_path / "out.json").is_file()


def test_cuts_are_a_gpus() -> None:
    with pytest.raises(SystemExit, match="nothing to cut without a GPU"):
        main(["cuts", *SMALL, "--device", "cpu"])


def test_the_floor() -> None:
    """The 1B shape by hand: 16 layers of 2048 x (2048 x 2 + 1024 x 2) and 3 x 2048 x 8192, and a head."""
    blocks = 16 * (2048 * (2 * 2048 + 2 * 1024) + 3 * 2048 * 8192)
    head = 32_768 * 2048
    one = floor_seconds(SHAPES["1B"], Load(1, 0, 1, 1), "bf16", 0.0)
    assert one == pytest.approx(2 * (blocks + head) / 4.28e12)
    packed = floor_seconds(SHAPES["1B"], Load(1, 0, 1, 1), "nvfp4_w4a16", 0.0)
    assert packed == pytest.approx((blocks * 4.5 / 8 + 2 * head) / 4.28e12)
    many = floor_seconds(SHAPES["1B"], Load(1024, 0, 1, 1), "bf16", 0.0)
    assert many == pytest.approx(2 * (blocks + head) * 1024 / 800e12)
    keys = floor_seconds(SHAPES["1B"], Load(8, 100, 2, 8), "bf16", 1e6) - 2 * one
    assert keys == pytest.approx((100 + 101) * 8 * 1e6 / 4.28e12 + 2 * blocks * 100 / 800e12)
