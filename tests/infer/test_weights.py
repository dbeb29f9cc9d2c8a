"""Replacing a sampler's weights: in place, complete, and every way of going wrong found."""

from collections.abc import Callable, Iterator

import pytest
import torch
from sampler_oracle import model_of
from torch import Tensor

from lowbit.configs.schema import PrecisionConfig
from lowbit.errors import WeightsError
from lowbit.infer import weights as held_weights
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.weights import fingerprint
from lowbit.models.layers import weights_and_state
from lowbit.models.transformer import Transformer
from lowbit.quant.resolve import resolve

REQUESTS = [Request((1, 2, 3, 4, 5), 0, 10, 3), Request((6,), 1, 10)]
PRECISIONS = ["bf16", "nvfp4", "nvfp4_w4a16", "mxfp8", "fp8_row", "int8"]


def _engine(precision: str | None = None, dtype: torch.dtype = torch.float32, **settings: object) -> EmbeddedSampler:
    policy = None if precision is None else resolve(PrecisionConfig(sampler=precision))
    return EmbeddedSampler(model_of(dtype), None, policy, slots=4, block=4, **settings)  # type: ignore[arg-type]


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    return iter(weights_and_state(model).items())


def _storage(engine: EmbeddedSampler) -> list[int]:
    derived = [t for m in engine.model.modules() for a, t in vars(m).items() if a.startswith("frozen")]
    tensors = [*engine.model.parameters(), engine.weights.head, *(t for t in derived if isinstance(t, Tensor))]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_update_is_a_new_sampler_at_the_old_addresses(precision: str, dtype: torch.dtype) -> None:
    """Samples equal, bit for bit, those of an engine built with the new weights; nothing has moved."""
    engine, new = _engine(precision, dtype), model_of(dtype, seed=9, init_std=0.3)
    before, where = engine.sample(REQUESTS, SamplingConfig(), seed=1), _storage(engine)
    report = engine.update(_tensors(new), 5)
    after = engine.sample(REQUESTS, SamplingConfig(), seed=1)
    assert _storage(engine) == where
    fresh = EmbeddedSampler(new, None, resolve(PrecisionConfig(sampler=precision)), slots=4, block=4)
    expected = fresh.sample(REQUESTS, SamplingConfig(), seed=1)
    assert [s.tokens for g in after for s in g] == [s.tokens for g in expected for s in g]
    assert [s.logprobs for g in after for s in g] == [s.logprobs for g in expected for s in g]
    assert after != before and all(s.versions == [5] * 10 for g in after for s in g)
    state = weights_and_state(new)
    assert (report.version, report.tensors) == (5, len(state))
    assert report.parameters == sum(t.numel() for t in state.values())
    assert report.fingerprint == pytest.approx(sum(float(t.double().abs().sum()) for t in state.values()), rel=1e-9)
    assert (report.scales > 0) == (precision in ("nvfp4_w4a16", "fp8_row", "int8")), "scales outside of the products"


def _without(name: str) -> Callable[[Transformer], Iterator[tuple[str, Tensor]]]:
    return lambda model: ((n, t) for n, t in _tensors(model) if n != name)


