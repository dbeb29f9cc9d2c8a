"""Visibility against a mask spelled out in plain Python from document numbers."""

import itertools

import pytest
import torch

from lowbit.errors import DataError
from lowbit.models.attention import dense_mask
from lowbit.models.visibility import Visibility, causal, documents, prefixes, without_padding


def test_causal_is_the_lower_triangle() -> None:
    rule = causal(2, 7)
    rule.validate()
    assert torch.equal(dense_mask(rule), torch.ones(7, 7).tril().bool().expand(2, 1, 7, 7))
    assert rule.position.tolist() == [list(range(7))] * 2


def test_documents_see_only_themselves() -> None:
    torch.manual_seed(3)
    first = torch.rand(4, 33) < 0.2
    first[3] = True
    rule = documents(first)
    rule.validate()
    mask = dense_mask(rule)
    for row in range(4):
        number, depth, numbers = 0, -1, []
        for token in range(33):
            if first[row, token] and token:
                number, depth = number + 1, -1
            depth += 1
            numbers.append(number)
            assert rule.position[row, token] == depth
        for i in range(33):
            for j in range(33):
                assert bool(mask[row, 0, i, j]) == (j <= i and numbers[i] == numbers[j])


def test_one_document_is_causal() -> None:
    rule, expected = documents(torch.zeros(2, 9, dtype=torch.bool)), causal(2, 9)
    for name in ("start", "limit", "position"):
        assert torch.equal(getattr(rule, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("start", 4, "start[1, 3] = 4 of token 3 in row 1"),
        ("start", -1, "start[1, 3] = -1 of token 3 in row 1"),
        ("limit", 3, "limit[1, 3] = 3 of token 3 in row 1"),
        ("limit", 9, "limit[1, 3] = 9 of token 3 in row 1"),
        ("position", 8, "position[1, 3] = 8 of token 3 in row 1"),
        ("position", -1, "position[1, 3] = -1 of token 3 in row 1"),
    ],
)
def test_validate_names_the_token(name: str, value: int, told: str) -> None:
    rule = causal(2, 8)
    getattr(rule, name)[1, 3] = value
    with pytest.raises(DataError) as error:
        rule.validate(max_sequence=8)
    assert told in str(error.value)


def test_validate_names_a_wrong_type_or_shape() -> None:
    rule = causal(2, 8)
    with pytest.raises(DataError, match=r"visibility\.limit must be int32"):
        Visibility(rule.start, rule.limit.long(), rule.position).validate()
    with pytest.raises(DataError, match=r"visibility\.position must be int32"):
        Visibility(rule.start, rule.limit, rule.position[:, 1:]).validate()
    with pytest.raises(DataError, match="bool tensor"):
        documents(torch.zeros(2, 8))


def test_prefixes_see_each_other_and_nothing_of_other_documents() -> None:
    torch.manual_seed(4)
    first, prefix = torch.rand(3, 30) < 0.15, torch.rand(3, 30) < 0.7
    rule = prefixes(first, prefix)
    number = first.long().cumsum(1) * first.any() + torch.where(first[:, :1], 0, 1)
    rule.validate(document=number)
    mask = dense_mask(rule)
    for row in range(3):
        begins = [0, *(t for t in range(1, 30) if first[row, t])]
        for begin, end in zip(begins, [*begins[1:], 30], strict=True):
            span = begin
            while span < end and prefix[row, span]:
                span += 1
            for i in range(begin, end):
                seen = [j for j in range(30) if mask[row, 0, i, j]]
                assert seen == list(range(begin, max(i + 1, span if i < span else 0)))


def test_padding_sees_itself_alone() -> None:
    real = torch.arange(10)[None] < torch.tensor([[10], [6], [1]])
    rule = without_padding(documents(torch.arange(10).expand(3, 10) % 4 == 0), real)
    rule.validate()
    mask, plain = dense_mask(rule)[:, 0], dense_mask(documents(torch.arange(10).expand(3, 10) % 4 == 0))[:, 0]
    for row in range(3):
        for i in range(10):
            expected = plain[row, i] & real[row] if real[row, i] else torch.arange(10) == i
            assert torch.equal(mask[row, i], expected)


def test_validation_of_documents_and_trees_names_the_token() -> None:
    rule = documents(torch.arange(8).expand(2, 8) % 4 == 0)
    number = (torch.arange(8) // 4).expand(2, 8)
    rule.validate(document=number, tree=True)
    rule.limit[1, 2] = 6
    with pytest.raises(DataError, match=r"limit\[1, 2\] = 6 of token 2 in row 1: lies beyond the end of its document"):
        rule.validate(document=number)
    rule.limit[1, 2], rule.start[0, 5] = 4, 3
    with pytest.raises(DataError, match=r"start\[0, 5\] = 3 of token 5 in row 0: is a token of another document"):
        rule.validate(document=number)
    rule.start[0, 5] = 5
    rule.limit[0, 1] = 3  # a branch of tokens 1 and 2
    rule.limit[0, 2] = 3
    rule.validate(document=number, tree=True)
    rule.limit[0, 2] = 4
    with pytest.raises(DataError, match=r"limit\[0, 2\] = 4 of token 2 in row 0: ends behind that of a token"):
        rule.validate(document=number, tree=True)


def _rule(start: list[int], limit: list[int]) -> Visibility:
    row = torch.tensor([start, limit, list(range(len(start)))], dtype=torch.int32)
    return Visibility(*row[:, None])


def test_a_tree_in_which_a_branch_sees_another_is_refused_and_no_other() -> None:
    """All rules of four tokens. In a tree the tokens that a token sees before it see no token that does not see them:
    what has been seen in one branch goes on being seen until the branch ends."""
    with pytest.raises(DataError, match=r"start\[0, 2\] = 1 of token 2 in row 0: lies in a branch that has ended"):
        _rule([0, 1, 1], [3, 2, 3]).validate(tree=True)
    count = 4
    good = 0
    for start in itertools.product(*(range(i + 1) for i in range(count))):
        for limit in itertools.product(*(range(i + 1, count + 1) for i in range(count))):
            nested = all(limit[j] <= limit[i] for i in range(count) for j in range(i, limit[i]))
            mutual = all(limit[query] > key for key in range(count) for query in range(start[key], key))
            rule = _rule(list(start), list(limit))
            if nested and mutual:
                rule.validate(tree=True)
                good += 1
            else:
                with pytest.raises(DataError, match=r"visibility\.(start|limit)\[0, \d\]"):
                    rule.validate(tree=True)
    assert good > 14


@pytest.mark.parametrize(
    "document", [torch.zeros(1, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3)]
)
def test_documents_of_another_shape_or_type_are_one_line(document: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"document must be int \[batch, tokens\] like start \[1, 3\], got torch"):
        _rule([0, 1, 2], [3, 3, 3]).validate(document=document)
