"""Philox4x32-10: published known answers, an implementation on Python integers, and the layout of streams."""

import numpy as np
import pytest
import torch

from lowbit.quant.philox import Product, Purpose, Side, Stream, layer_word, make_clock, make_key, philox4x32

KNOWN = [  # counter, key, result: Random123's kat_vectors for philox4x32, 10 rounds
    (["00000000"] * 4, ["00000000"] * 2, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
    (["ffffffff"] * 4, ["ffffffff"] * 2, ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
    (
        ["243f6a88", "85a308d3", "13198a2e", "03707344"],
        ["a4093822", "299f31d0"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ),
]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """On Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def stream(seed: int = 1, layer: str = "blocks.0.mlp", side: Side = Side.LEFT, **clock: int) -> Stream:
    return Stream(make_key(seed, layer), make_clock(**clock), Product.DGRAD, side)


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter: list[str], key: list[str], want: list[str]) -> None:
    c, k = ([int(w, 16) for w in words] for words in (counter, key))
    got = philox4x32(tuple(torch.tensor([w]) for w in c), (torch.tensor([k[0]]), torch.tensor([k[1]])))
    assert [f"{w.item():08x}" for w in got] == want
    assert scalar_philox(c, k) == [int(w, 16) for w in want]


def test_random_counters_against_python_integers() -> None:
    rng = np.random.default_rng(0)
    words = torch.from_numpy(rng.integers(0, 1 << 32, (6, 300)).astype(np.int64))
    got = torch.stack(philox4x32(tuple(words[:4]), (words[4], words[5]))).T
    for row, out in zip(words.T.tolist(), got.tolist(), strict=True):
        assert scalar_philox(row[:4], row[4:]) == out


def test_the_layout_of_a_stream() -> None:
    s = stream(seed=7, step=5, micro_batch=3, rank=2)
    lane = Product.DGRAD << 8 | Side.LEFT << 4 | Purpose.SCALES
    want = [w for i in range(3) for w in scalar_philox([i, 5, 3, 2 << 16 | lane], [7, layer_word("blocks.0.mlp")])]
    assert s.words(Purpose.SCALES, 10).tolist() == want[:10]
    assert s.halves(Purpose.SCALES, 5).tolist() == [want[0] & 0xFFFF, want[0] >> 16, want[1] & 0xFFFF, want[1] >> 16,
                                                   want[2] & 0xFFFF]  # fmt: skip
    sign_lane = Product.DGRAD << 8 | Side.SHARED << 4 | Purpose.SIGNS
    word = scalar_philox([0, 5, 3, 2 << 16 | sign_lane], [7, layer_word("blocks.0.mlp")])[0]
    assert s.signs(32).tolist() == [-1.0 if word >> i & 1 else 1.0 for i in range(32)]


def test_operands_share_signs_and_not_noise_and_everything_else_differs() -> None:
    left, right = stream(), stream(side=Side.RIGHT)
    assert torch.equal(left.signs(128), right.signs(128))
    noises = [
        left,
        right,
        stream(seed=2),
        stream(layer="blocks.1.mlp"),
        stream(step=1),
        stream(micro_batch=1),
        stream(rank=1),
    ]
    draws = [s.words(Purpose.ELEMENTS, 64) for s in noises] + [left.words(Purpose.SCALES, 64)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert (a == b).sum() == 0
    for other in noises[2:]:
        assert not torch.equal(left.signs(128), other.signs(128))


def test_a_longer_draw_begins_with_a_shorter_one() -> None:
    s = stream()
    assert torch.equal(s.halves(Purpose.ELEMENTS, 1001)[:77], s.halves(Purpose.ELEMENTS, 77))


def test_halves_are_uniform_and_uncorrelated() -> None:
    n = 1 << 18
    u = (stream().halves(Purpose.ELEMENTS, n).double() + 0.5) / 65536
    assert abs(u.mean().item() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    counts = torch.bincount((u * 256).long(), minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5
    v = u - 0.5
    for lag in (1, 2, 7, 8):
        assert abs((v[lag:] * v[:-lag]).mean().item() * 12) < 5 / n**0.5
    w = (stream(side=Side.RIGHT).halves(Purpose.ELEMENTS, n).double() + 0.5) / 65536 - 0.5
    assert abs((v * w).mean().item() * 12) < 5 / n**0.5


def test_words_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        make_key(-1, "a")
    with pytest.raises(ValueError, match="rank=70000"):
        make_clock(rank=70000)
