"""Imports each module that imports kernels in a process that has imported nothing of lowbit, as with a GPU's build of
PyTorch where Triton is installed, which imports more; prints those that cannot come first, with the reason.
"""

import importlib
import importlib.util
import os
import re
import traceback
from pathlib import Path

import torch

if importlib.util.find_spec("triton"):
    import triton  # noqa: F401

    torch.version.cuda = torch.version.cuda or "13.0"
ROOT = Path(__file__).parent.parent


def comes_first(name: str) -> bool:
    """Whether a child that has imported nothing of lowbit can import a module."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        importlib.import_module(name)
    except BaseException:
        print(name, traceback.format_exc(limit=-2), flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    rooms = sorted({kernels.parent for kernels in (ROOT / "lowbit").glob("*/kernels")})
    files = [room / "kernels" / "__init__.py" for room in rooms]
    for file in (file for room in rooms for file in sorted(room.rglob("*.py")) if file.parent.name != "kernels"):
        if re.search(r"^(from|import) .*\bkernels\b", file.read_text(encoding="utf-8"), re.M):
            files.append(file)
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    names = [".".join(each).removesuffix(".__init__") for each in parts]
    failed = sum([not comes_first(name) for name in names])
    print(len(names), "modules,", failed, "cannot come first")
