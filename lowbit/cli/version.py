"""`lowbit version`."""

from importlib import metadata

import lowbit


def version() -> None:
    """Print the versions of lowbit and PyTorch."""
    print(f"lowbit {lowbit.__version__}, torch {metadata.version('torch')}")
