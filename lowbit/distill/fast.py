"""Triton kernels in place of estimator and codec: when, and whether they do the same here.

A cache's kernels are checked once a process with its own settings, on random logits, against what defines them. If
they fail, to compile or to agree, a warning names them and PyTorch serves.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowbit.distill.blocks import Distributions
from lowbit.distill.codec import Layout, encode, pack
from lowbit.distill.estimators import Chosen, sampler
from lowbit.distill.noise import Noise, Places
from lowbit.errors import in_a_line
from lowbit.models.lm_head import default_chunk, token_chunks

logger = logging.getLogger("lowbit")

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
    try:
        why = difference(layout, softcap, temperature, dtype, device)
    except torch.OutOfMemoryError:  # which says nothing of the kernels
        raise
    except Exception as error:  # whatever a compiler or a driver may raise
        why = in_a_line(error)
    if why is not None:
        what = f"{layout.targets} targets of {layout.vocab_size:,} tokens by {layout.estimator.value}"
        logger.warning("the kernels that choose and code %s are not used here, PyTorch is: %s", what, why)
    return why


def difference(
    layout: Layout, softcap: float | None, temperature: float, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What the kernels do otherwise than PyTorch on a CPU, in words; None if it is nothing."""
    samples, length, generator = 4, 16, torch.Generator().manual_seed(1)
    rows = samples * length
    spread = torch.linspace(0.5, 8, rows)[:, None]
    logits = (torch.randn(rows, layout.vocab_size, generator=generator) * spread).to(dtype)
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
