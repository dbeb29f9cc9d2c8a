"""Who attends to whom, from two integers a token.

Key j is visible to query i when start[j] <= i < limit[j]. With start[j] = j this is causal attention, cut off at
limit[j]: the end of j's document in a packed sequence, or of its branch in a tree. A smaller start[j] opens a
bidirectional span (prefix language models). Masks never come from token ids.

`position` is the token's depth for the rotary embedding: it restarts with each document, and siblings in a tree share
it (models/trees.py). A local layer's window is measured in it: there, key j is visible to query i when, besides,
|position[i] - position[j]| < window.

    causal                    start[j] = j          limit[j] = T
    documents                 j                     end of j's document
    prefix, bidirectional     first token of span   end of j's document
    tree, parents first       j                     end of the subtree of j's node
    padding                   j                     j + 1: it sees itself, and nobody sees it
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.errors import DataError

MOST_DOCUMENTS = 65_535
"""What a kernel's grid takes."""
IDLE = 32
"""A kernel for sequences of varying length looks at so many times the blocks that hold tokens, at most: it has room for
the longest document in place of each."""


@dataclass(frozen=True)
class Visibility:
    """Visibility of a batch; three int32 tensors [B, T], and what `with_ends` adds."""

    start: Tensor
    """First query index that sees this key."""
    limit: Tensor
    """One past the last query index that sees this key."""
    position: Tensor
    """Depth of the token, for the rotary embedding."""
    ends: Tensor | None = None
    """Of packed documents: int32 [B T + 1], the token at which each begins, counted row after row, then B T."""
    sizes: Tensor | None = None
    """With `ends`: int64 [2], always on the CPU; documents to look at and tokens of the longest, both rounded up."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Visibility":
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> "Visibility":
        """The same in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def clone(self) -> "Visibility":
        """The same in tensors of its own."""
        return self._each(Tensor.clone)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Visibility":
        ends = None if self.ends is None else change(self.ends)
        return Visibility(change(self.start), change(self.limit), change(self.position), ends, self.sizes)

    def rows(self, count: int) -> "Visibility":
        """Of the first rows alone."""
        return Visibility(self.start[:count], self.limit[:count], self.position[:count])

    def expand(self, batch: int) -> "Visibility":
        """One row's rule for `batch` rows, as views."""
        return Visibility(*(tensor.expand(batch, -1) for tensor in (self.start, self.limit, self.position)))

    def with_ends(self) -> "Visibility":
        """Of a rule on the CPU: the same, with `ends` and `sizes` where it is packed documents and nothing else.

        Tokens of a document are neighbours that see those before them, and their positions follow each other; padding
        is a document by itself. A batch of many short documents and a long one has no `ends`: see `IDLE`.
        """
        rows, length = self.start.shape
        index = torch.arange(length, dtype=torch.int32)
        begins = torch.ones(rows, length, dtype=torch.bool)
        begins[:, 1:] = self.limit[:, :-1] == index[1:]  # nobody before it sees what comes from here on
        goes_on = (self.limit[:, 1:] == self.limit[:, :-1]) & (self.position[:, 1:] == self.position[:, :-1] + 1)
        packed = (self.start == index).all() & (begins[:, 1:] | goes_on).all() & (self.limit[:, -1] == length).all()
        if not packed:
            return self
        first = begins.flatten().nonzero().flatten().int()
        ends = torch.full((rows * length + 1,), rows * length, dtype=torch.int32)
        ends[: len(first)] = first
        documents = min(_rounded_up(len(first), 16), rows * length)
        longest = min(_rounded_up(int(ends[: len(first) + 1].diff().max()), 128), length)
        if documents > MOST_DOCUMENTS or documents * -(-longest // 128) > IDLE * -(-rows * length // 128):
            return self
        return replace(self, ends=ends, sizes=torch.tensor([documents, longest]))

    def validate(self, max_sequence: int | None = None, document: Tensor | None = None, tree: bool = False) -> None:
        """Check shapes, types and ranges, and that every token sees itself (else its softmax would be empty).

        Args:
            max_sequence: positions lie below it.
            document: int [B, T], the number of each token's document: nothing is visible across two of them.
            tree: a branch lies inside the one it leaves, and no token sees one of a branch that begins behind its own.

        Raises:
            DataError: names the row and the token. Reads values, so on a GPU it waits for them.
        """
        shape = self.start.shape
        for name in ("start", "limit", "position"):
            tensor = getattr(self, name)
            if tensor.dim() != 2 or tensor.shape != shape or tensor.dtype != torch.int32:
                raise DataError(
                    f"visibility.{name} must be int32 [batch, tokens] like start {list(shape)}, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
        index = torch.arange(shape[1], device=self.start.device)
        self._require(
            (self.start >= 0) & (self.start <= index), "start", "must lie in 0..token, so that it sees itself"
        )
        self._require(
            (self.limit > index) & (self.limit <= shape[1]), "limit", "must lie in token+1..tokens in the row"
        )
        end = torch.iinfo(torch.int32).max if max_sequence is None else max_sequence
        self._require((self.position >= 0) & (self.position < end), "position", f"must lie in 0..{end - 1}")
        if document is not None:
            if document.shape != shape or document.dtype.is_floating_point or document.dtype.is_complex:
                raise DataError(
                    f"document must be int [batch, tokens] like start {list(shape)}, "
                    f"got {document.dtype} {list(document.shape)}"
                )
            here = document.gather(1, self.start.long())
            self._require(here == document, "start", "is a token of another document")
            here = document.gather(1, self.limit.long() - 1)
            self._require(here == document, "limit", "lies beyond the end of its document")
        if tree:
            nested, open_since = self._branches()
            self._require(nested, "limit", "ends behind that of a token it descends from")
            self._require(self.start >= open_since, "start", "lies in a branch that has ended, which would see it")

    def is_causal(self) -> bool:
        """Whether every token sees all before it and nothing else. Reads values, so on a GPU it waits for them."""
        index = torch.arange(self.start.shape[1], device=self.start.device)
        return bool(((self.start == index) & (self.limit == len(index))).all())

    def _branches(self) -> tuple[Tensor, Tensor]:
        """For each token, [B, T]: whether its limit lies within those of all tokens before it that it sees, and one
        past the last token before it that it does not see."""
        nested = torch.ones_like(self.start, dtype=torch.bool)
        since = torch.zeros_like(self.start)
        for row, limits in enumerate(self.limit.tolist()):
            seen: list[int] = []  # by the present token, the innermost last
            ended = 0
            for token, limit in enumerate(limits):
                while seen and limits[seen[-1]] <= token:
                    ended = max(ended, seen.pop() + 1)
                if seen and limit > limits[seen[-1]]:
                    nested[row, token] = False
                since[row, token] = ended
                seen.append(token)
        return nested, since

    def _require(self, good: Tensor, name: str, rule: str) -> None:
        if bool(good.all()):
            return
        row, token = (int(i) for i in (~good).nonzero()[0])
        value = int(getattr(self, name)[row, token])
        raise DataError(f"visibility.{name}[{row}, {token}] = {value} of token {token} in row {row}: {rule}")


def _rounded_up(number: int, least: int) -> int:
    """The next of `least` times 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 ...: at most a quarter more, and few."""
    step = least * (1 << max(0, ((number - 1) // least).bit_length() - 3))
    return -(-number // step) * step


def causal(batch: int, length: int, device: torch.device | str = "cpu") -> Visibility:
    """Plain causal attention over `length` tokens. (`None` in place of a Visibility means the same and is faster.)"""
    index = torch.arange(length, dtype=torch.int32, device=device).expand(batch, length).contiguous()
    return Visibility(index, torch.full_like(index, length), index.clone())


def documents(first: Tensor) -> Visibility:
    """Causal attention inside each document of a packed sequence.

    Args:
        first: bool [B, T], true where a token begins a document. A row's first token always begins one (it may be
            the rest of a document that the cut between sequences has split).
    """
    if first.dim() != 2 or first.dtype != torch.bool:
        raise DataError(f"documents() takes a bool tensor [batch, tokens], got {first.dtype} {list(first.shape)}")
    length = first.shape[1]
    index = torch.arange(length, dtype=torch.int32, device=first.device).expand(first.shape)
    begin = torch.where(first, index, 0).cummax(dim=1).values
    # limit[j] = the first document start behind j: a running minimum from the right, shifted by one.
    next_first = torch.where(first, index, length).roll(-1, dims=1)
    next_first[:, -1] = length
    limit = next_first.flip(1).cummin(dim=1).values.flip(1)
    return Visibility(index.contiguous(), limit.to(torch.int32), (index - begin).to(torch.int32))


def prefixes(first: Tensor, prefix: Tensor) -> Visibility:
    """As `documents`, with spans at the beginning of documents whose tokens all see each other.

    Args:
        first: bool [B, T], true where a token begins a document. prefix: bool [B, T], true for the tokens of such a
            span; those that do not directly follow the beginning of a document, or of its span, count for nothing.
    """
    causal_part = documents(first)
    index = torch.arange(first.shape[1], dtype=torch.int32, device=first.device).expand(first.shape)
    begin = index - causal_part.position
    # A token belongs to the span when no token since its document's beginning is outside of it.
    last_outside = torch.where(prefix, -1, index).cummax(dim=1).values
    return Visibility(torch.where(last_outside < begin, begin, index).int(), causal_part.limit, causal_part.position)


def without_padding(rule: Visibility, real: Tensor) -> Visibility:
    """The same rule with the tokens outside of `real`, bool [B, T], as padding at the end of rows."""
    index = torch.arange(real.shape[1], dtype=torch.int32, device=real.device).expand(real.shape)
    length = real.sum(1, keepdim=True, dtype=torch.int32)
    return Visibility(
        torch.where(real, rule.start, index).int(),
        torch.where(real, torch.minimum(rule.limit, length), index + 1).int(),
        torch.where(real, rule.position, 0).int(),
    )
