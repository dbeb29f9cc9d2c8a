"""The decoding kernels against gathering and PyTorch's attention, on a GPU and in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit.infer.kv_codec import KvFormat

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "window", "block", "softcap"), [(1, 0, 16, None), (4, 7, 64, 1.5), (3, 300, 32, None), (2, 0, 32, 30.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", list(KvFormat))
def test_on_a_gpu(
    fmt: KvFormat, dtype: torch.dtype, group: int, window: int, block: int, softcap: float | None
) -> None:
    from attention_cases import compare

    compare(fmt, dtype, group, window, block, "cuda", softcap)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("fmt", ["auto", "int8"])
def test_in_the_interpreter(fmt: str) -> None:
    """FP8 and BF16 are left out: the interpreter casts to them wrongly."""
    script = Path(__file__).with_name("attention_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script, fmt], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_what_is_read_ahead_fits_a_processors_memory() -> None:
    script = Path(__file__).with_name("attention_compile.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) > 30 and all(taken <= limit for *_, taken, limit in lines), done.stdout
    assert {stages for _, _, _, stages, _, _ in lines} == {2, 3, 4}
