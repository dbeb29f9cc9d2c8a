"""The gradient of a step is that of the mean over its valid tokens, however they fall into micro-batches."""

import copy

import pytest
import torch
from reference_gpt import ReferenceGPT

from lowbit.configs.schema import CompileMode, EngineConfig, MlpKind, ModelConfig, OptimConfig, RopeConfig
from lowbit.data.batch import Batch
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import Visibility
from lowbit.trainer.engine import LocalEngine
from lowbit.trainer.objective import NextToken

VOCAB = 61

MODELS = {
    "mha": ModelConfig(layers=2, width=24, heads=2, kv_heads=2, mlp_width=40, max_sequence=64),
    "gqa_relu2_tied": ModelConfig(
        layers=2, width=24, heads=4, kv_heads=2, mlp=MlpKind.relu2, mlp_width=40, tied_head=True, qk_norm=False
    ),
    "mqa_head_dim": ModelConfig(layers=1, width=20, heads=3, kv_heads=1, head_dim=8, rope=RopeConfig(theta=5e5)),
}

# lowbit's parameter names, and what a plain implementation calls them.
NAMES = {
    "attention.q_norm": "q_norm",
    "attention.k_norm": "k_norm",
    "attention.q": "q",
    "attention.k": "k",
    "attention.v": "v",
    "attention.out": "out",
    "mlp.gate": "gate",
    "mlp.up": "up",
    "mlp.down": "down",
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
    "final_norm": "norm",
}


def reference_name(name: str) -> str:
    """ReferenceGPT's name of a Transformer's parameter."""
    for ours, theirs in NAMES.items():
        if f"{ours}." in name:
            return name.replace(f"{ours}.", f"{theirs}.")
    return name


def make_batch(rows: int, length: int, seed: int) -> Batch:
    """Random tokens in documents of random lengths; a third of the targets do not count."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=g)
    targets = torch.randint(0, VOCAB, (rows, length), generator=g)
    weights = (torch.rand(rows, length, generator=g) > 1 / 3).float()
    first = torch.rand(rows, length, generator=g) < 0.15
    first[:, 0] = True
    document = first.cumsum(1)  # [B, T]
    index = torch.arange(length).expand(rows, length)
    start_of = torch.where(first, index, 0).cummax(1).values
    limit = torch.stack([torch.searchsorted(d, d, right=True) for d in document])
    visibility = Visibility(index.int(), limit.int(), (index - start_of).int())
    return Batch(tokens, targets, weights, visibility, int(weights.sum()))


def both_models(config: ModelConfig) -> tuple[Transformer, ReferenceGPT]:
    """lowbit's model and the plain FP64 one with the same weights."""
    model = Transformer(config, VOCAB)
    model.init_weights(3)
    reference = ReferenceGPT(config, model.padded_vocab).double()
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs[reference_name(name)].copy_(parameter)
        # Padded rows may never be predicted; the plain model has no such rows.
        reference.head = torch.nn.Linear(config.width, VOCAB, bias=False, dtype=torch.float64)
        reference.head.weight.copy_(model.head_weight[:VOCAB])
    return model, reference


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_a_plain_fp64_model(name: str) -> None:
    model, reference = both_models(MODELS[name])
    batch = make_batch(4, 17, seed=1)
    assert batch.visibility is not None
    v = batch.visibility
    loss = reference(batch.tokens, batch.targets, batch.weights.double(), v.start, v.limit, v.position.double())
    loss.backward()
    out = NextToken()(model, batch)
    (out.loss_sum / batch.valid_tokens).backward()
    assert out.nll_sum.item() / batch.valid_tokens == pytest.approx(loss.item(), rel=1e-6)
    theirs = dict(reference.named_parameters())
    for ours, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected = theirs[reference_name(ours)].grad
        assert expected is not None
        if ours == "embedding.weight" and MODELS[name].tied_head:
            expected = expected.clone()
            assert reference.head.weight.grad is not None
            expected[:VOCAB] += reference.head.weight.grad
        if ours == "head.weight":
            assert not parameter.grad[VOCAB:].any(), "padded rows learn nothing"
            torch.testing.assert_close(parameter.grad[:VOCAB].double(), expected, rtol=2e-4, atol=1e-7)
            continue
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=2e-4, atol=1e-7)


def test_micro_batches_of_unequal_valid_tokens_sum_to_the_mean_over_the_step() -> None:
    model = Transformer(MODELS["mha"], VOCAB)
    model.init_weights(5)
    whole = make_batch(6, 16, seed=2)
    whole.weights[:4] *= torch.rand(4, 16) > 0.9  # the first micro-batches are nearly empty
    whole = Batch(whole.tokens, whole.targets, whole.weights, whole.visibility, int(whole.weights.sum()))
    assert whole.visibility is not None

    def gradients(pieces: list[slice]) -> dict[str, torch.Tensor]:
        engine = LocalEngine(copy.deepcopy(model), OptimConfig(), EngineConfig(compile=CompileMode.off))
        for piece in pieces:
            v = whole.visibility
            assert v is not None
            part = Batch(
                whole.tokens[piece],
                whole.targets[piece],
                whole.weights[piece],
                Visibility(v.start[piece], v.limit[piece], v.position[piece]),
                int(whole.weights[piece].sum()),
            )
            engine.micro_step(NextToken(z_loss=1e-3), part, 1.0 / whole.valid_tokens)
        return {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}

    once = gradients([slice(0, 6)])
    parts = gradients([slice(0, 1), slice(1, 4), slice(4, 6)])
    for name, gradient in once.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-7)
