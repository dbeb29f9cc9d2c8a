"""Triton kernels of decoding, for GPUs; what defines each is plain PyTorch beside its caller.

Triton comes with the CUDA builds of PyTorch and is needed for nothing else, so it is imported only there.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

Memory = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys, values [places, Hkv, D] and their scales [places, Hkv] of one layer."""
PACKED_ROWS = 64
"""Most rows of x that `begin_product` takes."""
PACKED_MULTIPLE = 128
"""What `begin_product` wants the width of x to be a multiple of."""
MOST_TOKENS = 1 << 20
"""Largest vocabulary that `draw` takes."""

if TYPE_CHECKING or torch.version.cuda is not None:
    from lowbit.infer.kernels.attention import decode, store
    from lowbit.infer.kernels.chain import chaining
    from lowbit.infer.kernels.draw import draw
    from lowbit.infer.kernels.fused import add_norm, embed, rms_norm, silu_mul, turn_and_store
    from lowbit.infer.kernels.packed import begin_product
    from lowbit.infer.kernels.step import begin_step, end_step
    from lowbit.infer.kernels.unfinished import finish
else:

    def _never(*arguments: Any) -> Any:
        """Never reached: used for CUDA tensors only."""
        raise RuntimeError("this PyTorch has no CUDA")

    def chaining(wanted: bool) -> AbstractContextManager[None]:
        """Nothing is launched."""
        return nullcontext()

    add_norm = begin_product = begin_step = decode = draw = embed = end_step = finish = _never
    rms_norm = silu_mul = store = turn_and_store = _never


def handles(keys: Tensor) -> bool:
    """Whether the kernels take a cache [..., Hkv, D]: a power-of-two D."""
    dim = keys.shape[-1]
    return keys.is_cuda and 16 <= dim <= 256 and dim & (dim - 1) == 0


__all__ = [
    "MOST_TOKENS",
    "PACKED_MULTIPLE",
    "PACKED_ROWS",
    "Memory",
    "add_norm",
    "begin_product",
    "begin_step",
    "chaining",
    "decode",
    "draw",
    "embed",
    "end_step",
    "finish",
    "handles",
    "rms_norm",
    "silu_mul",
    "store",
    "turn_and_store",
]
