"""Triton kernels of caching a teacher's targets, for GPUs; what defines each is plain PyTorch in `lowbit.distill`.

Triton comes with the CUDA builds of PyTorch and is needed for nothing else: only there `fast.Kernels` imports these.
"""
