"""Which device a run takes and in which type it computes, what it could do at best, and how much of that it uses.

    MFU = tokens per second per GPU * FLOPs per token / peak dense BF16 FLOP/s of the GPU

Peaks are the makers' dense BF16 tensor-core figures with FP32 accumulation, without sparsity, at the boost clock of
the data sheet. A device that is not in the table has no peak and no MFU: guessing one is how other trainers came to
report 104% to 563%. Products in faster formats are measured against the BF16 peak as well.
"""

import os
import re
import resource
import sys

import torch

from lowbit.configs.schema import ComputeDtype, PrecisionConfig
from lowbit.errors import ConfigError

GIB = 2**30
MFU_FORMULA = "MFU = tokens/s/GPU * FLOPs/token (6 a matmul parameter + causal half of attention) / dense BF16 peak"

PEAK_TFLOPS = (
    # A pattern on the device's name, most specific first; dense BF16 TFLOP/s.
    (r"\bGH200\b", 989.4),
    (r"\bH200 NVL\b", 835.5),
    (r"\bH200\b", 989.4),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\bA100\b", 312.0),
    (r"\bA40\b", 149.7),
    (r"\bA10\b", 125.0),
    (r"\bA30\b", 165.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 3090(?! Ti)\b", 71.2),
    (r"\bRTX 4090(?! D| Laptop)\b", 165.2),
    (r"\bRTX 5090(?! D| Laptop)\b", 209.5),
    (r"\bB[23]00\b", 2250.0),
    (r"\bGB[23]00\b", 2500.0),  # up to 1200 W and more
)


def device_name(device: torch.device) -> str:
    """The device's own name: of the GPU, or "CPU, N threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return str(device)


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none; a GPU becomes the current device."""
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def find_device(name: str, key: str = "device") -> torch.device:
    """The same, and the current device stays. Raises ConfigError for a device that is not there, which names `key`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", name):
        raise ConfigError(f"{key}={name}: must be auto, cpu, cuda or cuda:N; cuda:0 would work")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(f"{key}={name}, but PyTorch sees no CUDA device: set {key}=cpu, or see `lowbit doctor`")
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            raise ConfigError(f"{key}={name}, but the CUDA devices here are 0 to {count - 1}: see `lowbit doctor`")
    return device


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory, or of this machine's for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compute_dtype(precision: PrecisionConfig, device: torch.device) -> torch.dtype:
    """The type activations and products have on this device."""
    if precision.compute is ComputeDtype.auto:
        return torch.bfloat16 if fast_bf16(device) else torch.float32
    return torch.bfloat16 if precision.compute is ComputeDtype.bf16 else torch.float32


def set_deterministic(wanted: bool) -> None:
    """Have PyTorch use only kernels that give the same bits each time, or whatever is fastest."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made
    torch.use_deterministic_algorithms(wanted)


def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Dense peak of a device in FLOP/s; None where it is not known, and for any type but BF16."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    return peak_of(device_name(device))


def peak_of(name: str) -> float | None:
    """Dense BF16 peak in FLOP/s of the GPU with this name; None for one that the table has not."""
    if "MIG" in name:  # a slice of a GPU
        return None
    return next((tera * 1e12 for pattern, tera in PEAK_TFLOPS if re.search(pattern, name, re.IGNORECASE)), None)


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None) -> float | None:
    """Share of the peak that was used, by `MFU_FORMULA`; None ("n/a") when the peak is not known."""
    return None if peak is None else tokens_per_second * flops_per_token / peak


def fast_bf16(device: torch.device) -> bool:
    """Whether BF16 products are faster than FP32 ones: on a CPU with AVX512-BF16 or AMX, on CUDA from Ampere on."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(bool(check()) for name in checks if (check := getattr(torch.cpu, name, None)) is not None)
    return False


def memory_gib(device: torch.device) -> float:
    """Most memory the run held so far, GiB: allocated tensors on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
