"""`lowbit doctor` and `lowbit version`."""

import json
import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch
from processes import together

import lowbit
from lowbit.cli.doctor import _missing, capability_formats, diagnose, report
from lowbit.cli.main import run
from lowbit.quant.presets import PRESETS


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((7, 0), set()),  # V100
        ((7, 5), {"int8"}),  # T4
        ((8, 0), {"int8", "bf16"}),  # A100
        ((8, 6), {"int8", "bf16"}),  # A10
        ((8, 9), {"int8", "bf16", "fp8"}),  # L4
        ((9, 0), {"int8", "bf16", "fp8"}),  # H100, H200
        ((10, 0), {"int8", "bf16", "fp8", "mxfp8", "nvfp4"}),  # B200
        ((12, 0), {"int8", "bf16", "fp8", "mxfp8", "nvfp4"}),  # RTX 5090
    ],
)
def test_which_gpu_computes_what_natively(capability: tuple[int, int], native: set[str]) -> None:
    assert {name for name, how in capability_formats(capability).items() if how == "native"} == native


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["python"] == platform.python_version() and found["lowbit"] == lowbit.__version__
    assert found["packages"]["torch"] == metadata.version("torch") and found["packages"]["hydra-core"]
    assert found["cuda"] == torch.version.cuda
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert found["devices"][0]["memory_gib"] > 0.5 and found["devices"][0]["formats"]["nvfp4"] == "emulated"
    precisions = found["devices"][0]["precisions"]
    assert precisions["nvfp4"] == precisions["fp8_w8a16"] == "emulated" and set(precisions) == set(PRESETS)
    assert run(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == report(diagnose())


def test_what_is_missing_comes_with_its_command() -> None:
    packages: dict[str, str | None] = {"wandb": None, "matplotlib": None, "triton": None, "torch": "2.13"}
    assert _missing(packages, None, "13.0", gpu=False) == {
        "wandb": "pip install wandb",
        "matplotlib": "pip install 'lowbit[plot]'",
        "a C++ compiler (torch.compile on the CPU)": "apt-get install g++",
    }
    assert "triton" in _missing(packages, "/usr/bin/c++", "13.0", gpu=True)


def test_short_answers(tmp_path: Path) -> None:
    preset, version, bare = together([["doctor", "--preset"], ["version"], []], tmp_path)
    assert (preset.code, preset.out, preset.err) == (0, "gpu\n" if torch.cuda.is_available() else "cpu\n", "")
    assert version.out == f"lowbit {lowbit.__version__}, torch {metadata.version('torch')}\n"
    assert bare.code == 2 and "pretrain" in bare.out
