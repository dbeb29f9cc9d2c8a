"""Several answers to each prompt, sampled together as a tree: the prompt is read once and its keys are stored once.

A row of the batch is a prompt. Each step feeds one token for each of its K branches, which therefore lie in the cache
one after the other: prompt, then the first tokens of all branches, then the second ones, ... Who sees whom is the
visibility rule on *logical* indices, not on slots: the prompt has 0 .. P - 1, branch k its own range of N numbers,

    branch k, token t:  start = P + k N + t,  limit = P + (k + 1) N        prompt, token j:  start = j,  limit = P + K N

A slot that holds nothing yet starts beyond every query. Positions are depths: P + t in every branch.
"""

import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig
from lowbit.infer.cache import StaticKVCache

NOBODY = torch.iinfo(torch.int32).max
"""The start of a slot that no query sees."""


class TreeKVCache(StaticKVCache):
    """A `StaticKVCache` whose rows are trees; feed the prompts, then once for each token of the branches."""

    def __init__(
        self,
        config: ModelConfig,
        prompts: list[int],
        branches: int,
        new_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`prompts`: their lengths. `branches`, `new_tokens`: of each prompt, and of each branch."""
        longest = max(prompts)
        super().__init__(
            config, len(prompts), longest + branches * new_tokens, dtype, device, depth=longest + new_tokens
        )
        self.branches, self.new_tokens = branches, new_tokens
        self._prompts = torch.tensor(prompts, dtype=torch.int32, device=device)[:, None]  # [B, 1]
        self._steps = -1
        shape = (len(prompts), self.max_length)
        self.start = torch.full(shape, NOBODY, dtype=torch.int32, device=device)
        self.limit = torch.zeros(shape, dtype=torch.int32, device=device)
        self.depth = torch.zeros(shape, dtype=torch.int32, device=device)
        """Position of each slot's token."""
        self._now = self._of_prompts(longest)

    def _of_prompts(self, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """start, limit and position of the prompts' tokens, int32 [B, longest]; padding sees only itself."""
        index = torch.arange(longest, dtype=torch.int32, device=self.start.device).expand(len(self.start), -1)
        end = self._prompts + self.branches * self.new_tokens
        real = index < self._prompts
        return index, torch.where(real, end, index + 1), index

    def _of_step(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the branches' tokens in the present step, int32 [B, K]."""
        branch = torch.arange(self.branches, dtype=torch.int32, device=self.start.device)
        begin = self._prompts + branch * self.new_tokens
        return begin + self._steps, begin + self.new_tokens, (self._prompts + self._steps).expand_as(begin)

    def positions(self, new_tokens: int) -> Tensor:
        """Depth of the next tokens: int64 [B, T]."""
        return self._now[2].long()

    def mask(self, new_tokens: int, window: int | None) -> Tensor:
        """Which slots the next tokens see, themselves included: bool [B, 1, T, S]."""
        extent = self.extent(new_tokens)
        slots = (self.lengths[:, None] + torch.arange(new_tokens, device=self.lengths.device)).clamp(max=extent - 1)
        start, limit, depth = (
            stored[:, :extent].scatter(1, slots, now)
            for stored, now in zip((self.start, self.limit, self.depth), self._now, strict=True)
        )
        query = self._now[0][:, :, None]  # its own start is a token's logical index
        seen = (start[:, None] <= query) & (query < limit[:, None])
        if window is not None:
            seen = seen & (self._now[2][:, :, None] - depth[:, None] < window)
        return seen[:, None]

    def advance_prompts(self) -> None:
        """Count the prompts as read; the next forward takes the branches' first tokens."""
        slots = torch.arange(self._now[0].shape[1], device=self.start.device)
        real = slots < self._prompts
        for stored, now, nothing in zip((self.start, self.limit, self.depth), self._now, (NOBODY, 0, 0), strict=True):
            stored[:, : len(slots)] = torch.where(real, now, nothing)
        self.advance(self._prompts[:, 0].tolist())
        self._steps = 0
        self._now = self._of_step()

    def advance_branches(self) -> None:
        """Count one token of every branch."""
        slots = self.lengths[:, None] + torch.arange(self.branches, device=self.start.device)
        for stored, now in zip((self.start, self.limit, self.depth), self._now, strict=True):
            stored.scatter_(1, slots, now)
        self.advance([self.branches] * len(self.start))
        self._steps += 1
        self._now = self._of_step()
