"""Trees of conversations against each conversation by itself: masks by ancestry, and what a model computes of them."""

import random

import pytest
import torch

from lowbit.configs.schema import ModelConfig
from lowbit.errors import DataError
from lowbit.models.attention import dense_mask
from lowbit.models.lm_head import lm_head_nll
from lowbit.models.transformer import Transformer
from lowbit.models.trees import FlatTree, Node, flatten, paths, visibility_of

EOT, VOCAB = 0, 50


def _tree(seed: random.Random, depth: int = 3) -> Node:
    tokens = [seed.randrange(1, VOCAB) for _ in range(seed.randrange(1, 5))]
    children = [] if depth == 0 else [_tree(seed, depth - 1) for _ in range(seed.choice([0, 0, 1, 2, 3]))]
    return Node(tokens, seed.choice([0.0, 1.0]), children)


def test_the_example_of_the_docstring() -> None:
    flat = flatten(Node([11, 12, 13], 0.5, [Node([14, 15]), Node([16])]), EOT)
    assert flat.tokens == [EOT, 11, 12, 13, 14, 15, 13, 16]
    assert flat.targets == [11, 12, 13, 14, 15, EOT, 16, EOT]
    assert flat.weights == [0.5, 0.5, 0.5, 1, 1, 1, 1, 1]
    assert flat.limit == [8, 8, 8, 6, 6, 6, 8, 8]
    assert flat.position == [0, 1, 2, 3, 4, 5, 3, 4]


def _owners(root: Node) -> list[list[int]]:
    """For each token of the row the numbers of the nodes from the root to its own, by walking the tree."""
    chains: list[list[int]] = []
    count = 0

    def walk(node: Node, above: list[int]) -> None:
        nonlocal count
        here = [*above, count]
        count += 1
        chains.extend([here] * (len(node.tokens) + (0 if node.children else 1)))
        for child in node.children:
            walk(child, here)

    walk(root, [])
    return chains


@pytest.mark.parametrize("number", range(30))
def test_a_token_sees_its_ancestors_and_what_stands_before_it_in_its_node(number: int) -> None:
    tree = _tree(random.Random(number))
    flat = flatten(tree, EOT)
    rule = visibility_of([[flat]], len(flat) + 3)
    rule.validate(tree=True)
    mask, chains = dense_mask(rule)[0, 0], _owners(tree)
    assert len(chains) == len(flat)
    for i, chain in enumerate(chains):
        for j, other in enumerate(chains):
            assert bool(mask[i, j]) == (other[-1] in chain and j <= i)
    assert torch.equal(mask[-3:], torch.eye(len(flat) + 3, dtype=torch.bool)[-3:])


def _model(**changes: object) -> Transformer:
    config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, init_std=0.3, **changes)  # type: ignore
    model = Transformer(config, VOCAB)
    model.init_weights(3)
    return model


def _losses(model: Transformer, trees: list[FlatTree], length: int) -> torch.Tensor:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    flat = [t for tree in trees for t in tree.tokens]
    tokens[0, : len(flat)] = torch.tensor(flat)
    with torch.no_grad():
        hidden = model(tokens, visibility_of([trees], length))[0, : len(flat)]
        targets = torch.tensor([t for tree in trees for t in tree.targets])
        return lm_head_nll(hidden, model.head_weight, targets, vocab_size=VOCAB)


@pytest.mark.parametrize("windows", [[], [3, 0]])
def test_each_conversation_is_computed_as_if_alone(windows: list[int]) -> None:
    """Loss of every token in a packed tree equals that of the same token in its linear conversation."""
    model = _model(windows=windows)
    for number in range(8):
        trees = [_tree(random.Random(100 + number)), _tree(random.Random(200 + number))]
        flats = [flatten(tree, EOT) for tree in trees]
        together = _losses(model, flats, sum(map(len, flats)) + 2)
        weights = torch.tensor([w for flat in flats for w in flat.weights])
        total, count = (together * weights).sum(), 0.0
        alone = torch.zeros(())
        for tree in trees:
            for path in paths(tree):
                line = flatten(path, EOT)
                assert line.position == list(range(len(line))) and set(line.limit) == {len(line)}
                linear = _losses(model, [line], len(line))
                alone = alone + (linear * torch.tensor(line.weights)).sum()
                count += sum(line.weights)
        assert count == weights.sum()
        torch.testing.assert_close(total, alone, rtol=1e-5, atol=1e-4)


def test_mistakes() -> None:
    with pytest.raises(DataError, match="an empty answer"):
        flatten(Node([1], 1.0, [Node([])]), EOT)
    with pytest.raises(DataError, match="row 0 of trees has 3 tokens, more than 2"):
        visibility_of([[flatten(Node([1, 2]), EOT)]], 2)
    assert flatten(Node([], 1.0, [Node([1]), Node([2])]), EOT).tokens == [EOT, 1, EOT, 2]
