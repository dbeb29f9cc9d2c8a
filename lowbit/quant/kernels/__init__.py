"""Quantisers as single kernels; each gives the bits of the PyTorch reference in `lowbit.quant`.

`ops` are the operators that the linear layer calls, opaque to the compiler: what they return is what is kept, and a
graph that calls them compiles in seconds. On the CPU they run `quantise.cpp`, compiled on first use (`cpu`); on a GPU
the Triton kernels of `triton_blocks` (`gpu`, which registers them). Triton comes with the CUDA builds of PyTorch and is
imported only there.
"""

import torch

if torch.version.cuda is not None:
    from lowbit.quant.kernels import gpu as gpu
