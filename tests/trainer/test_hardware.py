"""Peaks by device name, and utilisation that cannot exceed what was measured."""

import pytest
import torch

from lowbit.errors import ConfigError
from lowbit.trainer import hardware
from lowbit.trainer.hardware import (
    MFU_FORMULA,
    device_name,
    fast_bf16,
    find_device,
    memory_gib,
    mfu,
    peak_flops,
    peak_of,
    pick_device,
)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("Some accelerator of tomorrow", None),
    ],
)
def test_peak_by_name(name: str, tera: float | None) -> None:
    assert peak_of(name) == (None if tera is None else pytest.approx(tera * 1e12))


def test_mfu() -> None:
    assert mfu(100.0, 2e9, 1e12) == pytest.approx(0.2)
    assert mfu(100.0, 2e9, None) is None
    assert "tokens/s" in MFU_FORMULA and "causal half" in MFU_FORMULA
    # The fastest known run of its shape on an H200 (156,340 tokens/s) must come out below 1.
    assert 0.3 < mfu(156_340, 2.95e9, peak_of("NVIDIA H200")) < 1


def test_cpu() -> None:
    cpu = torch.device("cpu")
    assert peak_flops(cpu) is None
    assert "CPU" in device_name(cpu)
    assert 0.01 < memory_gib(cpu) < 1000


def test_fast_bf16_on_a_cpu_follows_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for avx, amx in [(False, False), (True, False), (False, True)]:
        monkeypatch.setattr(hardware.torch.cpu, "_is_avx512_bf16_supported", lambda a=avx: a, raising=False)
        monkeypatch.setattr(hardware.torch.cpu, "_is_amx_tile_supported", lambda a=amx: a, raising=False)
        assert fast_bf16(cpu) == (avx or amx)
    monkeypatch.delattr(hardware.torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(hardware.torch.cpu, "_is_amx_tile_supported")
    assert fast_bf16(cpu) is False
    assert fast_bf16(torch.device("meta")) is False


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    device = torch.device("cuda", 0)
    assert peak_flops(device, torch.float32) is None
    assert memory_gib(device) >= 0
    assert fast_bf16(device) == (torch.cuda.get_device_capability(device)[0] >= 8)


def test_devices_that_are_none_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tpu", "", "cuda:x", "cuda:-1", "meta"):
        with pytest.raises(ConfigError, match=f"^device={name}: must be auto, cpu, cuda or cuda:N"):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda:1, but PyTorch sees no CUDA device"):
        pick_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device=cuda:2, but the CUDA devices here are 0 to 1"):
        pick_device("cuda:2")
    with pytest.raises(ConfigError, match=r"^rollout.device=cuda:2, but"):
        find_device("cuda:2", "rollout.device")
