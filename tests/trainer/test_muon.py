"""The batched Muon step against torch's own and against an SVD."""

import pytest
import torch
from torch import nn

from lowbit.trainer import muon
from lowbit.trainer.muon import Muon, orthogonalise, stacks

SHAPES = [(24, 24), (24, 24), (40, 16), (16, 40), (16, 40), (1, 7)]


def trajectories(steps: int, **settings: float | bool | str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights after `steps` on the same gradients: ours, torch's."""
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(w.clone()) for w in start] for _ in "ab")
    optimizers = Muon(ours, lr=0.05, **settings), torch.optim.Muon(theirs, lr=0.05, **settings)  # type: ignore[arg-type]
    for _ in range(steps):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(optimizers[0].state[a]["momentum_buffer"], optimizers[1].state[b]["momentum_buffer"])
    return ours, theirs


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.0},
        {"weight_decay": 0.2, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False, "ns_steps": 3},
    ],
)
def test_weights_follow_torch_muon(settings: dict[str, float | bool | str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "fast_bf16", lambda device: True)  # torch always multiplies in BF16
    ours, theirs = trajectories(4, **settings)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 6e-3 * b.norm()


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 30, 8), (2, 8, 30)])
def test_orthogonalise_moves_singular_values_along_the_polynomial(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, dtype=torch.float64)
    a, b, c = coefficients = (3.4445, -4.775, 2.0315)
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    expected = u @ torch.diag_embed(s) @ vh
    torch.testing.assert_close(orthogonalise(stack, 5, coefficients, 1e-7), expected, rtol=1e-6, atol=1e-9)


def test_stacks_hold_every_matrix_once_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_STACK_NUMBERS", 1300)
    matrices = [torch.empty(shape) for shape in SHAPES * 3]
    groups = list(stacks(matrices))
    assert sorted(id(m) for group in groups for m in group) == sorted(map(id, matrices))
    for group in groups:
        assert len({m.shape for m in group}) == 1
        assert len(group) == 1 or sum(m.numel() for m in group) <= 1300


def test_matrices_without_gradient_stay() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    parameters[0].grad = torch.randn(4, 4)
    Muon(parameters, lr=0.1).step()
    assert torch.equal(parameters[1], torch.ones(4, 4)) and not torch.equal(parameters[0], torch.ones(4, 4))
