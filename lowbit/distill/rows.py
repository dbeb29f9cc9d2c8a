"""A micro-batch's hidden states as stored bits: logits chunk by chunk, targets of each chunk, bits of all of them.

    logits = hidden @ head      targets = estimator(logits)      words = pack(encode(targets))

Estimators and codec are defined in PyTorch (`estimators`, `codec`), which is what runs on a CPU. On a GPU the Triton
kernels of `lowbit.distill.kernels` do the same with a handful of launches, after a check against those definitions;
if that fails, a warning says so and PyTorch serves. With the kernels nothing here waits for the device: the words, how
many there are and whether the logits were finite are on their way to the host when `Rows` is handed out, and looked at
when asked for, a micro-batch later.

The bytes depend on the kind of device, as matrix products and exponentials do. On one kind of device a row's depend on
nothing but its micro-batch: not on the number of processes, nor on interruptions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.distill.blocks import Distributions
from lowbit.distill.codec import Layout, encode, pack
from lowbit.distill.estimators import Chosen, sampler
from lowbit.distill.fast import Kernels, takes, wrong
from lowbit.distill.noise import Noise, Places
from lowbit.errors import NonFiniteError
from lowbit.models.lm_head import default_chunk, token_chunks

T = TypeVar("T")

_ROWS = 8192
"""Most positions at once in PyTorch: with a small vocabulary, what is looked at of each weighs more than its logits."""


@dataclass(frozen=True)
class Head:
    """From hidden states to distributions."""

    matrix: Tensor
    """[padded_vocab, width] in the compute type."""
    softcap: float | None
    temperature: float


@dataclass(frozen=True)
class Rows:
    """Stored bits of a micro-batch that a GPU may still be making."""

    words: Tensor
    """int32: as many as `sizes` sum to, and more."""
    sizes: Tensor
    """int64 [B]: words of each sample."""
    sums: Tensor
    """FP64 [6]: rows with targets, their entropies, named entries and rest; bad rows, and the first of them."""
    ready: torch.cuda.Event | None
    sample: int
    length: int

    def wait(self) -> tuple[Tensor, Tensor, Tensor]:
        """On the CPU: words int32 [W], words of each sample int64 [B], and the sums that records keep, FP64 [4].

        Raises: NonFiniteError where the teacher's logits are not finite.
        """
        if self.ready is not None:
            self.ready.synchronize()
        sums = self.sums.tolist()
        if sums[4]:
            sample, position = divmod(int(sums[5]), self.length)
            raise NonFiniteError(
                f"the teacher's logits are not finite at sample {self.sample + sample}, position {position}: "
                "the shards written so far are good; look at the teacher's precision and checkpoint"
            )
        words = self.words[: int(self.sizes.sum())].clone()  # the rest, and memory that is page-locked, goes
        return words, self.sizes.clone(), self.sums[:4]


class RowMaker:
    """Makes the rows of one cache."""

    def __init__(self, layout: Layout, noise: Noise, head: Head) -> None:
        self.layout, self.noise, self.head = layout, noise, head
        self._sampler = sampler(layout.estimator)
        device, settings = head.matrix.device, (head.softcap, head.temperature, head.matrix.dtype)
        fast = takes(layout, device) and wrong(layout, *settings, device) is None
        self._kernels = Kernels.of(layout, noise, head.softcap, head.temperature, device) if fast else None

    def __call__(self, hidden: Tensor, weights: Tensor, sample: int) -> Rows:
        """Rows of hidden states [B * T, width] and weights [B, T] of the next tokens (0: not learned, an empty row);
        sample: the first one's global number."""
        size, length = weights.shape
        places = Places.of(size, length, sample, hidden.device)
        counted = weights.flatten() != 0
        if self._kernels is None:
            chosen = self._chosen(hidden, places)
            fields = encode(self.layout, chosen.kept, chosen.entropy, self.noise, places, counted)
            words, sizes = pack(*fields, size)
            words = words.to(torch.int32)
        else:
            chosen = self._kernels.chosen(hidden, places, self.head.matrix)
            words, sizes = self._kernels.encoded(chosen, places, counted, size)
        return _on_the_way(words, sizes, _sums(chosen, counted), sample, length)

    def _chosen(self, hidden: Tensor, places: Places) -> Chosen:
        """In PyTorch."""
        matrix, vocab_size = self.head.matrix, self.layout.vocab_size
        parts = []
        for chunk in token_chunks(len(hidden), min(_ROWS, default_chunk(hidden.device.type, len(matrix)))):
            logits = hidden[chunk] @ matrix.t()
            p = Distributions(logits, vocab_size, self.head.softcap, self.head.temperature)
            kept = self._sampler(p, self.layout.targets, self.noise, places[chunk])
            parts.append(Chosen(kept, p.entropy, p.lse))
        return Chosen.cat(parts)


def one_behind(begun: Iterable[T]) -> Iterator[T]:
    """What is begun, each when the next one has been begun, too: a device has work while the host looks at one."""
    latest: list[T] = []
    for following in begun:
        yield from latest
        latest = [following]
    yield from latest


def _sums(chosen: Chosen, counted: Tensor) -> Tensor:
    """`Rows.sums`."""
    bad = ~torch.isfinite(chosen.lse)
    each = torch.stack([torch.ones_like(chosen.lse), chosen.entropy, chosen.kept.named.double(), chosen.kept.rest])
    sums = torch.where(counted, each, 0.0).sum(dim=1)
    return torch.cat([sums, torch.stack([bad.sum(), bad.int().argmax()]).double()])


def _on_the_way(words: Tensor, sizes: Tensor, sums: Tensor, sample: int, length: int) -> Rows:
    """Off to the CPU; from a GPU into page-locked memory, without waiting."""
    here = [tensor.to("cpu", non_blocking=True) for tensor in (words, sizes, sums)]
    ready = None
    if words.is_cuda:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(words.device))
    return Rows(here[0], here[1], here[2], ready, sample, length)
