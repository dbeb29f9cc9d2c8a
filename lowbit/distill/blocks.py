"""A chunk of teacher distributions, summarised in one pass so that sampling never sorts or scans a whole vocabulary.

The logits [C, V] of a chunk of positions are read once; for each block of 64 columns its greatest logit m, and with
e = exp(z - m) the sums of e and of e (z - m), are kept. Everything else follows from those [C, V / 64] numbers:

    lse      = log sum_b exp(m_b) sum e                     entropy = lse - E[z], without cancellation
    the n greatest logits lie in the n blocks with the greatest m (were one elsewhere, n blocks would hold a greater)
    the item at cumulative probability x lies in the block where the running sum of block masses passes x

so the top-n look at 64 n logits and a draw looks at 64. Sums over blocks are FP64; probabilities are accurate to
about 1e-6 of their own size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.models.lm_head import compiled

BLOCK = 64
HIDDEN = float("-inf")


class Distributions:
    """softmax(softcap(logits) / temperature) of C positions, over the first `vocab_size` columns.

    Takes over `logits` ([C, columns], any floating type): padding is set to -inf in place, and `hide` writes there.
    """

    def __init__(self, logits: Tensor, vocab_size: int, softcap: float | None = None, temperature: float = 1.0) -> None:
        logits[:, vocab_size:] = HIDDEN
        if logits.shape[1] % BLOCK:
            logits = F.pad(logits, (0, -logits.shape[1] % BLOCK), value=HIDDEN)
        self.vocab_size = vocab_size
        self._softcap, self._temperature = softcap, temperature
        self._logits = logits
        part = _statistics if logits.device.type == "cpu" else compiled(_statistics)
        greatest, total, moment = part(logits, softcap, temperature)  # [C, B] FP32
        self.block_max: Tensor = greatest
        greatest, total, moment = greatest.double(), total.double(), moment.double()
        top = greatest.amax(dim=1, keepdim=True)  # [C, 1]
        scale = torch.exp(greatest - top)
        self.lse: Tensor = top.squeeze(1) + torch.log((scale * total).sum(dim=1))
        """FP64 [C]; not finite where the logits are not."""
        share = torch.exp(greatest - self.lse[:, None])
        self.mass: Tensor = share * total
        """FP64 [C, B]: probability of each block, without what is hidden."""
        below = torch.where(share > 0, greatest - self.lse[:, None], 0.0)
        self.entropy: Tensor = -(self.mass * below + share * moment).sum(dim=1)
        """FP64 [C], in nats."""

    def gather(self, blocks: Tensor) -> Tensor:
        """Transformed logits of blocks int64 [C, n] -> FP32 [C, n, 64]; -inf where hidden or padding."""
        return _transform(gather_blocks(self._logits, blocks), self._softcap, self._temperature)

    def log_probability(self, ids: Tensor) -> Tensor:
        """FP64 log-probabilities of ids [C, n]."""
        z = _transform(self._logits.gather(1, ids), self._softcap, self._temperature)
        return z.double() - self.lse[:, None]

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities FP64 and ids [C, count] of the likeliest, in falling order, equal ones by rising id;
        of more equal ones than there is room for, any.
        """
        z, ids = largest(self.block_max, self.gather, count)
        return z.double() - self.lse[:, None], ids.clamp_(max=self.vocab_size - 1)

    def whole(self, rows: slice = slice(None)) -> Tensor:
        """Transformed logits FP32 [C, B * 64], for estimators that have to see every one."""
        return _transform(self._logits[rows], self._softcap, self._temperature)

    def hide(self, ids: Tensor, where: Tensor) -> None:
        """Take ids [C, n] (distinct in a row) for which `where` holds out of `gather` and `mass`."""
        self._logits.scatter_(1, ids, torch.where(where, HIDDEN, self._logits.gather(1, ids)))
        blocks = ids // BLOCK
        mass = torch.exp(self.gather(blocks).double() - self.lse[:, None, None]).sum(dim=2)
        self.mass.scatter_(1, blocks, mass)

    def pick(self, points: Tensor) -> Tensor:
        """The items at cumulative masses `points` FP64 [C, n], each in [0, total mass): int64 ids [C, n]."""
        cumulative = self.mass.cumsum(dim=1)
        points = torch.minimum(points, cumulative[:, -1:] * (1 - 2.0**-50))
        block = torch.searchsorted(cumulative, points, right=True).clamp_(max=self.mass.shape[1] - 1)
        within = points - (cumulative - self.mass).gather(1, block)  # [C, n]
        q = torch.exp(self.gather(block).double() - self.lse[:, None, None])  # [C, n, 64]
        inner = q.cumsum(dim=2)
        column = (inner <= within[:, :, None]).sum(dim=2)
        # A rounding error beyond the block's sum: its last item that has any probability.
        numbers = torch.arange(BLOCK, device=q.device)
        last = torch.where(q > 0, numbers, 0).amax(dim=2)
        return (block * BLOCK + torch.minimum(column, last)).clamp_(max=self.vocab_size - 1)


def gather_blocks(values: Tensor, blocks: Tensor) -> Tensor:
    """Blocks int64 [C, n] of values [C, B * 64] -> [C, n, 64], in contiguous pieces."""
    count, columns = values.shape
    first = torch.arange(count, device=values.device)[:, None] * (columns // BLOCK)
    return values.view(-1, BLOCK).index_select(0, (first + blocks).flatten()).view(*blocks.shape, BLOCK)


def largest(block_max: Tensor, gather: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest values and their columns, in falling order, equal ones by rising column: [C, count] each."""
    blocks = block_max.topk(min(count, block_max.shape[1]), dim=1).indices  # [C, n]
    blocks = blocks.sort(dim=1).values
    found = gather(blocks).flatten(1).topk(count, dim=1)
    columns = blocks.gather(1, found.indices // BLOCK) * BLOCK + found.indices % BLOCK
    order = columns.argsort(dim=1)
    order = order.gather(1, found.values.gather(1, order).argsort(dim=1, descending=True, stable=True))
    return found.values.gather(1, order), columns.gather(1, order)


def _transform(logits: Tensor, softcap: float | None, temperature: float) -> Tensor:
    z = logits.float()
    if softcap is not None:
        z = torch.where(z == HIDDEN, z, softcap * torch.tanh(z / softcap))
    return z if temperature == 1.0 else z / temperature


def _statistics(logits: Tensor, softcap: float | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per block of 64: the greatest z, the sum of e = exp(z - greatest), and the sum of e (z - greatest)."""
    z = _transform(logits, softcap, temperature).view(len(logits), -1, BLOCK)  # [C, B, 64]
    greatest = z.amax(dim=2)
    below = z - torch.where(greatest == HIDDEN, 0.0, greatest)[:, :, None]
    e = torch.exp(below)
    return greatest, e.sum(dim=2), torch.where(e > 0, e * below, 0.0).sum(dim=2)
