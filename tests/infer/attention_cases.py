"""The decoding kernels against gathering and PyTorch's attention.

`python attention_cases.py` runs them in Triton's interpreter (TRITON_INTERPRET=1), where there is no GPU.
"""

import itertools
import sys
from typing import Any

import torch

from lowbit.configs.schema import ModelConfig
from lowbit.infer.cache import PagedCache
from lowbit.infer.kernels.attention import decode, store
from lowbit.infer.kv_codec import KvCodec, KvFormat
from lowbit.models.attention import attention, cached_mask

ROWS = (0, 1, 15, 16, 63, 255, 256, 300)
"""Tokens before the new one."""
CASES = ((1, 0, 16, None), (4, 7, 64, 1.5), (3, 300, 32, None), (2, 0, 32, 30.0))
"""Query heads to a head of keys, window, tokens of a block, cap of the logits."""


def compare(
    fmt: KvFormat, dtype: torch.dtype, group: int, window: int, block: int, device: str, softcap: float | None
) -> None:
    """Write a token of each row and attend to it and what is before it, in scattered blocks; both ways."""
    heads, dim = 2, 32
    config = ModelConfig(layers=1, width=dim * heads * group, heads=heads * group, kv_heads=heads, max_sequence=512)
    codec = KvCodec.of(fmt, dtype)
    width = max(ROWS) // block + 2
    ours, theirs = (PagedCache(config, 1 + len(ROWS) * width, block, codec, device) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    order = 1 + torch.randperm(len(ROWS) * width, generator=generator)
    lines = torch.cat((torch.zeros(len(ROWS), 3, dtype=torch.int64), order.view(len(ROWS), width)), 1).to(device)
    lines[:, 1] = torch.tensor(ROWS)
    start, table = lines[:, 1], lines[:, 3:]  # as in the slots: numbers that are not next to each other
    for cache in (ours, theirs):
        places = torch.arange(block, cache.keys.shape[1], device=device)
        old = torch.randn(2, len(places), heads, dim, generator=torch.Generator().manual_seed(2)).to(device, dtype)
        cache.store(0, places, old[0], old[1])
    new = torch.randn(3, len(ROWS), 1, heads * group, dim, generator=generator).to(device, dtype)
    q, k, v = new[0].transpose(1, 2), new[1, ..., :heads, :].transpose(1, 2), new[2, ..., :heads, :].transpose(1, 2)
    slots = table.gather(1, start[:, None] // block)[:, 0] * block + start % block

    memory = (ours.keys[0], ours.values[0], ours.key_scales[0], ours.value_scales[0])
    store(k[:, :, 0], v[:, :, 0], memory, slots, codec.largest)
    got = decode(q[:, :, 0], memory, table, start, block, window, codec.largest, softcap)

    theirs.store(0, slots, k[:, :, 0], v[:, :, 0])
    for mine, its in zip((ours.keys, ours.values), (theirs.keys, theirs.values), strict=True):
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8)), "the same bytes"
    assert torch.equal(ours.key_scales, theirs.key_scales) and torch.equal(ours.value_scales, theirs.value_scales)
    mask = cached_mask(start, 1, width * block, window or None)
    keys, values = (x.repeat_interleave(group, 1) for x in theirs.gather(0, table.contiguous(), torch.float32))
    expected = attention(q.float(), keys, values, mask, softcap=softcap)[:, :, 0]
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, rtol=bound, atol=bound)


def mend_interpreter() -> None:
    """NumPy 2.4 does not make an int of an array of one number any more, which the interpreter's loops need."""
    from triton.runtime import interpreter

    known = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        known(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if __name__ == "__main__":
    mend_interpreter()
    formats = [KvFormat(name) for name in sys.argv[1:]]
    for fmt, (group, window, block, softcap) in itertools.product(formats, CASES):
        compare(fmt, torch.float32, group, window, block, "cpu", softcap)
        print(fmt, group, window, block, softcap)
