"""The fused kernels against what defines them, and a whole engine that decodes with kernels against one without.

`python fused_cases.py` runs them in Triton's interpreter (TRITON_INTERPRET=1), where there is no GPU.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial

import torch
from attention_cases import mend_interpreter
from sampler_oracle import begun_as_written, ended_as_written, model_of
from torch.nn import functional as F

from lowbit.infer import cache as cache_module
from lowbit.infer import kernels
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.fused import exchange, join
from lowbit.infer.kernels import attention, fused, step, unfinished
from lowbit.infer.kv_codec import KvFormat
from lowbit.infer.lines import NOISE, PROMPT, STORED, TABLE
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.unfinished import Unfinished
from lowbit.infer.weights import HeldWeights
from lowbit.models.layers import RMSNorm

Check = Callable[[torch.Tensor, torch.Tensor], None]


def products(dtype: torch.dtype, columns: int, device: str) -> list[Unfinished]:
    """[7, columns] with everything, or nothing, left to do: shares of the sum, and scales; strides of a wider one."""
    made = []
    for parts, after in itertools.product((1, 3), (None, torch.rand(1, 1), torch.rand(columns, 1))):
        share = torch.float32 if parts > 1 else dtype
        wide = (3 * torch.randn(parts, 7, columns + 8)).to(device, share)
        made.append(Unfinished(wide[:, :, 8:], None if after is None else after.to(device), dtype))
    return made


def _bounds(dtype: torch.dtype) -> tuple[Check, Check]:
    """What is near, and what is the same: bit for bit where results are rounded before they are added to others; in
    FP32 a GPU multiplies and adds at once."""
    bound = 1e-5 if dtype is torch.float32 else 2**-7
    exact = 2e-6 if dtype is torch.float32 else 0
    return tuple(partial(torch.testing.assert_close, rtol=b, atol=b) for b in (bound, exact))


def compare_parts(dtype: torch.dtype, device: str) -> None:
    """Norm and activation, of products with whatever is left of them."""
    close, same = _bounds(dtype)
    x = (3 * torch.randn(7, 1, 96)).to(device, dtype)
    norm = RMSNorm(96, 1e-6).to(device)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    close(fused.rms_norm(x, norm.weight, 1e-6), norm(x))
    for delta in products(dtype, 96, device):
        whole = unfinished.finish(delta)
        same(whole, delta.written_out())
        total, normed = fused.add_norm(x, delta, norm.weight, 1e-6)
        same(total, x + whole[:, None])
        close(normed, norm(total))
    tokens, table = torch.randint(0, 50, (6, 3)).to(device), torch.randn(50, 96).to(device)
    assert torch.equal(fused.embed(tokens[:, 1], table, dtype), F.embedding(tokens[:, 1], table).to(dtype))
    for both in products(dtype, 2 * 1500, device):
        gate, up = both.split([1500, 1500])
        whole_gate, whole_up = unfinished.finish(gate), unfinished.finish(up)
        same(torch.cat((whole_gate, whole_up), 1), both.written_out())
        close(fused.silu_mul(gate, up), F.silu(whole_gate) * whole_up)
        again = fused.silu_mul(gate, Unfinished.of(whole_up))  # of unlike kinds
        same(again, fused.silu_mul(gate, up))
    empty = Unfinished(torch.empty(2, 0, 96, device=device), torch.ones(1, 1, device=device), dtype)
    assert unfinished.finish(empty).shape == (0, 96)


def compare_turning(dtype: torch.dtype, device: str) -> None:
    """What is stored and asked for is the same, however much was left of the products."""
    _, same = _bounds(dtype)
    rope = tuple(torch.randn(7, 1, 1, 32, device=device) for _ in range(2))
    weights = (torch.rand(32, device=device), torch.rand(32, device=device), 1e-6)
    slots = torch.tensor([3, 9, 1, 40, 22, 0, 63], device=device)
    for norms, both in itertools.product((None, weights), products(dtype, 6 * 32, device)):
        qkv = both.split([4 * 32, 32, 32])
        got = []
        for parts in (qkv, tuple(Unfinished.of(unfinished.finish(part)) for part in qkv)):
            memory = (*torch.zeros(2, 64, 1, 32, device=device, dtype=dtype), *torch.zeros(2, 64, 1, device=device))
            got.append((fused.turn_and_store(parts, norms, rope, memory, slots, None), *memory))
        for ours, theirs in zip(*got, strict=True):
            same(ours, theirs)
        same(got[0][2][slots, 0], qkv[2].written_out())


def compare_steps(device: str) -> None:
    """Places, tables, noise, and the lines behind a step: slots that are nobody's, full tables, noise that has run
    out."""
    block, blocks, longest = 16, 3, 9
    lines = torch.zeros(6, TABLE + blocks + 2, dtype=torch.int64)
    lines[:, TABLE:] = torch.randint(1, 99, (6, blocks + 2))
    lines[:, STORED] = torch.tensor([0, 5, 15, 16, 40, 47])
    lines[:, PROMPT] = torch.tensor([0, 5, 9, 16, 20, 41])
    lines[:, NOISE] = torch.tensor([0, 3, 1, 2, 5, 4])
    lines, noise = lines.to(device), torch.rand(6, longest, dtype=torch.float64, device=device)
    rope = tuple(torch.randn(1, block * blocks, 1, 32, device=device) for _ in range(2))
    got, expected = (begin(lines, noise, rope, blocks, block) for begin in (step.begin_step, begun_as_written))
    assert torch.equal(got.places, expected.places) and torch.equal(got.noise, expected.noise)
    assert all(torch.equal(a, b) for a, b in zip(got.rope, expected.rope, strict=True))
    values = torch.stack((torch.arange(6, device=device) * 70_001.0, -torch.rand(6, device=device)), 1).double()
    other = lines.clone()
    step.end_step(lines, values)
    ended_as_written(other, values)
    assert torch.equal(lines, other)


def compare_engines(kv: KvFormat, **changes: object) -> None:
    """In the interpreter: FP32 on the CPU, the kernels put in by hand."""
    model = model_of(width=64, heads=2, kv_heads=1, mlp_width=96, **changes)
    plain, engine = (EmbeddedSampler(model, None, slots=4, block=16, kv=kv) for _ in range(2))
    exchange(engine.model)
    engine.weights = HeldWeights(engine.model, shared=False)
    join(engine.model, engine.weights)
    requests = [Request((1, 2, 3), 0, 4, 2), Request(tuple(range(18)), 1, 3)]
    expected = plain.sample(requests, SamplingConfig(), seed=1)
    with engine._lock:
        engine._reserve(engine._groups(requests, 1))
    engine._cache.kernels = True
    calls = []
    for name, function in (("decode", attention.decode), ("turn_and_store", fused.turn_and_store)):
        setattr(kernels, name, lambda *a, f=function, n=name: calls.append(n) or f(*a))
    kernels.store, kernels.rms_norm, kernels.silu_mul = attention.store, fused.rms_norm, fused.silu_mul
    kernels.embed, kernels.add_norm, kernels.finish = fused.embed, fused.add_norm, unfinished.finish
    kernels.begin_step, kernels.end_step = step.begin_step, step.end_step
    got = engine.sample(requests, SamplingConfig(), seed=1)
    assert len(calls) > 10 and cache_module.kernels is kernels
    for ours, theirs in zip([s for g in got for s in g], [s for g in expected for s in g], strict=True):
        assert ours.tokens == theirs.tokens
        close = torch.tensor(ours.logprobs) - torch.tensor(theirs.logprobs)
        assert close.abs().max() < 1e-4


if __name__ == "__main__":
    mend_interpreter()
    for case in sys.argv[1:]:
        if case == "parts":
            compare_parts(torch.float32, "cpu")
            compare_turning(torch.float32, "cpu")
            compare_steps("cpu")
        else:
            changes = {"qk_norm": {}, "no_norm": {"qk_norm": False}, "local": {"windows": [4, 0]}, "int8": {}}[case]
            compare_engines(KvFormat.int8 if case == "int8" else KvFormat.auto, **changes)
        print(case)
