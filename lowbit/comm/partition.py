"""How a flat tensor is cut: into pieces that follow each other through the pipeline, and pieces into one share a rank.

The collective and its single-process simulation cut alike, because where a share begins is where its blocks begin.
"""


def share(n: int, ranks: int, align: int) -> int:
    """Values a rank owns of n: equal shares, filled up to a multiple of `align`. The last ones may reach past n, or lie
    beyond it altogether: what is missing counts as zeros.
    """
    return _up(_up(n, ranks) // ranks, align)


def _up(n: int, multiple: int) -> int:
    """n filled up to a multiple."""
    return -(-n // multiple) * multiple


def piece_length(ranks: int, on_gpu: bool) -> int:
    """Values in a piece where nobody says otherwise.

    On a CPU 200 KB in all: exchanges of several ranks at once fill 97% of a slow link with messages of 25 to 50 KB
    each, 75% with 400 KB. On a GPU a whole bucket as a rule: a piece costs the host 0.3 to 0.5 ms of launches, as much
    as sending 8 million values over NVLink takes, and even on a link of 4 GB/s coding is 3% of the time, which is all
    that overlapping pieces could hide.
    """
    return max(ranks << 21, 1 << 26) if on_gpu else max(1 << 18, ranks << 15)


def pieces(n: int, length: int) -> list[tuple[int, int]]:
    """[begin, end) of pieces of `length` values; the last may be shorter."""
    return [(begin, min(begin + length, n)) for begin in range(0, n, length)]


def scatter_pieces(sizes: list[int], length: int, align: int) -> list[list[tuple[int, int]]]:
    """Pieces of a reduce-scatter, each with one range a rank.

    Args:
        sizes: values that each rank is to get; ranks' ranges follow each other in the tensor.
        length: values in a piece, over all ranks together, about.

    Returns:
        For every piece, [begin, end) in the whole tensor for each rank; empty ranges where a rank has no more.
    """
    count = max(1, -(-sum(sizes) // length))
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    steps = [share(size, count, align) for size in sizes]
    cut = []
    for k in range(count):
        ranges = []
        for start, size, step in zip(starts, sizes, steps, strict=True):
            ranges.append((start + min(k * step, size), start + min((k + 1) * step, size)))
        if any(end > begin for begin, end in ranges):
            cut.append(ranges)
    return cut
