"""The fused kernels against what defines them, and a whole engine that decodes with kernels against one without.

`python fused_cases.py` runs them in Triton's interpreter (TRITON_INTERPRET=1), where there is no GPU.
"""

import sys

import torch
from attention_cases import mend_interpreter
from sampler_oracle import model_of
from torch.nn import functional as F

from lowbit.infer import cache as cache_module
from lowbit.infer import kernels
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.fused import exchange, join
from lowbit.infer.kernels import attention, fused
from lowbit.infer.kv_codec import KvFormat
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.weights import HeldWeights
from lowbit.models.layers import RMSNorm


def compare_parts(dtype: torch.dtype, device: str) -> None:
    """Norm, activation and scale, on views with strides of their own."""
    bound = 1e-5 if dtype is torch.float32 else 2**-7
    x = (3 * torch.randn(5, 1, 96)).to(device, dtype)
    norm = RMSNorm(96, 1e-6).to(device)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.testing.assert_close(fused.rms_norm(x, norm.weight, 1e-6), norm(x), rtol=bound, atol=bound)
    delta = torch.randn(5, 1, 96).to(device, dtype)
    total, normed = fused.add_norm(x, delta, norm.weight, 1e-6)
    torch.testing.assert_close(total, x + delta, rtol=0, atol=0)
    torch.testing.assert_close(normed, norm(x + delta), rtol=bound, atol=bound)
    tokens, table = torch.randint(0, 50, (6, 3)).to(device), torch.randn(50, 96).to(device)
    assert torch.equal(fused.embed(tokens[:, 1], table, dtype), F.embedding(tokens[:, 1], table).to(dtype))
    both = (3 * torch.randn(7, 2 * 1500)).to(device, dtype)
    gate, up = both.split(1500, dim=1)
    torch.testing.assert_close(fused.silu_mul(gate, up), F.silu(gate) * up, rtol=bound, atol=bound)
    for after in (torch.rand(1, 1, device=device), torch.rand(1500, 1, device=device)):
        y = gate.contiguous()
        torch.testing.assert_close(fused.scaled(y, after), (y.float() * after.t()).to(dtype), rtol=0, atol=0)


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
    kernels.embed, kernels.add_norm = fused.embed, fused.add_norm
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
        else:
            changes = {"qk_norm": {}, "no_norm": {"qk_norm": False}, "local": {"windows": [4, 0]}, "int8": {}}[case]
            compare_engines(KvFormat.int8 if case == "int8" else KvFormat.auto, **changes)
        print(case)
