"""Triton kernels of decoding, for GPUs; what defines each is plain PyTorch beside its caller.

Triton comes with the CUDA builds of PyTorch and is needed for nothing else, so it is imported only there.
"""

import torch
from torch import Tensor

Memory = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys, values [places, Hkv, D] and their scales [places, Hkv] of one layer."""

if torch.version.cuda is not None:
    from lowbit.infer.kernels.attention import decode, store
    from lowbit.infer.kernels.packed import packed_product
else:

    def packed_product(
        x: Tensor, data: Tensor, scales: Tensor | None, after: Tensor | None, bits: int, block: int, asm: bool = True
    ) -> Tensor:
        """Never reached: used for CUDA tensors only."""
        raise RuntimeError("this PyTorch has no CUDA")

    def store(k: Tensor, v: Tensor, memory: Memory, slots: Tensor, largest: float | None) -> None:
        """Never reached: used for CUDA tensors only."""
        raise RuntimeError("this PyTorch has no CUDA")

    def decode(
        q: Tensor, memory: Memory, table: Tensor, start: Tensor, block: int, window: int, largest: float | None
    ) -> Tensor:
        """Never reached: used for CUDA tensors only."""
        raise RuntimeError("this PyTorch has no CUDA")


def handles(keys: Tensor) -> bool:
    """Whether the kernels take a cache [..., Hkv, D]: a power-of-two D."""
    dim = keys.shape[-1]
    return keys.is_cuda and 16 <= dim <= 256 and dim & (dim - 1) == 0


__all__ = ["Memory", "decode", "handles", "packed_product", "store"]
