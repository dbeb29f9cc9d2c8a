"""Mixture of experts against a loop over tokens in FP64: outputs, losses, gradients, loads; and as part of a model."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.configs.schema import GateKind, MlpKind, ModelConfig, MoeConfig, NormPlacement, QkNormScope, Recompute
from lowbit.errors import ConfigError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.cost import flops_per_token, parameter_parts, training_memory
from lowbit.models.layers import frozen_weights
from lowbit.models.moe import Moe
from lowbit.models.router import capacity, sort_choices
from lowbit.models.transformer import Transformer

MOE = MoeConfig(experts=6, top_k=2, expert_width=16, shared=1, balance_loss=0.3, z_loss=0.2)
CONFIG = ModelConfig(layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=64, moe=MOE)
VOCAB = 50


def _with(**changes: object) -> ModelConfig:
    return dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, **changes))  # type: ignore[arg-type]


def _random(module: nn.Module, scale: float = 0.3) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.normal_(0.0, scale)


def _mlp(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
    hidden = F.relu(up @ x) ** 2 if gate is None else F.silu(gate @ x) * (up @ x)
    return down @ hidden


def _reference(moe: Moe, x: Tensor, config: MoeConfig) -> tuple[Tensor, Tensor, Tensor]:
    """One token after the other, in FP64; (y, loss, choices of each expert)."""
    p = dict(moe.named_parameters())
    bias = moe.router.bias
    rows, shares, chosen, squares = [], [], [], []
    taken = [0] * config.experts
    room = None if config.capacity is None else capacity(config, len(x))
    for row in x:
        logits = p["router.weight"] @ row
        scores = logits.sigmoid() if config.gate is GateKind.sigmoid else logits.softmax(0)
        preferred = scores.detach() if bias is None else scores.detach() + bias
        experts = sorted(range(config.experts), key=lambda e: -float(preferred[e]))[: config.top_k]
        gates = scores[experts]
        if config.normalise:
            gates = gates / gates.sum()
        y = torch.zeros_like(row)
        for expert, gate in zip(experts, gates, strict=True):
            taken[expert] += 1
            if room is not None and taken[expert] > room:
                continue
            parts = [p[f"experts.{name}.weight"][expert] for name in ("up", "down")]
            first = p["experts.gate.weight"][expert] if "experts.gate.weight" in p else None
            y = y + config.gate_scale * gate * _mlp(row, first, *parts)
        if moe.shared is not None:
            y = y + _mlp(row, p.get("shared.gate.weight"), p["shared.up.weight"], p["shared.down.weight"])
        rows.append(y)
        shares.append(scores / scores.sum())
        chosen += experts
        squares.append(logits.logsumexp(0) ** 2)
    loads = torch.tensor([chosen.count(e) for e in range(config.experts)], dtype=x.dtype)
    balance = config.experts * (loads / len(chosen) * torch.stack(shares).mean(0)).sum()
    loss = config.balance_loss * balance + config.z_loss * torch.stack(squares).mean()
    return torch.stack(rows), loss, loads


CASES = {
    "softmax": {},
    "not normalised": {"normalise": False, "shared": 0},
    "sigmoid, scaled": {"gate": GateKind.sigmoid, "gate_scale": 2.5, "top_k": 3},
    "biased": {"gate": GateKind.sigmoid, "bias_rate": 0.1},
    "one of six": {"top_k": 1, "shared": 2, "normalise": False},
    "all of them": {"top_k": 6},
    "capacity": {"capacity": 0.7},
}


@pytest.mark.parametrize("mlp", list(MlpKind))
@pytest.mark.parametrize("case", CASES)
def test_equal_to_a_loop_over_tokens(case: str, mlp: MlpKind) -> None:
    config = dataclasses.replace(_with(**CASES[case]), mlp=mlp)
    moe = Moe(config)
    _random(moe)
    exact = copy.deepcopy(moe).double()
    x = torch.randn(2, 20, 32).requires_grad_()
    y, loss, statistics = moe(x)
    wide = x.detach().flatten(0, 1).double().requires_grad_()
    expected, expected_loss, loads = _reference(exact, wide, config.moe)
    torch.testing.assert_close(y.flatten(0, 1).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(statistics[: MOE.experts].double(), loads)
    seed = torch.randn_like(y)
    (y * seed).sum().add(loss * 7).backward()
    (expected * seed.flatten(0, 1)).sum().add(expected_loss * 7).backward()
    assert x.grad is not None and wide.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), wide.grad, rtol=1e-3, atol=1e-3)
    for (name, ours), reference in zip(moe.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and reference.grad is not None, name
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-3, atol=1e-3, msg=name)
    if case == "capacity":
        dropped = 1 - (loads.clamp(max=capacity(config.moe, 40)).sum() / 80)
        assert float(statistics[MOE.experts + 1]) == pytest.approx(float(dropped)) and dropped > 0.2
        with torch.no_grad():  # generation and validation drop nothing
            free = Moe(dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity=None)))
            free.load_state_dict(moe.state_dict())
            assert torch.equal(moe(x)[0], free(x)[0])


def test_statistics_of_a_uniform_router() -> None:
    moe = Moe(CONFIG)
    y, loss, statistics = moe(torch.randn(1, 30, 32))
    assert not y.any()
    assert float(loss.detach()) == pytest.approx(0.3 * 1.0 + 0.2 * torch.log(torch.tensor(6.0)).square())
    entropy, dropped, lse = statistics[-3:].tolist()
    assert entropy == pytest.approx(lse) == pytest.approx(float(torch.tensor(6.0).log())) and dropped == 0
    assert not statistics.requires_grad


def test_sorted_choices_are_a_permutation_by_expert() -> None:
    chosen = torch.randint(0, 5, (13, 3))
    order, place, offsets = sort_choices(chosen, 7)
    assert torch.equal(order[place], torch.arange(39))
    experts = chosen.flatten()[order]
    assert torch.equal(experts, experts.sort().values)
    assert offsets.tolist() == [int((chosen <= e).sum()) for e in range(7)] and offsets.dtype is torch.int32
    for expert in range(5):
        rows = order[experts == expert]
        assert torch.equal(rows, rows.sort().values), "tokens of one expert stay in order"


def test_the_router_computes_in_fp32_from_bf16() -> None:
    moe = Moe(_with(experts=64, top_k=8, shared=0))
    _random(moe, 0.02)
    x = torch.randn(1, 200, 32).bfloat16()
    y, _, statistics = moe(x)
    assert y.dtype is torch.bfloat16
    logits = x[0].double() @ moe.router.weight.double().t()
    loads = F.one_hot(logits.topk(8).indices, 64).sum((0, 1))
    assert torch.equal(statistics[:64].double(), loads.double())
    rounded = F.linear(x[0], moe.router.weight.bfloat16()).float()
    assert not torch.equal(F.one_hot(rounded.topk(8).indices, 64).sum((0, 1)), loads), (
        "the case would show a BF16 router"
    )


def _model(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(config, VOCAB, dtype)
    model.init_weights(7)
    return model


def _tokens(batch: int = 2, length: int = 23) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def test_names_parameters_and_costs() -> None:
    config = dataclasses.replace(_with(first_dense=1, bias_rate=0.01), qk_norm=False)
    model = _model(config)
    names = [name for name, _ in model.named_parameters() if name.startswith(("blocks.0.mlp.", "blocks.1.mlp."))]
    assert names == [
        *(f"blocks.0.mlp.{part}.weight" for part in ("gate", "up", "down")),
        "blocks.1.mlp.router.weight",
        *(f"blocks.1.mlp.experts.{part}.weight" for part in ("gate", "up", "down")),
        *(f"blocks.1.mlp.shared.{part}.weight" for part in ("gate", "up", "down")),
    ]
    parts = parameter_parts(config, VOCAB)
    count = {name: p.numel() for name, p in model.named_parameters()}
    assert parts.total == sum(count.values()) + sum(b.numel() for b in model.buffers())
    assert parts.experts == sum(n for name, n in count.items() if ".experts." in name)
    assert parts.router == sum(n for name, n in count.items() if ".router." in name)
    assert parts.biases == 2 * 6
    assert parts.active == parts.total - parts.experts * 4 // 6
    dense = dataclasses.replace(config, moe=MoeConfig())
    # Two layers exchange a network of 48 for three experts of 16, one of them shared, and a router: only that is more.
    assert flops_per_token(config, VOCAB, 64) - flops_per_token(dense, VOCAB, 64) == 6 * 2 * 6 * 32


def test_initialisation() -> None:
    config = dataclasses.replace(_with(experts=32, expert_width=64, bias_rate=0.1), width=128, layers=8)
    model = _model(config)
    moe = model.blocks[3].mlp
    assert isinstance(moe, Moe) and moe.shared is not None and moe.experts.gate is not None
    assert moe.router.bias is not None and not moe.router.bias.any()
    for weight, std in (
        (moe.router.weight, 0.02),
        (moe.experts.gate.weight, 0.02),
        (moe.experts.down.weight, 0.005),
        (moe.shared.down.weight, 0.005),
    ):
        assert abs(weight.std() / std - 1) < 5 / (2 * weight.numel()) ** 0.5


def test_a_model_gathers_the_losses_and_loads_of_its_layers() -> None:
    model = _model(_with(first_dense=1))
    assert model.take_auxiliary() is None and model.take_measured() is None
    model(_tokens())
    loss = model.take_auxiliary()
    assert loss is not None and loss.requires_grad and model.take_auxiliary() is None
    # At the start logits are small: each of two layers is nearly balanced, with logsumexp near log 6.
    assert float(loss.detach()) == pytest.approx(2 * (0.3 + 0.2 * 1.7918**2), rel=0.05)
    model(_tokens(1))
    taken = model.take_measured()
    assert taken is not None and taken.routing is not None and taken.passes == 2 and taken.routing.shape == (2, 6 + 3)
    assert taken.routing[:, :6].sum(1).tolist() == [3 * 23 * 2] * 2
    with torch.no_grad():
        model(_tokens())
    assert model.take_auxiliary() is None and model.take_measured() is None
    assert _model(dataclasses.replace(CONFIG, moe=MoeConfig())).take_auxiliary() is None


@pytest.mark.parametrize("recompute", [Recompute.full, Recompute.selective])
def test_recomputation_changes_nothing(recompute: Recompute) -> None:
    def gradients(how: Recompute) -> list[Tensor]:
        model = _model(_with(bias_rate=0.1))
        model.set_recompute(how)
        hidden = model(_tokens())
        auxiliary, measured = model.take_auxiliary(), model.take_measured()
        assert auxiliary is not None and measured is not None and measured.routing is not None
        ((hidden * torch.linspace(-1, 1, 32)).square().sum() + auxiliary).backward()
        return [measured.routing, *(p.grad for p in model.parameters() if p.grad is not None)]

    for ours, plain in zip(gradients(recompute), gradients(Recompute.none), strict=True):
        assert torch.equal(ours, plain)


def _greedy(model: Transformer, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The likeliest tokens behind each prompt."""
    requests = [Request(tuple(prompt), key, new) for key, prompt in enumerate(prompts)]
    found = EmbeddedSampler(model, None).sample(requests, SamplingConfig(0.0), seed=0)
    return [sample.tokens for [sample] in found]


