"""`lowbit version`."""

import lowbit


def version() -> None:
    """Print the versions of lowbit and PyTorch."""
    from importlib import metadata

    print(f"lowbit {lowbit.__version__}, torch {metadata.version('torch')}")
