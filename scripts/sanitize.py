"""Every kernel of ours once under NVIDIA's compute-sanitizer, through the tests that compare it with its reference.

    python scripts/sanitize.py [--tools memcheck racecheck ...] [--only NAME ...] [--jobs N] [--seconds S]

Needs a GPU, CUDA's `compute-sanitizer` and the packages of the tests. Tensors are allocated one by one, for within
a block of PyTorch's allocator the next tensor's memory can be written unseen. A line a subject and tool: what the
tests said, and the sanitizer; the last exit status is 1 where it found an error, or a subject did not come to an end.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEMCHECK = ("--report-api-errors", "no")
"""PyTorch asks the driver for things that it may refuse."""
BITS = "tests/quant/test_triton_blocks.py::test_a_gpu_gives_the_references_bits"
SUBJECTS = {
    "quantiser-mxfp8": (f"{BITS}[MXFP8]",),
    "quantiser-eden": (f"{BITS}[NVFP4_POW2_EDEN]",),
    "quantiser-2d": (f"{BITS}[NVFP4_2D]",),
    "quantiser-int8": (f"{BITS}[INT8_ROW]",),
    "signs": ("tests/quant/test_triton_blocks.py", "-k", "signs or nan_and_infinity"),
    "fp8-codes": ("tests/quant/backends/test_backends_gpu.py", "-k", "codes_are_the_references"),
    "squinch": ("tests/comm/test_codecs.py", "-k", "kernels and squinch"),
    "head-norm-rope": ("tests/models/test_kernels_gpu.py", "-k", "head_norm_rope and strided"),
    "add-norm": ("tests/models/test_kernels_gpu.py", "-k", "add_norm"),
    "packed": ("tests/infer/test_packed.py", "-k", "the_kernel_on_a_gpu"),
    "attention": ("tests/infer/test_attention_kernels.py", "-k", "on_a_gpu and bfloat16"),
    "fused": ("tests/infer/test_fused.py", "-k", "the_parts_on_a_gpu"),
    "draw": ("tests/infer/test_sampling.py", "-k", "the_kernels_on_a_gpu"),
    "distill": ("tests/distill/test_kernels.py", "-k", "on_a_gpu and not large"),
}
"""Of each subject: which tests, as pytest takes them."""


def sanitized(name: str, tool: str, seconds: float) -> tuple[str, bool]:
    """A line about a subject under a tool, and whether all is well."""
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", "0", "-p", "no:cacheprovider", *SUBJECTS[name]]
    command = ["compute-sanitizer", "--tool", tool, *(() if tool != "memcheck" else MEMCHECK), *pytest]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    shown = f"{name:<16} {tool:<10}"
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{shown} not at its end after {seconds:.0f} s", False
    tested = re.findall(r"^.*\b(?:passed|failed|error)\b.* in .*$", done.stdout, re.M)
    found = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", done.stdout + done.stderr, re.M)
    first = re.findall(r"^=+ ((?:Invalid|Error|Warning|Race|Uninit|Program hit|Barrier).*)$", done.stdout, re.M)[:1]
    words = [*(tested or ["no tests"]), *(found or ["no summary"]), *first]
    well = done.returncode == 0 and bool(tested and found) and bool(re.search(r"SUMMARY: 0 ", found[-1]))
    if not well and not found:
        words.append((done.stdout + done.stderr).strip()[-300:])
    return f"{shown} {'; '.join(words)}", well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=["memcheck"])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--jobs", type=int, default=4, help="subjects at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="most that a subject may take")
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("sanitize: no compute-sanitizer on the path; it comes with CUDA's toolkit")
    wanted = [(name, tool) for tool in args.tools for name in args.only]
    well = True
    with ThreadPoolExecutor(args.jobs) as pool:
        for line, fine in pool.map(lambda each: sanitized(each[0], each[1], args.seconds), wanted):
            print(line, flush=True)
            well &= fine
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
