"""On a GPU: experts, windows, shared keys, trees and Z-Reg, compiled in BF16, against plain FP32 on the CPU."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema import GateKind, ModelConfig, MoeConfig, Recompute
from lowbit.models.transformer import Transformer
from lowbit.models.trees import Node, flatten, visibility_of
from lowbit.models.visibility import Visibility, documents

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(layers=6, width=256, heads=4, kv_heads=2, mlp_width=512, init_std=0.05)
LAYOUTS: dict[str, dict[str, object]] = {
    "experts": {"moe": MoeConfig(experts=8, top_k=2, expert_width=128, shared=1, first_dense=1, bias_rate=1e-3)},
    "sigmoid experts": {"moe": MoeConfig(experts=8, top_k=3, expert_width=128, gate=GateKind.sigmoid)},
    "local and shared": {"windows": [64, 64, 0], "kv_from": [0, 0, 2, 0, 0, 2]},
    "Z-Reg": {"attention_z": 0.1},
    "capped, local, Z-Reg": {"attention_softcap": 2.0, "windows": [64, 0], "attention_z": 0.1},
    "Z-Reg, wide heads": {"attention_z": 0.1, "heads": 2, "kv_heads": 1},
}


def _relative(ours: Tensor, expected: Tensor) -> float:
    ours, expected = ours.detach().double().cpu(), expected.detach().double().cpu()
    return float((ours - expected).norm() / expected.norm())


def _rule(kind: str) -> Visibility | None:
    if kind == "causal":
        return None
    if kind == "documents":
        return documents(torch.rand(2, 300) < 0.02)
    tree = flatten(Node([1] * 40, 1.0, [Node([1] * 20), Node([1] * 30, 1.0, [Node([1] * 9), Node([1] * 11)])]), 0)
    return visibility_of([[tree, tree], [tree]], 300)


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.selective])
@pytest.mark.parametrize("kind", ["causal", "documents", "tree"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_bf16_equals_plain_fp32(layout: str, kind: str, recompute: Recompute) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Transformer(dataclasses.replace(CONFIG, **LAYOUTS[layout]), 512)  # type: ignore[arg-type]
    plain.init_weights(1)
    model = copy.deepcopy(plain).cuda()
    model.compute_dtype = torch.bfloat16
    model.set_recompute(recompute)
    model.compile_blocks()
    tokens, rule = torch.randint(0, 512, (2, 300)), _rule(kind)
    out, expected = model(tokens.cuda(), rule), plain(tokens, rule)
    seed = torch.randn_like(expected)
    losses = []
    for hidden, of, weight in ((out, model, seed.cuda()), (expected, plain, seed)):
        auxiliary = of.take_auxiliary()
        loss = (hidden.float() * weight).sum()
        (loss if auxiliary is None else loss + auxiliary).backward()
        losses.append(auxiliary)
    # A token that BF16 sends to another expert is wrong as a whole: experts get more room.
    room = 3.0 if "experts" in layout else 1.0
    assert _relative(out, expected) < 0.03 * room
    if losses[0] is not None and losses[1] is not None:
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=0.02)
    for (name, ours), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None:
            assert ours.grad is not None
            assert _relative(ours.grad, reference.grad) < 0.1 * room, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_waits_for_nothing(layout: str) -> None:
    """Masks, routing, dispatch, Z-Reg, and what they measure: no synchronisation with the host."""
    torch._dynamo.reset()
    model = Transformer(dataclasses.replace(CONFIG, **LAYOUTS[layout]), 512, torch.bfloat16).cuda()  # type: ignore[arg-type]
    model.init_weights(1)
    model.compile_blocks()
    tokens = torch.randint(0, 512, (2, 300), device="cuda")

    def step() -> None:
        for rule in (None, seen):
            hidden = model(tokens, rule)
            auxiliary = model.take_auxiliary()
            loss = hidden.float().square().sum()
            (loss if auxiliary is None else loss + auxiliary).backward()

    seen = documents(torch.rand(2, 300) < 0.02).to("cuda")
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_deterministic_algorithms_take_a_mixture_of_experts() -> None:
    torch._dynamo.reset()
    model = Transformer(dataclasses.replace(CONFIG, **LAYOUTS["experts"]), 512, torch.bfloat16).cuda()  # type: ignore[arg-type]
    model.init_weights(1)
    tokens = torch.randint(0, 512, (2, 300), device="cuda")
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(tokens).float().square().sum().backward()
            results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
