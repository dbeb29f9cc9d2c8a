"""Conversations whose answers share a prompt, as one row of tokens that computes the prompt once.

A tree's nodes are pieces of text; a path from the root to a leaf is one conversation. Written parents first (depth
first), the descendants of a token are one interval, which is all that the visibility rule needs: the token is visible
until its node's subtree ends. Position is depth, so that each path is computed exactly as if it stood alone.

What follows a node's last token depends on the branch. Each branch therefore begins with its own copy of that token,
whose target is the branch's first token, and the node itself ends one token earlier:

    prompt a b c, answers d e and f:      input   a b | c d e | c f
                                          target  b c | d e . | f .        . the end-of-text token
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lowbit.errors import DataError
from lowbit.models.visibility import Visibility


@dataclass(frozen=True)
class Node:
    """A piece of a conversation and what may follow it."""

    tokens: Sequence[int]
    weight: float = 1.0
    """Of its tokens as targets, and of the end-of-text token behind a leaf."""
    children: Sequence["Node"] = ()


@dataclass
class FlatTree:
    """A tree as a row; lists of one length."""

    tokens: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    limit: list[int] = field(default_factory=list)
    """One past the last token that sees this one, counted in this row."""
    position: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


def flatten(root: Node, eot_id: int) -> FlatTree:
    """A tree with the end-of-text token in front, as documents have it. Raises DataError for an empty leaf."""
    flat = FlatTree()
    _flatten(flat, root, eot_id, 0, eot_id)
    return flat


def _flatten(flat: FlatTree, node: Node, before: int, depth: int, eot_id: int) -> None:
    """Append a node that follows the token `before`, which stands at `depth`."""
    path = [before, *node.tokens]
    weights = [node.weight] * len(node.tokens)
    if not node.children:
        if not node.tokens:
            raise DataError("a conversation ends in an empty answer: leave the branch out")
        path.append(eot_id)
        weights.append(node.weight)
    begin = len(flat)
    flat.tokens += path[:-1]
    flat.targets += path[1:]
    flat.weights += weights
    flat.position += range(depth, depth + len(path) - 1)
    flat.limit += [0] * (len(path) - 1)
    for child in node.children:
        _flatten(flat, child, path[-1], depth + len(path) - 1, eot_id)
    flat.limit[begin : begin + len(path) - 1] = [len(flat)] * (len(path) - 1)


def paths(root: Node) -> list[Node]:
    """Every conversation of a tree by itself, as a tree without branches; shared tokens have weight in the first."""
    found: list[list[Node]] = []

    def walk(node: Node, above: list[Node]) -> None:
        chain = [*above, node]
        if not node.children:
            found.append(chain)
            return
        for child in node.children:
            walk(child, chain)

    walk(root, [])
    seen: set[int] = set()
    alone = []
    for chain in found:
        path: Node | None = None
        for node in reversed(chain):
            weight = 0.0 if id(node) in seen else node.weight
            path = Node(node.tokens, weight, () if path is None else (path,))
        seen |= {id(node) for node in chain}
        assert path is not None
        alone.append(path)
    return alone


def visibility_of(rows: Sequence[Sequence[FlatTree]], length: int) -> Visibility:
    """The rule of a batch whose rows hold these trees one after the other, then padding up to `length` tokens.

    Raises: DataError when a row is longer.
    """
    index = torch.arange(length, dtype=torch.int32).repeat(len(rows), 1)
    limit, position = index + 1, torch.zeros_like(index)
    for row, trees in enumerate(rows):
        begin = 0
        for tree in trees:
            end = begin + len(tree)
            if end > length:
                raise DataError(f"row {row} of trees has {sum(map(len, trees))} tokens, more than {length}")
            limit[row, begin:end] = torch.tensor(tree.limit, dtype=torch.int32) + begin
            position[row, begin:end] = torch.tensor(tree.position, dtype=torch.int32)
            begin = end
    return Visibility(index, limit, position)
