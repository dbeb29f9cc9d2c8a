"""Triton kernels compiled for compute capability 9.0, on a machine that need not have a GPU."""

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def build(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], sixteens: Collection[str], **options: Any
) -> dict[str, Any]:
    """What a kernel is compiled to, by stage (ttgir, cubin, ...), and bytes of shared memory (shared).

    types: of arguments that are no int32; pointers are aligned. sixteens: arguments that are multiples of sixteen.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in sixteens
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=divisible)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {**made.asm, "shared": made.metadata.shared}


def dumped(binary: bytes, flag: str) -> str:
    """What cuobjdump says of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where registers that do not fit go."""
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", dumped(binary, "-res-usage"))
    return int(registers), int(stack)
