"""The KV cache: keys and values of every layer in blocks, and the views of it that a forward pass works on.

    memory   [layers with keys of their own, blocks x tokens of a block, kv_heads, head_dim], keys and values
    table    [rows, blocks of a row]: where each row's tokens are; token p of a row is at table[p // B] * B + p % B

Which block belongs to whom is `blocks.BlockPool`'s business. Sharing a block is naming it in two tables, so the samples
of a prompt store it once, and a row moves to another slot by moving its table. (Earlier the samples of a prompt were
branches of a tree, one row, whose attention went over all branches' tokens for each of them and whose branches had to
end together: blocks share as much, and each sample comes and goes alone.)

A `View` is what `Transformer.forward` gets as its cache: T new tokens of R rows. A prefill whose rows all begin at 0
attends to what it has just computed; decoding on a GPU has kernels of its own (`kernels/`); everything else gathers
the rows' keys and calls `attention`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig
from lowbit.configs.schema_model import head_dim_of
from lowbit.infer import kernels
from lowbit.infer.kv_codec import KvCodec
from lowbit.infer.lines import Begun
from lowbit.infer.unfinished import Unfinished
from lowbit.models.attention import attention, cached_mask
from lowbit.models.cost import kv_owners
from lowbit.models.rope import Rope


class PagedCache:
    """The memory; allocated once."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block: int,
        codec: KvCodec,
        device: torch.device | str,
        old: "PagedCache | None" = None,
    ) -> None:
        """`block`: tokens of one. `old`: a smaller cache, whose contents come first."""
        self.block, self.codec, self.softcap = block, codec, config.attention_softcap
        layers = len(kv_owners(config))
        shape = (layers, blocks * block, config.kv_heads, head_dim_of(config))
        self.keys = torch.zeros(shape, dtype=codec.dtype, device=device)
        self.values = torch.zeros(shape, dtype=codec.dtype, device=device)
        scales = shape[:3] if codec.largest is not None else (layers, 0, config.kv_heads)
        self.key_scales = torch.zeros(scales, device=device)
        self.value_scales = torch.zeros(scales, device=device)
        if old is not None:
            for mine, its in zip(self._memory, old._memory, strict=True):
                mine[:, : its.shape[1]] = its

        self.kernels = kernels.handles(self.keys)
        """Whether the decoding kernels take it."""

    @property
    def _memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(memory.nbytes for memory in self._memory)

    def memory(self, layer: int) -> kernels.Memory:
        """Of one layer."""
        return self.keys[layer], self.values[layer], self.key_scales[layer], self.value_scales[layer]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, int64 [n] each."""
        for memory in self._memory:
            if memory.shape[1]:
                blocks = _bytes(memory).view(memory.shape[0], -1, self.block, *memory.shape[2:])
                blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [N, Hkv, D] of one layer to places int64 [N]."""
        for memory, scale_memory, new in (
            (self.keys, self.key_scales, k),
            (self.values, self.value_scales, v),
        ):
            codes, scales = self.codec.encode(new)
            _bytes(memory[layer]).index_copy_(0, slots, _bytes(codes))
            if scales is not None:
                scale_memory[layer].index_copy_(0, slots, scales)

    def gather(self, layer: int, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer in the blocks of a table int64 [R, n] -> [R, Hkv, n B, D] each."""
        found = []
        for memory, scale_memory in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            codes = self._select(_bytes(memory[layer]), table).view(self.codec.dtype)
            scales = None if self.codec.largest is None else self._select(scale_memory[layer], table)
            found.append(self.codec.decode(codes, scales, dtype).transpose(1, 2))
        return found[0], found[1]

    def _select(self, memory: Tensor, table: Tensor) -> Tensor:
        """Whole blocks at a time: [places, ...] -> [R, n B, ...]."""
        blocks = memory.view(-1, self.block * memory[0].numel()).index_select(0, table.flatten())
        return blocks.view(table.shape[0], -1, *memory.shape[1:])


def _bytes(x: Tensor) -> Tensor:
    """FP8 as bytes: PyTorch does not index FP8 tensors everywhere."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


class View:
    """R rows and their next T tokens; a `models.layers.KVCache`."""

    def __init__(
        self,
        cache: PagedCache,
        table: Tensor,
        start: Tensor,
        counts: Tensor | None = None,
        fresh: bool = False,
        begun: Begun | None = None,
    ) -> None:
        """
        Args:
            table: int64 [R, n]. start: int64 [R], tokens that each row has. counts: int64 [R], how many of the new
                ones are real, the others being padding behind them; None: all. fresh: every row starts at 0.
            begun: what is known of a step's new tokens already.
        """
        self.cache, self.table, self.start, self.counts, self.fresh = cache, table, start, counts, fresh
        self._begun = begun
        self._new: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots: Tensor | None = None if begun is None else begun.places

    def rope(self, new_tokens: int, tables: Callable[[Tensor], Rope]) -> Rope:
        """See `models.layers.KVCache`."""
        return tables(self._positions(new_tokens)) if self._begun is None else self._begun.rope

    def _positions(self, new_tokens: int) -> Tensor:
        """Depth of the next T tokens of each row: int64 [R, T]."""
        return self.start[:, None] + torch.arange(new_tokens, device=self.start.device)

    def mask(self, new_tokens: int, window: int | None) -> Any:
        """What `attend` needs to know of a layer's visibility."""
        if self.decodes(new_tokens):
            return window or 0
        if self.fresh:
            if window is None or window >= new_tokens:
                return None
            return cached_mask(self.start[:1] * 0, new_tokens, new_tokens, window)
        return cached_mask(self.start, new_tokens, self.table.shape[1] * self.cache.block, window)

    def decodes(self, new_tokens: int) -> bool:
        """Whether the decoding kernels take it."""
        return new_tokens == 1 and self.cache.kernels

    def attend(self, layer: int, q: Tensor, new: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        """Store the new keys and values, if the layer has its own, and attend: q [R, H, T, D] -> the same.

        Args:
            layer: among those with keys of their own. new: [R, Hkv, T, D] each.
        """
        length = q.shape[2]
        if self.decodes(length):
            return self._attend_decoding(layer, q, new, mask)
        if new is not None:
            k, v = (x.transpose(1, 2).flatten(0, 1) for x in new)  # [R T, Hkv, D]
            self.cache.store(layer, self._write_slots(length), k, v)
            if self.fresh:
                self._new[layer] = new if self.cache.codec.dtype is q.dtype else self._through(new)
        if self.fresh:
            k, v = self._new[layer]
            return attention(q, k, v, mask, softcap=self.cache.softcap)
        k, v = self.cache.gather(layer, self.table, q.dtype)
        if q.is_cuda and k.shape[1] != q.shape[1]:  # no fast kernel takes both a mask and grouped heads
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return attention(q, k, v, mask, softcap=self.cache.softcap)

    def _through(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.cache.codec.through(new[0]), self.cache.codec.through(new[1])

    def _attend_decoding(self, layer: int, q: Tensor, new: tuple[Tensor, Tensor] | None, window: int) -> Tensor:
        if new is not None:
            k, v = (x[:, :, 0] for x in new)
            kernels.store(k, v, self.cache.memory(layer), self._write_slots(1), self.cache.codec.largest)
        return self._decode(layer, q[:, :, 0], window)[:, :, None]

    def decode(
        self,
        layer: int,
        qkv: tuple[Unfinished, Unfinished, Unfinished],
        norms: tuple[Tensor, Tensor, float] | None,
        rope: Rope,
        window: Any,
    ) -> Tensor:
        """A layer's attention from its projections [R, heads * D]: [R, H, D]; see `kernels.turn_and_store`."""
        memory = self.cache.memory(layer)
        q = kernels.turn_and_store(qkv, norms, rope, memory, self._write_slots(1), self.cache.codec.largest)
        return self._decode(layer, q, window)

    def _decode(self, layer: int, q: Tensor, window: int) -> Tensor:
        cache = self.cache
        out: Tensor = kernels.decode(
            q, cache.memory(layer), self.table, self.start, cache.block, window, cache.codec.largest, cache.softcap
        )
        return out

    def _write_slots(self, new_tokens: int) -> Tensor:
        """Where the new tokens go, int64 [R T]; padding goes to block 0."""
        if self._slots is None:
            position = self._positions(new_tokens)
            block = (position // self.cache.block).clamp(max=self.table.shape[1] - 1)
            slots = self.table.gather(1, block) * self.cache.block + position % self.cache.block
            if self.counts is not None:
                real = torch.arange(new_tokens, device=slots.device) < self.counts[:, None]
                slots = torch.where(real, slots, position % self.cache.block)
            self._slots = slots.flatten()
        return self._slots
