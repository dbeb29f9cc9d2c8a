"""lowbit: pretrain, distil and post-train language models in few bits."""

__version__ = "0.1.0"
