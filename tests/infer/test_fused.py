"""Exchanged modules: the same numbers in fewer launches, and joined weights that are replaced in place."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packed_order import held_numbers
from sampler_oracle import begun_as_written, ended_as_written, logprobs_of, model_of
from torch import Tensor
from torch.nn import functional as F

from lowbit.configs.schema import NormPlacement, PrecisionConfig
from lowbit.infer import kernels, packed
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.fused import FusedNorm, JoinedLinear, JoinedNative, JoinedPacked, exchange, join
from lowbit.infer.packed import PackedLinear
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.unfinished import Unfinished
from lowbit.infer.weights import HeldWeights
from lowbit.models.layers import weights_and_state
from lowbit.models.rope import apply_rope
from lowbit.quant.apply import candidates
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.resolve import resolve

HAS_TRITON = importlib.util.find_spec("triton") is not None
REQUESTS = [Request((1, 2, 3), 0, 12, 3), Request(tuple(range(18)), 1, 10, 2)]
WIDE: dict[str, object] = {"width": 128, "heads": 4, "kv_heads": 2, "mlp_width": 256, "init_std": 0.1}


@pytest.fixture
def written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the kernels what defines them, so that all the rest runs on a CPU."""
    known: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def product(x: Tensor, data: Tensor, scales: Tensor | None, after: Tensor | None) -> Unfinished:
        outer = torch.ones(len(data) * 16, 1) if after is None else after
        key = (data.data_ptr(), data._version, len(data))
        if key not in known:  # with the tensor, so that no other comes to lie there
            known[key] = data, held_numbers(x.shape[1], data, scales, outer).operand().float()
        halves = zip(x.float().chunk(2, dim=1), known[key][1].chunk(2, dim=1), strict=True)
        return Unfinished(torch.stack([F.linear(a, b) for a, b in halves]), outer, x.dtype)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_norm(x: Tensor, delta: Unfinished, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + delta.written_out().view(x.shape)
        return total, rms_norm(total, weight, eps)

    def turn_and_store(
        qkv: tuple[Unfinished, Unfinished, Unfinished],
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        memory: kernels.Memory,
        slots: Tensor,
        largest: float | None,
    ) -> Tensor:
        assert norms is not None and largest is None
        q, k, v = (part.written_out().view(len(slots), -1, memory[0].shape[-1]) for part in qkv)
        q, k = (apply_rope(rms_norm(x, w, norms[2])[:, None], *rope)[:, 0] for x, w in ((q, norms[0]), (k, norms[1])))
        memory[0][slots], memory[1][slots] = k, v
        return q

    def decode(
        q: Tensor, memory: kernels.Memory, table: Tensor, start: Tensor, block: int, window: int, *_: object
    ) -> Tensor:
        places = (table[:, :, None] * block + torch.arange(block)).flatten(1)
        k, v = (x[places].transpose(1, 2) for x in memory[:2])
        seen = (torch.arange(places.shape[1]) <= start[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, seen, enable_gqa=True)[:, :, 0]

    monkeypatch.setattr(kernels, "handles", lambda keys: True)
    monkeypatch.setattr(packed, "begin_product", product)
    monkeypatch.setattr(kernels, "rms_norm", rms_norm)
    monkeypatch.setattr(kernels, "add_norm", add_norm)
    monkeypatch.setattr(kernels, "silu_mul", lambda gate, up: F.silu(gate.written_out()) * up.written_out())
    monkeypatch.setattr(kernels, "embed", lambda tokens, weight, dtype: weight[tokens].to(dtype))
    monkeypatch.setattr(kernels, "turn_and_store", turn_and_store)
    monkeypatch.setattr(kernels, "decode", decode)
    monkeypatch.setattr(kernels, "begin_step", begun_as_written)
    monkeypatch.setattr(kernels, "end_step", ended_as_written)


def _near(d: Tensor, precision: str | None) -> None:
    """Differences of log-probabilities are those of sums in another order."""
    if precision == "nvfp4":  # a 4-bit staircase: a few tokens fall on another step
        assert d.abs().median() < 0.02
    else:
        assert (d.exp() - 1 - d).mean() < 1e-3


def _fused(engine: EmbeddedSampler) -> EmbeddedSampler:
    """What the constructor does on a GPU."""
    for name, layer in candidates(engine.model).items():
        if isinstance(layer, LowbitLinear) and packed.weight_only(layer.policy):
            made = PackedLinear.of(layer, layer.policy, layer.key, layer.clock, name)
            parent, _, attribute = name.rpartition(".")
            setattr(engine.model.get_submodule(parent), attribute, made)
    exchange(engine.model)
    engine.weights = HeldWeights(engine.model, shared=False)
    join(engine.model, engine.weights)
    return engine


@pytest.mark.usefixtures("written_out")
@pytest.mark.parametrize(
    "precision",
    [
        "bf16",
        "nvfp4",
        "nvfp4_w4a16",
        pytest.param("mxfp8_w8a16", marks=pytest.mark.exhaustive),
        "fp8_w8a16",
    ],
)
def test_joined_products_are_those_of_each_layer(precision: str) -> None:
    """Also after an update, at the old addresses."""
    policy = resolve(PrecisionConfig(sampler=precision))
    model, new = model_of(torch.bfloat16, **WIDE), model_of(torch.bfloat16, seed=9, **WIDE)
    plain = EmbeddedSampler(model, None, policy, slots=4)
    engine = _fused(EmbeddedSampler(model, None, policy, slots=4))
    kinds = {type(layer) for layer in candidates(engine.model).values()}
    assert (JoinedLinear in kinds) == (precision == "bf16") and (JoinedPacked in kinds) == precision.endswith("a16")
    assert isinstance(engine.model.final_norm, FusedNorm)
    for weights in (None, new):
        if weights is not None:
            where = {name: tensor.data_ptr() for name, tensor in engine.weights._derived.items()}
            for each in (plain, engine):
                each.update(weights_and_state(weights).items(), 1)
            assert {name: tensor.data_ptr() for name, tensor in engine.weights._derived.items()} == where
        for request, group in zip(REQUESTS, engine.sample(REQUESTS, SamplingConfig(), seed=1), strict=True):
            for sample in group:
                _near(
                    torch.tensor(sample.logprobs) - logprobs_of(plain.model, request, sample, SamplingConfig()),
                    precision,
                )


@pytest.mark.usefixtures("written_out")
def test_norms_made_with_the_sum_before_them_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every norm between blocks comes with a sum; what was left of a pass that broke off is nobody's."""
    engine = _fused(EmbeddedSampler(model_of(torch.bfloat16, **WIDE), None, slots=4))
    calls = []
    for name, kernel in (("rms_norm", kernels.rms_norm), ("add_norm", kernels.add_norm)):
        monkeypatch.setattr(kernels, name, lambda *a, n=name, f=kernel: calls.append(n) or f(*a))
    norms = [*(block.attention_norm for block in engine.model.blocks), engine.model.final_norm]
    tokens = torch.randint(0, 60, (2, 9))
    with torch.no_grad():
        expected = engine.model(tokens)
        assert all(norm.given is None for norm in norms)
        assert calls == ["rms_norm"] + ["add_norm"] * 2 * len(engine.model.blocks)
        for norm_ in norms[1:]:
            norm_.given = (torch.zeros(2, 9, 128), torch.ones(2, 9, 128))
        assert torch.equal(engine.model(tokens), expected)


@pytest.mark.usefixtures("written_out")
def test_parts_of_a_buffer_are_what_layers_hold() -> None:
    engine = _fused(EmbeddedSampler(model_of(torch.bfloat16, **WIDE), None, slots=4))
    attention = engine.model.blocks[1].attention
    joined = attention.q.joined
    assert torch.equal(
        joined.weight, torch.cat([layer.weight.bfloat16() for layer in (attention.q, attention.k, attention.v)])
    )
    x = torch.randn(3, 128).bfloat16()
    together = attention.q.project_together(x, [attention.k, attention.v])
    for y, layer in zip(together, (attention.q, attention.k, attention.v), strict=True):
        torch.testing.assert_close(y, F.linear(x, layer.weight.bfloat16()), rtol=2**-7, atol=1e-3)
    [alone] = attention.q.project_together(x, [])
    torch.testing.assert_close(alone, together[0], rtol=2**-7, atol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("case", ["parts", "qk_norm", "no_norm", "local", "int8"])
def test_the_kernels_in_the_interpreter(case: str) -> None:
    """The parts alone, and whole engines."""
    script = Path(__file__).with_name("fused_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script, case], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [case]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_parts_on_a_gpu(dtype: torch.dtype) -> None:
    from fused_cases import compare_parts, compare_steps, compare_turning

    compare_parts(dtype, "cuda")
    compare_turning(dtype, "cuda")
    compare_steps("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        *(({}, precision) for precision in (None, "nvfp4", "nvfp4_w4a16", "mxfp8_w8a16", "fp8_row")),
        ({"qk_norm": False}, None),
        ({"windows": [20, 0]}, "nvfp4_w4a16"),
        ({"norm_placement": NormPlacement.after}, None),
        ({"kv_from": [0, 0, 2]}, None),
    ],
    ids=str,
)
def test_a_fused_engine_is_one_that_is_not(changes: dict[str, object], precision: str | None) -> None:
    """Also after an update."""
    policy = None if precision is None else resolve(PrecisionConfig(sampler=precision))
    model, new = (model_of(torch.bfloat16, seed=seed, **(WIDE | changes)).cuda() for seed in (4, 9))
    native = precision == "fp8_row"  # rounds once where the emulation does twice
    plain = EmbeddedSampler(model, None, policy, slots=8, fused=False, packed=native)
    engine = EmbeddedSampler(model, None, policy, slots=8)
    leads = {None: JoinedLinear, "nvfp4_w4a16": JoinedPacked, "fp8_row": JoinedNative}.get(precision)
    for block in engine.model.blocks if leads is not None else []:
        assert isinstance(block.mlp.gate, leads) and block.mlp.gate.joined is not None
    requests = [Request((1, 2, 3), i, 40, 4) for i in range(5)]
    for weights in (None, new):
        if weights is not None:
            for each in (plain, engine):
                each.update(weights_and_state(weights).items(), 1)
        apart = []
        for request, group in zip(requests, engine.sample(requests, SamplingConfig(), seed=1), strict=True):
            for sample in group:
                theirs = logprobs_of(plain.model, request, sample, SamplingConfig())
                apart.append(torch.tensor(sample.logprobs) - theirs)
        _near(torch.cat(apart), precision)
