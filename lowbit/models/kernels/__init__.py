"""Fused Triton kernels of the model, for GPUs. Each has a plain PyTorch twin in the model that defines it.

Triton comes with the CUDA builds of PyTorch and is needed for nothing else, so it is imported only there.
"""

import torch
from torch import Tensor

if torch.version.cuda is not None:
    from lowbit.models.kernels.add_norm import add_norm
    from lowbit.models.kernels.head_norm_rope import head_norm_rope
else:

    def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Never reached: used for CUDA tensors only."""
        raise RuntimeError("this PyTorch has no CUDA")

    def head_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        """Never reached: used for CUDA tensors only."""
        raise RuntimeError("this PyTorch has no CUDA")


def handles(x: Tensor) -> bool:
    """Whether `head_norm_rope` takes x [B, T, H, D]: a power-of-two D, and numbers in a row next to each other."""
    dim = x.shape[-1]
    return 16 <= dim <= 512 and dim & (dim - 1) == 0 and x.stride(-1) == 1


__all__ = ["add_norm", "handles", "head_norm_rope"]
