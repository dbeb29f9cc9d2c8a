"""Operands as training has them: inputs, weights and output gradients of a small model that has learned for a while.

Random numbers are kind to a quantiser. Gradients of a real loss are heavy-tailed, tiny (1e-6 and less), differ in size
from token to token, and hold rows of almost nothing; inputs share a mean. The model is a byte-level Transformer after
`STEPS` steps of Adam on the Python documentation that every interpreter carries.
"""

import pydoc_data.topics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from lowbit.configs.schema import ModelConfig
from lowbit.models.layers import Linear
from lowbit.models.lm_head import lm_head_loss
from lowbit.models.transformer import Transformer

CONFIG = ModelConfig(layers=2, width=128, heads=4, kv_heads=4, mlp_width=256, max_sequence=128)
STEPS, LENGTH = 80, 128
LEARNT_FROM, SEQUENCES = 6, 16
"""Sequences in a step of training, and in the micro-batch that gives the operands."""


@dataclass(frozen=True)
class Operands:
    """Of one linear layer in one micro-batch of 2048 tokens, all BF16-valued FP32."""

    x: Tensor
    """[tokens, in]."""
    weight: Tensor
    """[out, in]."""
    dy: Tensor
    """[tokens, out]."""


def _batch(generator: torch.Generator, sequences: int) -> Tensor:
    text = Path(pydoc_data.topics.__file__).read_bytes()
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(0, len(numbers) - LENGTH - 1, (sequences,), generator=generator).tolist()
    return torch.stack([numbers[start : start + LENGTH + 1] for start in starts])


def _loss(model: Transformer, batch: Tensor) -> Tensor:
    hidden, targets = model(batch[:, :-1]).reshape(-1, CONFIG.width), batch[:, 1:].reshape(-1)
    weights = torch.full((len(targets),), 1 / len(targets))
    return lm_head_loss(hidden, model.head_weight, targets, weights, vocab_size=256).loss_sum


@cache
def trained_operands() -> dict[str, Operands]:
    """By the layer's name; the first call trains (some seconds)."""
    model = Transformer(CONFIG, 256)
    model.init_weights(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(model, _batch(generator, LEARNT_FROM))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.55 * losses[0], "it has learned"
    inputs: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.blocks.named_modules() if isinstance(module, Linear)}

    def watch(name: str, module: nn.Module) -> None:
        def seen(_: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
            inputs[name] = given[0].detach()
            out.register_hook(lambda grad: grads.__setitem__(name, grad))

        module.register_forward_hook(seen)

    for name, module in layers.items():
        watch(name, module)
    _loss(model, _batch(generator, SEQUENCES)).backward()
    assert grads.keys() == layers.keys()
    return {
        name: Operands(
            *(t.detach().reshape(-1, t.shape[-1]).bfloat16().float() for t in (inputs[name], layer.weight, grads[name]))
        )
        for name, layer in layers.items()
    }
