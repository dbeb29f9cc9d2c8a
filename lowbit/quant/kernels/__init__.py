"""Quantisers as single kernels; each gives the bits of the PyTorch reference in `lowbit.quant`.

`ops` are the operators that the linear layer calls, opaque to the compiler: what they return is what is kept, and a
graph that calls them compiles in seconds. On the CPU they run `quantise.cpp`, compiled on first use (`cpu`).
"""
