"""Update rules against FP64 references, groups, and state that goes out and comes back bit by bit."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowbit.configs.schema import MuonConfig, OptimConfig, OptimizerKind
from lowbit.errors import CheckpointError, ConfigError
from lowbit.trainer.optim import Optimizer, build_optimizer

ADAMW = OptimConfig(lr=0.01)
MUON = OptimConfig(kind=OptimizerKind.muon, lr=0.01, muon=MuonConfig(lr=0.02, weight_decay=0.1))


class Model(nn.Module):
    """Names and shapes as in a small decoder; `tied` leaves the head out."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"up": nn.Linear(8, 16, bias=False), "down": nn.Linear(16, 8, bias=False), "norm": nn.RMSNorm(8)}
            )
            for _ in range(2)
        )
        self.final_norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 24, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def _gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def _train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.set_lr_scale(1 / (step + 1))
        _gradients(model, step)
        optimizer.step()


def _adamw_reference(weight: torch.Tensor, decay: float, grads: list[torch.Tensor]) -> torch.Tensor:
    """AdamW as in the paper, FP64."""
    w, m, v = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    for t, g in enumerate((grad.double() for grad in grads), start=1):
        lr = ADAMW.lr / t
        m = ADAMW.beta1 * m + (1 - ADAMW.beta1) * g
        v = ADAMW.beta2 * v + (1 - ADAMW.beta2) * g * g
        w = w - lr * decay * w
        w = w - lr * (m / (1 - ADAMW.beta1**t)) / ((v / (1 - ADAMW.beta2**t)).sqrt() + ADAMW.eps)
    return w


def test_adamw_against_fp64() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads: dict[str, list[torch.Tensor]] = {name: [] for name in before}
    for step in range(5):
        _gradients(model, step)
        for name, parameter in model.named_parameters():
            grads[name].append(parameter.grad)
    _train(model, build_optimizer(model, ADAMW), range(5))
    for name, parameter in model.named_parameters():
        decay = 0.0 if "norm" in name or name.startswith("embedding") else ADAMW.weight_decay
        expected = _adamw_reference(before[name], decay, grads[name])
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6, msg=name)


def test_muon_moves_along_the_orthogonal_factor() -> None:
    """First step from zero momentum: the update's direction is U V^T of the gradient's SVD, singular values near 1."""
    model = Model()
    name, before = "blocks.0.up.weight", model.blocks[0]["up"].weight.detach().clone()
    optimizer = build_optimizer(model, MUON)
    _gradients(model, 0)
    gradient = model.blocks[0]["up"].weight.grad.double()
    optimizer.step()
    update = (before * (1 - 0.02 * 0.1) - dict(model.named_parameters())[name].detach()).double() / 0.02  # [16, 8]
    update = update / 2**0.5  # sqrt(rows / columns)
    u, _, vt = torch.linalg.svd(gradient, full_matrices=False)
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.4 and singular.max() < 1.4
    aligned = torch.diagonal(u.T @ update @ vt.T)
    torch.testing.assert_close(aligned, (u.T @ update @ vt.T).norm(dim=0), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_parameter_is_in_exactly_one_group(config: OptimConfig, tied: bool) -> None:
    model = Model(tied)
    optimizer = build_optimizer(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = optimizer.groups()
    assert sum(row.tensors for row in rows) == len(before)
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in before.values())
    slots = [name.rsplit(".", 1)[0] for name in optimizer.state_tensors() if not name.endswith((".step", "_sq"))]
    assert sorted(slots) == sorted(before)
    _train(model, optimizer, range(1))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_table() -> None:
    rows = {row.group: row for row in build_optimizer(Model(), MUON).groups()}
    assert list(rows) == ["hidden matrices", "head", "embedding", "norms"]
    assert [row.optimizer for row in rows.values()] == ["Muon", "AdamW", "AdamW", "AdamW"]
    assert [row.tensors for row in rows.values()] == [4, 1, 1, 3]
    assert [row.lr for row in rows.values()] == [0.02, 0.01, 0.01, 0.01]
    assert [row.weight_decay for row in rows.values()] == [0.1, 0.1, 0.0, 0.0]
    assert [row.group for row in build_optimizer(Model(True), ADAMW).groups()] == [
        "hidden matrices",
        "embedding",
        "norms",
    ]


def test_muon_leaves_stacked_matrices_to_adamw() -> None:
    model = Model()
    model.blocks[0].register_parameter("experts", nn.Parameter(torch.ones(3, 8, 8)))
    rows = [row for row in build_optimizer(model, MUON).groups() if row.group == "hidden matrices"]
    assert [(row.optimizer, row.tensors, row.weight_decay) for row in rows] == [("Muon", 4, 0.1), ("AdamW", 1, 0.1)]


def test_a_matrix_of_no_group_is_an_error() -> None:
    model = Model()
    model.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(ConfigError, match=r"extra\.weight"):
        build_optimizer(model, ADAMW)


def test_frozen_parameters_are_left_alone() -> None:
    model = Model()
    model.embedding.weight.requires_grad_(False)
    assert "embedding" not in [row.group for row in build_optimizer(model, ADAMW).groups()]


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_state_goes_out_and_comes_back_bitwise(config: OptimConfig) -> None:
    torch.manual_seed(1)
    model, other = Model(), Model()
    optimizer = build_optimizer(model, config)
    _train(model, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _train(model, optimizer, range(3, 6))

    other.load_state_dict(weights)
    resumed = build_optimizer(other, config)
    resumed.load_state_tensors(saved)
    _train(other, resumed, range(3, 6))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name]), name


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_prepared_state_is_the_one_torch_makes(config: OptimConfig) -> None:
    """The state created before the first step equals what torch's own lazy creation leads to."""
    torch.manual_seed(1)
    model = Model()
    lazy_model = Model()
    lazy_model.load_state_dict(model.state_dict())
    optimizer, lazy = build_optimizer(model, config), build_optimizer(lazy_model, config)
    for torch_optimizer in lazy._optimizers:
        torch_optimizer.state.clear()
    _train(model, optimizer, range(2))
    _train(lazy_model, lazy, range(2))
    ours, theirs = optimizer.state_tensors(), lazy.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda state: state.pop("final_norm.weight.exp_avg"), "final_norm.weight.exp_avg is missing"),
        (
            lambda state: state.update({"blocks.9.up.weight.step": torch.zeros(())}),
            "blocks.9.up.weight.step is unknown",
        ),
        (lambda state: state.update({"head.weight.exp_avg": torch.zeros(8, 24)}), r"\(8, 24\).*\(24, 8\)"),
        (lambda state: state.update({"head.weight.exp_avg": torch.zeros(24, 8).half()}), "float16"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_a_state_that_does_not_fit_changes_nothing(damage: Callable[[dict], object], match: str) -> None:
    model = Model()
    optimizer = build_optimizer(model, ADAMW)
    state = {name: torch.ones_like(tensor) for name, tensor in optimizer.state_tensors().items()}
    damage(state)
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_state_tensors(state)
    assert all(tensor.count_nonzero() == 0 for tensor in optimizer.state_tensors().values())


def test_zero_grad_and_lr_scale() -> None:
    model = Model()
    optimizer = build_optimizer(model, MUON)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _gradients(model, 0)
    optimizer.set_lr_scale(0.0)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_a_step_on_cuda_never_waits_for_the_device(config: OptimConfig) -> None:
    model = Model().cuda()
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.set_lr_scale(0.5)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
