"""Triton kernels in place of estimator and codec: when, and whether they do the same here.

A cache's kernels are checked once a process with its own settings, on random logits, against what defines them. If
they fail, to compile or to agree, a warning names them and PyTorch serves. So are those that read a cache.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from lowbit.distill.blocks import Distributions
from lowbit.distill.codec import Decoded, Layout, decode, encode, pack
from lowbit.distill.estimators import Chosen, sampler
from lowbit.distill.noise import Noise, Places
from lowbit.errors import in_a_line
from lowbit.models.lm_head import default_chunk, token_chunks

logger = logging.getLogger("lowbit")

Reader = Callable[[Tensor, Tensor, int], Decoded]
"""Words int32, first word of each sample int64 [B], T -> targets of B samples of T positions."""
MOST_TOKENS = 1 << 18
"""Largest vocabulary that the kernels take: a program holds the sums of a row's blocks."""


@dataclass(frozen=True)
class Kernels:
    """Those of one cache."""

    targets: int
    choose: Callable[[Tensor, Places, Tensor, Chosen], None]
    """`Chooser`."""
    encode: Callable[[Chosen, Places, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    """`Encoder`."""
    key: Tensor
    """int64 [2] on the device: of the noise."""

    @staticmethod
    def of(layout: Layout, noise: Noise, softcap: float | None, temperature: float, device: torch.device) -> "Kernels":
        from lowbit.distill.kernels.choose import Chooser
        from lowbit.distill.kernels.encode import Encoder

        chooser = Chooser(layout.estimator, layout.targets, layout.vocab_size, softcap, temperature)
        encoder = Encoder(layout, layout.levels().double().to(device))
        return Kernels(layout.targets, chooser, encoder, torch.tensor(noise.key, device=device))

    def chosen(self, hidden: Tensor, places: Places, matrix: Tensor) -> Chosen:
        """Targets of hidden states [N, width], by chunks of logits."""
        out = Chosen.empty(len(hidden), self.targets, hidden.device)
        for chunk in token_chunks(len(hidden), default_chunk(hidden.device.type, len(matrix))):
            self.choose(hidden[chunk] @ matrix.t(), places[chunk], self.key, out[chunk])
        return out

    def encoded(self, chosen: Chosen, places: Places, counted: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Words int32, of which the first are used, and words of each sample int64 [samples]."""
        return self.encode(chosen, places, self.key, counted, samples)


def takes(layout: Layout, device: torch.device) -> bool:
    """Whether there are kernels for this: on NVIDIA's GPUs, up to a vocabulary of 262,144."""
    return device.type == "cuda" and torch.version.cuda is not None and layout.vocab_size <= MOST_TOKENS


@cache
def wrong(
    layout: Layout, softcap: float | None, temperature: float, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the kernels cannot be used for a cache, with a warning the first time; None if they can."""
    return _told("choose and code", layout, lambda: difference(layout, softcap, temperature, dtype, device))


@cache
def reader(layout: Layout, device: torch.device) -> Reader:
    """What reads a layout's bits on a device: `codec.decode`, or kernels that do the same."""
    if takes(layout, device) and _told("read", layout, lambda: misread(layout, device)) is None:
        return _decoder(layout)
    return partial(decode, layout)


def _told(do: str, layout: Layout, check: Callable[[], str | None]) -> str | None:
    """What a check finds, or why it could not be made, with a warning."""
    try:
        why = check()
    except torch.OutOfMemoryError:  # which says nothing of the kernels
        raise
    except Exception as error:  # whatever a compiler or a driver may raise
        why = in_a_line(error)
    if why is not None:
        what = f"{layout.targets} targets of {layout.vocab_size:,} tokens by {layout.estimator.value}"
        logger.warning("the kernels that %s %s are not used here, PyTorch is: %s", do, what, why)
    return why


def _decoder(layout: Layout) -> Reader:
    from lowbit.distill.kernels.decode import Decoder

    return Decoder(layout)


def misread(layout: Layout, device: torch.device) -> str | None:
    """What the kernels read otherwise than PyTorch on a CPU, in words; None if it is nothing."""
    samples, length = 4, 16
    rows = samples * length
    noise, places, counted = Noise(1, "check"), Places.of(samples, length), torch.arange(rows) % 5 != 1
    p = Distributions(_logits(rows, layout.vocab_size), layout.vocab_size)
    kept = sampler(layout.estimator)(p, layout.targets, noise, places)
    words, sizes = pack(*encode(layout, kept, p.entropy, noise, places, counted), samples)
    words, starts = words.to(torch.int32), sizes.cumsum(0) - sizes
    wanted, found = decode(layout, words, starts, length), _decoder(layout)(words.to(device), starts.to(device), length)
    for what in ("ids", "entropy"):
        if not torch.equal(getattr(found, what).cpu(), getattr(wanted, what)):
            return f"{what} differ"
    return None if torch.allclose(found.weights.cpu(), wanted.weights, rtol=1e-5, atol=1e-6) else "weights differ"


def _logits(rows: int, vocab_size: int) -> Tensor:
    """Random ones, flat to peaked, FP32 [rows, vocab]."""
    spread = torch.linspace(0.5, 8, rows)[:, None]
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * spread


def difference(
    layout: Layout, softcap: float | None, temperature: float, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What the kernels do otherwise than PyTorch on a CPU, in words; None if it is nothing."""
    samples, length = 4, 16
    rows = samples * length
    logits = _logits(rows, layout.vocab_size).to(dtype)
    noise, places, counted = Noise(1, "check"), Places.of(samples, length), torch.arange(rows) % 5 != 1
    p = Distributions(logits.clone(), layout.vocab_size, softcap, temperature)
    wanted = Chosen(sampler(layout.estimator)(p, layout.targets, noise, places), p.entropy, p.lse)

    kernels = Kernels.of(layout, noise, softcap, temperature, device)
    out = Chosen.empty(rows, layout.targets, device)
    there = places.to(device)
    kernels.choose(logits.to(device), there, kernels.key, out)
    found = out.to("cpu")
    why = _other_choice(found, wanted)
    if why is not None:
        return why
    words, sizes = pack(*encode(layout, found.kept, found.entropy, noise, places, counted), samples)
    got, got_sizes = (t.cpu() for t in kernels.encoded(out, there, counted.to(device), samples))
    same = torch.equal(got_sizes, sizes) and torch.equal(got[: len(words)], words.to(torch.int32))
    return None if same else "the codes differ"


def _other_choice(found: Chosen, wanted: Chosen) -> str | None:
    """How two choices differ by more than arithmetic explains: a few rows may, where a number lies at a boundary."""
    for what in ("lse", "entropy"):
        if not torch.allclose(getattr(found, what), getattr(wanted, what), rtol=1e-5, atol=1e-5):
            return f"{what} differs"
    ids = [_surely_chosen(one).sort(dim=1).values for one in (found, wanted)]
    same = (ids[0] == ids[1]).all(dim=1) & (found.kept.named == wanted.kept.named)
    if float(same.float().mean()) < 0.8:
        return f"other tokens are chosen in {int((~same).sum())} of {len(same)} rows"
    for what in ("weights", "rest"):
        ours, theirs = (getattr(one.kept, what)[same] for one in (found, wanted))
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-9):
            return f"{what} of the same tokens differ"
    return None


def _surely_chosen(chosen: Chosen) -> Tensor:
    """Ids, -1 for those without weight. Where all entries are named with exact weights, of which the last is the least
    (topk), also for what equals it: any of more such tokens than there was room for may have been taken.
    """
    ids, weights, rest = chosen.kept.ids, chosen.kept.weights, chosen.kept.rest
    all_exact = (chosen.kept.named == ids.shape[1]) & (rest > 0)
    least = torch.where(all_exact, weights[:, -1] * (1 + 1e-6), 0.0)
    return torch.where(weights > least[:, None], ids, -1)
