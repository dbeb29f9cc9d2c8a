"""When a kernel needs no operator around it.

An operator is what autograd and the compiler know a kernel by. Where neither is at work, PyTorch still spends more time
on a call of a Triton operator than a GPU on the kernel, and a prompt's reading has two a layer.
"""

import torch


def bare() -> bool:
    """Whether neither a compiler traces this nor a gradient is wanted."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled()
