"""Who multiplies a quantised product: the emulation anywhere, or hardware that has the format.

`base` says what a backend is; `emulated` is the reference; `fp8`, `torch_blocks` and `te` are the others. `choose`
gives every product of every layer its backend when a policy is applied; `selftest` is what a backend must pass first.
"""

from lowbit.quant.backends.base import Backend
from lowbit.quant.backends.fp8 import Fp8
from lowbit.quant.backends.torch_blocks import TorchBlocks

NATIVE: dict[str, Backend] = {backend.name: backend for backend in (Fp8(), TorchBlocks())}
"""Backends that multiply codes, by name, the preferred ones first."""
