"""`lowbit doctor`: what this machine has, what its devices compute natively, what is missing and how to get it."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

PACKAGES = (
    *("torch", "deepspeed", "hydra-core", "omegaconf", "datasets", "wandb", "tokenizers", "safetensors", "typer"),
    *("numpy", "pyarrow", "rich", "triton", "transformer-engine", "matplotlib", "tensorboard"),
)
OPTIONAL = {
    "triton": "pip install triton",
    "transformer-engine": "pip install 'lowbit[te]'",
    "matplotlib": "pip install 'lowbit[plot]'",
    "tensorboard": "pip install 'lowbit[tensorboard]'",
}
"""Packages that only some commands need, and how to get them."""
GPU_ONLY = ("triton", "transformer-engine")

TENSOR_CORES: dict[str, tuple[int, int]] = {
    "bf16": (8, 0),
    "int8": (7, 5),
    "fp8": (8, 9),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Compute capability from which NVIDIA's tensor cores multiply a format."""


@dataclass(frozen=True)
class Device:
    """One device and how it computes each format: native or emulated."""

    name: str
    memory_gib: float
    capability: str
    """Compute capability of a GPU; "" for a CPU."""
    formats: dict[str, str]
    """What the hardware multiplies."""
    precisions: dict[str, str]
    """How lowbit computes each precision preset there."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `lowbit doctor` found."""

    python: str
    lowbit: str
    packages: dict[str, str | None]
    """Version of each package, None where it is not installed."""
    cuda: str | None
    cudnn: int | None
    compiler: str | None
    """C++ compiler, which `torch.compile` needs on a CPU."""
    devices: list[Device] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """What is not there, and the command that gets it."""


def doctor(
    preset: Annotated[
        bool, typer.Option("--preset", help="Print only the preset for this machine: gpu or cpu.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show versions, devices, native and emulated formats, and what is missing."""
    if preset:
        print("gpu" if has_gpu() else "cpu")
        return
    import json

    found = diagnose()
    print(json.dumps(asdict(found), indent=2) if as_json else "\n".join(report(found)))


def has_gpu() -> bool:
    """Whether PyTorch can use a CUDA device. Machines without a driver are told apart without importing it."""
    if not any(Path(trace).exists() for trace in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")):
        return False
    import torch

    return torch.cuda.is_available()


def capability_formats(capability: tuple[int, int]) -> dict[str, str]:
    """How a GPU of this compute capability computes each format."""
    return {name: "native" if capability >= since else "emulated" for name, since in TENSOR_CORES.items()}


def diagnose() -> Diagnosis:
    """Look at this machine. Imports PyTorch."""
    import platform
    import shutil

    import torch

    import lowbit

    devices = [_cpu()] + [_gpu(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    packages = {name: _version(name) for name in PACKAGES}
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return Diagnosis(
        python=platform.python_version(),
        lowbit=lowbit.__version__,
        packages=packages,
        cuda=torch.version.cuda,
        cudnn=_cudnn() if torch.version.cuda else None,
        compiler=compiler,
        devices=devices,
        missing=_missing(packages, compiler, torch.version.cuda, len(devices) > 1),
    )


def report(found: Diagnosis) -> list[str]:
    """The printed lines of a diagnosis."""
    lines = [f"python {found.python}, lowbit {found.lowbit}"]
    lines += [f"  {name:<20}{version or 'not installed'}" for name, version in found.packages.items()]
    lines.append(f"  {'CUDA':<20}{found.cuda or 'none (CPU build of torch)'}")
    lines.append(f"  {'cuDNN':<20}{found.cudnn or 'none'}")
    lines.append(f"  {'C++ compiler':<20}{found.compiler or 'none'}")
    for device in found.devices:
        what = f", compute capability {device.capability}" if device.capability else ""
        lines.append(f"{device.name}: {device.memory_gib:.1f} GiB{what}")
        lines.append("  hardware: " + ", ".join(f"{name} {how}" for name, how in device.formats.items()))
        for how in dict.fromkeys(device.precisions.values()):
            names = [name for name, found in device.precisions.items() if found == how]
            lines.append(f"  lowbit, {how}: {', '.join(names)}")
    lines += [f"missing: {what}: {command}" for what, command in found.missing.items()]
    return lines if found.missing else [*lines, "nothing is missing"]


def _missing(packages: dict[str, str | None], compiler: str | None, cuda: str | None, gpu: bool) -> dict[str, str]:
    absent = [name for name, version in packages.items() if version is None and (gpu or name not in GPU_ONLY)]
    missing = {name: OPTIONAL.get(name, f"pip install {name}") for name in absent}
    if compiler is None:
        missing["a C++ compiler (torch.compile on the CPU)"] = "apt-get install g++"
    if cuda is None and Path("/proc/driver/nvidia").exists():
        missing["a CUDA build of torch (there is an NVIDIA GPU)"] = "pip install --force-reinstall torch"
    return missing


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cudnn() -> int | None:
    import torch

    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def _cpu() -> Device:
    import os

    import torch

    from lowbit.trainer.hardware import GIB, device_memory, device_name, fast_bf16
    from lowbit.trainer.precision import native_precisions

    cpu = torch.device("cpu")
    formats = dict.fromkeys(TENSOR_CORES, "emulated") | {"bf16": "native" if fast_bf16(cpu) else "emulated (slow)"}
    name = f"{device_name(cpu)}, {os.cpu_count()} cores"
    return Device(name, device_memory(cpu) / GIB, "", formats, native_precisions(cpu))


def _gpu(index: int) -> Device:
    import torch

    from lowbit.trainer.hardware import GIB
    from lowbit.trainer.precision import native_precisions

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    name = f"cuda:{index} {properties.name}"
    return Device(
        name,
        properties.total_memory / GIB,
        f"{capability[0]}.{capability[1]}",
        capability_formats(capability),
        native_precisions(torch.device("cuda", index)),
    )