FIRST = "blocks.0.attention.q.weight"
WRONG: dict[str, tuple[Callable[[Transformer], Iterator[tuple[str, Tensor]]], str]] = {
    "missing": (_without(FIRST), f"1 of 36 tensors are missing: {FIRST}"),
    "none": (lambda model: iter(()), "36 of 36 tensors are missing: .* and 31 more"),
    "unknown": (lambda model: iter([("blocks.9.x", torch.zeros(1)), *_tensors(model)]), "blocks.9.x is no tensor"),
    "twice": (lambda model: iter([*_tensors(model), (FIRST, torch.zeros(32, 32))]), f"{FIRST} was sent twice"),
    "shape": (lambda model: ((n, t[:-1] if n == FIRST else t) for n, t in _tensors(model)), r"shape \[31, 32\]"),
    "nan": (lambda model: ((n, t / 0 if n == FIRST else t) for n, t in _tensors(model)), f"{FIRST} has a number that"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_update_that_is_wrong_is_named_and_bars_sampling(kind: str) -> None:
    sent, text = WRONG[kind]
    engine = _engine()
    with pytest.raises(WeightsError, match=text):
        engine.update(sent(model_of(seed=9)), 1)
    assert engine.version == 0
    with pytest.raises(WeightsError, match="last update failed"):
        engine.sample(REQUESTS, SamplingConfig(), seed=1)
    engine.update(_tensors(model_of(seed=9)), 2)
    assert engine.sample(REQUESTS, SamplingConfig(), seed=1)[0][0].versions == [2] * 10


@pytest.mark.parametrize("place", range(0, 58, 5))
@pytest.mark.parametrize("precision", ["bf16", "fp8_row"])
def test_a_tensor_that_is_dropped_in_silence_is_found(
    precision: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write of all is left out, that of a master or of what is derived from it, whichever it is."""
    engine, writes, real = _engine(precision, torch.bfloat16), [0], held_weights.write

    def write(held: Tensor, new: Tensor) -> None:
        writes[0] += 1
        if writes[0] != place + 1:
            real(held, new)

    monkeypatch.setattr(held_weights, "write", write)
    new = model_of(torch.bfloat16, seed=9)
    with torch.no_grad():  # norms are ones before and after otherwise
        for parameter in new.parameters():
            parameter += 0.01
    with pytest.raises(WeightsError, match=r"it was not written, or written over|it is stale"):
        engine.update(_tensors(new), 1)
    assert writes[0] == (36 + 22 if precision == "bf16" else 36 + 22 + 21), "masters, matrices, scales"


def test_a_tensor_that_two_layers_share_by_mistake_is_found() -> None:
    engine = _engine("fp8_row")
    a, b = (f"blocks.{i}.attention.q.frozen" for i in (0, 1))
    engine.weights._derived[a] = engine.weights._derived[b]
    with pytest.raises(WeightsError, match=r"blocks\.0\.attention\.q\.frozen was made with"):
        engine.update(_tensors(model_of(seed=9)), 1)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_scales_that_are_zero_or_not_finite_are_found(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.quant.linear import LowbitLinear

    engine, real = _engine("fp8_row"), LowbitLinear.freeze

    def freeze(self: LowbitLinear, dtype: torch.dtype) -> None:
        real(self, dtype)
        assert self.frozen_scale is not None
        if self is engine.model.blocks[1].mlp.up:
            self.frozen_scale[3] = value

    monkeypatch.setattr(LowbitLinear, "freeze", freeze)
    with pytest.raises(WeightsError, match=r"blocks\.1\.mlp\.up\.frozen_scale has 1 scales that are zero or not"):
        engine.update(_tensors(model_of(seed=9)), 1)


def test_a_row_of_zeros_is_no_mistake() -> None:
    new = model_of(seed=9)
    with torch.no_grad():
        new.blocks[0].attention.q.weight[5] = 0.0
        new.blocks[1].mlp.down.weight.zero_()
    for precision in PRECISIONS:
        _engine(precision).update(_tensors(new), 1)


@pytest.mark.parametrize("precision", [None, "nvfp4"])
def test_shared_masters_are_not_copied_and_stale_ones_are_refused(precision: str | None) -> None:
    model = model_of(torch.bfloat16)
    policy = None if precision is None else resolve(PrecisionConfig(sampler=precision))
    engine = EmbeddedSampler(model, None, policy, slots=4, share=True)
    assert all(a is b for a, b in zip(engine.model.parameters(), model.parameters(), strict=True))
    before = engine.sample(REQUESTS, SamplingConfig(), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with pytest.raises(WeightsError, match="changed since the sampler's last update"):
        engine.sample(REQUESTS, SamplingConfig(), seed=1)
    assert engine.update(version=3).tensors == 36
    after = engine.sample(REQUESTS, SamplingConfig(), seed=1)
    assert after != before and after[0][0].versions == [3] * 10
    engine.update(_tensors(model), 4)
    fresh = EmbeddedSampler(model, None, policy, slots=4, share=True).sample(REQUESTS, SamplingConfig(), seed=1)
    assert [s.logprobs for g in fresh for s in g] == [s.logprobs for g in after for s in g]


def test_fingerprints_are_exact_sums() -> None:
    x = torch.randn(1000) * 1e3
    for tensor in (x, x.bfloat16(), x.to(torch.int8), x.view(10, 100)[:, ::2]):
        assert float(fingerprint(tensor)) == pytest.approx(float(tensor.double().abs().sum()), rel=1e-12)
