"""What a run says of itself at its beginning."""

import pytest

from lowbit.configs.schema import CommConfig, CommKind, ModelConfig
from lowbit.models.transformer import Transformer
from lowbit.trainer.announce import how_gradients_travel


@pytest.mark.parametrize(
    ("kind", "least", "words"),
    [
        (CommKind.none, 0, "FP32"),
        (CommKind.squinch, 0, "squinch"),
        (CommKind.squinch, 5_000, "squinch (78% of them as FP32: small ones)"),
        (CommKind.sq48, 10_000_000, "FP32, not sq48: all have fewer numbers than comm.exact_below=10000000"),
    ],
)
def test_how_gradients_travel(kind: CommKind, least: int, words: str) -> None:
    """Fourteen matrices of 64 x 64, an embedding and a head of 128 x 64: 57,344 of 73,728 numbers, and norms."""
    model = Transformer(ModelConfig(layers=2, width=64, heads=4, kv_heads=4, mlp_width=64, max_sequence=32), 100)
    assert how_gradients_travel(CommConfig(kind=kind, exact_below=least), model) == words
