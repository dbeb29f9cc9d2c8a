"""The moving average against its closed form, and weights that come back bit by bit."""

import pytest
import torch
from torch import nn

from lowbit.errors import CheckpointError
from lowbit.trainer.ema import Ema


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_closed_form() -> None:
    model = _model()
    first = model[0].weight.detach().clone()
    ema = Ema(model, 0.9)
    history = []
    for _ in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        history.append(model[0].weight.detach().double())
        history[-1] = history[-1].clone()
        ema.update()
    expected = 0.9**6 * first.double() + sum(0.1 * 0.9 ** (5 - k) * weight for k, weight in enumerate(history))
    torch.testing.assert_close(ema.state_tensors()["0.weight"].double(), expected, rtol=1e-5, atol=1e-6)


def test_swapped_and_back_bitwise() -> None:
    model = _model()
    ema = Ema(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    averages = {name: t.clone() for name, t in ema.state_tensors().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), ema.swapped():
        assert all(torch.equal(p, averages[name]) for name, p in model.named_parameters())
        with pytest.raises(RuntimeError, match="update"):
            ema.update()
        with pytest.raises(RuntimeError, match="swap"), ema.swapped():
            pass
        raise ZeroDivisionError
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(torch.equal(t, averages[name]) for name, t in ema.state_tensors().items())
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_an_error_half_way_through_the_swap_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    ema = Ema(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    exchange, calls = Ema._exchange, []

    def failing(self: Ema, name: str) -> None:
        calls.append(name)
        if len(calls) == 3:
            raise MemoryError
        exchange(self, name)

    monkeypatch.setattr(Ema, "_exchange", failing)
    with pytest.raises(MemoryError), ema.swapped():
        raise AssertionError("the block must not run")
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_state_round_trip_and_misfits() -> None:
    model, other = _model(), _model()
    ema, fresh = Ema(model, 0.9), Ema(other, 0.9)
    fresh.load_state_tensors({name: t.clone() for name, t in ema.state_tensors().items()})
    assert all(torch.equal(t, ema.state_tensors()[name]) for name, t in fresh.state_tensors().items())
    state = dict(ema.state_tensors())
    with pytest.raises(CheckpointError, match=r"0\.bias is missing"):
        fresh.load_state_tensors({name: t for name, t in state.items() if name != "0.bias"})
    with pytest.raises(CheckpointError, match="shape"):
        fresh.load_state_tensors(state | {"0.bias": torch.zeros(5)})


def test_tied_and_low_precision_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    ema = Ema(model, 0.9)
    ema.update()
    assert list(ema.state_tensors()) == ["0.weight"]
    assert ema.state_tensors()["0.weight"].dtype == torch.float32