def test_generation_is_that_of_the_whole_sequence() -> None:
    """Every token alone goes where it went among others, also beside another row and with frozen weights."""
    model = _model(dataclasses.replace(_with(first_dense=1, capacity=0.1), init_std=0.3))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    for prompt, tokens in zip(prompts, _greedy(model, prompts, 8), strict=True):
        text = [*prompt, *tokens]
        with torch.no_grad():
            hidden = model(torch.tensor([text]))[0]
            logits = hidden @ model.head_weight[:VOCAB].t()
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens


def test_bf16_model_and_frozen_experts() -> None:
    model = _model(dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = model(_tokens())
        with frozen_weights(model, torch.bfloat16):
            assert torch.equal(model(_tokens()), hidden)
            model.blocks[0].mlp.experts.up.weight.zero_()  # type: ignore[union-attr, operator]
            assert torch.equal(model(_tokens()), hidden)
    exact = _model()
    with torch.no_grad():
        assert 0 < (exact(_tokens()) - hidden.float()).norm() / hidden.float().norm() < 0.02


def test_two_kinds_of_blocks_make_two_graphs() -> None:
    """Dense and routed layers: a graph each, whole (no breaks), for any batch, with the plain blocks' numbers."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = _model(dataclasses.replace(_with(first_dense=2, bias_rate=0.1), layers=12))
    model = copy.deepcopy(plain)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=counter)
    for seed in range(2):
        torch.manual_seed(seed)
        tokens = torch.randint(0, VOCAB, (2, 16))
        for either in (plain, model):
            either.zero_grad()
            hidden = either(tokens)
            auxiliary = either.take_auxiliary()
            assert auxiliary is not None
            ((hidden * torch.linspace(-1, 1, 32)).square().sum() + auxiliary).backward()
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
        for (name, ours), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            if reference.grad is not None:
                torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert counter.frame_count == 2


def test_norms_after_and_whole_qk_norm_work_with_experts() -> None:
    config = dataclasses.replace(CONFIG, norm_placement=NormPlacement.after, qk_norm_scope=QkNormScope.layer)
    model = _model(config)
    assert model(_tokens()).isfinite().all() and model.take_auxiliary() is not None


def test_memory_counts_every_expert_and_the_rows_of_a_token() -> None:
    from lowbit.configs.schema import OptimizerKind

    few, many = (dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, experts=n)) for n in (6, 60))
    a, b = (training_memory(c, VOCAB, 2, 64, 2, Recompute.none, OptimizerKind.adamw) for c in (few, many))
    per_expert = 3 * 32 * 16 + 32
    assert b.parameters - a.parameters == 4 * 54 * 3 * per_expert
    assert b.activations - a.activations < a.activations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 7}, r"model\.moe\.top_k=7 model\.moe\.experts=6"),
        ({"top_k": 0}, r"model\.moe\.top_k=0"),
        ({"expert_width": 0}, r"model\.moe\.expert_width=0"),
        ({"first_dense": 3}, r"model\.moe\.first_dense=3 model\.layers=3"),
        ({"experts": -1}, r"model\.moe\.experts=-1"),
        ({"z_loss": -1.0}, r"model\.moe\.z_loss=-1"),
        ({"capacity": 0.0}, r"model\.moe\.capacity=0"),
        ({"gate_scale": 0.0}, r"model\.moe\.gate_scale=0"),
    ],
)
def test_impossible_mixtures_name_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Transformer(_with(**changes), VOCAB)


@pytest.mark.parametrize("share", [1e-30, 0.1, 1.25, 1e30])
def test_capacity_is_at_least_one_token_and_at_most_all(share: float) -> None:
    config = _with(capacity=share)
    assert 1 <= capacity(config.moe, 40) <= 40
    y, loss, _ = Moe(config)(torch.randn(1, 40, config.width))
    assert y.isfinite().all() and loss.isfinite()
