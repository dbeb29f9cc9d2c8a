"""Triton kernels of the gradient codecs: `TritonCoder`, imported only where a CUDA tensor is coded."""
