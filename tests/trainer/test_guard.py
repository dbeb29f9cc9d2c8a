"""The first bad module and gradient."""

import math

import pytest
import torch
from torch import nn

from lowbit.trainer.guard import first_bad, first_bad_gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)  # registered first, run last
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["blocks.0.up", "blocks.2.down", "head"])
def test_first_bad_module(name: str, value: float) -> None:
    model = Model()
    hooks = len(model.head._forward_hooks)
    assert first_bad(model, lambda: model(torch.ones(3, 4))) is None
    with torch.no_grad():
        model.get_submodule(name).weight[0, 0] = value
    assert first_bad(model, lambda: model(torch.ones(3, 4))) == name
    assert len(model.head._forward_hooks) == hooks


def test_first_bad_sees_through_compilation() -> None:
    """`compile` with Dynamo alone needs no C++ compiler; hooks added later are invisible to its code."""
    model = Model()
    for block in model.blocks:
        block.compile(backend="eager")
    model(torch.ones(3, 4))
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(math.nan)
    model(torch.ones(3, 4))
    assert first_bad(model, lambda: model(torch.ones(3, 4))) == "blocks.1.up"


def test_first_bad_looks_inside_containers() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"ids": [torch.arange(3)], "x": [x, x / 0]}

    model = nn.ModuleDict({"pair": Pair()})
    assert first_bad(model, lambda: model["pair"](torch.ones(2))) == "pair"


def test_first_bad_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert first_bad_gradient(model) is None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert first_bad_gradient(model) is None
    model[0].weight.grad[0, 0] = math.nan
    model[1].bias.grad[1] = math.inf
    assert first_bad_gradient(model) == "1.bias"


# Spikes -----------------------------------------------------------------------------------------------------------
