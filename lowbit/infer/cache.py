"""The KV cache: keys and values of every layer, each row of the batch with its own length.

Rows may hold prompts of different lengths. A prefill writes right-padded prompts from slot 0 on and then moves each
row by its real length; decoding writes one token behind each row. Slots at and beyond a row's length hold leftovers
that no query sees, because query t of a row sees slots 0 .. length + t and nothing else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig
from lowbit.errors import ConfigError
from lowbit.models.attention import cached_mask
from lowbit.models.cost import head_dim_of, kv_owners


class StaticKVCache:
    """Allocated once: 2 x layers with keys of their own x batch x kv_heads x max_length x head_dim of `dtype`."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        depth: int | None = None,
    ) -> None:
        """`max_length`: slots of a row. `depth`: longest sequence in them, where that is less than all of them."""
        depth = max_length if depth is None else depth
        if not 0 < depth <= config.max_sequence:
            raise ConfigError(
                f"a KV cache of {depth} tokens does not fit model.max_sequence={config.max_sequence}: "
                "it must hold between 1 and that many"
            )
        shape = (len(kv_owners(config)), batch, config.kv_heads, max_length, head_dim_of(config))
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.max_length = max_length
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._longest = 0
        self._rows = torch.arange(batch, device=device)[:, None]

    def extent(self, new_tokens: int) -> int:
        """Slots S that hold the longest row and `new_tokens` more; ConfigError when there are fewer."""
        extent = self._longest + new_tokens
        if extent > self.max_length:
            raise ConfigError(
                f"KV cache of {self.max_length} tokens is full: {self._longest} are stored, {new_tokens} more asked for"
            )
        return extent

    def positions(self, new_tokens: int) -> Tensor:
        """Depth of the next T tokens of each row: int64 [B, T]."""
        return self.lengths[:, None] + torch.arange(new_tokens, device=self.lengths.device)

    def mask(self, new_tokens: int, window: int | None) -> Tensor:
        """Which slots the next T tokens see: bool [B, 1, T, S], those up to themselves and within the window."""
        return cached_mask(self.lengths, new_tokens, self.extent(new_tokens), window)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, Hkv, T, D] of one layer behind each row's length; return all of them, [B, Hkv, S, D]."""
        new = k.shape[2]
        slots = self.lengths[:, None] + torch.arange(new, device=k.device)  # [B, T]
        # Indices around a slice put the indexed dimensions first: [B, T, Hkv, D].
        self.keys[layer][self._rows, :, slots] = k.transpose(1, 2).to(self.keys.dtype)
        self.values[layer][self._rows, :, slots] = v.transpose(1, 2).to(self.values.dtype)
        extent = self._longest + new
        return self.keys[layer][:, :, :extent], self.values[layer][:, :, :extent]

    def advance(self, counts: Sequence[int]) -> None:
        """Count the tokens of the last forward that are real: one number a row."""
        if len(counts) != len(self.lengths):
            raise ConfigError(f"KV cache: {len(counts)} counts for {len(self.lengths)} rows")
        self.lengths += torch.tensor(counts, dtype=torch.int64).to(self.lengths.device)
        self._longest += max(counts)
        if len(set(counts)) > 1:
            self._longest = int(self.lengths.max())
